"""Training of a llama of 1.24 B parameters on one GPU: tokens/s, MFU, peak memory, and what exact normalisation costs.

Sequences of 4,096 tokens, bfloat16 compute on float32 weights, compiled layers; the model and the step are those of a
run, on random tokens. Splits of one global batch of 16 rows take turns; times are medians of whole steps, optimizer
included. Model FLOPs of a token are 6 N + 6 L S H: N parameters (the tied embedding once, for the head), L layers,
S tokens a sequence, H hidden size; forward and backward, attention counted as causal, recomputation not at all. MFU is
tokens/s x FLOPs of a token / the dense bfloat16 peak of the device's data sheet.

`known counts` is the same step with the counts of the global batch given, which exact normalisation otherwise makes
before the first forward pass. Host synchronisations are the warnings of `torch.cuda.set_sync_debug_mode`; those of a
micro-batch are the slope between the splits, since a step has some of its own.

python benchmarks/gpu.py [--rounds N] [--transformers] [--dry-run]

Takes about 5 minutes on an H200; the split into one micro-batch of 16 rows needs its memory, and is halved on less.
`--transformers` adds transformers' Llama: compiled whole, autocast, the same splits and optimizer. `--dry-run` goes
through all of it on a CPU with a tiny shape.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from samestep.config.load import from_dict
from samestep.config.schema import Config
from samestep.data.batch import Batch, collate
from samestep.data.rows import Sample
from samestep.families import parameter_count, resolve_model
from samestep.parallel.mesh import Mesh, choose_device
from samestep.run.metrics import PeakMemory, peak_flops
from samestep.run.setup import build_model, build_step, describe_machine
from samestep.step.step import TrainStep

ROWS = 16
SPLITS = ((4, 4), (1, 16), (16, 1))
"""Micro-batches of a step, and rows of each."""


@dataclass(frozen=True)
class Shape:
    """Of a llama whose head has the embedding's weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    length: int


BILLION = Shape(2048, 16, 32, 8, 8192, 128_256, 4096)
TINY = Shape(32, 1, 4, 2, 48, 128, 16)


@dataclass
class Figures:
    """Of a way to take the step, with one split."""

    seconds: list[float]
    peak_bytes: int = 0
    synchronisations: int | None = None
    halved: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def configuration(shape: Shape, compiled: bool) -> Config:
    return from_dict(
        {
            "training": {"global_batch_size": ROWS, "steps": 1000},
            "parallelism": {"data_parallel_shard": 1},
            "lr_scheduler": {"type": "constant", "learning_rate": 1e-5},
            "train_dataset": {"path": "unused"},
            "compile": compiled,
            "model": {
                "model_type": "llama",
                "seq_length": shape.length,
                "hidden_size": shape.hidden,
                "intermediate_size": shape.inner,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "vocab_size": shape.vocabulary,
                "tie_word_embeddings": True,
                "params_dtype": "float32",
                "compute_dtype": "bfloat16",
            },
        }
    ).config


def micro_batches(shape: Shape, count: int, rows: int) -> list[Batch]:
    """Random rows, the same whatever the split; on the CPU, from where a run takes them too."""
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, (ROWS, shape.length + 1))
    positions, documents = np.arange(shape.length), np.zeros(shape.length, np.int64)
    samples = [Sample(row[:-1], row[1:], documents=documents, positions=positions) for row in tokens]
    places = list(range(count * rows))
    return [collate(samples[at : at + rows], places[at : at + rows], "padded") for at in range(0, count * rows, rows)]


def flops_per_token(shape: Shape, parameters: int) -> float:
    return 6 * parameters + 6 * shape.layers * shape.length * shape.hidden


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def fresh_memory(device: torch.device) -> Iterator[PeakMemory]:
    """What was left over is given back, and the peak counts from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield PeakMemory(device)


def seconds_of(take: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    take()
    wait(device)
    return time.perf_counter() - start


def synchronisations_of(take: Callable[[], object], device: torch.device) -> int | None:
    """Times that the host waits for the device in a step; None where there is no GPU."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            take()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def with_known_counts(step: TrainStep, batches: Sequence[Batch]) -> Callable[[], object]:
    """The step without its first part, whose result is given."""
    known = step.count(batches)

    def take() -> None:
        original, step.count = step.count, lambda _: known  # type: ignore[method-assign]
        try:
            step(batches)
        finally:
            step.count = original  # type: ignore[method-assign]

    return take


def measure(takes: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, Figures]:
    """All in turns; before that each once to compile, and once to count synchronisations and memory."""
    figures = {}
    for name, take in takes.items():
        take()
        with fresh_memory(device) as memory:
            found = Figures([], synchronisations=synchronisations_of(take, device))
            wait(device)
            found.peak_bytes = memory.bytes()
        figures[name] = found
    for _ in range(rounds):
        for name, take in takes.items():
            figures[name].seconds.append(seconds_of(take, device))
    return figures


