"""Time and page faults of a step with and without something, on a CPU, in one process.

Steps of both kinds are taken by turns: two processes may differ by more than what is measured, since the speed of
matrix products depends on where their memory happens to lie.

kernels   samestep's kernels and blocks, or PyTorch's operators
blocks    halves of a layer as one operator each, or part by part
memory    freed memory is kept (`cpu.keep_freed_memory`), or given back as glibc does by itself after a while
units     in bfloat16, on a CPU with units for it: products that are kept in float32 are made in them, or in float32

python benchmarks/switches.py SWITCH [CASE] [--turns N]     CASE: one of benchmarks/trainers.py, with samples of one
                                                            length
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from trainers import cases

from samestep.config.load import from_dict
from samestep.model import blocks
from samestep.ops import cross_entropy, dispatch, precision
from samestep.run.allocator import MMAP_THRESHOLD, TRIM_THRESHOLD, keep_freed_memory
from samestep.run.trainer import Events, Trainer

_MIB = 2**20


def kernels(library: Callable[..., Any] = dispatch.library) -> dict[bool, Callable[[], None]]:
    def switch(found: Callable[..., Any]) -> None:
        dispatch.library = found

    return {True: lambda: switch(library), False: lambda: switch(lambda: (None, "switched off"))}


def halves(attend: Callable[..., Any] = blocks.attend, feed: Callable[..., Any] = blocks.feed) -> Any:
    def switch(first: Callable[..., Any], second: Callable[..., Any]) -> None:
        blocks.attend, blocks.feed = first, second

    nothing = [lambda *_: None] * 2
    return {True: lambda: switch(attend, feed), False: lambda: switch(*nothing)}


def memory() -> dict[bool, Callable[[], Any]]:
    def give_back() -> None:
        # Where glibc's own thresholds come to rest once blocks of 32 MiB and more were freed.
        for option, size in ((MMAP_THRESHOLD, 32 * _MIB), (TRIM_THRESHOLD, 64 * _MIB)):
            ctypes.CDLL(None).mallopt(option, size)

    return {True: keep_freed_memory, False: give_back}


def units(inside: Callable[..., Any] = precision.in_bfloat16_units) -> dict[bool, Callable[[], None]]:
    def switch(context: Callable[..., Any]) -> None:
        precision.in_bfloat16_units = cross_entropy.in_bfloat16_units = context

    return {True: lambda: switch(inside), False: lambda: switch(lambda *_: contextlib.nullcontext(False))}


SWITCHES: dict[str, dict[bool, Callable[[], Any]]] = {
    "kernels": kernels(),
    "blocks": halves(),
    "memory": memory(),
    "units": units(),
}


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Turns(Events):
    """Switches after every turn of some steps; the first two turns are not counted."""

    def __init__(self, switch: dict[bool, Callable[[], Any]], steps: int, turns: int):
        self.switch, self.steps, self.last = switch, steps, 2 * (turns + 1) * steps
        self.step, self.started = 0, 0.0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.faults: dict[bool, list[float]] = {True: [], False: []}
        self.faults_before = 0

    def on_train_begin(self, trainer: Any) -> None:
        self.switch[True]()
        self._begin()

    def _begin(self) -> None:
        self.started, self.faults_before = time.perf_counter(), page_faults()

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.step += 1
        if self.step % self.steps:
            return
        turn = self.step // self.steps - 1
        if turn > 1:
            self.seconds[turn % 2 == 0].append((time.perf_counter() - self.started) / self.steps)
            self.faults[turn % 2 == 0].append((page_faults() - self.faults_before) / self.steps)
        self.switch[turn % 2 == 1]()
        self.should_stop = self.step == self.last
        self._begin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("switch", choices=list(SWITCHES))
    parser.add_argument("case", nargs="?", default="tiny", choices=["fixed", "tiny"])
    parser.add_argument("--turns", type=int, default=12)
    arguments = parser.parse_args()
    case = cases()[arguments.case]
    if arguments.switch == "units":
        case.config["model"]["compute_dtype"] = "bfloat16"
    turns = Turns(SWITCHES[arguments.switch], case.turn, arguments.turns)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(from_dict(case.config | {"output_dir": folder}).config, listeners=[turns]).train()
    on, off = (statistics.median(turns.seconds[kind]) for kind in (True, False))
    ratio = statistics.median(off / on for on, off in zip(turns.seconds[True], turns.seconds[False], strict=True))
    more, fewer = (statistics.median(turns.faults[kind]) for kind in (False, True))
    print(f"with {arguments.switch} {1e3 * on:.1f} ms, without {1e3 * off:.1f} ms, x{ratio:.3f}")  # noqa: T201
    print(f"page faults of a step: with {fewer:.0f}, without {more:.0f}")  # noqa: T201


if __name__ == "__main__":
    main()
