"""One optimizer step: count, accumulate, clip, update or skip, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samestep.data.batch import Batch
from samestep.ops.gradient_sink import GradientSink
from samestep.step.accumulate import MicroBatchHook, accumulate
from samestep.step.clip import clip_coefficient, global_norm
from samestep.step.objective import Objective
from samestep.step.update import Updater

GradientsHook = Callable[[Mapping[str, torch.Tensor]], None]

NON_FINITE = "non-finite gradient norm"
NO_TARGETS = "no targets"


@dataclass(frozen=True)
class StepReport:
    """What a step did, over the whole global batch.

    Attributes:
        loss: sum / count of the weighed terms, the number one big batch would print; NaN where there was no target.
        terms: each term's own sum / count.
        grad_norm: before clipping.
        learning_rate: the one used (or that would have been).
        targets: count of the trained term.
        tokens: positions that were not padding.
        skipped: None, or why weights and optimizer were left unchanged.
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


class TrainStep:
    """The step of one run.

    Args:
        max_norm: clip threshold, or None to measure only.
        micro_batch_mean: divide each micro-batch by its own count and average (the step then depends on the split).
        loss_dtype: float32 or wider.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        updater: Updater,
        sink: GradientSink,
        *,
        device: torch.device,
        max_norm: float | None,
        loss_dtype: torch.dtype = torch.float32,
        micro_batch_mean: bool = False,
    ):
        self.model, self.objective, self.updater, self.sink = model, objective, updater, sink
        self.device, self.max_norm, self.loss_dtype, self.micro_batch_mean = (
            device,
            max_norm,
            loss_dtype,
            micro_batch_mean,
        )

    def __call__(
        self,
        batches: Sequence[Batch],
        on_micro_batch: MicroBatchHook | None = None,
        on_gradients: GradientsHook | None = None,
    ) -> StepReport:
        """Take one step on the micro-batches of one global batch.

        Args:
            on_gradients: shown the gradients of the whole step, by name, before they are clipped.
        """
        counts = self.count(batches)
        losses = self.backward(batches, counts, on_micro_batch)
        gradients = self.sink.gradients()
        if on_gradients is not None:
            on_gradients(gradients)
        norm = global_norm(gradients.values(), self.device)
        coefficient = clip_coefficient(norm, self.max_norm)
        empty = (counts.sum(0) * self._weights() == 0).all()
        self.updater.apply(gradients, coefficient, skip=~norm.isfinite() | empty)
        self.sink.zero()
        return self._report(batches, counts, losses, norm, coefficient)

    def _weights(self) -> torch.Tensor:
        return torch.tensor(list(self.objective.weights.values()), dtype=torch.float64, device=self.device)

    def count(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Counts [micro-batches, terms] of the whole step, before any forward pass, on the device."""
        rows = [self.objective.counts(batch) for batch in batches]
        return torch.tensor(
            [[row[t] for t in self.objective.weights] for row in rows], dtype=torch.float64, device=self.device
        )

    def backward(
        self, batches: Sequence[Batch], counts: torch.Tensor, on_micro_batch: MicroBatchHook | None = None
    ) -> torch.Tensor:
        """Add up the gradients of the step in the sink; returns the loss of each term, float64 [terms]."""
        terms = {term: column for column, term in enumerate(self.objective.weights)}
        # One big batch divides by its count; the mean of means divides each part by its own and by how many there are.
        divisors = (counts * len(batches) if self.micro_batch_mean else counts.sum(0).expand_as(counts)).clamp(min=1)
        divisors = divisors.to(self.loss_dtype)
        self.model.train()
        return accumulate(
            self.model,
            self.objective,
            batches,
            lambda index, term: divisors[index, terms[term]],
            device=self.device,
            dtype=self.loss_dtype,
            on_micro_batch=on_micro_batch,
        )

    def _report(
        self,
        batches: Sequence[Batch],
        counts: torch.Tensor,
        losses: torch.Tensor,
        norm: torch.Tensor,
        coefficient: torch.Tensor,
    ) -> StepReport:
        # The only host read of the step.
        values = torch.cat([losses, counts.sum(0), norm.reshape(1), coefficient.reshape(1)]).tolist()
        weights = list(self.objective.weights.values())
        terms, totals = values[: len(weights)], values[len(weights) : 2 * len(weights)]
        targets = max(int(n) for n, weight in zip(totals, weights, strict=True) if weight)
        skipped = NO_TARGETS if not targets else NON_FINITE if not math.isfinite(values[-2]) else None
        learning_rate = self.updater.learning_rate
        self.updater.updates += skipped is None
        return StepReport(
            loss=sum(weight * value for weight, value in zip(weights, terms, strict=True)) if targets else math.nan,
            terms={
                t: value if n else math.nan for t, value, n in zip(self.objective.weights, terms, totals, strict=True)
            },
            grad_norm=values[-2] if targets else math.nan,
            clip_coefficient=values[-1] if targets else math.nan,
            learning_rate=learning_rate,
            targets=targets,
            tokens=sum(batch.tokens for batch in batches),
            samples=sum(batch.samples for batch in batches),
            accumulation_steps=len(batches),
            skipped=skipped,
        )
