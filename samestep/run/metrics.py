"""What a run writes down: `metrics.jsonl`, `events.jsonl`, and what it sends to loggers. The schemas are in
docs/run_folder.md."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from samestep.errors import CheckpointError
from samestep.run.loggers import Logger, finite_only
from samestep.run.record import EVENTS_FILE, METRICS_FILE
from samestep.step.step import StepReport

_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s from the vendors' data sheets, by a part of the device name."""


def finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not finite becomes null."""
    return value if value is not None and math.isfinite(value) else None


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s the device can reach at most, or None where it is not known (any CPU)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


class PeakMemory:
    """Peak memory since creation: on a GPU what PyTorch allocated, on a CPU growth of the largest resident set."""

    def __init__(self, device: torch.device):
        self.device = device
        self._before = 0 if device.type == "cuda" else _resident_maximum()

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, _resident_maximum() - self._before)  # some sandboxes let the maximum fall


def _resident_maximum() -> int:
    try:
        status = Path("/proc/self/status").read_bytes()
        return int(status.partition(b"VmHWM:")[2].split(None, 1)[0]) * 1024
    except (OSError, IndexError):
        return 0


class JsonLines:
    """A file of one JSON object a line. Each line reaches the operating system before `write` returns.

    Without a path nothing is kept: of many ranks one writes.
    """

    def __init__(self, path: Path | None):
        self._is_kept = path is not None
        self._file = (path or Path(os.devnull)).open("ab+", buffering=0)
        if self._file.seek(0, os.SEEK_END) and not _ends_line(self._file, self._file.tell()):
            self._file.write(b"\n")  # a kill left half a line, which the next one must not join

    def write(self, **values: Any) -> None:
        self._file.write(json.dumps(values, allow_nan=False).encode() + b"\n")

    def sync(self) -> int:
        """Force everything to disk; returns the size in bytes."""
        if self._is_kept:
            os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def _ends_line(file: IO[bytes], size: int) -> bool:
    file.seek(size - 1)
    return file.read(1) == b"\n"


def _last_line(file: IO[bytes], size: int) -> bytes:
    """The last line of the first `size` bytes, with its line end if it has one."""
    start, tail = size, b""
    while start and b"\n" not in tail[:-1]:
        start = max(0, start - 2**16)
        file.seek(start)
        tail = file.read(size - start)
    return tail[tail[:-1].rfind(b"\n") + 1 :]


def check_cut(path: Path, size: int, step: int) -> None:
    """The file can be cut back to `size` bytes: a row of `step` ends there.

    Raises:
        CheckpointError: it is shorter, or other rows were written meanwhile.
    """
    if size == 0:
        return
    fix = "restore it, or go on in another output_dir with --resume PATH of the checkpoint"
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise CheckpointError(
            f"{path} has {found} bytes, but had {size} when the checkpoint of step {step} was saved: rows are missing\n"
            f"  fix: {fix}"
        )
    with path.open("rb") as file:
        last = _last_line(file, size)
    try:
        is_row = last.endswith(b"\n") and json.loads(last)["step"] == step
    except (ValueError, KeyError, TypeError):
        is_row = False
    if not is_row:
        raise CheckpointError(
            f"{path}: no row of step {step} ends at byte {size}, where the checkpoint of that step was saved: the rows "
            f"are of another course of the run, or were edited\n  fix: {fix}"
        )


def cut_back(path: Path, size: int, lost: Path) -> int:
    """Cut a file back to `size` bytes; what was beyond goes to the end of `lost`. Returns the number of lines moved."""
    if not path.exists() or path.stat().st_size <= size:
        return 0
    with path.open("rb+") as file:
        file.seek(size)
        tail = file.read()
        with lost.open("ab") as kept:
            kept.write(tail if tail.endswith(b"\n") else tail + b"\n")
            kept.flush()
            os.fsync(kept.fileno())
        file.truncate(size)
        os.fsync(file.fileno())
    return tail.count(b"\n")


class Metrics:
    """Writer of a run's numbers and events.

    Args:
        flops_per_token: of training, for `mfu`.
        loggers: also told of every number. One that fails is told no more: watching a run must not end it.
        warn: told why.
    """

    def __init__(
        self,
        folder: Path | None,
        device: torch.device,
        flops_per_token: float,
        loggers: Sequence[Logger] = (),
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.rows = JsonLines(folder / METRICS_FILE if folder else None)
        self.events = JsonLines(folder / EVENTS_FILE if folder else None)
        self.memory = PeakMemory(device)
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops(device)
        self._loggers, self._warn = list(loggers), warn

    def step(
        self, step: int, report: StepReport, consumed: int, seconds: float, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write one step's row.

        Args:
            seconds: wall time of the step with the fetching of its data.
            extra: what `StepMonitor.read` gave.
        """
        rate = report.tokens / seconds
        terms = {name: finite(value) for name, value in report.terms.items()} if len(report.terms) > 1 else {}
        row = {
            "step": step,
            "loss": finite(report.loss),
            "grad_norm": finite(report.grad_norm),
            "clip_coefficient": finite(report.clip_coefficient),
            "lr": report.learning_rate,
            "targets": report.targets,
            "tokens": report.tokens,
            "samples": report.samples,
            "consumed_samples": consumed,
            "accumulation_steps": report.accumulation_steps,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "targets_per_second": report.targets / seconds,
            "mfu": rate * self._flops_per_token / self._peak_flops if self._peak_flops else None,
            "peak_memory_bytes": self.memory.bytes(),
            "skipped": report.skipped is not None,
            **({} if report.loss_scale is None else {"loss_scale": report.loss_scale}),
            **({"ranks": _extremes(report.ranks)} if len(report.ranks) > 1 else {}),
            **({"terms": terms} if terms else {}),
            **{name: _finite_parts(value) for name, value in (extra or {}).items()},
        }
        self.rows.write(**row)
        due = [logger for logger in self._loggers if step % logger.interval == 0]
        if due:
            names = ("loss", "grad_norm", "clip_coefficient", "lr", "tokens_per_second", "peak_memory_bytes")
            shown = {name: row[name] for name in (*names, "loss_scale") if name in row} | (dict(extra) if extra else {})
            self._send({f"train/{name}": value for name, value in _flat(shown)}, step, due)

    def evaluation(self, step: int, loss: float, targets: int, seconds: float) -> None:
        self.rows.write(step=step, eval_loss=finite(loss), eval_targets=targets, eval_seconds=seconds)
        self._send({"eval/loss": loss}, step, self._loggers)

    def event(self, kind: str, step: int, **details: Any) -> None:
        self.events.write(event=kind, step=step, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), **details)

    def _send(self, values: Mapping[str, float | None], step: int, loggers: Sequence[Logger]) -> None:
        numbers = finite_only(values)
        for logger in list(loggers) if numbers else []:
            self._guarded(logger, partial(logger.log, numbers, step))

    def _guarded(self, logger: Logger, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # services fail in ways of their own
            self._loggers.remove(logger)
            self._warn(f"{type(logger).__name__} gets no more numbers: {type(error).__name__}: {error}")

    def close(self) -> None:
        for logger in list(self._loggers):
            self._guarded(logger, logger.close)
        self.rows.close()
        self.events.close()


def _extremes(ranks: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """[least, greatest] over ranks of what each told."""
    columns = list(zip(*ranks, strict=True))
    names = {"step_seconds": 1, "data_seconds": 2, "peak_memory_bytes": 3}
    return {name: [min(columns[place]), max(columns[place])] for name, place in names.items()}


def _finite_parts(value: Any) -> Any:
    """`finite` of every number in lists and dicts."""
    if isinstance(value, dict):
        return {name: _finite_parts(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite_parts(part) for part in value]
    return finite(value)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """`{"a": {"b": [1, 2]}}` -> `a/b/0: 1`, `a/b/1: 2`."""
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(place): part for place, part in enumerate(value)}
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", part) for inner, part in _flat(value))
        else:
            yield name, value
