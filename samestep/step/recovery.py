"""A micro-batch that runs out of memory is run again as two halves, inside the same step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from samestep.data.batch import MicroBatch
from samestep.errors import TrainingError
from samestep.ops.gradient_sink import GradientSink
from samestep.torch_private import is_out_of_memory

M = TypeVar("M", bound=MicroBatch)

Pass = tuple[dict[str, torch.Tensor], torch.Tensor]
"""What a forward and backward pass came to: summed losses by term, and the losses [terms]; without gradient."""


@dataclass(frozen=True)
class Advice:
    """What a user may write where memory does not suffice.

    Attributes:
        one_sample: does not fit.
        sharded: a micro-batch of sharded weights does not.
    """

    one_sample: str
    sharded: str


OF_A_FILE = Advice(
    "lower model.seq_length, or write recompute.mode: full, model.compute_dtype: bfloat16, or on several ranks "
    "parallelism.data_parallel_shard: -1",
    "lower training.local_batch_size or local_batch_tokens, which changes no step, and go on with --resume auto",
)


class Recovery:
    """Runs micro-batches, and what does not fit into memory in halves. No rank needs to hear of it: the passes of a
    rank that holds all weights contain nothing collective.

    Args:
        sink: where the gradients of a pass add up; None where a pass cannot be run again, since other ranks take part
            in it.
        advice: for errors.

    Attributes:
        limit: positions of the largest micro-batch that is tried; None while all have fitted. Whoever knows the other
            ranks' may lower it.
        failed: positions of the largest micro-batch of this step that did not fit; 0 if all did.
    """

    def __init__(self, sink: GradientSink | None, advice: Advice = OF_A_FILE):
        self._sink, self._advice = sink, advice
        self.limit: int | None = None
        self.failed = 0

    @property
    def told(self) -> tuple[int, int]:
        """What the other ranks get to know of a step: `failed`, and `limit` or 0."""
        return self.failed, self.limit or 0

    def parts(self, batch: M) -> Iterator[M]:
        """A micro-batch as far apart as its passes are run by now."""
        if self._is_too_large(batch):
            for half in batch.halves():
                yield from self.parts(half)
        else:
            yield batch

    def run(self, batch: M, attempt: Callable[[M], Pass]) -> Pass:
        """The result of `attempt(batch)`, or the sum of those of its parts.

        Raises:
            TrainingError: a single sample does not fit, or other ranks are in the middle of the pass as well.
        """
        if self._sink is not None:
            if self._is_too_large(batch):
                return self._apart(batch, attempt)
            self._sink.watch()
        try:
            return attempt(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        # Not before the error is gone: it holds the frames of the pass, and they its tensors.
        _free()
        if not batch.is_divisible or self._sink is None:
            raise self._does_not_fit(batch, reason)
        self.failed = max(self.failed, batch.positions)
        self.limit = max(half.positions for half in batch.halves())
        with self._sink.beyond():
            return self._apart(batch, attempt)

    def _is_too_large(self, batch: MicroBatch) -> bool:
        return self.limit is not None and batch.is_divisible and batch.positions > self.limit

    def _apart(self, batch: M, attempt: Callable[[M], Pass]) -> Pass:
        (sums, losses), (more, others) = (self.run(half, attempt) for half in batch.halves())
        return {term: value + more[term] for term, value in sums.items()}, losses + others

    def _does_not_fit(self, batch: MicroBatch, reason: str) -> TrainingError:
        samples = f"{batch.samples} sample{'s' * (batch.samples != 1)}"
        what = f"out of memory in a micro-batch of {samples} and {batch.positions} positions ({reason})"
        if not batch.is_divisible:
            return TrainingError(f"{what}: it cannot be halved\n  fix: {self._advice.one_sample}")
        return TrainingError(
            f"{what}: with sharded weights the other ranks are in the middle of it as well, so it cannot be halved\n"
            f"  fix: {self._advice.sharded}"
        )


def _free() -> None:
    """Give back what a pass that broke off had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
