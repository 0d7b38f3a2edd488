"""Documents from text files and JSON lines.

A document is a sequence of segments: text, and whether its tokens are training targets. Plain text is one segment;
a chat row (`messages`) is one segment for each role name and one for each content.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob  # Path.glob takes no absolute pattern
from pathlib import Path
from typing import Any

from samestep.config.schema import EvalDatasetConfig, TrainDatasetConfig
from samestep.errors import DataError

AnyDataset = TrainDatasetConfig | EvalDatasetConfig
TEXT_SUFFIXES = {".txt", ".text", ".md", ".py", ".rst"}
JSONL_SUFFIXES = {".jsonl", ".ndjson"}


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        segments: (text, is_target) pairs, in order.
        where: file and row, for messages.
    """

    segments: tuple[tuple[str, bool], ...]
    where: str

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)


def read_documents(dataset: AnyDataset, section: str = "train_dataset") -> list[Document]:
    """All documents of a dataset section that hold text, in file order (files of a folder or glob by name).

    Raises:
        DataError: nothing found, an unreadable file, or a bad row; the message names file, row and byte.
    """
    documents: list[Document] = []
    for path in _files(dataset, section):
        documents += _read_file(path, dataset)
    if not documents:
        raise DataError(f"{section}.path: the files hold no document: {dataset.path}")
    return documents


def _files(dataset: AnyDataset, section: str) -> list[Path]:
    patterns = [dataset.path] if isinstance(dataset.path, str) else list(dataset.path or [])
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES | JSONL_SUFFIXES and p.is_file())
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(Path(name) for name in glob(pattern, recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not matches:
            raise DataError(
                f"{section}.path: no file at {pattern}\n  fix: write a text file, a .jsonl file, a folder, or a "
                "glob; a path in the YAML is relative to the YAML file, one on the command line to the current folder"
            )
        found += matches
    return found


def _read_file(path: Path, dataset: AnyDataset) -> Iterator[Document]:
    kind = dataset.type
    if kind == "auto":
        kind = "jsonl" if path.suffix in JSONL_SUFFIXES else "text"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    text = raw.removeprefix(BOM_UTF8)
    offset = len(raw) - len(text)
    return (_read_jsonl if kind == "jsonl" else _read_text)(path, text, offset, dataset)


def _decode(raw: bytes, where: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {offset + error.start} (0x{raw[error.start]:02x}) is not UTF-8 text\n"
            "  fix: convert the file to UTF-8, or remove it from the path"
        ) from error


def _read_text(path: Path, raw: bytes, offset: int, dataset: AnyDataset) -> Iterator[Document]:
    text = _decode(raw, str(path), offset)
    pieces = text.split(dataset.document_separator) if dataset.document_separator else [text]
    for number, piece in enumerate(pieces, 1):
        if piece:
            where = f"{path}: document {number}" if dataset.document_separator else str(path)
            yield Document(((piece, True),), where)


def _read_jsonl(path: Path, raw: bytes, offset: int, dataset: AnyDataset) -> Iterator[Document]:
    for number, line in enumerate(raw.split(b"\n"), 1):  # splitlines() also splits at U+2028, legal inside JSON text
        where = f"{path}: row {number}"
        if line.strip():
            segments = _segments(_parse_row(line, where, offset), where, dataset)
            if any(text for text, _ in segments):
                yield Document(segments, where)
        offset += len(line) + 1


def _parse_row(line: bytes, where: str, offset: int) -> dict[str, Any]:
    text = _decode(line, where, offset)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError alone: a number of thousands of digits
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where} (byte {offset}): not a JSON object: {reason}\n"
            "  fix: each line must hold one complete JSON object; a last line cut short means a truncated file"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds a {type(row).__name__}, but each line must be a JSON object")
    return row


def _segments(row: dict[str, Any], where: str, dataset: AnyDataset) -> tuple[tuple[str, bool], ...]:
    if isinstance(row.get(dataset.text_column), str):
        segments: tuple[tuple[str, bool], ...] = ((row[dataset.text_column], True),)
    elif isinstance(row.get("messages"), list):
        segments = tuple(_chat_segments(row["messages"], where, dataset.targets == "assistant"))
    else:
        raise DataError(
            f"{where}: has neither a text column {dataset.text_column!r} nor a list 'messages'; "
            f"it has: {', '.join(map(repr, sorted(row))) or 'nothing'}\n"
            "  fix: set text_column to the column that holds the text"
        )
    for text, _ in segments:
        _check_encodable(text, where)
    return segments


def _chat_segments(messages: list[Any], where: str, only_assistant: bool) -> Iterator[tuple[str, bool]]:
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: message {number} needs a text 'role' and a text 'content'")
        yield f"{role}: ", not only_assistant
        yield f"{content}\n", not only_assistant or role == "assistant"


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is no "
            "character and cannot be encoded\n  fix: remove the row, or write the full escape pair"
        ) from error
