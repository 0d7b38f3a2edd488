"""Warnings of what goes wrong without an error: weights that stand still, numbers that are not finite, loss spikes.

All ranks find the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.config.schema import Config
from samestep.data.batch import Batch
from samestep.dtypes import NARROW
from samestep.model.attention import AttentionCore
from samestep.model.decoder import Decoder, Layer
from samestep.ops.precision import is_narrow
from samestep.parallel.data import free, local
from samestep.parallel.mesh import Mesh
from samestep.step.objective import Objective
from samestep.step.recovery import Recovery
from samestep.step.step import NO_TARGETS, OVERFLOW, StepReport, TrainStep
from samestep.step.update import Updater

WINDOW = 50
"""Losses that a new one is compared with, and steps between two warnings of a jump."""
_LEAST_SPREAD = 0.01
"""Of the median: a run that has learned its data by heart has no spread to speak of."""
_SAMPLE = 1024
_PIECE = 1 << 22
_NAMES = 10
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@dataclass(frozen=True)
class Finding:
    """A warning for the terminal, and its event."""

    event: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Watch:
    """What `monitor` asks to be warned of. Give it `on_gradients` as a hook while `needs_gradients`, then `after`."""

    def __init__(self, config: Config, model: Decoder, step: TrainStep, mesh: Mesh):
        monitor = config.monitor
        self._config, self._model, self._step, self._mesh = config, model, step, mesh
        self._still = StillWeights(model, step.updater, monitor.watch_steps) if monitor.watch_steps else None
        self._spikes = LossSpikes(monitor.loss_spike_zscore) if monitor.loss_spike_zscore else None

    @property
    def needs_gradients(self) -> bool:
        """Whether the next step's gradients, as they are before the update, are of interest."""
        return self._still is not None and self._still.needs_gradients

    def on_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        if self._still is not None:
            self._still.on_gradients(gradients)

    def after(self, step: int, report: StepReport, batches: Sequence[Batch], samples: range) -> list[Finding]:
        """After each step.

        Args:
            batches: the micro-batches of this rank.
            samples: places of the step's samples in the order of the run.
        """
        found = list(self._still.after(report, self._mesh)) if self._still is not None else []
        if self._config.monitor.check_finite and report.skipped not in (None, NO_TARGETS):
            place = self._where_not_finite(batches)
            # Of a loss scale that is too large the gradients overflow in the backward pass: that is how it is found.
            if report.skipped != OVERFLOW or place.details["module"] is not None:
                found.append(place)
        z = self._spikes.add(step, report.loss) if self._spikes is not None else None
        if z is not None:
            found.append(self._describe_spike(report.loss, z, samples))
        return found

    def _where_not_finite(self, batches: Sequence[Batch]) -> Finding:
        step, mesh = self._step, self._mesh
        own = first_not_finite(
            self._model, step.objective, batches, mesh, step.recovery, is_compiled=self._config.compile
        )
        places = [(*place, rank) for rank, place in enumerate(mesh.gather(own)) if place is not None]
        if not places:
            text = "all that the forward pass computes is finite: the gradient overflowed in the backward pass"
            return Finding("non_finite", text, {"module": None})
        micro_batch, _, module, rank = min(places)
        text = f"the first numbers that are not finite come from {module} (micro-batch {micro_batch} of rank {rank})"
        return Finding("non_finite", text, {"module": module, "micro_batch": micro_batch, "rank": rank})

    def _describe_spike(self, loss: float, z: float, samples: range) -> Finding:
        model = self._config.model
        fields = ("layernorm_compute_dtype", "softmax_compute_dtype")
        narrow = [f"model.{name}: float32" for name in fields if getattr(model, name) in NARROW]
        advice = (
            f"write {' and '.join(narrow)}"
            if narrow
            else "look at the data of this step; if it happens again, lower lr_scheduler.learning_rate"
        )
        text = (
            f"the loss jumped to {loss:.4g}, {z:.1f} standard deviations above the median of the last {WINDOW} steps "
            f"(samples {samples.start} to {samples.stop - 1} in the order of the run); {advice}"
        )
        return Finding("loss_spike", text, {"loss": loss, "zscore": z, "samples": [samples.start, samples.stop - 1]})


# ---- losses that jump


