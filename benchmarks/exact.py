"""Exact mode against the default mode: whole steps of 16 samples on one thread, interleaved, medians.

python benchmarks/exact.py [rows' lengths ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from samestep.config.load import from_dict
from samestep.config.schema import Config
from samestep.data.batch import Batch, collate
from samestep.data.rows import Sample
from samestep.parallel.mesh import Mesh
from samestep.run.setup import build_model, build_step

SAMPLES, VOCABULARY, ROUNDS = 16, 8192, 5


def config(exact: bool) -> Config:
    """A decoder of 7.4 M parameters."""
    return from_dict(
        {
            "training": {"exact": exact, "global_batch_size": SAMPLES},
            "parallelism": {"data_parallel_shard": 1},
            "train_dataset": {"path": "unused"},
            "model": {
                "seq_length": 512,
                "hidden_size": 256,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "compute_dtype": "float32",
            },
        }
    ).config


def micro_batches(length: int, size: int) -> list[Batch]:
    """16 random samples of `length` tokens in micro-batches of `size`."""
    random = np.random.default_rng(0)
    positions, documents = np.arange(length), np.zeros(length, dtype=np.int64)
    tokens = random.integers(0, VOCABULARY, (SAMPLES, length + 1))
    samples = [Sample(row[:-1], row[1:], documents=documents, positions=positions) for row in tokens]
    starts = range(0, SAMPLES, size)
    return [collate(samples[start : start + size], list(range(start, start + size)), "padded") for start in starts]


def stepper(exact: bool) -> Callable[[list[Batch]], float]:
    """A run's step; returns its seconds."""
    mesh, settings = Mesh.alone(), config(exact)
    step = build_step(settings, build_model(settings, VOCABULARY, mesh), mesh, "once_per_step")

    def take(batches: list[Batch]) -> float:
        start = time.perf_counter()
        step(batches)
        return time.perf_counter() - start

    return take


def main() -> None:
    torch.set_num_threads(1)
    default, exact = stepper(False), stepper(True)
    for length in map(int, sys.argv[1:] or (64, 256, 512)):
        candidates = {f"default, micro-batch {size}": (default, micro_batches(length, size)) for size in (16, 4, 1)}
        candidates["exact"] = (exact, micro_batches(length, 1))
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for round_ in range(ROUNDS + 1):
            for name, (take, batches) in candidates.items():
                seconds = take(batches)
                if round_:
                    times[name].append(seconds)
        for name, values in times.items():
            ratio = statistics.median(e / own for e, own in zip(times["exact"], values, strict=True))
            median = 1e3 * statistics.median(values)
            print(f"rows of {length:<4} {name:<24} {median:8.1f} ms   exact is x{ratio:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
