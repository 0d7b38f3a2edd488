"""The only forward and backward loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from samestep.data.batch import Batch
from samestep.step.objective import Objective

MicroBatchHook = Callable[[int, dict[str, torch.Tensor]], None]


def accumulate(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    denominators: Callable[[int, str], torch.Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_micro_batch: MicroBatchHook | None = None,
) -> torch.Tensor:
    """Run every micro-batch forward and, at once, backward, so that memory does not grow with their number.

    Args:
        denominators: (micro-batch, term) -> what the term's sum is divided by, a scalar on the device.
        dtype: of the losses, float32 or wider.
        on_micro_batch: called after each backward with its index and detached sums.

    Returns:
        Sums [terms] of the terms in the order of `objective.weights`, each weighed as in the loss: sum over
        micro-batches of S_t / denominator, without gradient, in float64.
    """
    totals = torch.zeros(len(objective.weights), dtype=torch.float64, device=device)
    for index, batch in enumerate(batches):
        sums = objective.sums(model, batch.to(device))
        parts = {term: sums[term].to(dtype) / denominators(index, term) for term in objective.weights}
        trained = [weight * parts[term] for term, weight in objective.weights.items() if weight]
        torch.stack(trained).sum().backward()
        totals += torch.stack([parts[term].detach().double() for term in objective.weights])
        if on_micro_batch is not None:
            on_micro_batch(index, {term: value.detach() for term, value in sums.items()})
    return totals
