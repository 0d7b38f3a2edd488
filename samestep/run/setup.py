"""From a configuration to the parts of a run: micro-batches, model, step."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from samestep.config.load import load as load_config
from samestep.config.schema import Config
from samestep.data.batch import Batch, collate
from samestep.data.order import StepSamples
from samestep.data.rows import Rows
from samestep.data.tokenize import Tokenizer, load_tokenizer
from samestep.errors import CheckpointError
from samestep.families import parameter_shapes, resolve_model
from samestep.model.decoder import Decoder
from samestep.model.init import initialize
from samestep.model.weights import check_tensors
from samestep.ops import Precision, random_key
from samestep.ops.gradient_sink import GradientSink
from samestep.plan import split_step, usable_samples
from samestep.run import checkpoint
from samestep.run.record import CONFIG_FILE
from samestep.step.objective import DecoderObjective
from samestep.step.schedule import make_schedule
from samestep.step.step import TrainStep
from samestep.step.update import Updater

TOKENIZER_FILE = "tokenizer.json"


def micro_batches(config: Config, rows: Rows, samples: StepSamples, step: int) -> list[Batch]:
    """The micro-batches of one step on this process; empty where `remainder: drop` leaves nothing.

    Args:
        step: number of the step, which keys its dropout.
    """
    training = config.training
    usable = usable_samples(len(samples.rows), training.local_batch_size, training.remainder)
    (ranges,) = split_step(usable, 1, training.local_batch_size)
    key = random_key(training.seed, step)
    return [
        collate(
            [rows[int(row)] for row in samples.rows[start:stop]],
            [int(place) for place in samples.places[start:stop]],
            training.micro_batch,
            key,
        )
        for start, stop in ranges
    ]


def build_model(config: Config, vocab_size: int, precision: Precision | None = None) -> Decoder:
    """The model with its first values, on the CPU."""
    model = Decoder(resolve_model(config.model, vocab_size), precision or Precision.from_config(config.model))
    initialize(model, config.training.seed, config.model.initializer_range)
    return model


def build_step(config: Config, model: Decoder) -> TrainStep:
    """The step on a model: objective, optimizer, schedule and gradient sink as the config says.

    Args:
        config: with its length in steps (`plan.in_steps`).
    """
    training = config.training
    assert training.steps is not None
    parameters = list(model.named_parameters())
    return TrainStep(
        model,
        DecoderObjective(training.z_loss_weight),
        Updater(parameters, config.optimizer, make_schedule(config.lr_scheduler, training.steps)),
        GradientSink(parameters, model.precision.gradient),
        device=model.device,
        max_norm=training.max_norm,
        loss_dtype=model.precision.loss,
        micro_batch_mean=training.loss_normalization == "micro_batch_mean",
    )


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


@dataclass(frozen=True)
class OpenedRun:
    """The model of a run at its newest complete checkpoint."""

    config: Config
    tokenizer: Tokenizer
    model: Decoder
    step: int
    checkpoint: Path


def open_run(folder: Path, overrides: Sequence[str] = ()) -> OpenedRun:
    """Load the model of a run folder, or of one of its checkpoints.

    Raises:
        CheckpointError: no complete checkpoint, or one of another shape.
    """
    is_checkpoint = checkpoint.is_step_folder(folder) or (folder / checkpoint.MARKER).is_file()
    path = folder if is_checkpoint else newest_checkpoint(folder)[0]
    loaded = checkpoint.load(path, need_optimizer=False)
    config = load_config(path / CONFIG_FILE, overrides).config
    tokenizer = kept_tokenizer(loaded)
    model = Decoder(resolve_model(config.model, tokenizer.vocab_size), Precision.from_config(config.model))
    load_weights(model, loaded)
    return OpenedRun(config, tokenizer, model.to(choose_device()), loaded.state["run"]["step"], path)


def newest_checkpoint(run: Path) -> tuple[Path, list[str]]:
    """The newest usable checkpoint of a run folder, and why newer ones were passed over.

    Raises:
        CheckpointError: there is none.
    """
    root = run / "checkpoints"
    if (run / CONFIG_FILE).is_file():
        save_path = load_config(run / CONFIG_FILE).config.checkpoint.save_path
        root = Path(save_path) if save_path else root
    path, problems = checkpoint.newest(root)
    if path is None:
        detail = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(f"{run}: no complete checkpoint in {root}{detail}\n  fix: name the folder of a run")
    return path, problems


def kept_tokenizer(loaded: checkpoint.Checkpoint) -> Tokenizer:
    """The tokenizer of a run. Its `tokenizer.json` does not tell which token ends a document; the state does."""
    return load_tokenizer(loaded.path / TOKENIZER_FILE, loaded.state["end_token"])


def load_weights(model: Decoder, loaded: checkpoint.Checkpoint) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in loaded.model.items()}
    check_tensors(shapes, parameter_shapes(model.spec), str(loaded.path))
    model.load_state_dict(loaded.model, strict=not model.spec.tied)
