"""The `optimizer` and `lr_scheduler` sections: fields by type, their defaults, and which have no effect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt, MaxLen, MinLen
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from samestep.config.kinds import (
    BETAS_NAMES,
    EPS_NAMES,
    LR_END_NAMES,
    PEAK_NAMES,
    BelowOne,
    Count,
    Natural,
    NonNegative,
    Positive,
    Ratio,
    Section,
    Text,
    decay_shape,
    refuse_idle,
    schedule,
)
from samestep.errors import ConfigError

OPTIMIZER_FIELDS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": [0.9, 0.95], "eps": 1e-8},
    "SGD": {"momentum": 0.0, "nesterov": False},
    "Adafactor": {"decay_rate": 0.8, "clip_threshold": 1.0},
    "Lion": {"betas": [0.9, 0.99]},
    "Muon": {
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_coefficients": [3.4445, -4.7750, 2.0315],
        "matched_adamw_rms": 0.2,
        "adamw_include": ["*embed*", "*lm_head*", "*loss_head*", "*output_layer*", "*wte*", "*wpe*"],
    },
}
"""Optimizer -> the fields that act for it alone, with their defaults."""


class OptimizerConfig(Section):
    """The update rule. A field that is null has the default of its `type`."""

    type: Literal["AdamW", "SGD", "Adafactor", "Lion", "Muon"] = "AdamW"
    """Name of the optimizer. `Muon` updates hidden matrices and leaves all other parameters to AdamW with the same
    learning rate. For `Lion` a learning rate of a third to a tenth of AdamW's is usual. `Adafactor` takes
    `learning_rate` relative to the size of each parameter, and never more than 1 / sqrt(update)."""
    betas: Annotated[list[BelowOne], MinLen(2), MaxLen(2)] | None = Field(
        None, validation_alias=AliasChoices(*BETAS_NAMES)
    )
    """Decay of the first and second moment (`AdamW`, `Lion`, and what `Muon` leaves to AdamW); null = [0.9, 0.95],
    `Lion` [0.9, 0.99]. Also accepted: `adamw_betas`."""
    eps: NonNegative = Field(1e-8, validation_alias=AliasChoices(*EPS_NAMES))
    """Added to the root of the second moment (`AdamW`, and what `Muon` leaves to AdamW). Also accepted: `adamw_eps`."""
    momentum: BelowOne | None = None
    """Decay of the running gradient sum (`SGD`, `Muon`); null = 0 for `SGD`, 0.95 for `Muon`."""
    nesterov: bool | None = None
    """Look one step ahead along the momentum (`SGD`, `Muon`); null = false for `SGD`, true for `Muon`."""
    decay_rate: Ratio | None = None
    """`Adafactor`: at update t the second moment decays by 1 - t ** -decay_rate; null = 0.8."""
    clip_threshold: Annotated[float, Ge(1)] | None = None
    """`Adafactor`: largest root mean square of a parameter's update before the learning rate; null = 1.0."""
    ns_steps: Annotated[Count, Lt(100)] | None = None
    """`Muon`: Newton-Schulz iterations; null = 5."""
    ns_coefficients: Annotated[list[float], MinLen(3), MaxLen(3)] | None = None
    """`Muon`: coefficients of the Newton-Schulz polynomial; null = [3.4445, -4.775, 2.0315]."""
    matched_adamw_rms: Positive | None = None
    """`Muon`: a matrix update is scaled by this times sqrt(max(rows, columns)), which gives it the root mean square of
    an AdamW update, so that learning rate and weight decay tuned for AdamW fit; null = 0.2."""
    adamw_include: list[Text] | None = None
    """`Muon`: matrices left to AdamW: exact names, substrings or wildcards; null = embeddings and output layers."""
    master_weights: Literal["float32", "stochastic_rounding", "none"] = "float32"
    """What an update smaller than the storage dtype can hold becomes, of weights stored in bfloat16 or float16:
    `float32`: master copies keep it, 4 bytes a parameter; `stochastic_rounding` (bfloat16): the weight moves with the
    probability that keeps its mean, without a copy; `none`: it is lost, and small learning rates stop training."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Moments between two updates (`AdamW`): `bfloat16`: half the memory, rounded stochastically; `int8`: a quarter, in
    blocks of 256 (torchao, `pip install "samestep[lowbit]"`), not with sharded weights. Arithmetic is in float32."""
    weight_decay: NonNegative = 0.01
    """Weight decay: decoupled, times the learning rate each update; `SGD` adds it to the gradient (L2) instead."""
    weight_decay_include: list[Text] | None = None
    """Parameters that decay: exact names, substrings or wildcards; wins over `weight_decay_exclude`."""
    weight_decay_exclude: list[Text] | None = None
    """Parameters that do not decay, besides vectors and biases."""

    @model_validator(mode="after")
    def _fields_fit_type(self) -> OptimizerConfig:
        refuse_idle("optimizer", self, self.type, OPTIMIZER_FIELDS)
        if self.state_dtype != "float32" and self.type != "AdamW":
            raise ConfigError(
                f"only AdamW can keep its state in {self.state_dtype}; {self.type} keeps float32",
                field="optimizer.state_dtype",
                fix="write float32, or type: AdamW",
            )
        if self.type == "SGD" and self.nesterov and not self.momentum:
            raise ConfigError(
                "Nesterov momentum needs a momentum", field="optimizer.nesterov", fix="write `momentum: 0.9` as well"
            )
        return self

    def setting(self, name: str) -> Any:
        """The value of a field that acts for this type, or the type's default where it is null."""
        value = getattr(self, name)
        return OPTIMIZER_FIELDS[self.type][name] if value is None else value