class LossSpikes:
    """Finds losses far above those before them.

    A loss is compared with the median of the last `WINDOW`, in units of their spread, 1.4826 x the median absolute
    deviation, which is the standard deviation where they are normal (Hampel 1974); outliers do not move either.

    Args:
        zscore: units from which on a loss is a spike.
    """

    def __init__(self, zscore: float):
        self._zscore = zscore
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._last: int | None = None

    def add(self, step: int, loss: float) -> float | None:
        """The z-score of a spike, or None; also None within `WINDOW` steps of the last one."""
        if not math.isfinite(loss):
            return None
        z = self._measure(loss)
        self._losses.append(loss)
        if z < self._zscore or (self._last is not None and step - self._last < WINDOW):
            return None
        self._last = step
        return z

    def _measure(self, loss: float) -> float:
        if len(self._losses) < WINDOW:
            return 0.0
        median = statistics.median(self._losses)
        spread = 1.4826 * statistics.median(abs(value - median) for value in self._losses)
        return (loss - median) / max(spread, _LEAST_SPREAD * abs(median), 1e-12)


# ---- numbers that are not finite


@torch.no_grad()
def first_not_finite(
    model: Decoder,
    objective: Objective,
    batches: Sequence[Batch],
    mesh: Mesh,
    recovery: Recovery,
    *,
    is_compiled: bool,
) -> tuple[int, int, str] | None:
    """Run micro-batches forward once more: (micro-batch, place in the order of execution, what) of the first result
    that is not finite on this rank. A collective where weights are sharded. One host read a micro-batch."""
    found = None
    for index, batch in enumerate(batches):
        with ExitStack() as stack:
            flags: list[tuple[str, Tensor]] = []
            for name, module in model.named_modules():
                if name and not (is_compiled and _is_inside_compiled(name)):
                    for hook in _watch_module(name, module, flags):
                        stack.callback(hook.remove)
            for part in recovery.parts(batch):
                objective.sums(model, part.to(mesh.device))
        bad = torch.stack([flag for _, flag in flags]).tolist()
        if found is None and any(bad):
            place = bad.index(True)
            found = index, place, flags[place][0]
        if found is not None and mesh.weights is None:
            break
    free(model)
    return found


def _is_inside_compiled(name: str) -> bool:
    """A hook there would make the compiled layers compile again."""
    return ".mlp." in name or name.endswith((".q_proj", ".k_proj", ".v_proj", ".q_norm", ".k_norm"))


