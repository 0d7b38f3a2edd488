"""How many steps a run has, from steps, epochs or tokens. Pure arithmetic; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from samestep.config.schema import Config, TrainingConfig
from samestep.errors import ConfigError


@dataclass(frozen=True)
class DataFacts:
    """What the plan needs to know of the data.

    Attributes:
        samples, tokens, targets: of one epoch; tokens are inputs.
        step_lengths, step_targets: of the samples of the first global batch.
        vocab_size: of the tokenizer.
        epoch_lengths: epoch -> lengths of all its samples in their order, int64 [samples]; called only for
            `training.tokens`.
    """

    samples: int
    tokens: int
    targets: int
    step_lengths: tuple[int, ...]
    step_targets: tuple[int, ...]
    vocab_size: int
    epoch_lengths: Callable[[int], np.ndarray] | None = None


@dataclass(frozen=True)
class Progress:
    """Where a run stands: global batches consumed, the cursor of the data, and the tokens of the consumed batches."""

    steps: int = 0
    consumed_samples: int = 0
    tokens: int = 0


def usable_samples(samples: int, unit: int, remainder: str) -> int:
    """How many samples of a global batch are trained; `unit` is data_parallel x local_batch_size."""
    return samples // unit * unit if remainder == "drop" else samples


def run_length(training: TrainingConfig, unit: int, facts: DataFacts | None, progress: Progress | None = None) -> int:
    """Steps of the run, from `training.steps`, `epochs` or `tokens`.

    Steps are whole: a part of an epoch is rounded up, and the step in which the trained tokens reach `tokens` is the
    last. Samples that `remainder: drop` or `last_batch: drop` discards count neither as steps nor as tokens.

    Args:
        unit: data_parallel x local_batch_size.
        progress: of a resumed run. Its steps count as they are, whatever global batch size they had; the rest of the
            epochs or tokens is counted from its cursor on.

    Raises:
        ConfigError: epochs or tokens, and the data is not known.
    """
    if training.steps is not None:
        return training.steps
    name = "epochs" if training.epochs is not None else "tokens"
    if facts is None or (name == "tokens" and not facts.epoch_lengths):
        raise ConfigError("can be counted only in known data", field=f"training.{name}", fix="write training.steps")
    progress = progress or Progress()
    rest = _steps_to_epochs if training.epochs is not None else _steps_to_tokens
    return progress.steps + rest(training, unit, facts, progress)


def _steps_to_epochs(training: TrainingConfig, unit: int, facts: DataFacts, progress: Progress) -> int:
    """Steps from the cursor to the end of `training.epochs`."""
    per_epoch, _ = steps_of_epoch(training, unit, facts)
    # Exact decimals: 0.1 of 30 steps is 3, but the product of floats may lie just above.
    whole, part = divmod(Fraction(str(training.epochs)), 1)
    goal = min(math.ceil(part * per_epoch) * training.global_batch_size, facts.samples)
    epoch, place = divmod(progress.consumed_samples, facts.samples)
    if epoch > whole:
        return 0
    if epoch == whole:
        return _steps_between(training, unit, facts.samples, place, goal)
    first = _steps_between(training, unit, facts.samples, place, facts.samples)
    return first + (whole - epoch - 1) * per_epoch + _steps_between(training, unit, facts.samples, 0, goal)


def _steps_between(training: TrainingConfig, unit: int, samples: int, place: int, goal: int) -> int:
    """Steps of one epoch that begin at or after `place` and before `goal`, the first at `place`."""
    sizes = _batch_sizes(training, unit, samples - place)
    return min(len(sizes), max(0, math.ceil((goal - place) / training.global_batch_size)))


def _steps_to_tokens(training: TrainingConfig, unit: int, facts: DataFacts, progress: Progress) -> int:
    """Steps from the cursor until `training.tokens` are reached: whole epochs at once, the last one batch by batch."""
    assert training.tokens is not None and facts.epoch_lengths is not None
    left, steps = training.tokens - progress.tokens, 0
    epoch, place = divmod(progress.consumed_samples, facts.samples)
    while left > 0:
        lengths = facts.epoch_lengths(epoch)
        taken = _batch_tokens(training, unit, lengths[place:])
        total = int(taken.sum())
        if total >= left:
            return steps + int(np.searchsorted(np.cumsum(taken), left)) + 1
        repeats = 1
        if place == 0 and _same_every_epoch(training, unit, lengths):
            repeats = (left - 1) // total
        steps, left, epoch, place = steps + repeats * len(taken), left - repeats * total, epoch + repeats, 0
    return steps


def _batch_tokens(training: TrainingConfig, unit: int, lengths: np.ndarray) -> np.ndarray:
    """Trained tokens of each step on what is left of an epoch, int64 [steps]."""
    sizes = _batch_sizes(training, unit, len(lengths))
    sums = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.arange(len(sizes)) * training.global_batch_size
    return sums[starts + sizes] - sums[starts]


def _same_every_epoch(training: TrainingConfig, unit: int, lengths: np.ndarray) -> bool:
    """Whether every epoch trains the same number of tokens, whatever its order: it drops none, or all are as long."""
    used = int(_batch_sizes(training, unit, len(lengths)).sum())
    return used == len(lengths) or bool((lengths == lengths[0]).all())


def _batch_sizes(training: TrainingConfig, unit: int, samples: int) -> np.ndarray:
    """Trained samples of each step on the last `samples` of an epoch, int64 [steps]; batches without any are none."""
    full, last = divmod(samples, training.global_batch_size)
    sizes = np.full(full, usable_samples(training.global_batch_size, unit, training.remainder), dtype=np.int64)
    last = usable_samples(last, unit, training.remainder) if training.last_batch == "use" else 0
    return np.append(sizes, last) if last else sizes


def check_rest_of_epoch(training: TrainingConfig, unit: int, facts: DataFacts, progress: Progress, steps: int) -> None:
    """`remainder: error` also holds for the batch that ends the epoch in which a resumed run stands."""
    rest = -progress.consumed_samples % facts.samples
    full, last = divmod(rest, training.global_batch_size)
    is_met = training.last_batch == "use" and steps - progress.steps > full
    if training.remainder == "error" and is_met and last % unit:
        raise ConfigError(
            f"going on from sample {progress.consumed_samples}, the last batch of that epoch has {last} samples, no "
            f"multiple of data_parallel x local_batch_size = {unit}, and training.remainder is error",
            field="training.global_batch_size",
            fix="write the global_batch_size that the run had, remainder: use, or last_batch: drop",
        )


def steps_of_epoch(training: TrainingConfig, unit: int, facts: DataFacts) -> tuple[int, int]:
    """Steps of one epoch, and the samples of its short last batch."""
    return len(_batch_sizes(training, unit, facts.samples)), facts.samples % training.global_batch_size


def epochs_of(steps: int, steps_per_epoch: int | None, facts: DataFacts | None, progress: Progress) -> float | None:
    """Passes over the data: those behind the cursor, and those of the steps still to take."""
    if not facts or not steps_per_epoch:
        return None
    return progress.consumed_samples / facts.samples + max(0, steps - progress.steps) / steps_per_epoch


def in_steps(config: Config, steps: int) -> Config:
    """The same configuration with its length given as `training.steps`."""
    length = {"steps": steps, "epochs": None, "tokens": None}
    return config.model_copy(update={"training": config.training.model_copy(update=length)})
