"""From a data set or a data loader to windows: the micro-batches of one step on this rank.

A window holds the next `per_device_train_batch_size x gradient_accumulation_steps x ranks` samples of the order. They
are laid into micro-batches of `per_device_train_batch_size` in that order, which the ranks take in turn: the same
samples as with the Trainer of transformers, but at the end of the data none is dropped and none is taken twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, Sampler

from samestep.errors import CheckpointError, DataError
from samestep.parallel.mesh import Mesh

Inputs = Any
"""What a data collator made of samples: a dict of tensors and whatever else a model takes."""


@dataclass
class Cursor:
    """Place in the data; what a checkpoint keeps of it.

    Attributes:
        epoch: passes that are complete.
        samples: of the current pass that were used, where they can be counted.
        micro_batches: of the current pass, of the rank that had most.
    """

    epoch: int = 0
    samples: int = 0
    micro_batches: int = 0


@dataclass(frozen=True)
class Window:
    """The data of one step.

    Attributes:
        batches: micro-batches of this rank, made by the data collator.
        count: micro-batches of the rank that has most.
        samples: over all ranks; 0 where they cannot be counted.
        is_last: of its pass.
    """

    batches: list[Inputs]
    count: int
    samples: int
    is_last: bool


class Windows(Protocol):
    """The windows of a run.

    Attributes:
        steps_in_epoch: None where the length of the data is not known.
    """

    steps_in_epoch: int | None

    def after(self, cursor: Cursor) -> Iterator[Window]:
        """The windows that are left of the pass that `cursor` is in. All ranks draw them together."""
        ...

    def fraction(self, cursor: Cursor, max_steps: int) -> float:
        """Which part of the current pass is behind `cursor`, counted in micro-batches."""
        ...


@dataclass(frozen=True)
class Shape:
    """How a window is cut.

    Attributes:
        micro: samples of a micro-batch.
        accumulation: micro-batches of a rank.
    """

    micro: int
    accumulation: int
    ranks: int
    rank: int

    @property
    def samples(self) -> int:
        """Of a whole window, over all ranks."""
        return self.micro * self.accumulation * self.ranks


class Order:
    """The order of samples: a pure function of seed and epoch, the same whatever the ranks.

    `random` is the permutation that the Trainer of transformers uses on one process: `torch.randperm` of a generator
    seeded with seed + epoch.

    Args:
        strategy: `random`, `sequential` or `group_by_length`.
        lengths: of the samples, for `group_by_length`.
        group: samples that shall be of similar length.
    """

    def __init__(self, count: int, strategy: str, seed: int, *, lengths: Sequence[int] | None = None, group: int = 1):
        self.count = count
        self._strategy, self._seed, self._lengths, self._group = strategy, seed, lengths, group

    def rows(self, epoch: int) -> list[int]:
        """All samples in the order of an epoch."""
        if self._strategy == "sequential":
            return list(range(self.count))
        generator = torch.Generator().manual_seed((self._seed + epoch) % 2**63)
        if self._strategy == "group_by_length":
            from transformers.trainer_pt_utils import get_length_grouped_indices

            return get_length_grouped_indices(self._lengths, self._group, generator=generator)
        return torch.randperm(self.count, generator=generator).tolist()


class RankBatches(Sampler[list[int]]):
    """A batch sampler: the micro-batches of this rank, as lists of samples, from a place in an epoch on.

    Args:
        drop_last: leave out the samples at the end of an epoch that do not fill one micro-batch on every rank.

    Attributes:
        epoch, first: where the next iteration begins; `first` counts samples.
    """

    def __init__(self, order: Order, shape: Shape, *, drop_last: bool):
        unit = shape.micro * shape.ranks
        self.usable = order.count // unit * unit if drop_last else order.count
        if not self.usable:
            raise DataError(
                f"the training data has {order.count} samples, fewer than {unit}: one micro-batch on every rank"
                "\n  fix: write dataloader_drop_last=False, or a smaller per_device_train_batch_size"
                if order.count
                else "the training data is empty"
            )
        self.epoch, self.first = 0, 0
        self._order, self._shape = order, shape

    def __iter__(self) -> Iterator[list[int]]:
        rows = self._order.rows(self.epoch)[: self.usable]
        for start in range(self.first, self.usable, self._shape.samples):
            yield from self._groups(rows[start : start + self._shape.samples])

    def __len__(self) -> int:
        return sum(self._own(samples) for samples in self.windows(self.first))

    def windows(self, first: int) -> list[int]:
        """Samples of each window from the sample `first` to the end of the epoch."""
        size = self._shape.samples
        return [min(size, self.usable - start) for start in range(first, self.usable, size)]

    def counts(self, samples: int) -> tuple[int, int]:
        """Micro-batches of a window: of this rank, and of the first, which has most."""
        groups = -(-samples // self._shape.micro)
        return self._own(samples), -(-groups // self._shape.ranks)

    def _own(self, samples: int) -> int:
        groups = -(-samples // self._shape.micro)
        return len(range(self._shape.rank, groups, self._shape.ranks))

    def _groups(self, rows: Sequence[int]) -> list[list[int]]:
        micro = self._shape.micro
        groups = [list(rows[start : start + micro]) for start in range(0, len(rows), micro)]
        return groups[self._shape.rank :: self._shape.ranks]


class MapWindows:
    """Windows of a data set that has a length.

    Args:
        loader: iterates over the micro-batches that `batches` names.
    """

    def __init__(self, loader: Iterable[Inputs], batches: RankBatches, shape: Shape):
        self.loader, self.batches, self._shape = loader, batches, shape
        self.steps_in_epoch: int | None = len(batches.windows(0))

    def after(self, cursor: Cursor) -> Iterator[Window]:
        self.batches.epoch, self.batches.first = cursor.epoch, cursor.samples
        sizes = self.batches.windows(cursor.samples)
        found = iter(self.loader)
        for number, samples in enumerate(sizes):
            own, most = self.batches.counts(samples)
            yield Window(list(islice(found, own)), most, samples, number == len(sizes) - 1)

    def fraction(self, cursor: Cursor, max_steps: int) -> float:
        unit = self._shape.micro * self._shape.ranks
        return -(-cursor.samples // unit) / -(-self.batches.usable // unit)


class RankPart(IterableDataset[Any]):
    """This rank's samples of a stream that every rank reads.

    Args:
        dataset: yields samples; begins anew with each iteration.

    Attributes:
        first: samples at the beginning of the next pass that are read and passed over.
    """

    def __init__(self, dataset: Iterable[Any], shape: Shape):
        self.dataset, self._shape = dataset, shape
        self.first = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, if it wants to know."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        shape = self._shape
        for number, sample in enumerate(islice(self.dataset, self.first, None)):
            if number // shape.micro % shape.ranks == shape.rank:
                yield sample


class StreamWindows:
    """Windows of what is only sure to end when it does: a stream, or the data loader of a user.

    The ranks agree on each window: how many micro-batches the longest has, and whether any has more. The micro-batches
    that are left at the end of a pass are a window of their own.

    Args:
        loader: yields the micro-batches of this rank, a pass with each iteration.
        part: the stream itself, where it can be begun at a sample.
    """

    def __init__(self, loader: Any, shape: Shape, mesh: Mesh, part: RankPart | None = None):
        self.loader, self._shape, self._mesh, self._part = loader, shape, mesh, part
        length = _length(loader if part is None else part.dataset)
        if length is not None and part is not None:
            length = -(-length // (shape.micro * shape.ranks))
        self._micro_batches = length
        self.steps_in_epoch = None if length is None else -(-length // shape.accumulation)

    def after(self, cursor: Cursor) -> Iterator[Window]:
        for target in self._of_epochs():
            target.set_epoch(cursor.epoch)
        found = self._begun(cursor)
        size = self._shape.accumulation
        ahead = list(islice(found, size + 1))
        while True:
            own, ahead = ahead[:size], ahead[size:]
            told = self._mesh.gather((len(own), bool(ahead)))
            most, goes_on = max(count for count, _ in told), any(more for _, more in told)
            if not most:
                return
            yield Window(own, most, self._shape.samples if self._part is not None else 0, not goes_on)
            if not goes_on:
                return
            ahead += islice(found, size + 1 - len(ahead))

    def _of_epochs(self) -> list[Any]:
        """Whatever wants to know the epoch: the loader, its samplers, the data."""
        batches = getattr(self.loader, "batch_sampler", None)
        source = getattr(self.loader, "dataset", None) if self._part is None else self._part
        found = (self.loader, batches, getattr(batches, "sampler", None), getattr(self.loader, "sampler", None), source)
        return list({id(target): target for target in found if hasattr(target, "set_epoch")}.values())

    def _begun(self, cursor: Cursor) -> Iterator[Inputs]:
        """A pass from the cursor on; what is before it is read again."""
        if self._part is not None:
            self._part.first = cursor.samples
            return iter(self.loader)
        found = iter(self.loader)
        passed = sum(1 for _ in islice(found, cursor.micro_batches))
        if passed < cursor.micro_batches and self._mesh.world.size == 1:
            raise CheckpointError(
                f"the run has used {cursor.micro_batches} micro-batches of this pass, but the data loader has only "
                f"{passed}\n  fix: resume with the data loader that the run began with"
            )
        return found

    def fraction(self, cursor: Cursor, max_steps: int) -> float:
        return cursor.micro_batches / (self._micro_batches or max_steps * self._shape.accumulation)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


def first_batch(window: Window, mesh: Mesh) -> Inputs:
    """A micro-batch by which ranks without one know what theirs would look like. A collective."""
    found = mesh.gather(window.batches[0] if window.batches else None)
    return next(batch for batch in found if batch is not None)


class EvalBatches(Sampler[list[int]]):
    """A batch sampler: this rank's share of a data set, which is neighbouring samples, in batches."""

    def __init__(self, count: int, size: int, ranks: int, rank: int):
        share, more = divmod(count, ranks)
        start = rank * share + min(rank, more)
        self._rows = range(start, start + share + (rank < more))
        self._size = size

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self._rows), self._size):
            yield list(self._rows[start : start + self._size])

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)


def lengths_of(dataset: Any, column: str, name: str | None) -> list[int]:
    """Length of each sample, for `group_by_length`.

    Args:
        column: of a `datasets.Dataset`, where it has one.
        name: the field whose length counts; None: `input_ids`.

    Raises:
        DataError: the samples have no such field.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    name = name or "input_ids"
    try:
        return [len(dataset[i][name]) for i in range(len(dataset))]
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"the samples have no field {name!r} whose length could be taken for train_sampling_strategy "
            f"group_by_length\n  fix: add a column and name it in length_column_name, or write random"
        ) from error
