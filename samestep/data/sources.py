"""Documents from text files, JSON, Parquet and Hugging Face data sets.

A document is a sequence of segments: text, and whether its tokens are training targets. Plain text is one segment;
what rows may look like is in `segments.py`.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob  # Path.glob takes no absolute pattern
from pathlib import Path
from typing import Any

from samestep.config.kinds import HUB_PREFIX
from samestep.config.schema import EvalDatasetConfig, TrainDatasetConfig
from samestep.data.compressed import COMPRESSED_SUFFIXES, inflate
from samestep.data.segments import Segments, columns_of, segments_of
from samestep.errors import DataError

AnyDataset = TrainDatasetConfig | EvalDatasetConfig
SUFFIXES = {
    "text": {".txt", ".text", ".md", ".py", ".rst"},
    "jsonl": {".jsonl", ".ndjson"},
    "json": {".json"},
    "parquet": {".parquet"},
}
"""Kind of file -> endings of its name, before `.gz` or `.zst`."""

_SPACE = re.compile(r"[ \t\n\r]*")
_PARQUET_ROWS = 1024
_PART = ": document "


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        segments: (text, is_target) pairs, in order.
        where: file and row, for messages.
    """

    segments: Segments
    where: str

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)


def read_documents(dataset: AnyDataset, section: str = "train_dataset") -> list[Document]:
    """All documents of a dataset section that hold text, in file order (files of a folder or glob by name).

    Raises:
        DataError: nothing found, a file named twice, an unreadable file, or a bad row; the message names file, row and
            byte (of the decompressed content).
    """
    documents: list[Document] = []
    sources = _sources(dataset, section)
    chooses = dataset.dataset_split or dataset.dataset_subset
    if chooses and not any(_kind(source, dataset) == "huggingface" for source in sources):
        raise DataError(
            f"{section}: dataset_split and dataset_subset choose from a Hugging Face data set, but {dataset.path} is "
            "none\n  fix: remove them"
        )
    for source in sources:
        documents += _read(source, dataset)
    if not documents:
        raise DataError(f"{section}.path: the files hold no document: {dataset.path}")
    if dataset.document_separator:
        text_files = {str(source) for source in sources if _kind(source, dataset) == "text"}
        if text_files and not any(d.where.rpartition(_PART)[0] in text_files for d in documents):
            raise DataError(
                f"{section}.document_separator: {dataset.document_separator!r} occurs in no text file of {dataset.path}"
                '\n  fix: in YAML, write line ends in double quotes ("\\n\\n"), or remove the field'
            )
    return documents


# ---- finding


def _sources(dataset: AnyDataset, section: str) -> list[Path | str]:
    """Files, folders of Hugging Face data sets, and `hf://` names."""
    patterns = [dataset.path] if isinstance(dataset.path, str) else list(dataset.path or [])
    found: list[Path | str] = []
    for pattern in patterns:
        matches = _matches(pattern, dataset)
        if not matches:
            raise DataError(
                f"{section}.path: no file at {pattern}\n  fix: write a text file, a .jsonl, .json or .parquet file, a "
                "folder, a glob, or hf://datasets/OWNER/NAME; a path in the YAML is relative to the YAML file, one on "
                "the command line to the current folder"
            )
        found += matches
    seen: set[Path | str] = set()
    for source in found:
        real = source.resolve() if isinstance(source, Path) else source
        if real in seen:
            raise DataError(
                f"{section}.path: {source} is named twice, so each of its samples would be trained twice an epoch\n"
                "  fix: name every file once; a folder or a wildcard may cover it already"
            )
        seen.add(real)
    return found


def _matches(pattern: str, dataset: AnyDataset) -> list[Path | str]:
    if pattern.startswith(HUB_PREFIX):
        return [pattern]
    path = Path(pattern)
    if path.is_dir():
        if _is_saved_dataset(path) or dataset.type == "huggingface":
            return [path]
        kinds = SUFFIXES if dataset.type == "auto" else (dataset.type,)
        wanted = {suffix for kind in kinds for suffix in SUFFIXES[kind]}
        return [p for p in sorted(path.rglob("*")) if _suffix(p) in wanted and p.is_file()]
    if path.is_file():
        return [path]
    return [Path(name) for name in sorted(glob(pattern, recursive=True)) if Path(name).is_file()]  # noqa: PTH207


def _is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _suffix(path: Path) -> str:
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path
    return name.suffix.lower()


def _kind(source: Path | str, dataset: AnyDataset) -> str:
    if isinstance(source, str) or source.is_dir():
        return "huggingface"
    if dataset.type != "auto":
        return dataset.type
    return next((kind for kind, suffixes in SUFFIXES.items() if _suffix(source) in suffixes), "text")


# ---- reading


def _read(source: Path | str, dataset: AnyDataset) -> Iterator[Document]:
    kind = _kind(source, dataset)
    if kind == "huggingface":
        return _documents(_huggingface_rows(source, dataset), dataset)
    path = Path(source)
    if kind == "parquet":
        return _documents(_parquet_rows(path, dataset), dataset)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    raw = inflate(path, raw)
    text = raw.removeprefix(BOM_UTF8)
    offset = len(raw) - len(text)
    if kind == "text":
        return _text_documents(path, text, offset, dataset)
    return _documents((_jsonl_rows if kind == "jsonl" else _json_rows)(path, text, offset), dataset)


