"""The only forward and backward loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from samestep.data.batch import MicroBatch
from samestep.step.objective import Objective
from samestep.step.recovery import Pass, Recovery

BeforeHook = Callable[[int, int], None]
MicroBatchHook = Callable[[int, dict[str, torch.Tensor]], None]


def accumulate(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[MicroBatch],
    denominators: Callable[[int, str], torch.Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    scale: float,
    before: BeforeHook,
    recovery: Recovery,
    on_micro_batch: MicroBatchHook | None = None,
) -> torch.Tensor:
    """Run every micro-batch forward and, at once, backward, so that memory does not grow with their number.

    Args:
        denominators: (micro-batch, term) -> what the term's sum is divided by, a scalar on the device.
        dtype: of the losses, float32 or wider.
        scale: the gradients are those of `scale` times the loss.
        before: called before each micro-batch with its index and how many there are.
        recovery: runs a micro-batch, in parts where it does not fit into memory; it stays one for all others.
        on_micro_batch: called after each backward with its index and detached sums.

    Returns:
        S_t / denominator [micro-batches, terms], terms in the order of `objective.weights`, without gradient, float64.
    """
    rows = []
    for index, batch in enumerate(batches):
        before(index, len(batches))

        def attempt(part: MicroBatch, index: int = index) -> Pass:
            sums = objective.sums(model, part.to(device))
            parts = {term: sums[term].to(dtype) / denominators(index, term) for term in objective.weights}
            trained = [weight * parts[term] for term, weight in objective.weights.items() if weight]
            (torch.stack(trained).sum() * scale).backward()
            losses = torch.stack([parts[term].detach().double() for term in objective.weights])
            return {term: value.detach() for term, value in sums.items()}, losses

        sums, losses = recovery.run(batch, attempt)
        rows.append(losses)
        if on_micro_batch is not None:
            on_micro_batch(index, sums)
    return torch.stack(rows)
