"""Time of a step with PyTorch's operators over that with samestep's kernels, on a CPU.

One process takes both kinds of step by turns: two processes may differ by more than the kernels save, since the speed
of matrix products depends on where their memory happens to lie.

python benchmarks/kernels.py [CASE] [--turns N]     CASE: one of benchmarks/trainers.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from trainers import cases

from samestep.config.load import from_dict
from samestep.ops import dispatch
from samestep.run.trainer import Events, Trainer


class Turns(Events):
    """Switches the kernels off and on again after every turn of some steps; the first two turns are not counted."""

    def __init__(self, steps: int, turns: int):
        self.steps, self.last = steps, 2 * (turns + 1) * steps
        self.library, self.step, self.started = dispatch.library, 0, 0.0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_train_begin(self, trainer: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, trainer: Any, report: Any) -> None:
        self.step += 1
        if self.step % self.steps:
            return
        turn = self.step // self.steps - 1
        if turn > 1:
            self.seconds[turn % 2 == 0].append((time.perf_counter() - self.started) / self.steps)
        dispatch.library = self.library if turn % 2 else lambda: (None, "switched off")
        self.should_stop = self.step == self.last
        self.started = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="tiny", choices=list(cases()))
    parser.add_argument("--turns", type=int, default=12)
    arguments = parser.parse_args()
    case = cases()[arguments.case]
    if not case.config["train_dataset"]:
        parser.error(f"the data of {arguments.case} is made by benchmarks/trainers.py")
    turns = Turns(case.turn, arguments.turns)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(from_dict(case.config | {"output_dir": folder}).config, listeners=[turns]).train()
    with_kernels, without = (statistics.median(turns.seconds[on]) for on in (True, False))
    ratio = statistics.median(off / on for on, off in zip(turns.seconds[True], turns.seconds[False], strict=True))
    print(f"kernels {1e3 * with_kernels:.1f} ms, PyTorch's operators {1e3 * without:.1f} ms, x{ratio:.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
