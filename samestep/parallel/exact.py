"""The reduction of exact mode: sums of integers, which no order and no grouping of the ranks can change."""

from __future__ import annotations

import math

import torch

from samestep.errors import ConfigError
from samestep.ops.exact_sum import bits_for, from_fixed, to_fixed
from samestep.ops.gradient_sink import ExactSink, GradientSink
from samestep.parallel.mesh import Mesh


class ExactReduction:
    """Adds up the gradients of a step over the ranks without rounding; every rank holds all weights.

    Every rank then has the same gradients to the bit, and the first one alone answers for what is derived from them.

    Args:
        summands: most passes with samples of a step, over all ranks.

    Raises:
        ConfigError: on this mesh two ranks, or two runs of one kernel, may round differently.
    """

    def __init__(self, mesh: Mesh, summands: int):
        assert mesh.weights is None
        _check_kernels(mesh)
        self._mesh, self._summands = mesh, summands

    def before(self, index: int, count: int) -> None:
        """Nothing: what this rank adds up needs no other rank."""

    def finish(self, sink: GradientSink | ExactSink) -> bool:
        """Sum over the ranks. False if a number did not fit: then the sums are forgotten, and the passes are to be made
        again, with a coarser unit that all ranks take from the largest number of all."""
        assert isinstance(sink, ExactSink)
        sink.largest = _largest_of_all(sink.largest, self._mesh)
        largest = float(sink.largest)
        # One that is not finite spoils the step whatever the unit.
        bits = bits_for(largest, self._summands) if math.isfinite(largest) else sink.bits
        if bits < sink.bits:
            sink.zero()
            sink.bits = bits
            return False
        self._mesh.sum_(sink.total)
        return True

    def losses(self, parts: torch.Tensor) -> torch.Tensor:
        """Losses [passes, terms] of this rank's passes -> float64 [terms] whose sum over ranks is the step's."""
        losses = exact_sums(parts, self._summands, self._mesh)
        return losses if self._mesh.is_first else torch.zeros_like(losses)

    def owned(self, gradient: torch.Tensor, turn: int) -> torch.Tensor | None:
        """What this rank answers for of a gradient; None if another rank does."""
        return gradient if self._mesh.is_first else None


def exact_sums(parts: torch.Tensor, summands: int, mesh: Mesh) -> torch.Tensor:
    """The sum over passes and ranks of numbers [passes, terms], float64 [terms], the same on every rank and however the
    passes are spread over the ranks. NaN where a summand is not finite.

    Args:
        summands: most passes over all ranks that are not zero.
    """
    largest = _largest_of_all(parts.abs().amax(0), mesh).tolist()
    bits = [bits_for(size, summands) if math.isfinite(size) else 0 for size in largest]
    columns = zip(parts.double().unbind(1), bits, strict=True)
    totals = mesh.sum_(torch.stack([to_fixed(column, unit).sum() for column, unit in columns]))
    sums = [
        from_fixed(total, unit, torch.float64)
        if math.isfinite(size)
        else torch.full_like(total, math.nan, dtype=torch.float64)
        for total, unit, size in zip(totals, bits, largest, strict=True)
    ]
    return torch.stack(sums)


def _largest_of_all(own: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Largest over all ranks; infinite where one is not finite, since a maximum over ranks may lose a NaN."""
    return mesh.max_(own.nan_to_num(nan=math.inf, posinf=math.inf))


def _check_kernels(mesh: Mesh) -> None:
    """All ranks form a number in the same way, every time."""
    if mesh.device.type != "cpu":
        if not torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                "a GPU adds up some gradients in an order that changes from run to run",
                field="training.exact",
                fix="write training.deterministic: true, or exact: false",
            )
        return
    threads = mesh.gather(torch.get_num_threads())
    if len(set(threads)) > 1:
        raise ConfigError(
            f"the ranks have {', '.join(map(str, threads))} threads, and sums inside a kernel are split among threads",
            field="training.exact",
            fix=f"start all ranks with OMP_NUM_THREADS={min(threads)}, or write exact: false",
        )
