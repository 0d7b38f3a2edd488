"""Bytes of `.gz` and `.zst` files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from samestep.errors import DataError

COMPRESSED_SUFFIXES = {".gz", ".zst"}
_CHUNK = 65_536
_LARGEST_WINDOW = 2**31
"""`zstd --long=31` writes such files; the library's own limit is 128 MiB."""


def inflate(path: Path, raw: bytes) -> bytes:
    """The content of a file: decompressed if its name ends in `.gz` (all members) or `.zst` (all frames).

    Raises:
        DataError: truncated or damaged; names the byte of the decompressed stream up to which it could be read.
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED_SUFFIXES:
        return raw
    pieces: list[bytes] = []
    decoder: Any = None
    for start in range(0, len(raw), _CHUNK):
        left = raw[start : start + _CHUNK]
        while left:
            if decoder is None and suffix == ".gz":
                left = left.lstrip(b"\0")  # padding between members, as on a tape
                if not left:
                    break
            decoder = decoder or _decoder(suffix)
            try:
                pieces.append(decoder.decompress(left))
            except Exception as error:  # zlib.error or zstandard.ZstdError, which is imported late
                raise DataError(
                    f"{path}: the compressed data is damaged after byte {_size(pieces)} of its content: {error}\n"
                    "  fix: fetch or compress the file again"
                ) from error
            left = decoder.unused_data if decoder.eof else b""
            if decoder.eof:
                decoder = None
    if decoder is not None:
        raise DataError(
            f"{path}: the compressed data ends too early, at byte {_size(pieces)} of its content: the file is "
            "truncated\n  fix: fetch or compress the file again"
        )
    return b"".join(pieces)


def _decoder(suffix: str) -> Any:
    if suffix == ".gz":
        return zlib.decompressobj(wbits=31)
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


def _size(pieces: list[bytes]) -> int:
    return sum(map(len, pieces))
