"""Checkpoints of a run: what is in them, and which are kept. docs/checkpoints.md lists their files."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from samestep.errors import CheckpointError
from samestep.parallel.data import like, local
from samestep.parallel.mesh import Mesh, World
from samestep.run.storage import (
    MARKER,
    Stored,
    Tensors,
    defect,
    read_tensors,
    replace_file,
    stored_tensors,
    sync_folder,
    write_folder,
)

BEST_FILE = "best.json"
STATE_FILE = "state.json"
MODEL, OPTIMIZER = "model", "optimizer"
FORMAT = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far."""

    step: int
    eval_loss: float


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
        read_tensors(self.path / part, targets)


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
        sync_folder(root)
    return moved


def write_best(root: Path, best: Best | None) -> None:
    """Name the best checkpoint in `best.json`, at once or not at all; without one there is no such file."""
    file = root / BEST_FILE
    if best is None or not (root / folder_name(best.step)).is_dir():
        file.unlink(missing_ok=True)
        return
    replace_file(file, json.dumps({**asdict(best), "checkpoint": folder_name(best.step)}, allow_nan=False))


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
