"""Checkpoints: a directory is complete or does not exist. docs/checkpoints.md lists its files.

Every rank writes its share of the tensors with PyTorch's distributed checkpoint, as safetensors; the rest is JSON. All
is written under a temporary name, flushed to disk, then renamed. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from samestep.errors import CheckpointError
from samestep.parallel.data import like, local
from samestep.parallel.mesh import Mesh, World

MARKER = "complete.json"
BEST_FILE = "best.json"
STATE_FILE = "state.json"
MODEL, OPTIMIZER = "model", "optimizer"
FORMAT = 3
_WRITING = ".writing-"

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]

# One process saves, and every rank reads, without the others on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far."""

    step: int
    eval_loss: float


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: what it says of the run, and the names of its tensors, none of which is read yet."""

    path: Path
    model: dict[str, Stored]
    optimizer: dict[str, Stored]
    state: dict[str, Any]

    def read(self, part: Literal["model", "optimizer"], targets: Tensors) -> None:
        """Fill tensors in place with those of the same names and shapes.

        Args:
            targets: plain, or distributed in whatever layout. This rank reads the parts that it holds, and meets no
                other rank.

        Raises:
            CheckpointError: a name that is not there, another shape, or a file that cannot be read.
        """
        from torch.distributed import checkpoint as dcp  # late, here as below: it takes a second

        reader = dcp.HuggingFaceStorageReader(str(self.path / part))
        try:
            dcp.load({name: tensor.detach() for name, tensor in targets.items()}, storage_reader=reader, no_dist=True)
        except (OSError, SafetensorError, dcp.CheckpointException) as error:
            raise CheckpointError(f"{self.path / part} could not be read: {_reason(error)}") from error


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step_folder(folder: Path) -> bool:
    """Whether a folder is called as checkpoints are; abandoned ones are not."""
    return re.fullmatch(r"step-\d{8,}", folder.name) is not None


def save(
    root: Path,
    step: int,
    *,
    model: Tensors,
    optimizer: Tensors | None,
    state: Mapping[str, Any],
    texts: Mapping[str, str],
    keep: int,
    mesh: Mesh,
    best: Best | None = None,
) -> Path:
    """Write a checkpoint, then delete all but the newest `keep` and the best. A collective of the mesh's storage group.

    Args:
        model: weights by name; a plain tensor is the same on every rank, and one of them writes it.
        optimizer: None to leave it out (such a checkpoint can be evaluated, not resumed).
        state: JSON values; those of the first rank are written.
        texts: further files by name, likewise.
        best: its checkpoint, this one or an older one, is named in `best.json` and never deleted.

    Raises:
        CheckpointError: on every rank, if any could not write its share; nothing is left behind and older checkpoints
            are untouched.
    """
    final = root / folder_name(step)

    def renew() -> None:
        write_best(root, best)
        _prune(root, keep, {final.name, folder_name(best.step)} if best else {final.name})

    write_folder(
        final,
        {MODEL: model} if optimizer is None else {MODEL: model, OPTIMIZER: optimizer},
        lambda: {STATE_FILE: _dumped(state), **texts},
        mesh,
        fix="free disk space or set checkpoint.save_path; older checkpoints are untouched",
        then=renew,
    )
    return final


def _dumped(state: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **state}, allow_nan=False)


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
            _sync_tree(temporary)
        for name, text in texts().items():
            _write_text(temporary / name, text)
        _write_text(temporary / MARKER, json.dumps(_inventory(temporary, written), indent=1))
        _sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(final.parent)
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


FileFacts = dict[str, Any]
"""Of one file: `bytes` and `sha256`."""


def _together(mesh: Mesh, function: Callable[[], T]) -> list[T]:
    """Call a function on every rank; returns its results by rank, on each.

    Raises:
        CheckpointError: it failed on any rank; every rank then raises, with the reasons of all.
    """
    from torch.distributed.checkpoint import CheckpointException

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
    _sync_folder(folder)
    return {f"{folder.name}/{file.name}": _facts(file) for file in own}


def _prune(root: Path, keep: int, kept: set[str]) -> None:
    for old in complete_folders(root)[:-keep]:
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)


class Saver:
    """Writes the checkpoints of a run. Every rank has one and calls `save` at the same steps.

    Args:
        root: the folder of checkpoints.
        keep: newest checkpoints that are not deleted.
        in_background: `save` copies the tensors to CPU memory and returns; a thread writes them while training goes
            on. At most one checkpoint is being written: a further one waits for it.
        on_saved: told of each complete checkpoint its step, its path, and whether it was the best when it was made; in
            the thread that calls `save`, `poll` or `wait`.
    """

    def __init__(
        self, root: Path, mesh: Mesh, *, keep: int, in_background: bool, on_saved: Callable[[int, Path, bool], None]
    ):
        self.root, self.mesh, self.keep, self.in_background = root, mesh, keep, in_background
        self._on_saved = on_saved
        self._writing: tuple[int, bool, Future[Path]] | None = None
        mesh.storage_group  # noqa: B018 - all ranks make it here, not in their threads

    def save(
        self,
        step: int,
        *,
        model: Tensors,
        optimizer: Tensors | None,
        state: Mapping[str, Any],
        texts: Mapping[str, str],
        best: Best | None = None,
    ) -> None:
        """Write a checkpoint, as the function `save` does, after the former one is complete.

        Raises:
            CheckpointError: it, or the former one, could not be written.
        """
        self.wait()
        if self.in_background:
            model = _copies(model, self.mesh)
            optimizer = None if optimizer is None else _copies(optimizer, self.mesh)

        def write() -> Path:
            return save(
                self.root,
                step,
                model=model,
                optimizer=optimizer,
                state=state,
                texts=texts,
                keep=self.keep,
                mesh=self.mesh,
                best=best,
            )

        is_best = best is not None and best.step == step
        if self.in_background:
            self._writing = (step, is_best, _in_thread(write))
        else:
            self._on_saved(step, write(), is_best)

    def poll(self) -> None:
        """Tell of a checkpoint that has become complete; ranks may differ in when it has.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writing is not None and self._writing[2].done():
            self.wait()

    def wait(self) -> None:
        """Until no checkpoint is being written; otherwise like `poll`."""
        if self._writing is not None:
            (step, is_best, written), self._writing = self._writing, None
            self._on_saved(step, written.result(), is_best)


