"""Going on from a checkpoint: which one, and what a configuration must share with it. Nothing here writes a file."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

from samestep.config.schema import Config
from samestep.errors import CheckpointError, ConfigError, ConfigErrors
from samestep.run import checkpoint
from samestep.run.record import RUN_FILE, holds_run, read_record, refuse_checkpoints
from samestep.run.setup import newest_checkpoint

FIXED = {
    "training.seed": "it orders the samples, so the place in the data would mean other samples",
    "train_dataset.shuffle": "it orders the samples, so the place in the data would mean other samples",
    "optimizer.type": "the state of one optimizer means nothing to another",
    "model.params_dtype": "weights and optimizer state are stored in it",
    "model.embedding_params_dtype": "the embedding and its optimizer state are stored in it",
    "optimizer.master_weights": "without masters the weights have lost what masters would hold",
    "optimizer.state_dtype": "the optimizer's state is stored in it",
    "model.gradient_dtype": "gradients are summed in it",
}
"""Fields that no resume may change, and why."""


def fixed_settings(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of `FIXED`, as JSON values."""
    return {field: _value(config, field) for field in FIXED}


def _value(config: Config, field: str) -> Any:
    """What a field means: null is the dtype that it stands for."""
    meaning = {"model.embedding_params_dtype": "model.embedding_storage"}
    return reduce(getattr, meaning.get(field, field).split("."), config)


def find_checkpoint(resume: str, folder: Path, root: Path, root_field: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, every byte of it verified, or None to begin; and why newer ones were passed over.

    Args:
        resume: `none`, `auto`, or the path of a checkpoint or of a run folder, which stands for its newest one.
        folder: of the run.
        root: the folder of its checkpoints, which `root_field` configures.

    Raises:
        ConfigError: a run would begin in a folder that holds one.
        CheckpointError: there are checkpoints, but none that can be used; or the named one cannot be used.
    """
    if resume == "none":
        if holds_run(folder):
            raise ConfigError(
                f"{folder} already holds a run",
                field="output_dir",
                fix="write --resume auto to go on with it, another output_dir, or remove the folder",
            )
        refuse_checkpoints(root, root_field)
        return None, []
    if resume != "auto":
        return _named(Path(resume))
    found, passed_over = checkpoint.newest(root)
    if passed_over and not found:
        raise CheckpointError(
            f"{root} holds no usable checkpoint:\n  " + "\n  ".join(passed_over) + "\n"
            "  fix: name another checkpoint with --resume PATH, or begin anew in another output_dir"
        )
    record = read_record(folder)
    if found is None and record is not None and record.origin is not None:
        return _named(Path(record.origin.checkpoint))
    return found, passed_over


def _named(path: Path) -> tuple[Path, list[str]]:
    is_run = (path / RUN_FILE).is_file() or (path / "checkpoints").is_dir()
    if is_run:
        return newest_checkpoint(path)
    checkpoint.verify(path)
    return path, []


def check_settings(config: Config, loaded: checkpoint.Checkpoint) -> None:
    """A configuration agrees with a checkpoint in all that a resume must not change.

    Raises:
        ConfigError: a field differs; `ConfigErrors` if several do.
    """
    kept = dict(loaded.state["settings"])
    if config.tokenizer.end_token is not None:
        kept["tokenizer.end_token"] = loaded.state["end_token"]
    errors = [
        ConfigError(
            f"{_text(value)}, but the run that wrote {loaded.path} has {_text(kept[field])}: "
            f"{FIXED.get(field, 'it ends every document, so the samples would be others')}",
            field=field,
            fix=f"write {_text(kept[field])}, or begin a new run in another output_dir",
        )
        for field in kept
        if (value := _value(config, field)) != kept[field]
    ]
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)


def _text(value: Any) -> str:
    """As in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
