"""Validation loss: sum over the whole set divided by its number of targets, whatever the batch size."""

from __future__ import annotations

import math

import torch
from torch import nn

from samestep.data.batch import collate
from samestep.data.rows import Rows
from samestep.step.objective import Objective


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: Objective, rows: Rows, batch_size: int, device: torch.device
) -> tuple[float, int]:
    """(loss, targets) of a data set; the loss is the weighed sum over terms of sum / count, NaN without a target."""
    was_training = model.training
    model.eval()
    sums = dict.fromkeys(objective.weights, 0.0)
    counts = dict.fromkeys(objective.weights, 0)
    for start in range(0, len(rows), batch_size):
        places = range(start, min(start + batch_size, len(rows)))
        batch = collate([rows[i] for i in places], list(places), "padded")
        for term, count in objective.counts(batch).items():
            counts[term] += count
        for term, value in objective.sums(model, batch.to(device)).items():
            sums[term] += float(value)
    model.train(was_training)
    trained = {term: weight for term, weight in objective.weights.items() if weight}
    targets = max(counts[term] for term in trained)
    if not targets:
        return math.nan, 0
    return sum(weight * sums[term] / max(counts[term], 1) for term, weight in trained.items()), targets