def _in_thread(function: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    # A process that ends on an error must not wait for ranks that are gone.
    Thread(target=work, name="checkpoint", daemon=True).start()
    return future


def _copies(tensors: Tensors, mesh: Mesh) -> dict[str, torch.Tensor]:
    """In CPU memory; what is distributed stays so, over the same ranks."""
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    return {name: like(local(t).to("cpu", copy=True), t, mesh.storage) for name, t in found.items()}


def abandon_after(root: Path, step: int) -> list[Path]:
    """Take checkpoints with a greater step out of the way of a run that goes on from `step`: `step-00000010` becomes
    `step-00000010.abandoned`, which is never read or deleted. Returns the new paths.

    The newest goes first: a kill in between leaves a shorter run that is whole.
    """
    moved = []
    for folder in reversed(step_folders(root)):
        if _step_of(folder) <= step:
            break
        target, number = root / f"{folder.name}.abandoned", 1
        while target.exists():
            number += 1
            target = root / f"{folder.name}.abandoned-{number}"
        folder.rename(target)
        moved.append(target)
    if moved:
        _sync_folder(root)
    return moved


def write_best(root: Path, best: Best | None) -> None:
    """Name the best checkpoint in `best.json`, at once or not at all; without one there is no such file."""
    file = root / BEST_FILE
    if best is None or not (root / folder_name(best.step)).is_dir():
        file.unlink(missing_ok=True)
        return
    replace_file(file, json.dumps({**asdict(best), "checkpoint": folder_name(best.step)}, allow_nan=False))


def replace_file(file: Path, text: str) -> None:
    """Write a file, at once or not at all."""
    temporary = file.with_name(f"{_WRITING}{file.name}")
    _write_text(temporary, text)
    temporary.replace(file)
    _sync_folder(file.parent)


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_tree(path: Path) -> None:
    for file in path.rglob("*"):
        (_sync_folder if file.is_dir() else _sync_file)(file)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def step_folders(root: Path) -> list[Path]:
    """Folders called as checkpoints are, oldest first, whatever is in them."""
    return sorted(filter(is_step_folder, root.glob("step-*")), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def complete_folders(root: Path) -> list[Path]:
    """Checkpoints with a marker, oldest first."""
    return [folder for folder in step_folders(root) if (folder / MARKER).is_file()]


def run_id(folder: Path) -> str | None:
    """Id of the run that wrote a checkpoint; None where it cannot be read."""
    try:
        return json.loads((folder / STATE_FILE).read_text(encoding="utf-8")).get("run_id")
    except (OSError, ValueError, AttributeError):
        return None


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


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest usable checkpoint under `root`, and why newer ones were passed over."""
    skipped: list[str] = []
    for folder in reversed(step_folders(root)):
        problem = defect(folder)
        if problem is None:
            return folder, skipped
        skipped.append(f"{folder}: {problem}")
    return None, skipped


def verify(folder: Path) -> None:
    """Read every byte of a checkpoint. One rank does it for all.

    Raises:
        CheckpointError: not there, not complete, or damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint")
    problem = defect(folder)
    if problem is not None:
        raise CheckpointError(f"{folder}: {problem}")


def open_checkpoint(folder: Path, *, need_optimizer: bool = True) -> Checkpoint:
    """What a checkpoint says and which tensors it has; cheap, on every rank, after one of them has verified it.

    Raises:
        CheckpointError: of another version, or without the optimizer state that was asked for.
    """
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{folder}: has format {state['format']}, but this version reads {FORMAT}\n"
            "  fix: go on with the version of samestep that wrote it, or begin a new run"
        )
    if need_optimizer and not (folder / OPTIMIZER).is_dir():
        raise CheckpointError(f"{folder}: holds no optimizer state (no_save_optim), so it cannot be resumed")
    optimizer = stored_tensors(folder / OPTIMIZER) if need_optimizer else {}
    return Checkpoint(folder, stored_tensors(folder / MODEL), optimizer, state)


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


def random_states() -> dict[str, Any]:
    """States of all global random generators, as JSON values. samestep draws from none of them; user code may."""
    numpy_state = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "python": _listed(random.getstate()),
        "numpy": {**numpy_state, "state": {k: np.asarray(v).tolist() for k, v in numpy_state["state"].items()}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
    return states


def set_random_states(states: Sequence[Mapping[str, Any]], world: World) -> None:
    """Take over what `random_states` gave on this rank, if there were as many ranks.

    Args:
        states: by rank; those of devices that are not here are passed over.

    Raises:
        CheckpointError: another version of Python, NumPy or PyTorch wrote states that do not fit this one.
    """
    if len(states) != world.size:
        return
    own = states[world.rank]
    try:
        version, internal, gauss = own["python"]
        random.setstate((version, tuple(internal), gauss))
        numpy_state = own["numpy"]
        key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
        np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
        torch.set_rng_state(_bytes_tensor(own["torch"]))
        for device, state in zip(range(torch.cuda.device_count()), own.get("cuda", []), strict=False):
            torch.cuda.set_rng_state(_bytes_tensor(state), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the states of the random generators do not fit this machine: {error}\n"
            "  fix: resume with the versions of Python, NumPy and PyTorch that wrote the checkpoint"
        ) from error


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value