SCHEDULE_FIELDS: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant_with_cooldown": {
        "keep_steps": 0,
        "decay_steps": None,
        "decay_ratio": None,
        "num_cycles": 0.5,
        "lr_end": 0.0,
        "final_steps": 0,
        "lr_end2": None,
    },
    "linear": {"lr_end": 0.0},
    "cosine": {"lr_end": 0.0, "num_cycles": 0.5, "decay_steps": None, "decay_ratio": None},
    "cosine_with_restarts": {"lr_end": 0.0, "num_cycles": 1.0, "decay_steps": None, "decay_ratio": None},
    "polynomial": {"lr_end": 1e-7, "power": 1.0, "decay_steps": None, "decay_ratio": None},
    "wsd": {
        "lr_end": 1e-7,
        "decay_type": "linear",
        "decay_steps": None,
        "decay_ratio": None,
        "decay_start_steps": None,
        "decay_start_ratio": None,
    },
    "inverse_sqrt": {"timescale": None},
    "cosine_annealing": {"lr_end": 0.0, "t_max": None},
    "cosine_annealing_warm_restarts": {"lr_end": 0.0, "t_0": None, "t_mult": 1},
}
"""Schedule -> the fields that act for it alone, with their defaults; None where the run's length decides."""


class LrSchedulerConfig(Section):
    """The learning rate over the updates of the run; its length is always `training.steps`. A field that is null has
    the default of its `type`; all types can warm up."""

    type: Annotated[
        Literal[
            "constant",
            "constant_with_cooldown",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "wsd",
            "inverse_sqrt",
            "cosine_annealing",
            "cosine_annealing_warm_restarts",
        ],
        BeforeValidator(schedule),
    ] = "constant"
    """Shape after the warm-up; docs/schedules.md has the formulas. `wsd` is warm-up, stable, decay. Also accepted:
    `ConstantWarmUpLR`, `constant_with_warmup`, `ConstantWithCoolDownLR`, `LinearWithWarmUpLR`, `CosineWithWarmUpLR`,
    `cosine_with_min_lr`, `CosineWithRestartsAndWarmUpLR`, `PolynomialWithWarmUpLR`, `WarmUpStableDecayLR`,
    `warmup_stable_decay`, `CosineAnnealingLR`, `CosineAnnealingWarmRestarts`."""
    learning_rate: Positive = Field(1e-5, validation_alias=AliasChoices(*PEAK_NAMES))
    """Peak learning rate. Also accepted: `base_lr`."""
    warmup_steps: Natural = 0
    """Updates that rise from `warmup_lr_init` to the peak."""
    warmup_ratio: Ratio | None = None
    """Warm-up as a fraction of `training.steps`; if given, it overrides `warmup_steps`."""
    warmup_lr_init: NonNegative = 0.0
    """Learning rate of the first warm-up update."""
    lr_end: NonNegative | None = Field(None, validation_alias=AliasChoices(*LR_END_NAMES))
    """Learning rate at the end of the decay; null = 0, for `polynomial` and `wsd` 1e-7 (or the peak if that is less).
    Also accepted: `lr_end1`, `eta_min`, `min_lr`."""
    num_cycles: Positive | None = None
    """Cosine waves (`cosine`, `constant_with_cooldown`; null = 0.5, which falls once) or restarts
    (`cosine_with_restarts`; null = 1)."""
    power: Positive | None = None
    """`polynomial`: exponent; null = 1."""
    decay_steps: Count | None = None
    """The update at which the decay ends (`cosine`, `cosine_with_restarts`), or how many updates it takes
    (`polynomial`: after the warm-up; `constant_with_cooldown`: after `keep_steps`; `wsd`: the last ones); null = to the
    end of the run, for `wsd` its last tenth."""
    decay_ratio: Ratio | None = None
    """`decay_steps` as a fraction of `training.steps`; if given, it overrides `decay_steps`."""
    decay_start_steps: Natural | None = None
    """`wsd`: the update at which the decay begins, instead of `decay_steps`."""
    decay_start_ratio: Ratio | None = None
    """`decay_start_steps` as a fraction of `training.steps`; if given, it overrides `decay_start_steps`."""
    decay_type: Annotated[Literal["linear", "cosine", "sqrt"] | None, BeforeValidator(decay_shape)] = None
    """`wsd`: shape of the decay, `sqrt` is 1 - sqrt(progress); null = `linear`."""
    keep_steps: Natural | None = None
    """`constant_with_cooldown`: updates at the peak; null = 0."""
    final_steps: Natural | None = None
    """`constant_with_cooldown`: updates at `lr_end` before `lr_end2`; null = 0."""
    lr_end2: NonNegative | None = None
    """`constant_with_cooldown`: learning rate after `final_steps`; null = `lr_end`."""
    timescale: Count | None = None
    """`inverse_sqrt`: the rate has halved three times this many updates after the warm-up; null = the warm-up, or 10000
    without one."""
    t_max: Count | None = None
    """`cosine_annealing`: updates of half a wave, which then rises again; null = to the end of the run."""
    t_0: Count | None = None
    """`cosine_annealing_warm_restarts`: updates of the first cycle, after the warm-up; this type needs it."""
    t_mult: Count | None = None
    """`cosine_annealing_warm_restarts`: each cycle is this many times as long as the one before; null = 1."""

    @model_validator(mode="after")
    def _fields_fit_type(self) -> LrSchedulerConfig:
        refuse_idle("lr_scheduler", self, self.type, SCHEDULE_FIELDS)
        length = self.decay_steps is not None or self.decay_ratio is not None
        if length and (self.decay_start_steps is not None or self.decay_start_ratio is not None):
            raise ConfigError(
                "the decay has both a length and a start",
                field="lr_scheduler.decay_start_steps",
                fix="keep one of `decay_steps`, `decay_ratio`, `decay_start_steps`, `decay_start_ratio`",
            )
        if self.type == "cosine_annealing_warm_restarts" and self.t_0 is None:
            raise ConfigError(
                "the length of the first cycle is needed", field="lr_scheduler.t_0", fix="write `t_0: 1000`, say"
            )
        if self.type == "constant_with_cooldown" and (self.setting("num_cycles") - 0.5) % 1:
            raise ConfigError(
                f"{self.num_cycles} waves do not end at `lr_end`, so the rate would jump after the cool-down",
                field="lr_scheduler.num_cycles",
                fix="write 0.5, 1.5, 2.5, ...",
            )
        return self

    def setting(self, name: str) -> Any:
        """The value of a field that acts for this type, or the type's default where it is null."""
        value = getattr(self, name)
        if value is None:
            value = SCHEDULE_FIELDS[self.type][name]
            return min(value, self.learning_rate) if name == "lr_end" else value
        return value

    def warmup_updates(self, total_steps: int) -> int:
        """Updates of the warm-up in a run of `total_steps`."""
        return self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * total_steps)

    def decay_span(self, total_steps: int) -> tuple[int, int]:
        """The updates at which the decay begins and ends; types without a decay of their own have warm-up to end."""
        warmup = self.warmup_updates(total_steps)
        length = self.decay_steps if self.decay_ratio is None else round(self.decay_ratio * total_steps)
        if self.type == "wsd":
            begin = self.decay_start_steps
            if self.decay_start_ratio is not None:
                begin = round(self.decay_start_ratio * total_steps)
            if begin is None and length is None:
                begin = max(warmup, total_steps - max(1, round(total_steps / 10)))
            elif begin is None and length is not None:
                begin = total_steps - length
            return begin or 0, total_steps
        if self.type == "constant_with_cooldown":
            begin = warmup + self.setting("keep_steps")
            return begin, total_steps - self.setting("final_steps") if length is None else begin + length
        if length is None:
            return warmup, total_steps
        return warmup, warmup + length if self.type == "polynomial" else length
