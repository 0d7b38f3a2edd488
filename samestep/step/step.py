"""One optimizer step: count, accumulate, reduce, clip, update or skip, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from samestep.data.batch import MicroBatch
from samestep.ops.gradient_sink import ExactSink, GradientSink
from samestep.parallel.data import GradientReduction, local
from samestep.parallel.exact import ExactReduction
from samestep.parallel.mesh import Mesh
from samestep.step.accumulate import MicroBatchHook, accumulate
from samestep.step.clip import clip_coefficient, squares
from samestep.step.objective import Objective, PreparedObjective
from samestep.step.recovery import OF_A_FILE, Advice, Recovery
from samestep.step.scaler import LossScaler
from samestep.step.update import Updater
from samestep.torch_private import scale_

GradientsHook = Callable[[Mapping[str, torch.Tensor]], None]

NON_FINITE = "non-finite gradient norm"
OVERFLOW = "gradients overflow at this loss scale"
NO_TARGETS = "no targets"


@dataclass(frozen=True)
class Totals:
    """Sums over the micro-batches of all ranks.

    Attributes:
        counts: float64 [terms], on the device.
        others: micro-batches with samples, tokens, samples; float64 [3], on the device.
    """

    counts: torch.Tensor
    others: torch.Tensor


@dataclass(frozen=True)
class StepReport:
    """What a step did, over the whole global batch; the same on every rank.

    Attributes:
        loss: sum / count of the weighed terms, the number one big batch would print; NaN where there was no target.
        terms: each term's own sum / count.
        grad_norm: before clipping.
        learning_rate: the one used (or that would have been).
        targets: count of the trained term.
        tokens: positions that were not padding.
        accumulation_steps: micro-batches of the rank that has most.
        skipped: None, or why weights and optimizer were left unchanged; `OVERFLOW` where a lower loss scale may help.
        loss_scale: what the losses were multiplied by in the backward passes; None without a scaler.
        ranks: what each rank told, by rank.
    """

    loss: float
    terms: dict[str, float]
    grad_norm: float
    clip_coefficient: float
    learning_rate: float
    targets: int
    tokens: int
    samples: int
    accumulation_steps: int
    skipped: str | None
    loss_scale: float | None = None
    ranks: tuple[tuple[float, ...], ...] = ((),)


class TrainStep:
    """The step of one run, on all its ranks.

    Two small collectives frame it: the counts before the first forward pass; the losses, the norm and what the ranks
    have to tell after the last backward pass. Between them the gradients are reduced.

    Args:
        reduction: of the gradients over the ranks.
        max_norm: clip threshold, or None to measure only.
        micro_batch_mean: divide each micro-batch by its own count and average (the step then depends on the split).
        loss_dtype: float32 or wider.
        around_passes: entered while the passes of a step run, during which no weight changes.
        scaler: where gradients pass through float16.
        advice: where a micro-batch does not fit into memory.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        updater: Updater,
        sink: GradientSink | ExactSink,
        reduction: GradientReduction | ExactReduction,
        mesh: Mesh,
        *,
        max_norm: float | None,
        loss_dtype: torch.dtype = torch.float32,
        micro_batch_mean: bool = False,
        around_passes: Callable[[], AbstractContextManager[None]] = nullcontext,
        scaler: LossScaler | None = None,
        advice: Advice = OF_A_FILE,
    ):
        self.model, self.objective, self.updater = model, objective, updater
        self.sink, self.reduction, self.mesh = sink, reduction, mesh
        self.max_norm, self.loss_dtype, self.micro_batch_mean = max_norm, loss_dtype, micro_batch_mean
        self.around_passes, self.scaler = around_passes, scaler
        self.recovery = Recovery(sink if isinstance(sink, GradientSink) and mesh.weights is None else None, advice)

    def __call__(
        self,
        batches: Sequence[MicroBatch],
        on_micro_batch: MicroBatchHook | None = None,
        on_gradients: GradientsHook | None = None,
        tell: Callable[[], Sequence[float]] = tuple,
    ) -> StepReport:
        """Take one step on the micro-batches of this rank, as many as every other rank has.

        Args:
            on_gradients: shown the gradients of the whole step, by name, before they are clipped.
            tell: asked at the end for numbers of this rank, as many on each, which every rank gets to know.
        """
        self.recovery.failed = 0
        counts, totals = self.count(batches)
        losses = self.backward(batches, counts, totals, on_micro_batch)
        gradients, scale = self.sink.gradients(), self.loss_scale
        if on_gradients is not None:
            if self.scaler is not None:
                # Whoever looks shall see them as they are. Else the update divides by the scale in passing.
                scale_([local(gradient) for gradient in gradients.values()], 1 / scale)
                scale = 1.0
            on_gradients(gradients)
        share = squares(gradients.values(), self.reduction.owned, self.mesh.device).sum()
        losses, square, told = self._exchange(losses, share, tell())
        norm = square.sqrt() / scale
        coefficient = clip_coefficient(norm, self.max_norm)
        empty = (totals.counts * self._weights() == 0).all()
        self.updater.apply(gradients, coefficient / scale, skip=~norm.isfinite() | empty)
        self.sink.zero()
        return self._report(len(batches), totals, losses, norm, coefficient, told)

    @property
    def loss_scale(self) -> float:
        """What the losses of the next step are multiplied by in the backward passes."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def _weights(self) -> torch.Tensor:
        return torch.tensor(list(self.objective.weights.values()), dtype=torch.float64, device=self.mesh.device)

    def count(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, Totals]:
        """Before any forward pass: counts [micro-batches, terms] of this rank, and the totals of all. On the device."""
        rows = [self.objective.counts(batch) for batch in batches]
        counts = torch.tensor([[row[t] for t in self.objective.weights] for row in rows], dtype=torch.float64)
        others = [
            sum(batch.samples > 0 for batch in batches),
            sum(batch.tokens for batch in batches),
            sum(batch.samples for batch in batches),
        ]
        own = torch.cat([counts.sum(0), torch.tensor(others, dtype=torch.float64)])
        total = self.mesh.sum_(own.to(self.mesh.device))
        return counts.to(self.mesh.device), Totals(total[:-3], total[-3:])

    def backward(
        self,
        batches: Sequence[MicroBatch],
        counts: torch.Tensor,
        totals: Totals,
        on_micro_batch: MicroBatchHook | None = None,
    ) -> torch.Tensor:
        """Add up the gradients of the step, times `loss_scale`, in the sink; returns this rank's share of each loss,
        float64 [terms]."""
        terms = {term: column for column, term in enumerate(self.objective.weights)}
        # One big batch divides by its count; the mean of means divides each part by its own and by how many there are.
        divisors = counts * totals.others[0] if self.micro_batch_mean else totals.counts.expand_as(counts)
        divisors = divisors.clamp(min=1).to(self.loss_dtype)
        if not all(module.training for module in self.model.modules()):  # to set it again takes longer than to look
            self.model.train()
        with self.around_passes():
            if isinstance(self.objective, PreparedObjective):
                parts = [part for batch in batches for part in self.recovery.parts(batch)]
                self.objective.prepare(self.model, parts, totals.counts, self.mesh)
            return self._passes(batches, divisors, terms, on_micro_batch)

    def _passes(
        self,
        batches: Sequence[MicroBatch],
        divisors: torch.Tensor,
        terms: Mapping[str, int],
        on_micro_batch: MicroBatchHook | None,
    ) -> torch.Tensor:
        while True:
            parts = accumulate(
                self.model,
                self.objective,
                batches,
                lambda index, term: divisors[index, terms[term]],
                device=self.mesh.device,
                dtype=self.loss_dtype,
                scale=self.loss_scale,
                before=self.reduction.before,
                recovery=self.recovery,
                on_micro_batch=on_micro_batch,
            )
            if self.reduction.finish(self.sink):
                return self.reduction.losses(parts)
            on_micro_batch = None  # it has seen them all

    def _exchange(
        self, losses: torch.Tensor, square: torch.Tensor, told: Sequence[float]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One small sum over ranks: losses [terms], square of the norm, and what each rank tells [ranks, numbers]."""
        world = self.mesh.world
        table = torch.zeros(world.size, len(told), dtype=torch.float64)
        table[world.rank] = torch.tensor(told, dtype=torch.float64)
        message = torch.cat([losses, square.reshape(1), table.flatten().to(self.mesh.device)])
        total = self.mesh.sum_(message)
        size = len(losses)
        return total[:size], total[size], total[size + 1 :].view(world.size, -1)

    def _report(
        self,
        accumulation_steps: int,
        totals: Totals,
        losses: torch.Tensor,
        norm: torch.Tensor,
        coefficient: torch.Tensor,
        told: torch.Tensor,
    ) -> StepReport:
        # The only host read of the step.
        numbers = torch.cat([torch.stack([norm, coefficient]), losses, totals.counts, totals.others, told.flatten()])
        norm_read, coefficient_read, *values = numbers.tolist()
        weights = list(self.objective.weights.values())
        size = len(weights)
        terms, counts, (_, tokens, samples) = values[:size], values[size : 2 * size], values[2 * size : 2 * size + 3]
        targets = max(int(n) for n, weight in zip(counts, weights, strict=True) if weight)
        skipped = NO_TARGETS if not targets else NON_FINITE if not math.isfinite(norm_read) else None
        loss_scale = None
        if self.scaler is not None:
            loss_scale = self.scaler.scale
            if targets and self.scaler.update(skipped is None):
                skipped = OVERFLOW
        learning_rate = self.updater.learning_rate
        self.updater.updates += skipped is None
        width = told.shape[1]
        rest = values[2 * size + 3 :]
        return StepReport(
            loss=sum(weight * value for weight, value in zip(weights, terms, strict=True)) if targets else math.nan,
            terms={
                t: value if n else math.nan for t, value, n in zip(self.objective.weights, terms, counts, strict=True)
            },
            grad_norm=norm_read if targets else math.nan,
            clip_coefficient=coefficient_read if targets else math.nan,
            learning_rate=learning_rate,
            targets=targets,
            tokens=int(tokens),
            samples=int(samples),
            accumulation_steps=accumulation_steps,
            skipped=skipped,
            loss_scale=loss_scale,
            ranks=tuple(tuple(rest[rank * width : (rank + 1) * width]) for rank in range(told.shape[0])),
        )
