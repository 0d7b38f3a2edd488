"""The objective of a user's own `training_step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from samestep.hf.batch import ModelBatch
from samestep.parallel.mesh import Mesh


class StepObjective:
    """Of a Trainer whose `training_step` is overridden and runs backward itself.

    The gradients are in place when it returns, so what is handed on is a number from which no gradient flows back.

    Args:
        trainer: its `training_step` returns a micro-batch's share of the loss of the global batch.
        inner: the objective of its loss, by which targets are counted.
    """

    def __init__(self, trainer: Any, inner: Any):
        self._trainer, self._inner = trainer, inner
        self._term = next(iter(inner.weights))
        self.weights: Mapping[str, float] = {self._term: 1.0}  # what it returns is weighed already
        self._total = torch.ones((), dtype=torch.float64)

    def counts(self, batch: ModelBatch) -> dict[str, int]:
        return {self._term: self._inner.counts(batch)[self._term]}

    def prepare(self, model: nn.Module, batches: Sequence[ModelBatch], counts: torch.Tensor, mesh: Mesh) -> None:
        """Note the count of the global batch."""
        self._total = counts[0].clamp(min=1)

    def sums(self, model: nn.Module, batch: ModelBatch) -> dict[str, torch.Tensor]:
        """Of a micro-batch that was trained on."""
        if not batch.samples:
            # It takes part in the passes of the other ranks; nothing of it may count.
            return self._inner.sums(model, batch)
        loss = self._trainer.training_step(model, batch.inputs, self._total.long())
        return {self._term: (loss.detach().double() * self._total).requires_grad_()}
