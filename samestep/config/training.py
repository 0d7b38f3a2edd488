"""The `training` section of a configuration."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from annotated_types import Gt, Lt, MaxLen, MinLen
from pydantic import BeforeValidator, model_validator

from samestep.config.kinds import (
    Count,
    Natural,
    NonNegative,
    Positive,
    PowerOfTwo,
    Section,
    clip_threshold,
)
from samestep.errors import ConfigError


class LossScaleConfig(Section):
    """What losses are multiplied by before their backward pass where a dtype is float16, so that small gradients do not
    vanish; updates and all numbers shown are without it. A plain number is a `fixed` scale. All scales and factors are
    powers of two, by which nothing is rounded."""

    fixed: PowerOfTwo | None = None
    """A scale that never changes; null = follow the gradients, by the other fields."""
    init: PowerOfTwo = 65536.0
    """Scale of the first step."""
    growth_factor: Annotated[PowerOfTwo, Gt(1)] = 2.0
    """What the scale is multiplied by after `growth_interval` steps without overflow."""
    backoff_factor: Annotated[PowerOfTwo, Lt(1)] = 0.5
    """What the scale is multiplied by when gradients overflow; that step is skipped."""
    growth_interval: Count = 2000
    """Steps without overflow until the scale grows."""
    min_scale: PowerOfTwo = 1.0
    """The scale falls no lower; from there on an overflow counts for `training.max_consecutive_skipped_steps`."""

    @model_validator(mode="before")
    @classmethod
    def _number_is_fixed(cls, data: Any) -> Any:
        if not isinstance(data, int | float) or isinstance(data, bool):
            return data
        if not 0 < data < math.inf:
            raise ConfigError(f"{data} is no scale", fix="write a number > 0, or remove it")
        return {"fixed": data}

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        defaults = type(self).model_fields
        moved = [name for name in defaults if name != "fixed" and getattr(self, name) != defaults[name].default]
        if self.fixed is not None and moved:
            raise ConfigError(
                "it has no effect on a fixed scale",
                field=f"training.loss_scale.{moved[0]}",
                fix="remove it, or write fixed: null",
            )
        for name in ("fixed", "init", "min_scale"):
            value = getattr(self, name)
            if value is not None and value < 2.0**-24:
                raise ConfigError(
                    f"{value:g} would leave nothing of the gradients in float16",
                    field=f"training.loss_scale.{name}",
                    fix="write 1 or more",
                )
        if self.init < self.min_scale:
            raise ConfigError(
                f"{self.init} is below min_scale {self.min_scale}",
                field="training.loss_scale.init",
                fix=f"write {self.min_scale} or more",
            )
        return self

    @property
    def first(self) -> float:
        """Scale of the first step."""
        return self.init if self.fixed is None else self.fixed


class TrainingConfig(Section):
    """The optimizer step and how many of them."""

    steps: Count | None = 1000
    """Optimizer steps of the run (global batches consumed, skipped ones included); null if `epochs` or `tokens` is
    given."""
    epochs: Positive | None = None
    """Passes over the training data, instead of `steps`; the last one may be a part, rounded up to a whole step."""
    tokens: Count | None = None
    """Tokens to train on, instead of `steps`; the step that reaches them is the last."""
    local_batch_size: Count | Literal["auto"] | None = 1
    """Samples of one micro-batch on one rank; `auto`: samples of like length together, as many as the plan finds memory
    for; null if `local_batch_tokens` is given."""
    local_batch_tokens: Count | None = None
    """Positions of one micro-batch on one rank, padding included, instead of `local_batch_size`: samples of like length
    go together, so little is padding; a longer sample is a micro-batch of its own."""
    global_batch_size: Count = 1
    """Samples of one optimizer step over all ranks; the accumulation steps follow from it."""
    max_norm: Annotated[Positive | None, BeforeValidator(clip_threshold)] = 1.0
    """Largest global L2 norm of the gradient; null measures without clipping."""
    max_consecutive_skipped_steps: Natural = 0
    """Skipped (non-finite) steps in a row that end the run; 0 = no limit."""
    seed: Natural = 42
    """Seed of weights, data order and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels; slower."""
    loss_normalization: Literal["global_targets", "micro_batch_mean"] = "global_targets"
    """`global_targets`: divide by the targets of the whole global batch; `micro_batch_mean`: average the means of the
    micro-batches, which makes the step depend on the split."""
    remainder: Literal["use", "drop", "error"] = "use"
    """Samples of a global batch past the last multiple of data-parallel ranks x `local_batch_size`: use them,
    drop them, or refuse to start."""
    last_batch: Literal["use", "drop"] = "use"
    """The short global batch at the end of the data: use it or drop it."""
    micro_batch: Literal["padded", "packed"] | None = None
    """Lay samples out padded to the longest, or end to end with block-diagonal attention; the step is the same. Null =
    packed, unless all samples have one length (`train_dataset.rows: cut`)."""
    exact: bool = False
    """Make every update equal to the bit, however the batch is spread over micro-batches, accumulation and
    data-parallel ranks: each sample is a pass of its own, and all sums are of integers. Slower for short rows; needs
    weights that are not sharded, and gradients in float32."""
    z_loss_weight: NonNegative = 0.0
    """Weight of the squared log-partition (z-loss) added to the loss; 0 = off."""
    cast_weights: Literal["auto", "once_per_step", "every_micro_batch"] = "auto"
    """When weights are cast to a 16-bit `model.compute_dtype` in which they are not stored: once a step, which takes 2
    bytes a weight, or in every pass; the numbers are the same. `auto`: once, where several micro-batches make a step
    and the plan finds memory for it. Sharded and compiled layers always cast in every pass. Refused where nothing is
    cast, and with `compile`."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Scale of the loss in float16."""
    rampup_batch_size: Annotated[list[Natural], MinLen(3), MaxLen(3)] | None = None
    """Grow the global batch: `[start, increment, samples]`."""

    @model_validator(mode="before")
    @classmethod
    def _one_run_length(cls, data: Any) -> Any:
        """The default of `steps` holds only where no length is given."""
        if not isinstance(data, dict):
            return data
        given = [name for name in ("steps", "epochs", "tokens") if data.get(name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"the length of the run is given {len(given)} times: {', '.join(given)}",
                field=f"training.{given[-1]}",
                fix="keep one of them, and write null for the rest",
            )
        if given:
            return {"steps": None, **data}
        return {name: value for name, value in data.items() if name != "steps"}

    @model_validator(mode="before")
    @classmethod
    def _one_micro_batch_size(cls, data: Any) -> Any:
        """The default of `local_batch_size` holds only where no budget is given."""
        if not isinstance(data, dict):
            return data
        samples, positions = data.get("local_batch_size"), data.get("local_batch_tokens")
        if samples is not None and positions is not None:
            raise ConfigError(
                "the size of a micro-batch is given twice, in samples (local_batch_size) and in positions",
                field="training.local_batch_tokens",
                fix="keep one of them, and write null for the other",
            )
        if positions is not None:
            return {**data, "local_batch_size": None}
        return data if samples is not None else {k: v for k, v in data.items() if k != "local_batch_size"}

    @property
    def has_budget(self) -> bool:
        """Whether positions, not samples, limit a micro-batch."""
        return not isinstance(self.local_batch_size, int)

    @property
    def least_samples(self) -> int:
        """Samples that a micro-batch has unless the data is short: `local_batch_size`, or one with a budget."""
        return self.local_batch_size if isinstance(self.local_batch_size, int) else 1

    @model_validator(mode="after")
    def _budget_has_no_remainder(self) -> Self:
        if self.has_budget and self.remainder != "use":
            size = "local_batch_size auto" if self.local_batch_tokens is None else "local_batch_tokens"
            raise ConfigError(
                f"with {size} a micro-batch has no number of samples that a global batch could be a multiple of, so "
                f"`{self.remainder}` has no meaning",
                field="training.remainder",
                fix="write use, or a number for local_batch_size",
            )
        return self

    @model_validator(mode="after")
    def _exact_fits(self) -> Self:
        if self.exact and self.loss_normalization == "micro_batch_mean":
            raise ConfigError(
                "the mean of the micro-batches' means depends on how the batch is split, which `exact: true` rules out",
                field="training.loss_normalization",
                fix="write global_targets, or exact: false",
            )
        if self.exact and self.remainder == "drop":
            raise ConfigError(
                "which samples are dropped depends on micro-batch size and ranks, which `exact: true` rules out",
                field="training.remainder",
                fix="write use or error, or exact: false",
            )
        return self
