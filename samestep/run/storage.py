"""Folders of tensors and texts that are complete or do not exist.

Every rank writes its share of the tensors with PyTorch's distributed checkpoint, as safetensors; the rest is text. All
is written under a temporary name, flushed to disk, then renamed. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from samestep.errors import CheckpointError
from samestep.parallel.data import like, local
from samestep.parallel.mesh import Mesh

MARKER = "complete.json"
"""Written last: size and hash of every other file."""
_WRITING = ".writing-"

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
FileFacts = dict[str, Any]
"""Of one file: `bytes` and `sha256`."""

# One process saves, and every rank reads, without the others on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def write_folder(
    final: Path,
    parts: Mapping[str, Tensors],
    texts: Callable[[], Mapping[str, str]],
    mesh: Mesh,
    *,
    fix: str,
    also: Callable[[Path], None] | None = None,
    then: Callable[[], None] | None = None,
) -> None:
    """Write a folder that is complete or does not exist, in place of an older one. A collective of the mesh's storage
    group.

    Args:
        parts: tensors by the name of their subfolder; a plain tensor is the same on every rank, and one of them writes
            it.
        texts: gives further files by name; asked on the first rank, as the others are not.
        fix: what a user may do if it cannot be written.
        also: writes whatever else it likes into the folder, whose path it is given while it is still a temporary one.
        then: once the folder is complete.

    Raises:
        CheckpointError: on every rank, if any could not write its share; nothing is left behind.
    """
    temporary = final.with_name(f"{_WRITING}{final.name}")

    def finish() -> None:
        if also is not None:
            also(temporary)
            sync_tree(temporary)
        for name, text in texts().items():
            _write_text(temporary / name, text)
        _write_text(temporary / MARKER, json.dumps(_inventory(temporary, written), indent=1))
        sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        sync_folder(final.parent)
        if then is not None:
            then()

    try:
        _together(mesh, lambda: _begin(temporary) if mesh.is_first else None)
        written: dict[str, FileFacts] = {}
        for part, tensors in parts.items():
            for facts in _together(mesh, partial(_save_tensors, temporary / part, tensors, mesh)):
                written |= facts
        _together(mesh, lambda: finish() if mesh.is_first else None)
    except CheckpointError as error:
        if mesh.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final} could not be written: {error}\n  fix: {fix}") from error


def _together(mesh: Mesh, function: Callable[[], T]) -> list[T]:
    """Call a function on every rank; returns its results by rank, on each.

    Raises:
        CheckpointError: it failed on any rank; every rank then raises, with the reasons of all.
    """
    from torch.distributed.checkpoint import CheckpointException  # late, here as below: it takes a second

    outcome: tuple[Any, str | None]
    fault: Exception | None = None
    try:
        outcome = (function(), None)
    except (OSError, SafetensorError, CheckpointException) as error:
        outcome = (None, _reason(error))
    except Exception as error:  # of code that is not ours; the other ranks must hear of it, too
        outcome, fault = (None, f"{type(error).__name__}: {error}"), error
    outcomes: list[tuple[Any, str | None]] = [outcome] * mesh.world.size
    if mesh.storage_group is not None:
        dist.all_gather_object(outcomes, outcome, group=mesh.storage_group)
    reasons = {reason for _, reason in outcomes if reason is not None}
    if reasons:
        raise CheckpointError("; ".join(sorted(reasons))) from fault
    return [value for value, _ in outcomes]


def _reason(error: BaseException) -> str:
    """What went wrong, without the traces of all ranks that PyTorch puts in its message."""
    from torch.distributed.checkpoint import CheckpointException

    if not isinstance(error, CheckpointException):
        return str(error)
    for failure, _ in error.failures.values():
        if isinstance(failure, KeyboardInterrupt):
            raise failure  # PyTorch catches that as well
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))


def _begin(temporary: Path) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    kind = temporary.name.removeprefix(_WRITING).partition("-")[0]
    for leftover in temporary.parent.glob(f"{_WRITING}{kind}-*"):
        shutil.rmtree(leftover)
    temporary.mkdir()


def _save_tensors(folder: Path, tensors: Tensors, mesh: Mesh) -> dict[str, FileFacts]:
    """Write this rank's share of tensors; returns the files that it wrote, by their path below the checkpoint."""
    from torch.distributed import checkpoint as dcp

    dcp.save(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
        process_group=mesh.storage_group,
        no_dist=mesh.storage_group is None,
    )
    own = sorted(folder.glob(f"shard-{mesh.world.rank + 1:05d}-*"))
    for file in own:
        _sync_file(file)  # PyTorch does so before it has flushed its own buffer
    sync_folder(folder)
    return {f"{folder.name}/{file.name}": _facts(file) for file in own}


