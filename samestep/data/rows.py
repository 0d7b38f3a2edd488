"""Rows: the samples of a run, made from documents.

A row holds spans of one token array. Inside a span attention is causal; spans of a row never see each other. A span of
n + 1 tokens gives n inputs and the n labels that follow them: this is the only place where labels are shifted.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from samestep.config.schema import DatasetConfig
from samestep.data.sources import Document
from samestep.data.tokenize import Tokenizer, in_batches
from samestep.errors import DataError

IGNORE = -100


@dataclass(frozen=True)
class TokenStore:
    """Token ids of all documents, end to end.

    Attributes:
        tokens: uint32 [tokens].
        is_target: bool [tokens]; whether a token counts where it is a label.
        ends: int64 [documents]; where each document stops in `tokens`.
    """

    tokens: np.ndarray
    is_target: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One row, ready to be laid into a micro-batch. All arrays are int64 [length].

    Attributes:
        labels: the token to predict at each position, or -100.
        documents: 0, 1, ... for each span of the row.
        positions: position inside its span.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def targets(self) -> int:
        return int((self.labels != IGNORE).sum())


class Rows:
    """All samples of a data set, indexable.

    Args:
        store: the tokens.
        starts, stops: int64 [spans]; a span is `tokens[start:stop]`.
        row_ends: int64 [rows]; row i holds the spans from `row_ends[i - 1]` to `row_ends[i]`.
    """

    def __init__(self, store: TokenStore, starts: np.ndarray, stops: np.ndarray, row_ends: np.ndarray):
        self._store, self._starts, self._stops, self._row_ends = store, starts, stops, row_ends

    def __len__(self) -> int:
        return len(self._row_ends)

    def _spans(self, row: int) -> range:
        return range(int(self._row_ends[row - 1]) if row else 0, int(self._row_ends[row]))

    def __getitem__(self, row: int) -> Sample:
        inputs, labels, documents, positions = [], [], [], []
        for number, span in enumerate(self._spans(row)):
            start, stop = int(self._starts[span]), int(self._stops[span])
            tokens = self._store.tokens[start:stop].astype(np.int64)
            inputs.append(tokens[:-1])
            labels.append(np.where(self._store.is_target[start + 1 : stop], tokens[1:], IGNORE))
            documents.append(np.full(stop - start - 1, number, dtype=np.int64))
            positions.append(np.arange(stop - start - 1, dtype=np.int64))
        return Sample(*(np.concatenate(parts) for parts in (inputs, labels, documents, positions)))

    def lengths(self) -> np.ndarray:
        """Inputs of every row, int64 [rows]."""
        return self._lengths

    @cached_property
    def _lengths(self) -> np.ndarray:
        sums = np.concatenate([[0], np.cumsum(self._stops - self._starts - 1)])
        return np.diff(sums[np.concatenate([[0], self._row_ends])])

    def targets(self) -> np.ndarray:
        """Targets of every row, int64 [rows]."""
        before = np.concatenate([[0], np.cumsum(self._store.is_target)])
        sums = np.concatenate([[0], np.cumsum(before[self._stops] - before[self._starts + 1])])
        return np.diff(sums[np.concatenate([[0], self._row_ends])])

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tokens, targets and row borders."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self._store.tokens, self._store.is_target, self._starts, self._stops, self._row_ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenStore:
    """Encode documents and end each with the end-of-text token, which is a target where the text before it is."""
    tokens, flags, ends, total = [], [], [], 0
    for batch in in_batches(documents, lambda document: sum(len(text) for text, _ in document.segments)):
        encoded = iter(_encode(tokenizer, batch))
        for document in batch:
            for _, is_target in document.segments:
                ids = next(encoded)
                tokens.append(ids.astype(np.uint32))
                flags.append(np.full(len(ids), is_target))
                total += len(ids)
            tokens.append(np.array([tokenizer.end_id], dtype=np.uint32))
            flags.append(np.array([document.segments[-1][1]]))
            total += 1
            ends.append(total)
    return TokenStore(np.concatenate(tokens), np.concatenate(flags), np.array(ends, dtype=np.int64))


def _encode(tokenizer: Tokenizer, batch: Sequence[Document]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_batch([text for document in batch for text, _ in document.segments])
    except DataError as error:
        if len(batch) == 1:
            raise DataError(f"{batch[0].where}: {error}") from error
        return [ids for document in batch for ids in _encode(tokenizer, [document])]  # to name the one at fault


def split_tail(store: TokenStore, fraction: float) -> tuple[TokenStore, TokenStore]:
    """Cut the joined text: the last `fraction` of the tokens is for validation."""
    cut = len(store.tokens) - round(len(store.tokens) * fraction)
    before = store.ends[store.ends < cut]
    head = TokenStore(store.tokens[:cut], store.is_target[:cut], np.append(before, cut))
    tail = TokenStore(store.tokens[cut:], store.is_target[cut:], store.ends[store.ends > cut] - cut)
    return head, tail


def split_documents(store: TokenStore, fraction: float, order: np.ndarray) -> tuple[TokenStore, TokenStore]:
    """Give every document to training or validation: the last `fraction` of `order` (a permutation) is validation."""
    count = len(store.ends)
    if count < 2:
        raise DataError(
            f"train_dataset.split: documents needs two documents or more, but there is {count}\n"
            "  fix: write split: tail, or document_separator to divide the text into documents"
        )
    held_out = max(1, min(count - 1, round(count * fraction)))
    chosen = np.zeros(count, dtype=bool)
    chosen[order[count - held_out :]] = True
    return _select(store, ~chosen), _select(store, chosen)


def _select(store: TokenStore, chosen: np.ndarray) -> TokenStore:
    sizes = np.diff(store.ends, prepend=0)
    keep = np.repeat(chosen, sizes)
    return TokenStore(store.tokens[keep], store.is_target[keep], np.cumsum(sizes[chosen]))


def build_rows(store: TokenStore, dataset: DatasetConfig, seq_length: int, section: str = "train_dataset") -> Rows:
    """Make the rows of a data set.

    `cut`: the joined text in pieces of `seq_length` inputs; neighbours overlap by one token, so that every token but
    the first is a label exactly once. `documents`: one document a row. `pack_documents`: whole documents laid into rows
    of at most `seq_length` inputs (best fit, longest first).

    Raises:
        DataError: no row could be made, or a document is too long and `long_documents` is `error`.
    """
    if dataset.rows == "cut":
        starts = np.arange(0, len(store.tokens) - 1, seq_length, dtype=np.int64)
        stops = np.minimum(starts + seq_length + 1, len(store.tokens))
        row_ends = np.arange(1, len(starts) + 1)
    else:
        starts, stops = _document_spans(store, dataset, seq_length, section)
        row_ends = np.arange(1, len(starts) + 1)
        if dataset.rows == "pack_documents":
            starts, stops, row_ends = _best_fit(starts, stops, seq_length)
    if not len(row_ends):
        raise DataError(f"{section}.path: {len(store.tokens)} tokens are too few to make one row of two tokens")
    return Rows(store, starts, stops, row_ends)


def _document_spans(
    store: TokenStore, dataset: DatasetConfig, seq_length: int, section: str
) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.diff(store.ends, prepend=0)
    too_long = np.flatnonzero(sizes > seq_length + 1)
    if dataset.long_documents == "error" and len(too_long):
        raise DataError(
            f"{section}: document {too_long[0] + 1} has {sizes[too_long[0]]} tokens, more than a row of "
            f"model.seq_length {seq_length} + 1\n"
            "  fix: write long_documents: split or truncate, or raise model.seq_length"
        )
    # Rounded up; none of a document of one token, which has no label.
    pieces = (np.maximum(sizes - 1, 0) + seq_length - 1) // seq_length
    if dataset.long_documents == "truncate":
        pieces = np.minimum(pieces, 1)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its document
    starts = np.repeat(store.ends - sizes, pieces) + number * seq_length
    return starts, np.minimum(starts + seq_length + 1, np.repeat(store.ends, pieces))


def _best_fit(starts: np.ndarray, stops: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sizes = stops - starts - 1
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free positions -> rows that have just that many
    spaces: list[int] = []  # sorted keys of by_space
    for span in np.argsort(-sizes, kind="stable"):
        size = int(sizes[span])
        at = bisect.bisect_left(spaces, size)
        if at < len(spaces):
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space]
                spaces.pop(at)
        else:
            space, row = seq_length, len(rows)
            rows.append([])
        rows[row].append(int(span))
        left = space - size
        if left:
            if left not in by_space:
                bisect.insort(spaces, left)
                by_space[left] = []
            by_space[left].append(row)
    order = np.array([span for row in rows for span in sorted(row)], dtype=np.int64)
    row_ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return starts[order], stops[order], row_ends
