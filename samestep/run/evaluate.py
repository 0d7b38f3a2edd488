"""Validation loss: sum over the whole set divided by its number of targets, whatever the batch size and the ranks."""

from __future__ import annotations

import math

import torch
from torch import nn

from samestep.data.batch import Batch, collate, filler
from samestep.data.rows import Rows
from samestep.parallel.data import free
from samestep.parallel.exact import exact_sums
from samestep.parallel.mesh import Mesh
from samestep.plan import split_step
from samestep.step.objective import Objective


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: Objective, rows: Rows, batch_size: int, mesh: Mesh, *, exact: bool = False
) -> tuple[float, int]:
    """(loss, targets) of a data set; the loss is the weighed sum over terms of sum / count, NaN without a target.

    A collective: every rank takes its part of the rows and gets the result of all.

    Args:
        batch_size: rows of a pass on one rank.
        exact: one row a pass and sums that no order changes, so that the loss is the same to the bit on any mesh.
    """
    table = split_step(len(rows), mesh.layout.data_parallel, 1 if exact else batch_size)
    ranges = table[mesh.data_rank]
    was_training = model.training
    model.eval()
    sums, counts = [], []
    for index in range(max(1, *map(len, table))):  # as many passes on every rank, since sharded weights are gathered
        batch = _batch(rows, *ranges[index]) if index < len(ranges) else filler()
        count = objective.counts(batch)
        found = objective.sums(model, batch.to(mesh.device))
        counts.append(torch.tensor([count[term] for term in objective.weights], dtype=torch.float64))
        sums.append(torch.stack([found[term].double() for term in objective.weights]))
    model.train(was_training)
    free(model)
    total = _total(torch.stack(sums), torch.stack(counts).sum(0).to(mesh.device), len(rows) if exact else None, mesh)
    trained = [(weight, *pair) for weight, pair in zip(objective.weights.values(), total, strict=True) if weight]
    targets = max(int(count) for _, _, count in trained)
    loss = sum(weight * value / max(count, 1) for weight, value, count in trained)
    return (loss, targets) if targets else (math.nan, 0)


def _batch(rows: Rows, start: int, stop: int) -> Batch:
    return collate([rows[i] for i in range(start, stop)], list(range(start, stop)), "padded")


def _total(sums: torch.Tensor, counts: torch.Tensor, summands: int | None, mesh: Mesh) -> list[tuple[float, float]]:
    """(sum, count) of each term over all ranks, of this rank's sums [passes, terms] and counts [terms].

    Args:
        summands: most passes of all ranks, for a sum that no order changes; None for a plain one.
    """
    if summands is None:
        both = mesh.sum_(torch.stack([sums.sum(0), counts], 1))
    else:
        both = torch.stack([exact_sums(sums, summands, mesh), mesh.sum_(counts)], 1)
    return [(value, count) for value, count in both.tolist()]
