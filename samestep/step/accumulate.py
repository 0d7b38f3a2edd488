"""The only forward and backward loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from samestep.data.batch import Batch
from samestep.step.objective import Objective

BeforeHook = Callable[[int, int], None]
MicroBatchHook = Callable[[int, dict[str, torch.Tensor]], None]


def accumulate(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    denominators: Callable[[int, str], torch.Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    before: BeforeHook,
    on_micro_batch: MicroBatchHook | None = None,
) -> torch.Tensor:
    """Run every micro-batch forward and, at once, backward, so that memory does not grow with their number.

    Args:
        denominators: (micro-batch, term) -> what the term's sum is divided by, a scalar on the device.
        dtype: of the losses, float32 or wider.
        before: called before each forward with its index and how many there are.
        on_micro_batch: called after each backward with its index and detached sums.

    Returns:
        S_t / denominator [micro-batches, terms], terms in the order of `objective.weights`, without gradient, float64.
    """
    rows = []
    for index, batch in enumerate(batches):
        before(index, len(batches))
        sums = objective.sums(model, batch.to(device))
        parts = {term: sums[term].to(dtype) / denominators(index, term) for term in objective.weights}
        trained = [weight * parts[term] for term, weight in objective.weights.items() if weight]
        torch.stack(trained).sum().backward()
        rows.append(torch.stack([parts[term].detach().double() for term in objective.weights]))
        if on_micro_batch is not None:
            on_micro_batch(index, {term: value.detach() for term, value in sums.items()})
    return torch.stack(rows)
