"""Checkpoints of the Trainer: `checkpoint-N/` folders for `from_pretrained`, from which a run goes on exactly.

A folder is complete or does not exist. Beside what transformers writes (weights, tokenizer, `trainer_state.json`,
`training_args.bin`, which is never read) it holds `optimizer/` as safetensors, `samestep.json` with the schedule, the
place in the data and the states of the random generators, and `complete.json` with the hash of every file. Nothing is
ever unpickled.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from samestep.errors import CheckpointError
from samestep.hf.update import TorchUpdater
from samestep.parallel.data import place
from samestep.run.storage import MARKER, defect, read_state, stored_tensors

STATE_FILE = "samestep.json"
OPTIMIZER = "optimizer"
FORMAT = 1
_WEIGHTS = "model*.safetensors"
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class Resumed:
    """A complete checkpoint.

    Attributes:
        state: of `samestep.json`.
        passed_over: why newer ones cannot be used.
    """

    path: Path
    state: dict[str, Any]
    passed_over: tuple[str, ...]


def folder_name(step: int) -> str:
    return f"checkpoint-{step}"


def folders(root: Path) -> list[Path]:
    """Folders called as checkpoints are, oldest first, whatever is in them."""
    found = [folder for folder in root.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", folder.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The step at which a checkpoint was written, by its name."""
    return int(folder.name.rpartition("-")[2])


def _age(folder: Path) -> tuple[float, int]:
    """Sorts checkpoints by when they were written: an output folder may hold those of an earlier run, of later steps.
    One that does not tell counts as the latest, so that it is spoken of."""
    try:
        written = float(json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        written = math.inf
    return written, step_of(folder)


def rotate(saved: list[Path], limit: int | None, best: str | None) -> list[Path]:
    """Delete all but the `limit` newest, the best one among them; returns what is left.

    Args:
        saved: the checkpoints of a run, oldest first; no others are touched.
    """
    if limit is None:
        return saved
    kept = {saved[-1]} | {folder for folder in saved if best is not None and folder == Path(best)}
    for folder in reversed(saved):
        if len(kept) < limit:
            kept.add(folder)
    for folder in saved:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    return [folder for folder in saved if folder in kept]


def find(resume: str | Literal[True], root: Path) -> Resumed:
    """The checkpoint to go on from: the newest complete one under `root` for True, or the one of a path.

    Raises:
        CheckpointError: there is none, or it cannot be resumed.
    """
    if resume is not True:
        path = Path(resume)
        problem = _problem(path)
        if problem:
            raise CheckpointError(
                f"{path}: {problem}\n  fix: name the folder of another checkpoint, or write True for the newest one of "
                "output_dir"
            )
        return _opened(path, ())
    passed_over: list[str] = []
    for path in sorted(folders(root), key=_age, reverse=True):
        problem = _problem(path)
        if problem is None:
            return _opened(path, tuple(passed_over))
        passed_over.append(f"{path}: {problem}")
    reasons = "".join(f"\n  {reason}" for reason in passed_over)
    raise CheckpointError(
        f"{root} has no checkpoint from which a run can go on{reasons}\n"
        "  fix: name the folder of a checkpoint, or begin without resume_from_checkpoint"
    )


def _problem(path: Path) -> str | None:
    if not path.is_dir():
        return "no such checkpoint"
    if (path / "trainer_state.json").is_file() and not any((path / name).is_file() for name in (STATE_FILE, MARKER)):
        return (
            "it was written by transformers.Trainer, whose optimizer state is a pickle, which samestep does not read; "
            "its weights can be had with from_pretrained, to begin a new run"
        )
    return defect(path, OPTIMIZER)


def _opened(path: Path, passed_over: tuple[str, ...]) -> Resumed:
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: has format {state['format']}, but this version reads {FORMAT}\n"
            "  fix: go on with the version of samestep that wrote it"
        )
    if state["updater"] is None:
        raise CheckpointError(
            f"{path}: holds no optimizer and schedule (save_only_model), so no run can go on from it\n"
            "  fix: name another checkpoint, or begin a new run with its weights"
        )
    return Resumed(path, state, passed_over)


def load_updater(updater: TorchUpdater, resumed: Resumed) -> None:
    """Put a checkpoint's optimizer state into an updater, however either is laid out over ranks.

    Raises:
        CheckpointError: the state is of other parameters or of another optimizer.
    """
    state = resumed.state["updater"]
    name = type(updater.optimizer).__name__
    if state["optimizer"] != name:
        raise CheckpointError(
            f"{resumed.path} holds the state of the optimizer {state['optimizer']}, but this run has {name}\n"
            "  fix: resume with the optimizer that the run began with"
        )
    tensors: dict[str, torch.Tensor] = {}
    if state["has_tensors"]:
        folder = resumed.path / OPTIMIZER
        tensors = read_state(folder, stored_tensors(folder), updater.parameters)
    updater.load_state(tensors, state["updates"])
    updater.load_groups(state["groups"])


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Put the weights of a checkpoint into the model that wrote it, in place; each rank reads its part.

    Raises:
        CheckpointError: there are none, or they are of another model.
    """
    if (folder / _ADAPTER).is_file():
        _load_adapter(model, folder)
        return
    files = sorted(folder.glob(_WEIGHTS))
    if not files:
        raise CheckpointError(f"{folder}: holds no weights ({_WEIGHTS})")
    try:
        places = {name: file for file in files for name in _names(file)}
        targets = model.state_dict(keep_vars=True)
        aliases = _aliases(targets)
        if all(name in aliases for name in places) and {aliases[name] for name in places} == set(aliases.values()):
            for name, whole in _tensors(places):
                _copy(targets[name], whole, name, folder)
            return
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the weights could not be read: {error}") from error
    _load_converted(model, targets, folder)


def correct_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Let the `config.json` of a folder, if there is one, name the dtype of the weights in it."""
    file = folder / "config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _tensors(places: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(set(places.values())):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)


def _aliases(targets: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name -> a mark that tied tensors share; only one of them is stored."""
    return {name: id(tensor) if isinstance(tensor, nn.Parameter) else hash(name) for name, tensor in targets.items()}


def _copy(target: torch.Tensor, whole: torch.Tensor, name: str, folder: Path) -> None:
    if target.shape != whole.shape:
        raise CheckpointError(
            f"{folder}: {name} has shape {tuple(whole.shape)}, but {tuple(target.shape)} in the model\n"
            "  fix: load the model that the run began with"
        )
    place(target.detach(), whole)


def _load_converted(model: nn.Module, targets: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Of a model whose weights are stored under other names or in other shapes than it holds them."""
    if not hasattr(type(model), "from_pretrained"):
        raise CheckpointError(f"{folder}: the weights are of another model\n  fix: load the one the run began with")
    kind: Any = type(model)
    stored = kind.from_pretrained(folder, dtype="auto")
    found = stored.state_dict()
    missing = sorted(set(targets) - set(found))
    if missing:
        raise CheckpointError(f"{folder}: {missing[0]} is not there, so the weights are of another model")
    for name, target in targets.items():
        _copy(target, found[name], name, folder)


def _load_adapter(model: Any, folder: Path) -> None:
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
