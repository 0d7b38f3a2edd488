"""From a configuration to the parts of a run: micro-batches, model, step."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from samestep.config.load import load as load_config
from samestep.config.schema import Config
from samestep.data.batch import Batch, collate, filler
from samestep.data.order import StepSamples
from samestep.data.rows import Rows, Sample
from samestep.data.tokenize import Tokenizer, load_tokenizer
from samestep.errors import CheckpointError
from samestep.families import parameter_shapes, resolve_model
from samestep.length import usable_samples
from samestep.model.activations import compile_layers, keep_in_cpu_memory, recompute
from samestep.model.decoder import Decoder, sparse_tables
from samestep.model.init import initialize
from samestep.model.linear import cast_once
from samestep.model.pretrained import read_pretrained
from samestep.model.weights import check_tensors
from samestep.ops import Precision, random_key
from samestep.ops.float8 import lack_of_float8
from samestep.ops.gradient_sink import ExactSink, GradientSink
from samestep.parallel.data import GradientReduction, place, shard
from samestep.parallel.exact import ExactReduction
from samestep.parallel.mesh import Mesh, choose_device
from samestep.plan import split_samples
from samestep.recompute import recomputed_modules
from samestep.run import checkpoint
from samestep.run.record import CONFIG_FILE
from samestep.run.storage import MARKER, read_state
from samestep.step.objective import DecoderObjective
from samestep.step.scaler import LossScaler
from samestep.step.schedule import make_schedule
from samestep.step.step import TrainStep
from samestep.step.update import Updater

TOKENIZER_FILE = "tokenizer.json"


def micro_batches(
    config: Config, rows: Rows, samples: StepSamples, step: int, mesh: Mesh, budget: int | None = None
) -> list[Batch]:
    """The micro-batches of one step on this rank, as many as on every other; empty on all of them where
    `remainder: drop` leaves nothing.

    Args:
        step: number of the step, which keys its dropout.
        budget: positions of a micro-batch where they limit it (`Plan.local_batch_tokens`).
    """
    training, ranks = config.training, mesh.layout.data_parallel
    usable = usable_samples(len(samples.rows), ranks * training.least_samples, training.remainder)
    lengths = rows.lengths()[samples.rows[:usable]].tolist()
    table = split_samples(config, lengths, ranks, budget)
    key = random_key(training.seed, step)
    own = table[mesh.data_rank]
    batches = collate_groups(own, lambda i: rows[int(samples.rows[i])], samples.places, config.micro_batch, key)
    return fill_up(batches, max(map(len, table)), key)


def collate_groups(
    groups: Sequence[Sequence[int]],
    sample: Callable[[int], Sample],
    places: np.ndarray,
    layout: str,
    dropout_key: int,
) -> list[Batch]:
    """Micro-batches of samples of a global batch.

    Args:
        groups: the samples of each micro-batch, as places in the global batch.
        sample: place in the global batch -> the sample.
        places: in the endless order, of the global batch.
    """
    return [
        collate([sample(i) for i in group], [int(places[i]) for i in group], layout, dropout_key) for group in groups
    ]


def fill_up(batches: list[Batch], count: int, dropout_key: int) -> list[Batch]:
    """`count` micro-batches: ranks with fewer than another take part in every collective with empty ones."""
    return batches + [filler(dropout_key)] * (count - len(batches))


def build_model(
    config: Config, vocab_size: int, mesh: Mesh, precision: Precision | None = None, *, resumed: bool = False
) -> Decoder:
    """The model with its first values, on the device of the mesh; of a sharded one this rank's part.

    Args:
        resumed: a checkpoint's weights will follow, so that `model.pretrained` is not read.

    Raises:
        ConfigError, CheckpointError: `model.pretrained` cannot be read, or is of another model.
    """
    precision = precision or Precision.from_config(config.model)
    spec = resolve_model(config.model, vocab_size)
    if mesh.weights is None:
        model = Decoder(spec, precision).to(mesh.device)
    else:
        with torch.device("meta"):
            model = Decoder(spec, precision)
        shard(model, mesh, config.parallelism, precision)
        model.to_empty(device="cpu" if config.parallelism.cpu_offload else mesh.device)
        model.reset_buffers(mesh.device)
    if config.compile:
        compile_layers(model)
    recompute(model, recomputed_modules(config.recompute, spec.num_layers))
    if config.swap.enable and mesh.device.type != "cpu":
        keep_in_cpu_memory(model)

    def put(name: str, target: torch.Tensor, whole: torch.Tensor) -> None:
        place(target, whole.to(model.stored_dtype(name)))

    if config.model.pretrained is None or resumed:
        initialize(model, config.training.seed, config.model.initializer_range, put)
    else:
        weights = read_pretrained(config.model.pretrained, spec)
        for name, parameter in model.named_parameters():
            put(name, parameter, weights[name])
    return model


def build_step(
    config: Config,
    model: Decoder,
    mesh: Mesh,
    reduce: Literal["once_per_step", "every_micro_batch"],
    *,
    casts_once: bool = False,
) -> TrainStep:
    """The step on a model: objective, optimizer, schedule, and how gradients add up, as the config says.

    Args:
        config: with its length in steps (`length.in_steps`).
        reduce, casts_once: from the plan.
    """
    training = config.training
    assert training.steps is not None
    parameters = list(model.named_parameters())
    sink: GradientSink | ExactSink
    reduction: GradientReduction | ExactReduction
    if training.exact:
        reduction = ExactReduction(mesh, training.global_batch_size)
        sink = ExactSink(parameters, mesh.device)
    else:
        sink = GradientSink(parameters, model.precision.gradient, can_resume=mesh.weights is None)
        reduction = GradientReduction(model, mesh, reduce, model.precision.reduce)
    return TrainStep(
        model,
        DecoderObjective(training.z_loss_weight),
        Updater(
            parameters,
            config.optimizer,
            make_schedule(config.lr_scheduler, training.steps),
            model.stored_dtype,
            training.seed,
        ),
        sink,
        reduction,
        mesh,
        max_norm=training.max_norm,
        loss_dtype=model.precision.loss,
        micro_batch_mean=training.loss_normalization == "micro_batch_mean",
        around_passes=partial(around_passes, model, casts_once, not training.exact and mesh.weights is None),
        scaler=LossScaler(training.loss_scale) if torch.float16 in vars(model.precision).values() else None,
    )


@contextmanager
def around_passes(model: Decoder, casts_once: bool, sparse: bool) -> Iterator[None]:
    """Around the passes of a step.

    Args:
        sparse: the gradients of tables may be sparse.
    """
    with cast_once(model) if casts_once else nullcontext(), sparse_tables(model) if sparse else nullcontext():
        yield


def stored_weights(model: Decoder) -> dict[str, torch.Tensor]:
    """The weights by name, in the dtype that they are stored in, whatever dtype their shards have."""
    return {name: parameter.detach().to(model.stored_dtype(name)) for name, parameter in model.named_parameters()}


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
    """Load the model of a run folder, or of one of its checkpoints. One that computes in float8 does so in bfloat16
    where the device cannot.

    Raises:
        CheckpointError: no complete checkpoint, or one of another shape.
    """
    path = find_checkpoint_of(folder)
    loaded = checkpoint.open_checkpoint(path, need_optimizer=False)
    config = load_config(path / CONFIG_FILE, overrides).config
    tokenizer = kept_tokenizer(loaded)
    precision, device = Precision.from_config(config.model), choose_device()
    if precision.linear is not None and lack_of_float8(device):
        precision = replace(precision, linear=None)
    model = Decoder(resolve_model(config.model, tokenizer.vocab_size), precision)
    load_weights(model, loaded)
    return OpenedRun(config, tokenizer, model.to(device), loaded.state["run"]["step"], path)


def find_checkpoint_of(folder: Path) -> Path:
    """A checkpoint itself, or the newest of a run folder; every byte of it verified.

    Raises:
        CheckpointError: no complete checkpoint.
    """
    if checkpoint.is_step_folder(folder) or (folder / MARKER).is_file():
        checkpoint.verify(folder)
        return folder
    return newest_checkpoint(folder)[0]


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
    """Put a checkpoint's weights into a model, however either is laid out over ranks.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape.
    """
    shapes = {name: stored.shape for name, stored in loaded.model.items()}
    check_tensors(shapes, parameter_shapes(model.spec), str(loaded.path))
    loaded.read("model", dict(model.named_parameters()))


def load_updater(updater: Updater, loaded: checkpoint.Checkpoint) -> None:
    """Put a checkpoint's optimizer state into an updater, however either is laid out over ranks.

    Raises:
        CheckpointError: the state is of other parameters or of another optimizer.
    """
    state = read_state(loaded.path / checkpoint.OPTIMIZER, loaded.optimizer, updater.parameters)
    updater.load_state(state, loaded.state["run"]["updates"])
