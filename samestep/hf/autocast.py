"""Passes in bfloat16 or float16 of a model whose weights are float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from samestep.hf.batch import ModelBatch
from samestep.parallel.mesh import Mesh


class AutocastObjective:
    """An objective whose forward passes run in `torch.autocast`; weights and sums of gradients stay as they are.

    Args:
        objective: forms its losses in float32.
        dtype: of the products.
    """

    def __init__(self, objective: Any, dtype: torch.dtype, device: torch.device):
        self._objective, self._dtype, self._device = objective, dtype, device

    @property
    def weights(self) -> Mapping[str, float]:
        return self._objective.weights

    def counts(self, batch: ModelBatch) -> dict[str, int]:
        return self._objective.counts(batch)

    def prepare(self, model: nn.Module, batches: Sequence[ModelBatch], counts: torch.Tensor, mesh: Mesh) -> None:
        with self._passes():
            self._objective.prepare(model, batches, counts, mesh)

    def sums(self, model: nn.Module, batch: ModelBatch) -> dict[str, torch.Tensor]:
        with self._passes():
            return self._objective.sums(model, batch)

    def sums_and_outputs(self, model: nn.Module, batch: ModelBatch) -> tuple[dict[str, torch.Tensor], Any]:
        with self._passes():
            return self._objective.sums_and_outputs(model, batch)

    def _passes(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype)