def own(shape: Shape, device: torch.device, rounds: int) -> tuple[dict[str, Figures], int]:
    """Figures of samestep by name of the split, and the number of parameters."""
    config, mesh = configuration(shape, compiled=device.type == "cuda"), Mesh.alone()
    model = build_model(config, shape.vocabulary, mesh)
    step = build_step(config, model, mesh, "once_per_step")
    takes: dict[str, Callable[[], object]] = {}
    for count, rows in SPLITS:
        batches = micro_batches(shape, count, rows)
        takes[name_of(count, rows)] = lambda batches=batches: step(batches)
        if (count, rows) == SPLITS[0]:
            takes["known counts"] = with_known_counts(step, batches)
    figures = measure(takes, rounds, device)
    limit = step.recovery.limit
    for count, rows in SPLITS:
        figures[name_of(count, rows)].halved = limit is not None and rows * shape.length > limit
    return figures, parameter_count(resolve_model(config.model))


def name_of(count: int, rows: int) -> str:
    return f"{count} x {rows}"


def theirs(shape: Shape, device: torch.device, rounds: int) -> dict[str, Figures]:
    """Figures of transformers' Llama, but for the split into one micro-batch: its logits would take 34 GB a copy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.compiler.reset()  # which may hold the other model
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=shape.hidden,
                intermediate_size=shape.inner,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                vocab_size=shape.vocabulary,
                max_position_embeddings=shape.length,
                tie_word_embeddings=True,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    forward = torch.compile(model) if device.type == "cuda" else model

    def take(batches: Sequence[Batch]) -> float:
        targets = ROWS * shape.length
        total = torch.zeros((), device=device)
        for batch in batches:
            ids = batch.input_ids.to(device, non_blocking=True)
            labels = batch.labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                logits = forward(input_ids=ids).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / targets
            del logits
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    takes: dict[str, Callable[[], object]] = {}
    for count, rows in SPLITS:
        if count > 1:
            batches = micro_batches(shape, count, rows)
            takes[f"transformers {name_of(count, rows)}"] = lambda batches=batches: take(batches)
    return measure(takes, rounds, device)


def table(figures: dict[str, Figures], shape: Shape, parameters: int, device: torch.device) -> list[str]:
    """In markdown; the ratio is the median of those of steps of one round, to the first of the same side."""
    tokens, peak = ROWS * shape.length, peak_flops(device)
    lines = [
        "| micro-batches x rows | s/step | x | tokens/s | MFU | peak memory, GiB | host synchronisations |",
        "|---|---|---|---|---|---|---|",
    ]
    first = next(iter(figures.values()))
    for name, found in figures.items():
        if name == f"transformers {name_of(*SPLITS[0])}":
            first = found
        ratio = statistics.median(a / b for a, b in zip(found.seconds, first.seconds, strict=True))
        rate = tokens / found.median
        mfu = f"{rate * flops_per_token(shape, parameters) / peak:.1%}" if peak else "-"
        waits = "-" if found.synchronisations is None else str(found.synchronisations)
        lines.append(
            f"| {name}{' (halved)' if found.halved else ''} | {found.median:.4f} | {ratio:.3f} | {rate:,.0f} | {mfu} "
            f"| {found.peak_bytes / 2**30:.1f} | {waits} |"
        )
    return lines


def conclusions(figures: dict[str, Figures]) -> list[str]:
    base, known = figures[name_of(*SPLITS[0])], figures["known counts"]
    cost = statistics.median(a / b for a, b in zip(base.seconds, known.seconds, strict=True)) - 1
    lines = [f"Exact normalisation costs {cost:.2%} of a step."]
    one, many = (figures[name_of(count, ROWS // count)].synchronisations for count in (1, ROWS))
    if one is not None and many is not None:
        lines.append(f"Host synchronisations of a micro-batch: {(many - one) / (ROWS - 1):.2f}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Training of a llama of 1.24 B parameters on one GPU.")
    parser.add_argument("--rounds", type=int, default=6, help="timed steps of each kind")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers' Llama")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on the CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.dry_run else choose_device()
    if device.type != "cuda" and not arguments.dry_run:
        parser.error("there is no GPU here; --dry-run takes a tiny shape on the CPU")
    shape, start = TINY if arguments.dry_run else BILLION, time.perf_counter()
    figures, parameters = own(shape, device, arguments.rounds)
    result = dict(figures)
    if arguments.transformers:
        result |= theirs(shape, device, arguments.rounds)
    title = f"{describe_machine(device)}, PyTorch {torch.__version__}, {parameters:,} parameters, {shape}"
    lines = [title, "", *table(result, shape, parameters, device), "", *conclusions(figures)]
    print("\n".join([*lines, f"Took {time.perf_counter() - start:.0f} s."]))  # noqa: T201


if __name__ == "__main__":
    main()
