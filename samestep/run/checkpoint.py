"""Checkpoints: a directory is complete or does not exist. docs/checkpoints.md lists its files.

All is written under a temporary name, flushed to disk, then renamed. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from samestep.errors import CheckpointError

MARKER = "complete.json"
BEST_FILE = "best.json"
STATE_FILE = "state.json"
FORMAT = 2


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far."""

    step: int
    eval_loss: float


@dataclass(frozen=True)
class Checkpoint:
    """What a complete checkpoint holds."""

    path: Path
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step_folder(folder: Path) -> bool:
    """Whether a folder is called as checkpoints are; abandoned ones are not."""
    return re.fullmatch(r"step-\d{8,}", folder.name) is not None


def save(
    root: Path,
    step: int,
    *,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor] | None,
    state: Mapping[str, Any],
    texts: Mapping[str, str],
    keep: int,
    best: Best | None = None,
) -> Path:
    """Write a checkpoint, then delete all but the newest `keep` and the best.

    Args:
        optimizer: None to leave it out (such a checkpoint can be evaluated, not resumed).
        state: JSON values.
        texts: further files by name.
        best: its checkpoint, this one or an older one, is named in `best.json` and never deleted.

    Raises:
        CheckpointError: it could not be written; nothing is left behind and older checkpoints are untouched.
    """
    final = root / folder_name(step)
    temporary = root / f".writing-{folder_name(step)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".writing-step-*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        _save_tensors(temporary / "model.safetensors", model)
        if optimizer is not None:
            _save_tensors(temporary / "optimizer.safetensors", optimizer)
        _write_text(temporary / STATE_FILE, json.dumps({"format": FORMAT, **state}, allow_nan=False))
        for name, text in texts.items():
            _write_text(temporary / name, text)
        _write_text(temporary / MARKER, json.dumps(_inventory(temporary), indent=1))
        _sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(root)
        write_best(root, best)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final} could not be written: {error}\n  fix: free disk space or set checkpoint.save_path; "
            "older checkpoints are untouched"
        ) from error
    kept = {final.name, folder_name(best.step)} if best else {final.name}
    for old in complete_folders(root)[:-keep]:
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return final


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
    temporary = file.with_name(f".writing-{file.name}")
    _write_text(temporary, text)
    temporary.replace(file)
    _sync_folder(file.parent)


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name != MARKER
    }


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


def defect(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None: every file must have the size and hash of the marker."""
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


def load(folder: Path, *, need_optimizer: bool = True) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: not there, not complete, damaged, or without the optimizer state that was asked for.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint")
    problem = defect(folder)
    if problem is not None:
        raise CheckpointError(f"{folder}: {problem}")
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise CheckpointError(f"{folder}: has format {state['format']}, but this version reads {FORMAT}")
    optimizer_file = folder / "optimizer.safetensors"
    if need_optimizer and not optimizer_file.is_file():
        raise CheckpointError(f"{folder}: holds no optimizer state (no_save_optim), so it cannot be resumed")
    optimizer = load_file(optimizer_file) if need_optimizer else {}
    return Checkpoint(folder, load_file(folder / "model.safetensors"), optimizer, state)


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


def set_random_states(states: Mapping[str, Any]) -> None:
    """Take over what `random_states` gave; states of devices that are not here are passed over.

    Raises:
        CheckpointError: another version of Python, NumPy or PyTorch wrote states that do not fit this one.
    """
    try:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        numpy_state = states["numpy"]
        key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
        np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
        torch.set_rng_state(_bytes_tensor(states["torch"]))
        for device, state in zip(range(torch.cuda.device_count()), states.get("cuda", []), strict=False):
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
