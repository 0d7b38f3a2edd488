"""Loss terms: each is a sum over the data and a count that can be read from the data alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from samestep.data.batch import Batch
from samestep.data.rows import IGNORE
from samestep.parallel.mesh import Mesh


class Objective(Protocol):
    """What the step knows of a model and its loss.

    The loss of a step is sum over terms of `weights[t] * S_t / max(N_t, 1)`, S_t and N_t summed over the whole global
    batch. A term of weight 0 is reported, never trained on.
    """

    weights: Mapping[str, float]

    def counts(self, batch: Any) -> dict[str, int]:
        """Term -> count of a micro-batch, from its labels alone."""
        ...

    def sums(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Term -> sum over a micro-batch, a scalar of float32 or wider; terms of weight 0 carry no gradient."""
        ...


@runtime_checkable
class PreparedObjective(Protocol):
    """An objective that must know something of the whole step before it can tell the sums of a micro-batch."""

    def prepare(self, model: nn.Module, batches: Sequence[Any], counts: torch.Tensor, mesh: Mesh) -> None:
        """Called once a step, on every rank, between the counts and the first of the sums.

        Args:
            batches: the micro-batches of this rank, as far apart as they will be run; as many on every rank where a
                pass of the model is a collective.
            counts: of the whole global batch by term, float64 [terms], on the device.
        """
        ...


class DecoderObjective:
    """Next-token cross-entropy of the native decoder, with an optional z-loss (de Brebisson and Vincent 2016).

    With a z-loss the trained term is `loss` = sum over targets of (cross-entropy + weight x logsumexp^2), and both
    parts are reported.
    """

    def __init__(self, z_loss_weight: float = 0.0):
        self.z_loss_weight = z_loss_weight
        self.weights: Mapping[str, float] = (
            {"loss": 1.0, "cross_entropy": 0.0, "z_loss": 0.0} if z_loss_weight else {"cross_entropy": 1.0}
        )

    def counts(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.weights, int((batch.labels != IGNORE).sum()))

    def sums(self, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        total, cross_entropy, z_loss = model.losses(batch, self.z_loss_weight)
        if self.z_loss_weight:
            return {"loss": total, "cross_entropy": cross_entropy, "z_loss": z_loss}
        return {"cross_entropy": total}
