"""Checkpoints: a directory is complete or does not exist.

    step-00000010/
      model.safetensors       weights, as stored
      optimizer.safetensors   moments, step counts and float32 masters
      state.json              counters, cursor, random states, size of metrics.jsonl
      config.resolved.yaml    tokenizer.json
      complete.json           size and SHA-256 of every other file; written last

All is written under a temporary name, flushed to disk, then renamed. `best.json` beside them names the checkpoint with
the lowest validation loss (`checkpoint.keep_best`). Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
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
FORMAT = 1


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
        _write_text(temporary / "state.json", json.dumps({"format": FORMAT, **state}, allow_nan=False))
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
    kept = folder_name(best.step) if best else None
    for old in complete_folders(root)[:-keep]:
        if old.name != kept:
            shutil.rmtree(old, ignore_errors=True)
    return final


def write_best(root: Path, best: Best | None) -> None:
    """Name the best checkpoint in `best.json`, at once or not at all; without one there is no such file."""
    file = root / BEST_FILE
    if best is None or not (root / folder_name(best.step)).is_dir():
        file.unlink(missing_ok=True)
        return
    temporary = root / f".writing-{BEST_FILE}"
    _write_text(temporary, json.dumps({**asdict(best), "checkpoint": folder_name(best.step)}, allow_nan=False))
    temporary.replace(file)
    _sync_folder(root)


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


def complete_folders(root: Path) -> list[Path]:
    """Checkpoints with a marker, oldest first."""
    return sorted(path.parent for path in root.glob(f"step-*/{MARKER}"))


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
    for folder in sorted(root.glob("step-*"), reverse=True):
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
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
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
    """Take over what `random_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = states["numpy"]
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    with contextlib.suppress(KeyError):
        torch.cuda.set_rng_state_all([_bytes_tensor(state) for state in states["cuda"]])


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value
