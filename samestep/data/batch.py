"""From the samples of a global batch to the micro-batches of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from samestep.data.rows import IGNORE, Sample

NOWHERE = -1
"""Document and sample id of padding."""


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
    def targets(self) -> int:
        return int((self.labels != IGNORE).sum())

    @property
    def tokens(self) -> int:
        """Positions that are not padding."""
        return int((self.document_ids != NOWHERE).sum())

    def to(self, device: torch.device) -> Batch:
        if device == self.input_ids.device:
            return self
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "labels", "position_ids", "document_ids", "sample_ids")
        }
        return replace(self, **moved)


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
    one_document_a_row = [span[:2] for span in spans] == [(r, 0) for r in range(len(rows))]
    return Batch(
        **{name: torch.from_numpy(value) for name, value in fields.items()},
        spans=None if one_document_a_row else tuple(spans),
        dropout_key=dropout_key,
        samples=len(samples),
    )


def filler(dropout_key: int = 0) -> Batch:
    """A micro-batch of no sample: one position of padding. A rank without samples takes part in the step with it."""
    fields = {name: torch.full((1, 1), fill) for name, fill in _FILL.items()}
    return Batch(**fields, spans=None, dropout_key=dropout_key, samples=0)


_FILL = {"input_ids": 0, "labels": IGNORE, "position_ids": 0, "document_ids": NOWHERE, "sample_ids": NOWHERE}


def _document_spans(sample: Sample) -> list[tuple[int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(sample.documents)) + 1).tolist(), len(sample)]
    return list(pairwise(edges))