def _watch_module(name: str, module: nn.Module, flags: list[tuple[str, Tensor]]) -> Iterator[Any]:
    """Hooks that add (what, whether it is not finite) to `flags`. Inputs that were finite when they left the module
    before, and are not now, were made between modules."""

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        between = f"between the modules before {name}"
        if isinstance(module, Layer) and module.layer == 0:
            between = "embed_tokens"
        elif isinstance(module, AttentionCore):
            between = f"the rotary embedding of {name.rpartition('.')[0]}"
        _add_flag(between, inputs, flags)

    def leave(module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
        _add_flag(name, result if isinstance(result, tuple) else (result,), flags)

    yield module.register_forward_pre_hook(enter)
    yield module.register_forward_hook(leave)


def _add_flag(what: str, values: Sequence[Any], flags: list[tuple[str, Tensor]]) -> None:
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    if tensors:
        flags.append((what, torch.stack([~t.isfinite().all() for t in tensors]).any()))


# ---- weights that stand still


class StillWeights:
    """Finds trained weights of which no bit has changed after a number of updates.

    What is compared is what the optimizer updates: the master weights where there are any. A sample of each tensor
    tells of most that they moved, a fingerprint of all its bits of the rest, so that an embedding of which few rows get
    a gradient has moved. Both are of this rank's part.

    Args:
        updates: after how many to look.
    """

    def __init__(self, model: Decoder, updater: Updater, updates: int):
        self._model, self._updater, self._count = model, updater, updates
        self._first: int | None = updater.updates
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[str, Tensor] = {}
        self._largest_rate = 0.0

    @property
    def needs_gradients(self) -> bool:
        return self._first is not None and (not self._before or self._is_last)

    @property
    def _is_last(self) -> bool:
        """Whether the next update is the last one before the look."""
        return self._first is not None and self._updater.updates + 1 == self._first + self._count

    def on_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Before an update."""
        if self._first is None:
            return
        if not self._before:
            self._first = self._updater.updates
            self._before = {name: (_sample(part), _fingerprint(part)) for name, part in self._parts()}
        if self._is_last:
            parts = {name: local(gradient) for name, gradient in gradients.items()}
            self._gradients = {name: part.abs().amax() for name, part in parts.items() if part.numel()}

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._updater.parameters:
            yield name, local(self._updater.trained(name).detach())

    def after(self, report: StepReport, mesh: Mesh) -> Iterator[Finding]:
        """After an update or a skip."""
        if self._first is None or report.skipped is not None:
            return
        self._largest_rate = max(self._largest_rate, report.learning_rate)
        if self._updater.updates < self._first + self._count:
            return
        self._first = None
        yield from self._describe(*self._look(mesh))
        self._before.clear()
        self._gradients.clear()

    def _look(self, mesh: Mesh) -> tuple[list[str], set[str]]:
        """Names of what stands still, and of what has a gradient, on all ranks."""
        parts = dict(self._parts())
        if not parts:
            return [], set()
        sampled = [(_sample(part) != self._before[name][0]).any() for name, part in parts.items()]
        moved = dict(zip(parts, torch.stack([flag.to(mesh.device) for flag in sampled]).tolist(), strict=True))
        for name in [name for name in parts if not moved[name]]:
            moved[name] = bool(_fingerprint(parts[name]) != self._before[name][1])
        zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
        gradients = [self._gradients[n].double().to(mesh.device) if n in self._gradients else zero for n in parts]
        flags = torch.tensor([float(moved[name]) for name in parts], dtype=torch.float64, device=mesh.device)
        table = mesh.max_(torch.stack([flags, torch.stack(gradients)])).tolist()
        still = [name for name, has_moved in zip(parts, table[0], strict=True) if not has_moved]
        return still, {name for name, gradient in zip(parts, table[1], strict=True) if gradient != 0}

    def _describe(self, still: Sequence[str], with_gradient: set[str]) -> Iterator[Finding]:
        reasons: dict[str, tuple[str, list[str]]] = {}
        for name in still:
            reason, text = self._reason(name, name in with_gradient)
            reasons.setdefault(reason, (text, []))[1].append(name)
        for reason, (text, names) in reasons.items():
            shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
            message = f"no number of {shown} has changed in {self._count} updates: {text}"
            details = {"parameters": names[:_NAMES], "count": len(names), "reason": reason}
            yield Finding("still_weights", message, details)

    def _reason(self, name: str, has_gradient: bool) -> tuple[str, str]:
        """A short name, and why with what to write."""
        if not self._largest_rate:
            return (
                "learning rate",
                "the learning rate was 0; look at lr_scheduler (warmup_lr_init, learning_rate)",
            )
        if not has_gradient:
            return "gradient", "their gradient is 0; look at whether the loss depends on them"
        stored = self._model.stored_dtype(name)
        if is_narrow(stored) and name not in self._updater.masters:
            dtype = str(stored).removeprefix("torch.")
            return "resolution", (
                f"updates are lost in {dtype}, whose numbers are {torch.finfo(stored).eps:.2g} apart at 1 while the "
                f"learning rate is {self._largest_rate:.2g}; write optimizer.master_weights: float32, or "
                "model.params_dtype: float32"
            )
        return "resolution", f"updates are too small; the learning rate of at most {self._largest_rate:.2g} is too low"


def _bits(part: Tensor) -> Tensor:
    return part.reshape(-1).view(_BITS[part.element_size()])


def _sample(part: Tensor) -> Tensor:
    bits = _bits(part)
    if len(bits) <= _SAMPLE:
        return bits.clone()
    return bits[torch.linspace(0, len(bits) - 1, _SAMPLE, dtype=torch.float64, device=bits.device).long()]


def _fingerprint(part: Tensor) -> Tensor:
    """A number that changes with every single element: sum of bits x odd numbers, modulo 2^64; int64 scalar."""
    bits = _bits(part)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].long()
        odd = torch.arange(start, start + len(piece), device=bits.device).mul_(2).add_(1)
        total += (piece * odd).sum()
    return total
