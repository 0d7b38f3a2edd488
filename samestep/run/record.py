"""Whose a run folder is: `run.json` gives every run an id, which each of its checkpoints carries.

Rows of `metrics.jsonl` fit only the checkpoints of the run that wrote them, so a folder and a checkpoint of different
runs never mix. A run may begin from a checkpoint of another one in a folder of its own: its origin.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from samestep.errors import CheckpointError, ConfigError
from samestep.run import checkpoint
from samestep.run.storage import replace_file

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.resolved.yaml"


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another run from which a run began."""

    checkpoint: str
    run_id: str
    step: int


@dataclass(frozen=True)
class RunRecord:
    """What `run.json` holds; `origin` is None for a run that began with first values."""

    id: str
    origin: Origin | None = None

    def owns(self, loaded: checkpoint.Checkpoint) -> bool:
        """Whether this run itself wrote a checkpoint, so that its place in `metrics.jsonl` is known."""
        return loaded.state["run_id"] == self.id

    def may_go_on_from(self, loaded: checkpoint.Checkpoint) -> bool:
        """Its own checkpoints, and those of its origin up to where it began."""
        if self.owns(loaded):
            return True
        origin, state = self.origin, loaded.state
        return origin is not None and state["run_id"] == origin.run_id and state["run"]["step"] <= origin.step


def kept_bytes(record: RunRecord, loaded: checkpoint.Checkpoint | None) -> int:
    """Size to which `metrics.jsonl` is cut back: 0 for a run that begins, be it from another run's checkpoint."""
    return loaded.state["metrics_bytes"] if loaded and record.owns(loaded) else 0


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RUN_FILE, METRICS_FILE, CONFIG_FILE))


def read_record(folder: Path) -> RunRecord | None:
    """The record of a run folder, or None where there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = folder / RUN_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        origin = values["origin"]
        return RunRecord(values["id"], Origin(**origin) if origin else None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged, so it is not known which run this is: {error}\n"
            "  fix: restore it, or write another output_dir and --resume PATH of a checkpoint"
        ) from error


def write_record(folder: Path, record: RunRecord) -> None:
    """Write `run.json`, at once or not at all."""
    replace_file(folder / RUN_FILE, json.dumps(asdict(record), indent=1))


def refuse_checkpoints(root: Path, field: str) -> None:
    """A run that begins has no checkpoints yet.

    Raises:
        ConfigError: there are some; they would be pruned or resumed as if they were of this run.
    """
    found = checkpoint.step_folders(root)
    if found:
        raise ConfigError(
            f"{root} already holds checkpoints of another run, such as {found[-1].name}",
            field=field,
            fix="write another folder, remove the checkpoints, or go on with them by --resume auto",
        )


def record_of(folder: Path, root: Path, loaded: checkpoint.Checkpoint | None) -> RunRecord:
    """The record with which a run goes on in a folder. Writes nothing.

    Args:
        root: the folder of checkpoints.
        loaded: the checkpoint it goes on from; None to begin.

    Raises:
        ConfigError: the run folder, or the folder of checkpoints, belongs to another run than the checkpoint.
    """
    record = read_record(folder)
    if loaded is None:
        return record or RunRecord(_new_id())
    if record is None and not holds_run(folder):
        origin = Origin(str(loaded.path.absolute()), loaded.state["run_id"], loaded.state["run"]["step"])
        record = RunRecord(_new_id(), origin)
    elif record is None or not record.may_go_on_from(loaded):
        raise ConfigError(
            f"{folder} holds another run than the one that wrote {loaded.path}",
            field="output_dir",
            fix="write another output_dir to go on from that checkpoint there, or resume a checkpoint of this run",
        )
    _check_owners(folder, root, record)
    return record


def _check_owners(folder: Path, root: Path, record: RunRecord) -> None:
    known = {record.id}
    if record.origin and root.is_relative_to(folder):
        known.add(record.origin.run_id)  # only the checkpoints of a run were copied here
    for path in checkpoint.step_folders(root):
        owner = checkpoint.run_id(path)
        if owner is not None and owner not in known:
            raise ConfigError(
                f"{root} holds checkpoints of another run, such as {path.name}",
                field="checkpoint.save_path",
                fix="write a folder of its own for this run",
            )


def _new_id() -> str:
    return uuid.uuid4().hex
