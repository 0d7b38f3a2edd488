"""The order of samples: a pure function of (number of rows, seed, epoch), whatever the layout.

The state of the data is one integer, `consumed`: how many places of the endless order epoch 0, epoch 1, ... are behind
us. Place p is in epoch p // rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from samestep.errors import DataError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Finaliser of Steele, Lea and Flood (2014): a bijection of 64-bit integers that looks random."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count), int64 [count], equal on every machine and library version."""
    with np.errstate(over="ignore"):
        key = _splitmix64(_splitmix64(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch))
        return np.argsort(_splitmix64(np.arange(count, dtype=np.uint64) ^ key), kind="stable")


@dataclass(frozen=True)
class StepSamples:
    """The global batch of one step.

    Attributes:
        rows: int64 [samples]; which rows, in order.
        places: int64 [samples]; their places in the endless order, which name them for ever.
        consumed: the cursor after this step.
    """

    rows: np.ndarray
    places: np.ndarray
    consumed: int


class GlobalOrder:
    """Deals out global batches. A batch never crosses an epoch: the last one of an epoch is short, or dropped.

    Args:
        count: rows of the data set.
        batch_size: samples of a global batch.
        drop_last: leave out the short batch at the end of each epoch.

    Raises:
        DataError: `drop_last` would leave out everything.
    """

    def __init__(self, count: int, batch_size: int, seed: int, *, shuffle: bool = True, drop_last: bool = False):
        if drop_last and count < batch_size:
            raise DataError(
                f"the data has {count} samples, fewer than training.global_batch_size {batch_size}: "
                "last_batch: drop leaves nothing"
            )
        self._count, self._batch_size, self._seed = count, batch_size, seed
        self._shuffle, self._drop_last = shuffle, drop_last
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        if self._cached[0] != epoch:
            rows = permutation(self._count, self._seed, epoch) if self._shuffle else np.arange(self._count)
            self._cached = (epoch, rows)
        return self._cached[1]

    def next(self, consumed: int) -> StepSamples:
        """The global batch that starts at the cursor `consumed`."""
        epoch, start = divmod(consumed, self._count)
        stop = min(start + self._batch_size, self._count)
        if self._drop_last and stop - start < self._batch_size:
            epoch, start, stop = epoch + 1, 0, self._batch_size
        places = epoch * self._count + np.arange(start, stop, dtype=np.int64)
        at_end = stop == self._count or (self._drop_last and self._count - stop < self._batch_size)
        return StepSamples(
            rows=self._epoch_rows(epoch)[start:stop],
            places=places,
            consumed=(epoch + 1) * self._count if at_end else int(places[-1]) + 1,
        )
