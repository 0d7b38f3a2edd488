"""What a loss that somebody else computes is divided by, and what it sums over: found out by asking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.rows import IGNORE
from samestep.hf.batch import ModelBatch
from samestep.ops.precision import is_narrow
from samestep.parallel.mesh import Mesh

Ask = Callable[[ModelBatch, float], Tensor]
"""(micro-batch, num_items_in_batch) -> loss, with the same random numbers each time."""

_FACTOR = 4
"""Between the two counts that a loss is asked with: a power of two divides without rounding."""


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and what each module was in afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass
class Findings:
    """What the micro-batches of all ranks have shown of a loss; 0 where none has.

    Attributes:
        asked: there were targets to ask with.
        follows_count: the loss was divided by the count it was told.
        ignores_count: the loss was the same for another count.
        is_mixed: it was neither.
        is_no_mean: the loss of all targets is not the mean of those of its two parts, weighed by their counts.
        is_no_sum: nor their sum.
        uses_others: it compares other rows of the logits with targets than those that are counted.
        used, counted: how many rows of the logits that is, on a rank where they differ.
    """

    asked: float = 0
    follows_count: float = 0
    ignores_count: float = 0
    is_mixed: float = 0
    is_no_mean: float = 0
    is_no_sum: float = 0
    uses_others: float = 0
    used: float = 0
    counted: float = 0

    def of_all_ranks(self, mesh: Mesh) -> Findings:
        """A collective."""
        own = torch.tensor([float(getattr(self, field.name)) for field in fields(self)], dtype=torch.float64)
        return Findings(*mesh.max_(own.to(mesh.device)).tolist())


Parts = Sequence[tuple[ModelBatch, int]]
"""The targets of a micro-batch taken apart, each part with its count."""


def parted(batch: ModelBatch, name: str, items: Callable[[Mapping[str, Any]], int], can_mask: bool) -> Parts | None:
    """The targets of a micro-batch in two parts, of about one and two thirds; None where there is no way to part them.

    Targets of positions are masked, with the same inputs. Others are parted by rows. Classes are sorted, so that a loss
    that weighs them is seen to do so.

    Args:
        name: of the input that holds the targets.
        items: inputs -> count.
        can_mask: whether the loss knows that -100 does not count. What is masked already shows that it does.
    """
    labels = batch.inputs.get(name)
    parts: list[ModelBatch] = []
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim > 1:
        kept = (labels.flatten() != IGNORE).nonzero().squeeze(1)
        kept = kept[labels.flatten()[kept].argsort(stable=True)]
        if len(kept) > 1 and (can_mask or len(kept) < labels.numel()):
            first, rest = labels.flatten().clone(), labels.flatten().clone()
            cut = max(1, len(kept) // 3)
            first[kept[cut:]] = IGNORE
            rest[kept[:cut]] = IGNORE
            parts = [batch.with_inputs(**{name: part.view_as(labels)}) for part in (first, rest)]
    if not parts and batch.has_rows and batch.rows > 1:
        rows = list(range(batch.rows))
        if isinstance(labels, Tensor) and labels.shape == (batch.rows,):
            rows = labels.argsort(stable=True).tolist()
        cut = max(1, batch.rows // 3)
        parts = [batch.part(rows[:cut]), batch.part(rows[cut:])]
    counted = [(part, items(part.inputs)) for part in parts]
    return counted if counted and all(count for _, count in counted) else None


def probe(ask: Ask, batch: ModelBatch, items: int, total: float, parts: Parts | None) -> Findings:
    """Ask a loss four times, without gradient; equally often on every rank, since a pass of the model may be a
    collective.

    Args:
        items: targets of the micro-batch; 0: it has none, and its answers show nothing.
        total: count of the global batch.
    """
    with torch.no_grad():
        answers = [ask(batch, total), ask(batch, total * _FACTOR)]
        answers += [ask(part, total) for part, _ in parts or ((batch, 0), (batch, 0))]
    loss, other, *of_parts = (float(answer) for answer in answers)
    # Half precision keeps two or three digits. Else only sums in another order move the loss.
    bound = abs(loss) * (2e-2 if is_narrow(answers[0].dtype) else 2e-5)
    if not items or not loss:
        return Findings()
    found = Findings(asked=1)
    found.follows_count = abs(other * _FACTOR - loss) <= bound
    found.ignores_count = abs(other - loss) <= bound
    found.is_mixed = not (found.follows_count or found.ignores_count)
    if parts is not None:
        (_, first), (_, second) = parts
        mean = (of_parts[0] * first + of_parts[1] * second) / (first + second)
        found.is_no_mean = first + second != items or abs(mean - loss) > bound
        found.is_no_sum = abs(sum(of_parts) - loss) > bound
    return found


def used_rows(ask: Ask, model: nn.Module, batch: ModelBatch, total: float) -> Tensor | None:
    """Which rows of the model's logits move a loss: bool, of the logits' shape without the last axis. None where that
    cannot be seen: the model gives no logits, runs more than once, or computes the loss itself.

    The model runs once, without gradient.
    """
    with torch.enable_grad(), _logits_as_leaves(model) as seen:
        loss = ask(batch, total)
    if len(seen) != 1 or not loss.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(loss, seen, allow_unused=True)
    return None if gradient is None else (gradient != 0).any(-1)


@contextmanager
def _logits_as_leaves(model: nn.Module) -> Iterator[list[Tensor]]:
    """The logits of every pass of a model inside, from which gradients begin."""
    seen: list[Tensor] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        torch.set_grad_enabled(False)

    def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
        torch.set_grad_enabled(True)
        if isinstance(outputs, dict) and isinstance(outputs.get("logits"), Tensor):
            seen.append(outputs["logits"].detach().requires_grad_())
            outputs["logits"] = seen[-1]

    hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
