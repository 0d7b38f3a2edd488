"""Peak memory of a rank: what the plan says against what two steps take, on one process of a CPU.

Each shape runs in a process of its own, which gives freed memory back to the system at once: the figure is what was
held, not what the C allocator kept for later. Needs Linux with glibc.

python benchmarks/memory.py [shapes ...]
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.config.load import from_dict
from samestep.config.schema import Config
from samestep.data.batch import Batch
from samestep.data.rows import Sample
from samestep.length import DataFacts
from samestep.parallel.mesh import Mesh
from samestep.plan import Plan, make_plan
from samestep.run.setup import build_model, build_step, collate_groups

MIB = 2**20
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Shape:
    """A configuration and its data.

    Attributes:
        model, training, others: fields of the configuration.
        lengths: of the samples of a global batch.
        limit: bytes, for `training.local_batch_size: auto`.
    """

    lengths: Sequence[int]
    model: dict[str, Any]
    training: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


LLAMA_35M = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}
LARGE_VOCABULARY = LLAMA_35M | {"vocab_size": 128_000, "num_hidden_layers": 2}
DEEP = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "params_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
}
DOCUMENTS = (31, 62, 77, 118, 140, 163, 187, 222, 222, 250, 301, 340, 397, 455, 507, 624)
"""4,096 tokens in chat rows of unequal length."""

SHAPES = {
    "35 M llama, 2 x 512": Shape([512] * 4, LLAMA_35M, {"local_batch_size": 2}),
    "35 M llama, 4096 packed": Shape(DOCUMENTS, LLAMA_35M, {"local_batch_tokens": 4096, "micro_batch": "packed"}),
    "vocabulary 128,000, 8 x 512": Shape([512] * 8, LARGE_VOCABULARY, {"local_batch_size": 8}),
    "12 layers, 8 x 1024": Shape([1024] * 16, DEEP, {"local_batch_size": 8}),
    "12 layers, recompute full": Shape([1024] * 8, DEEP, {"local_batch_size": 8}, {"recompute": {"mode": "full"}}),
    "gpt2 in bfloat16, 4 x 512": Shape([512] * 8, GPT2, {"local_batch_size": 4}),
    "35 M llama, auto within 1.25 GiB": Shape(DOCUMENTS, LLAMA_35M, {"local_batch_size": "auto"}, limit=5 * 2**28),
    "12 layers, recompute mlp": Shape(
        [1024] * 8,
        DEEP,
        {"local_batch_size": 4},
        {"recompute": {"mode": "select", "select_module": {"mlp": ["0-11"]}}},
    ),
    "35 M llama, Lion": Shape([512], LLAMA_35M, {}, {"optimizer": {"type": "Lion"}}),
    "35 M llama, SGD": Shape([512], LLAMA_35M, {}, {"optimizer": {"type": "SGD", "momentum": 0.9}}),
    "llama in bfloat16": Shape([512] * 4, LLAMA_35M | {"compute_dtype": "bfloat16"}, {"local_batch_size": 2}),
}


def config_of(shape: Shape) -> Config:
    model = {"seq_length": max(shape.lengths), "compute_dtype": "float32", **shape.model}
    training = {"steps": 2, "global_batch_size": len(shape.lengths), **shape.training}
    return from_dict({"train_dataset": {"path": "unused"}, "model": model, "training": training, **shape.others}).config


def plan_of(shape: Shape, config: Config) -> Plan:
    lengths = tuple(shape.lengths)
    facts = DataFacts(len(lengths), sum(lengths), sum(lengths), lengths, lengths, shape.model["vocab_size"])
    return make_plan(config, facts=facts, memory_limit=shape.limit)


def micro_batches(shape: Shape, config: Config, plan: Plan) -> list[Batch]:
    """Random samples, in the micro-batches of the plan."""
    random = np.random.default_rng(0)

    def sample(place: int) -> Sample:
        size = shape.lengths[place]
        tokens = random.integers(0, shape.model["vocab_size"], size + 1)
        return Sample(tokens[:-1], tokens[1:], documents=np.zeros(size, dtype=np.int64), positions=np.arange(size))

    groups = [micro_batch.places for micro_batch in plan.micro_batches]
    return collate_groups(groups, sample, np.arange(len(shape.lengths)), config.micro_batch, 0)


def steps(shape: Shape) -> Plan:
    """Build everything and take two steps."""
    config, mesh = config_of(shape), Mesh.alone()
    plan = plan_of(shape, config)
    step = build_step(config, build_model(config, shape.model["vocab_size"], mesh), mesh, plan.reduce)
    batches = micro_batches(shape, config, plan)
    for _ in range(2):
        step(batches)
    return plan


def measure(shape: Shape) -> str:
    """A row of the table; for a process of its own."""
    small = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6}
    model = shape.model | small | {"num_hidden_layers": shape.model["num_hidden_layers"]}
    training = {"micro_batch": shape.training.get("micro_batch", "padded")}
    steps(Shape([8, 7], model, training, shape.others))  # code pages do not count
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    plan = steps(shape)
    measured, planned = resident("VmHWM") - before, plan.memory.total
    return f"{planned / MIB:.1f} | {measured / MIB:.1f} | {planned / measured:.3f} |"


def resident(name: str) -> int:
    """Bytes of the line `name` of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    if "MALLOC_TRIM_THRESHOLD_" in os.environ and len(sys.argv) == 2 and sys.argv[1] in SHAPES:
        torch.set_num_threads(1)
        print(measure(SHAPES[sys.argv[1]]))  # noqa: T201
        return
    print("| shape | planned, MiB | measured, MiB | planned / measured |\n|---|---|---|---|")  # noqa: T201
    for name in sys.argv[1:] or SHAPES:
        command = [sys.executable, __file__, name]
        done = subprocess.run(command, env=os.environ | GIVE_BACK, capture_output=True, text=True)
        print(f"| {name} | {(done.stdout or done.stderr).strip()}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