def _documents(rows: Iterable[tuple[dict[str, Any], str]], dataset: AnyDataset) -> Iterator[Document]:
    for row, where in rows:
        segments = segments_of(row, where, dataset.text_column, dataset.targets == "assistant")
        if any(text for text, _ in segments):
            yield Document(segments, where)


def _decode(raw: bytes, where: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {offset + error.start} (0x{raw[error.start]:02x}) is not UTF-8 text\n"
            "  fix: convert the file to UTF-8, or remove it from the path"
        ) from error


def _text_documents(path: Path, raw: bytes, offset: int, dataset: AnyDataset) -> Iterator[Document]:
    text = _decode(raw, str(path), offset)
    separator = dataset.document_separator
    if not separator or separator not in text:
        if text:
            yield Document(((text, True),), str(path))
        return
    for number, piece in enumerate(text.split(separator), 1):
        if piece:
            yield Document(((piece, True),), f"{path}{_PART}{number}")


def _jsonl_rows(path: Path, raw: bytes, offset: int) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(raw.split(b"\n"), 1):  # splitlines() also splits at U+2028, legal inside JSON text
        where = f"{path}: row {number}"
        if line.strip():
            yield _json_line(line, where, offset), where
        offset += len(line) + 1


def _json_line(line: bytes, where: str, offset: int) -> dict[str, Any]:
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
        raise DataError(
            f"{where}: holds a {type(row).__name__}, but each line must be a JSON object\n"
            "  fix: for a file that is one JSON array, write type: json"
        )
    return row


def _json_rows(path: Path, raw: bytes, offset: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows of one array, parsed one by one so that a mistake has a row and a byte."""
    text = _decode(raw, str(path), offset)

    def byte(at: int) -> int:
        return offset + len(text[:at].encode())

    def skip(at: int) -> int:
        match = _SPACE.match(text, at)
        assert match is not None
        return match.end()

    at = skip(0)
    if at == len(text):
        return
    if text[at] != "[":
        raise DataError(
            f"{path} (byte {byte(at)}): must hold one JSON array of objects\n"
            "  fix: for a file of one JSON object a line, write type: jsonl"
        )
    at, number, decoder = skip(at + 1), 0, json.JSONDecoder()
    closed = text[at : at + 1] == "]"
    while not closed:
        number += 1
        where = f"{path}: row {number}"
        try:
            row, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg} at byte {byte(error.pos)}"
            raise DataError(
                f"{where} (byte {byte(at)}): not a JSON object: {reason}\n"
                "  fix: repair the row; an end in the middle of the array means a truncated file"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{where} (byte {byte(at)}): holds a {type(row).__name__}, but must be a JSON object")
        yield row, where
        at = skip(end)
        closed = text[at : at + 1] == "]"
        if not closed and text[at : at + 1] != ",":
            raise DataError(
                f"{where}: is followed by {text[at : at + 1] or 'the end of the file'!r} at byte {byte(at)}, not by "
                "`,` or `]`\n  fix: repair the array; an end in the middle of it means a truncated file"
            )
        at = at if closed else skip(at + 1)
    if skip(at + 1) != len(text):
        raise DataError(f"{path}: there is more after the end of the array, at byte {byte(skip(at + 1))}")


def _parquet_rows(path: Path, dataset: AnyDataset) -> Iterator[tuple[dict[str, Any], str]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = columns_of(file.schema_arrow.names, dataset.text_column, str(path))
            for batch in file.iter_batches(_PARQUET_ROWS, columns=columns):
                try:
                    rows: Iterable[dict[str, Any]] = batch.to_pylist()
                except UnicodeDecodeError:  # again one by one, to reach the row at fault
                    rows = (batch.slice(index, 1).to_pylist()[0] for index in range(len(batch)))
                for row in rows:
                    number += 1
                    yield row, f"{path}: row {number}"
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as Parquet after row {number}: {error}\n  fix: fetch or write the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: row {number + 1}: byte {error.start} of a text is not UTF-8") from error


def _huggingface_rows(source: Path | str, dataset: AnyDataset) -> Iterator[tuple[dict[str, Any], str]]:
    table = _open_dataset(source, dataset)
    columns = columns_of(table.column_names, dataset.text_column, str(source))
    for number, row in enumerate(table.select_columns(columns), 1):
        yield row, f"{source}: row {number}"


def _open_dataset(source: Path | str, dataset: AnyDataset) -> Any:
    """A `datasets.Dataset`: of a folder written by `save_to_disk`, or of the Hub."""
    import datasets

    try:
        if isinstance(source, Path):
            found = datasets.load_from_disk(str(source))
        else:
            name = source.removeprefix(HUB_PREFIX)
            found = datasets.load_dataset(name, dataset.dataset_subset, split=dataset.dataset_split)
    except Exception as error:  # many kinds, of several libraries
        raise DataError(f"{source}: cannot be opened as a Hugging Face data set: {error}") from error
    if not isinstance(found, dict):
        if isinstance(source, Path) and dataset.dataset_split:
            raise DataError(f"{source}: is one data set without splits\n  fix: remove dataset_split")
        return found
    split = dataset.dataset_split or (next(iter(found)) if len(found) == 1 else "train")
    if split not in found:
        raise DataError(
            f"{source}: has no split {split!r}; it has: {', '.join(map(repr, found))}\n  fix: write dataset_split"
        )
    return found[split]
