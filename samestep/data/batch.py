"""From the samples of a global batch to the micro-batches of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, Self

import numpy as np
import torch

from samestep.data.rows import IGNORE, Sample

NOWHERE = -1
"""Document and sample id of padding."""


class MicroBatch(Protocol):
    """What the step knows of a micro-batch, whoever made it."""

    @property
    def samples(self) -> int:
        """Number of samples; 0: it takes part in the passes of the other ranks, and counts for nothing."""
        ...

    @property
    def tokens(self) -> int:
        """Positions that are not padding."""
        ...

    @property
    def positions(self) -> int:
        """Padding included."""
        ...

    @property
    def is_divisible(self) -> bool:
        """Whether it has halves."""
        ...

    def to(self, device: torch.device) -> Self: ...

    def halves(self) -> tuple[Self, Self]:
        """Two micro-batches of its samples, laid out as it is."""
        ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch. All tensors are int64 [rows, positions].

    Attributes:
        input_ids: token ids; 0 in padding.
        labels: the token to predict at each position (already shifted), or -100.
        position_ids: position inside the document.
        document_ids: 0, 1, ... inside each sample; -1 in padding.
        sample_ids: place of the sample in the endless order of the run; -1 in padding.
        spans: (row, start, stop) of every document, or None where each row is one document from its first position.
        dropout_key: key of this step's dropout masks.
        samples: number of samples.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    sample_ids: torch.Tensor
    spans: tuple[tuple[int, int, int], ...] | None
    dropout_key: int
    samples: int

    @property
    def positions(self) -> int:
        """Padding included."""
        return self.input_ids.numel()

    @property
    def targets(self) -> int:
        return int((self.labels != IGNORE).sum())

    @property
    def tokens(self) -> int:
        """Positions that are not padding."""
        return int((self.document_ids != NOWHERE).sum())

    def to(self, device: torch.device) -> Batch:
        if device == self.input_ids.device:
            return self
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _FILL}
        return replace(self, **moved)

    @property
    def is_divisible(self) -> bool:
        return self.samples > 1

    def halves(self) -> tuple[Batch, Batch]:
        """Two micro-batches of the samples of one, which has two samples or more, laid out as it is."""
        assert self.is_divisible
        count = self.samples // 2
        if len(self.input_ids) == self.samples:
            return _rows(self, 0, count), _rows(self, count, self.samples)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.sample_ids[0].diff().nonzero().flatten() + 1])
        edge, width = int(starts[count]), self.input_ids.shape[1]
        return _columns(self, 0, edge, count), _columns(self, edge, width, self.samples - count)

    def empty(self) -> Batch:
        """A micro-batch of no sample, for a rank that has run out of them."""
        return filler(self.dropout_key)


def collate(samples: Sequence[Sample], places: Sequence[int], layout: str, dropout_key: int = 0) -> Batch:
    """Lay samples into one micro-batch.

    Args:
        places: name of each sample in the endless order.
        layout: `padded` (a row each, padded to the longest) or `packed` (one row, end to end).
    """
    if layout == "packed":
        rows = [list(zip(samples, places, strict=True))]
    else:
        rows = [[pair] for pair in zip(samples, places, strict=True)]
    width = max(sum(len(sample) for sample, _ in row) for row in rows)
    shape = (len(rows), width)
    fields = {name: np.full(shape, fill, dtype=np.int64) for name, fill in _FILL.items()}
    spans = []
    for r, row in enumerate(rows):
        at = 0
        for sample, place in row:
            here = slice(at, at + len(sample))
            fields["input_ids"][r, here] = sample.input_ids
            fields["labels"][r, here] = sample.labels
            fields["position_ids"][r, here] = sample.positions
            fields["document_ids"][r, here] = sample.documents
            fields["sample_ids"][r, here] = place
            spans += [(r, at + start, at + stop) for start, stop in _document_spans(sample)]
            at += len(sample)
    return Batch(
        **{name: torch.from_numpy(value) for name, value in fields.items()},
        spans=_spans_or_none(spans, len(rows)),
        dropout_key=dropout_key,
        samples=len(samples),
    )


def _spans_or_none(spans: Sequence[tuple[int, int, int]], rows: int) -> tuple[tuple[int, int, int], ...] | None:
    one_document_a_row = [span[:2] for span in spans] == [(r, 0) for r in range(rows)]
    return None if one_document_a_row else tuple(spans)


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a padded micro-batch, padded to the longest of them."""
    width = int((batch.document_ids[start:stop] != NOWHERE).sum(1).max())
    spans = batch.spans and _spans_or_none(
        [(row - start, first, last) for row, first, last in batch.spans if start <= row < stop], stop - start
    )
    parts = {name: getattr(batch, name)[start:stop, :width] for name in _FILL}
    return replace(batch, **parts, spans=spans, samples=stop - start)


def _columns(batch: Batch, start: int, stop: int, samples: int) -> Batch:
    """Some neighbouring samples of a packed micro-batch."""
    assert batch.spans is not None
    spans = _spans_or_none([(0, a - start, b - start) for _, a, b in batch.spans if start <= a < stop], 1)
    parts = {name: getattr(batch, name)[:, start:stop] for name in _FILL}
    return replace(batch, **parts, spans=spans, samples=samples)


def filler(dropout_key: int = 0) -> Batch:
    """A micro-batch of no sample: one position of padding. A rank without samples takes part in the step with it."""
    fields = {name: torch.full((1, 1), fill) for name, fill in _FILL.items()}
    return Batch(**fields, spans=None, dropout_key=dropout_key, samples=0)


_FILL = {"input_ids": 0, "labels": IGNORE, "position_ids": 0, "document_ids": NOWHERE, "sample_ids": NOWHERE}


def _document_spans(sample: Sample) -> list[tuple[int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(sample.documents)) + 1).tolist(), len(sample)]
    return list(pairwise(edges))