def _inventory(folder: Path, written: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    """Of every file but the marker.

    Args:
        written: what the ranks told of their files, which are not read again.

    Raises:
        OSError: a file of another rank is not here.
    """
    for name in written:
        if not (folder / name).is_file():
            raise OSError(f"{name}, written by another rank, is not there: all ranks need the same file system")
    files = (file for file in folder.rglob("*") if file.is_file())
    own = {name: _facts(file) for file in files if (name := file.relative_to(folder).as_posix()) not in written}
    return dict(sorted({**own, **written}.items()))


def _facts(file: Path) -> FileFacts:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a part of a checkpoint, by name; none is read."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: Stored(tuple(facts.size), facts.properties.dtype)
        for name, facts in found.items()
        if isinstance(facts, TensorStorageMetadata)
    }


def read_tensors(folder: Path, targets: Tensors) -> None:
    """Fill tensors in place with those of the same names and shapes.

    Args:
        targets: plain, or distributed in whatever layout. This rank reads the parts that it holds, and meets no other
            rank.

    Raises:
        CheckpointError: a name that is not there, another shape, or a file that cannot be read.
    """
    from torch.distributed import checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        dcp.load({name: tensor.detach() for name, tensor in targets.items()}, storage_reader=reader, no_dist=True)
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        raise CheckpointError(f"{folder} could not be read: {_reason(error)}") from error


def read_state(folder: Path, stored: Mapping[str, Stored], parameters: Tensors) -> dict[str, torch.Tensor]:
    """The state of an optimizer by `KEY.PARAMETER`, laid out as its parameters are, however it was when it was written.

    Args:
        stored: what `stored_tensors` tells of the folder.

    Raises:
        CheckpointError: a file cannot be read.
    """
    tensors = {name: _room(facts, parameters.get(name.partition(".")[2])) for name, facts in stored.items()}
    read_tensors(folder, tensors)
    return tensors


def _room(stored: Stored, parameter: torch.Tensor | None) -> torch.Tensor:
    """Memory for a tensor of a parameter's optimizer state, split as the parameter is; what has another shape than it,
    such as a number, is whole on every rank."""
    if parameter is None or stored.shape != parameter.shape:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return like(torch.empty_like(local(parameter), dtype=stored.dtype), parameter)


def defect(folder: Path, parts: str = "*") -> str | None:
    """Why a checkpoint cannot be used, or None: every file must have the size and hash of the marker.

    Args:
        parts: pattern of the subfolders in which there may be no other file.
    """
    try:
        inventory = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"no readable {MARKER}: it was never finished"
    for name, expected in inventory.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if _sha256(file) != expected["sha256"]:
            return f"{name} is corrupted (its hash differs)"
    for file in folder.glob(f"{parts}/*"):
        if file.relative_to(folder).as_posix() not in inventory:
            return f"{file.relative_to(folder)} is not in {MARKER}: it is of another checkpoint"
    return None


def replace_file(file: Path, text: str) -> None:
    """Write a file, at once or not at all."""
    temporary = file.with_name(f"{_WRITING}{file.name}")
    _write_text(temporary, text)
    temporary.replace(file)
    sync_folder(file.parent)


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_tree(path: Path) -> None:
    """Flush all that is in a folder to the disk."""
    for file in path.rglob("*"):
        (sync_folder if file.is_dir() else _sync_file)(file)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
