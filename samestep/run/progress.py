"""What a run shows on the terminal: a bar, or plain lines where nobody watches."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from samestep.config.kinds import DTYPE_NAMES
from samestep.dtypes import KindDtypes
from samestep.plan import Plan

if TYPE_CHECKING:
    from samestep.step.step import StepReport

_SHOWN_MICRO_BATCHES = 8
_HELD = ("parameters", "buffers", "gradients", "optimizer", "masters")
_MOVED = ("casts", "gathered", "transfers")
_SHORT = {long: short for short, long in DTYPE_NAMES.items()}


def amount(value: float) -> str:
    """1234567 -> 1.23 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def mebibytes(value: int) -> str:
    return f"{value / 2**20:,.1f} MiB"


def number(value: float, digits: int = 4) -> str:
    """A number, or what it means that there is none."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "none"


class Display:
    """Progress of one run.

    Args:
        interval: steps between plain lines where the output is no terminal; the first step has one as well.
    """

    def __init__(self, total_steps: int, interval: int, console: Console | None = None):
        self.console = console or Console()
        self._total, self._interval = total_steps, interval
        self._bar: Progress | None = None
        self._is_first = True

    def start(self, step: int) -> None:
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=step)
        self._since, self._tokens = time.perf_counter(), 0

    def step(self, step: int, report: StepReport) -> None:
        self._tokens += report.tokens
        due = self._is_first or step % self._interval == 0 or step == self._total
        self._is_first = False
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        if due:
            now = time.perf_counter()
            rate = self._tokens / max(now - self._since, 1e-9)
            text = (
                f"loss {number(report.loss)}  norm {number(report.grad_norm, 3)}  lr {report.learning_rate:.3e}"
                f"  {amount(rate)} tokens/s"
            )
            if self._bar is not None:
                self._bar.update(self._task, description=text)
            else:
                self.say(f"step {step}/{self._total}  {text}")
            self._since, self._tokens = now, 0

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan as a table of facts, a table of micro-batches, and notes."""
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts(plan):
        facts.add_row(name, value)
    console.print(facts)
    table = Table(title="micro-batches of the first step", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("rank", "micro-batch", "samples", "tokens", "padding", "targets"):
        table.add_column(heading, justify="right")
    for micro in plan.micro_batches[:_SHOWN_MICRO_BATCHES]:
        cells = (micro.rank, micro.index, micro.samples, micro.tokens, micro.padding, micro.targets)
        table.add_row(*("?" if cell is None else str(cell) for cell in cells))
    hidden = len(plan.micro_batches) - _SHOWN_MICRO_BATCHES
    if hidden > 0:
        table.add_row("...", f"{hidden} more")
    console.print(table)
    console.print(_dtype_table(plan.dtypes))
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _dtype_table(rows: Sequence[KindDtypes]) -> Table:
    table = Table(title="dtypes", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "weights", "compute", "gradients", "reduce", "masters", "state"):
        table.add_column(heading)
    for row in rows:
        compute = _short(row.compute) if row.products is None else f"{_short(row.compute)} in {_short(row.products)}"
        others = (row.gradients, row.reduction, row.masters, row.state)
        table.add_row(row.kind, _short(row.weights), compute, *map(_short, others))
    return table


def _short(dtype: str | None) -> str:
    """bfloat16 -> bf16."""
    return "-" if dtype is None else _SHORT.get(dtype, dtype)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    layout, memory = plan.layout, plan.memory

    def known(value: float | int | None, unit: str = "") -> str:
        return "?" if value is None else f"{amount(value)}{unit}"

    ranks = "1 rank" if layout.data_parallel == 1 else f"{layout.data_parallel} ranks"
    size = f"up to {plan.local_batch_tokens} positions" if plan.local_batch_size is None else plan.local_batch_size
    batch = f"{plan.global_batch_size} samples = {plan.accumulation_steps} x {size} on {ranks}"
    if plan.samples_dropped:
        batch += f", {plan.samples_dropped} dropped"
    epochs = "" if plan.epochs is None else f" = {plan.epochs:.2f} epochs of {plan.steps_per_epoch} steps"
    degrees = ("replicate", "shard", "tensor", "context", "pipeline")
    flops = known(plan.flops_per_step, "FLOP")
    parts = [f"{name} {mebibytes(getattr(memory, name))}" for name in _HELD]
    parts += [f"{name} {mebibytes(getattr(memory, name))}" for name in _MOVED if getattr(memory, name)]
    parts += [f"{name} ~{mebibytes(getattr(memory, name))}" for name in ("activations", "logits")]
    host = f", {mebibytes(memory.host)} of it in CPU memory" if memory.host else ""
    rows = [
        ("layout", " x ".join(f"{name} {getattr(layout, name)}" for name in degrees)),
        ("global batch", batch),
        ("run", f"{plan.steps} steps{epochs}"),
        (
            "a step",
            f"{known(plan.tokens)} tokens, {known(plan.targets)} targets, {known(plan.padding)} padding, {flops}",
        ),
        ("parameters", f"{plan.parameters:,}"),
        ("memory", f"{mebibytes(memory.total)}{host}: {', '.join(parts)}"),
    ]
    if plan.sent_bytes:
        rows.append(("sent", f"{mebibytes(plan.sent_bytes)} by a rank in a step"))
    if layout.shard > 1 and plan.accumulation_steps > 1:
        for cost in plan.reductions:
            text = f"{cost.reduce}: memory {mebibytes(cost.memory.total)}, sent {mebibytes(cost.sent)}"
            rows.append(("reduce", f"{text}{' (chosen)' if cost.reduce == plan.reduce else ''}"))
    return rows
