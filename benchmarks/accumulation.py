"""Time of a step of 16 micro-batches of one row over that of the same step as one micro-batch, on a CPU.

One process takes both kinds of step by turns, with one model and one optimizer. (As two processes by turns, each of
which waits half a minute for the other, the figures were those of memory that the system had taken back meanwhile.)

python benchmarks/accumulation.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence

from torch.profiler import ProfilerActivity, profile
from trainers import PLAYS, base, llama, merged

from samestep.config.load import from_dict
from samestep.data.batch import Batch
from samestep.data.dataset import load_data, make_order
from samestep.length import in_steps
from samestep.parallel.mesh import Mesh
from samestep.run.allocator import keep_freed_memory
from samestep.run.setup import build_model, build_step, micro_batches
from samestep.step.step import TrainStep

ROWS = 16
SETTINGS = base(llama(512, 6, 8, 1376, 32_000, 512), ROWS, ROWS, PLAYS, 4096)
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


def products(step: TrainStep, split: Sequence[Batch]) -> float:
    """Seconds of matrix products in a step."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(split)
    return sum(event.self_cpu_time_total for event in seen.key_averages() if event.key in PRODUCTS) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        configs = [
            from_dict(merged(SETTINGS, {"training": {"local_batch_size": size}, "output_dir": f"{folder}/run"})).config
            for size in (ROWS, 1)
        ]
        data, mesh = load_data(configs[0]), Mesh.alone()
        samples = make_order(configs[0], data).next(0)
        model = build_model(configs[0], data.tokenizer.vocab_size, mesh)
        step = build_step(in_steps(configs[0], 1000), model, mesh, "once_per_step")
        splits = [micro_batches(config, data.train, samples, 1, mesh) for config in configs]
        seconds: list[list[float]] = [[], []]
        for turn in range(rounds + 1):
            for split, times in zip(splits, seconds, strict=True):
                start = time.perf_counter()
                step(split)
                if turn:
                    times.append(time.perf_counter() - start)
        of_products = [products(step, split) for split in splits]
    ratio = statistics.median(many / one for one, many in zip(*seconds, strict=True))
    one, many = (statistics.median(times) for times in seconds)
    print(f"1 micro-batch {one:.2f} s, {len(splits[1])} micro-batches {many:.2f} s, x{ratio:.3f}")  # noqa: T201
    one, many = of_products
    print(f"matrix products in them {one:.2f} s and {many:.2f} s, x{many / one:.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
