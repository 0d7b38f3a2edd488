"""What a user may write: one pydantic model per YAML section.

The docstring under each field is its help, its JSON schema text and its line in docs/config.md. Names are
those of a MindFormers PyNative file, so that such a file runs unchanged; `FOREIGN` lists fields that exist only there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from samestep.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------------------
# Kinds of values
# ---------------------------------------------------------------------------------------------------------------------

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
SCHEDULE_NAMES = {
    "ConstantWarmUpLR": "constant",
    "constant_with_warmup": "constant",
    "ConstantWithCoolDownLR": "constant_with_cooldown",
    "LinearWithWarmUpLR": "linear",
    "CosineWithWarmUpLR": "cosine",
    "cosine_with_min_lr": "cosine",
    "CosineWithRestartsAndWarmUpLR": "cosine_with_restarts",
    "PolynomialWithWarmUpLR": "polynomial",
    "WarmUpStableDecayLR": "wsd",
    "warmup_stable_decay": "wsd",
    "CosineAnnealingLR": "cosine_annealing",
    "CosineAnnealingWarmRestarts": "cosine_annealing_warm_restarts",
}
REFUSED_SCHEDULES = {
    "LearningRateWiseLayer": "one learning rate for each layer is not available; all parameters share one schedule",
    "reduce_lr_on_plateau": "it follows the validation loss, but a schedule here is a function of the updates made",
}
DECAY_NAMES = {"1-sqrt": "sqrt"}
HUB_PREFIX = "hf://datasets/"
"""Before the OWNER/NAME of a data set on the Hugging Face Hub, as its own file system writes it."""
EPSILON_NAMES = ("layer_norm_epsilon", "rms_norm_eps", "layernorm_epsilon")
PEAK_NAMES = ("learning_rate", "base_lr")
LR_END_NAMES = ("lr_end", "lr_end1", "eta_min", "min_lr")
BETAS_NAMES = ("betas", "adamw_betas")
EPS_NAMES = ("eps", "adamw_eps")
ALIASES = {f"model.{name}": f"model.{EPSILON_NAMES[0]}" for name in EPSILON_NAMES[1:]} | {
    "model.rope_scaling.rope_type": "model.rope_scaling.type"
}
ALIASES |= {f"lr_scheduler.{name}": "lr_scheduler.learning_rate" for name in PEAK_NAMES[1:]}
ALIASES |= {f"lr_scheduler.{name}": "lr_scheduler.lr_end" for name in LR_END_NAMES[1:]}
ALIASES |= {f"optimizer.{name}": "optimizer.betas" for name in BETAS_NAMES[1:]}
ALIASES |= {f"optimizer.{name}": "optimizer.eps" for name in EPS_NAMES[1:]}
"""Other accepted spellings of a dotted field."""


def _whole(value: Any) -> Any:
    """`1e3` is a float in YAML; it is taken where 1000 is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _long_dtype(value: Any) -> Any:
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _schedule(value: Any) -> Any:
    if isinstance(value, str) and value in REFUSED_SCHEDULES:
        raise ConfigError(f"`{value}`: {REFUSED_SCHEDULES[value]}", fix="write one of the other schedules")
    return SCHEDULE_NAMES.get(value, value) if isinstance(value, str) else value


def _decay_shape(value: Any) -> Any:
    return DECAY_NAMES.get(value, value) if isinstance(value, str) else value


def refuse_idle(section: str, config: Section, kind: str, fields: dict[str, dict[str, Any]]) -> None:
    """Refuse a field that is set but belongs to another `type` of the section.

    Args:
        kind: the type.
        fields: type -> its own fields; a field of no type acts for every type.

    Raises:
        ConfigError: names the fields that act for the type. A value equal to the default passes, so that a resolved
            file, which writes every field, loads again.
    """
    specific = {name for names in fields.values() for name in names}
    for name in type(config).model_fields:
        if name not in specific or name in fields[kind]:
            continue
        if getattr(config, name) != type(config).model_fields[name].default:
            users = ", ".join(f"`{other}`" for other, names in fields.items() if name in names)
            acting = ", ".join(f"`{other}`" for other in fields[kind]) or "none"
            raise ConfigError(
                f"it has no effect with type `{kind}`, only with {users}",
                field=f"{section}.{name}",
                fix=f"remove it; the fields of its own that `{kind}` has: {acting}",
            )


def _wide(value: str) -> str:
    if value not in ("float32", "float64"):
        raise ConfigError(
            f"{value} is too narrow for sums over micro-batches: each addition loses low bits, and the error grows "
            "with the number of accumulation steps",
            fix="write float32 or float64",
        )
    return value


def _clip_threshold(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or (math.isfinite(value) and value > 0):
        return value
    if value == 0:
        why = "0 would scale every gradient to zero"
    elif value < 0:
        why = "a negative value would reverse every gradient"
    else:
        why = f"{value} is not a finite number"
    raise ConfigError(f"{why}; the largest gradient norm must be > 0", fix="write null to measure without clipping")


def _shard_degree(value: int) -> int:
    if value == 0:
        raise ConfigError("0 ranks cannot hold a shard", fix="write -1 for all data-parallel ranks, or 1 not to shard")
    return value


Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, BeforeValidator(_whole), Gt(0)]
Natural = Annotated[int, BeforeValidator(_whole), Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Ratio = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Between = Annotated[float, Gt(0), Lt(1)]
Text = Annotated[str, MinLen(1)]
Paths = Text | Annotated[list[Text], MinLen(1)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16", "float64"], BeforeValidator(_long_dtype)]
WideDtype = Annotated[Dtype, AfterValidator(_wide)]


class Section(BaseModel):
    """Base of all sections: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=False,
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------------------------------


class TokenizerConfig(Section):
    """How text becomes tokens."""

    type: Literal["auto", "char", "bpe", "file"] = "auto"
    """`char`: one token a character; `bpe`: trained on the training text; `file`: read from `path`; `auto`: `file` if
    `path` is given, else `bpe`."""
    path: Text | None = None
    """A `tokenizer.json`, or a Hugging Face tokenizer's folder (`tokenizer.json`; `vocab.json` and `merges.txt`; or a
    SentencePiece model, read by `transformers`); relative to the YAML file."""
    vocab_size: Count = 4096
    """Tokens of a `bpe` tokenizer when it is trained here."""
    end_token: Text | None = None
    """Token that ends every document; null = found by its usual names."""

    @model_validator(mode="after")
    def _path_fits_type(self) -> TokenizerConfig:
        if self.type == "file" and self.path is None:
            raise ConfigError(
                "type is `file`, but no file is named",
                field="tokenizer.path",
                fix="write `path: FOLDER/tokenizer.json`",
            )
        if self.type in ("char", "bpe") and self.path is not None:
            raise ConfigError(
                f"a `{self.type}` tokenizer is made from the training text and reads no file",
                field="tokenizer.path",
                fix="write `type: file`, or remove `path`",
            )
        return self


class TrainingConfig(Section):
    """The optimizer step and how many of them."""

    steps: Count | None = 1000
    """Optimizer steps of the run (global batches consumed, skipped ones included); null if `epochs` or `tokens` is
    given."""
    epochs: Positive | None = None
    """Passes over the training data, instead of `steps`; the last one may be a part, rounded up to a whole step."""
    tokens: Count | None = None
    """Tokens to train on, instead of `steps`; the step that reaches them is the last."""
    local_batch_size: Count = 1
    """Samples of one micro-batch on one rank."""
    global_batch_size: Count = 1
    """Samples of one optimizer step over all ranks; the accumulation steps follow from it."""
    max_norm: Annotated[Positive | None, BeforeValidator(_clip_threshold)] = 1.0
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
    micro_batch: Literal["padded", "packed"] = "padded"
    """Lay samples out padded to the longest, or end to end with block-diagonal attention; the step is the same."""
    z_loss_weight: NonNegative = 0.0
    """Weight of the squared log-partition (z-loss) added to the loss; 0 = off."""
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


class ParallelismConfig(Section):
    """How many ranks share the work, and how."""

    data_parallel_shard: Annotated[Int, AfterValidator(_shard_degree)] = -1
    """Ranks that shard weights, gradients and optimizer state; -1 = all data-parallel ranks, 1 = do not shard."""
    reshard_after_forward_policy: Literal["default", "always", "never"] = "default"
    """Free gathered weights after the forward pass; `default`: unless pipeline parallel is used."""
    dense_fsdp_shard_size: Count | None = None
    """Smaller shard degree for weights outside the experts; null = `data_parallel_shard`."""
    cpu_offload: bool = False
    """Keep sharded weights and optimizer state in CPU memory."""
    tensor_parallel: Count = 1
    """Ranks that split each weight matrix."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel ranks; acts only with `tensor_parallel` > 1."""
    context_parallel: Count = 1
    """Ranks that split each sequence."""
    context_parallel_method: Literal["colossal", "ulysses", "hybrid"] = "colossal"
    """How context-parallel ranks exchange keys and values: ring, all-to-all over heads, or both."""
    ulysses_degree_in_cp: Count | None = None
    """Ranks of `context_parallel` that use all-to-all over heads."""
    pipeline_parallel: Count = 1
    """Pipeline stages."""
    pipeline_parallel_schedule: Literal["1f1b", "interleaved_1f1b", "gpipe"] = "1f1b"
    """Order of forward and backward passes in the pipeline."""
    pipeline_parallel_layers_per_stage: str | list[str] | None = "auto"
    """Layers of each stage, such as `["0-3", "4-7"]`; `auto` or null splits evenly."""
    pipeline_parallel_interleave_num: Count = 1
    """Pieces of the network on each pipeline rank."""
    expert_parallel: Count = 1
    """Ranks that split the experts of a layer."""


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
    weight_decay: NonNegative = 0.01
    """Weight decay: decoupled, times the learning rate each update; `SGD` adds it to the gradient (L2) instead."""
    weight_decay_include: list[Text] | None = None
    """Parameters that decay: exact names, substrings or wildcards; wins over `weight_decay_exclude`."""
    weight_decay_exclude: list[Text] | None = None
    """Parameters that do not decay, besides vectors and biases."""

    @model_validator(mode="after")
    def _fields_fit_type(self) -> OptimizerConfig:
        refuse_idle("optimizer", self, self.type, OPTIMIZER_FIELDS)
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
        BeforeValidator(_schedule),
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
    decay_type: Annotated[Literal["linear", "cosine", "sqrt"] | None, BeforeValidator(_decay_shape)] = None
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


class DatasetConfig(Section):
    """Fields that training and validation data share."""

    type: Literal["auto", "text", "jsonl", "json", "parquet", "huggingface"] = "auto"
    """Kind of data: `text`; `jsonl`: one JSON object a line; `json`: one array of objects; `parquet`; `huggingface`: a
    folder written by `save_to_disk`, or a data set of the Hub; `auto` goes by the name's ending or the folder's
    content. Text and JSON files may end in `.gz` or `.zst`."""
    dataset_split: Text | None = None
    """Split of a Hugging Face data set; null = the only one, or `train`."""
    dataset_subset: Text | None = None
    """Subset (configuration) of a data set of the Hugging Face Hub; null = its default."""
    text_column: Text = "text"
    """Column that holds the text. Rows without it may be chats (`messages` with role and content, or `conversations`
    with from and value), `prompt` and `completion`, or `instruction`, `input` and `output`. A row or turn of another
    form, such as an unknown role in `conversations`, is an error that names it; a row without text is passed over."""
    rows: Literal["cut", "documents", "pack_documents"] = "cut"
    """How samples are made: `cut`: the joined text in pieces of `model.seq_length`; `documents`: one document a sample;
    `pack_documents`: whole documents laid into samples of `model.seq_length`."""
    document_separator: Text | None = None
    """Text between two documents of a text file; null = a file is one document. One that occurs nowhere is refused."""
    long_documents: Literal["split", "truncate", "error"] = "split"
    """A document longer than `model.seq_length`: split it, keep its start, or refuse it."""
    targets: Literal["all", "assistant"] = "all"
    """Which turns of a chat are targets; `completion` and `output` count as the assistant's."""


class TrainDatasetConfig(DatasetConfig):
    """Training data."""

    path: Paths
    """Files (`.txt`, `.jsonl`, `.json`, `.parquet`), folders or wildcards, relative to the YAML file; or
    `hf://datasets/OWNER/NAME` on the Hugging Face Hub."""
    split: Literal["documents", "tail"] | None = None
    """Take validation data from here: whole documents, or the end of the text; null = take none."""
    eval_fraction: Between = 0.1
    """Share of the data that `split` takes."""
    shuffle: bool = True
    """Shuffle the samples anew in each pass over the data."""


class EvalDatasetConfig(DatasetConfig):
    """Validation data."""

    path: Paths | None = None
    """Files, folders, wildcards or `hf://datasets/OWNER/NAME`, as in `train_dataset`; null = none."""


class EvaluationConfig(Section):
    """When and how validation data is measured."""

    interval_steps: Natural = 0
    """Training steps between evaluations; 0 = only at the end."""
    local_batch_size: Count | None = None
    """Samples of one evaluation micro-batch on one rank; null = `training.local_batch_size`."""


class RopeScalingConfig(Section):
    """Rotary positions beyond the length that a model was first trained with; fields that `type` does not use are
    refused."""

    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = Field(
        "default", validation_alias=AliasChoices("type", "rope_type")
    )
    """`default`: none; `linear`: positions divided by `factor`; `dynamic`: a base that grows with the length of each
    document; `llama3`: low frequencies divided; `yarn`: low frequencies divided, attention sharpened. Also accepted:
    `rope_type`."""
    factor: Annotated[float, Ge(1)] | None = None
    """How many times longer; null (`yarn` only) = `max_position_embeddings` / `original_max_position_embeddings`."""
    original_max_position_embeddings: Count | None = None
    """Positions of the first training; `dynamic`, `llama3` and `yarn` need it."""
    low_freq_factor: Positive | None = None
    """`llama3`: wavelengths above the original length / this are divided by `factor`; null = 1."""
    high_freq_factor: Positive | None = None
    """`llama3`: wavelengths below the original length / this stay; null = 4."""
    beta_fast: Positive | None = None
    """`yarn`: pairs that turn more often than this within the original length stay; null = 32."""
    beta_slow: Positive | None = None
    """`yarn`: pairs that turn less often than this are divided by `factor`; null = 1."""
    mscale: Positive | None = None
    """`yarn`: numerator of `attention_factor`; acts only together with `mscale_all_dim`."""
    mscale_all_dim: Positive | None = None
    """`yarn`: denominator of `attention_factor`; acts only together with `mscale`."""
    attention_factor: Positive | None = None
    """`yarn`: what cosines and sines are multiplied by; null = from `factor`, `mscale` and `mscale_all_dim`."""


class ModelConfig(Section):
    """The network and its number formats."""

    model_type: Text = "llama"
    """Family of the network; decides defaults, biases, position encoding and gating."""
    architectures: Text | list[Text] | None = None
    """Class name in a Hugging Face configuration; null = the family's."""
    vocab_size: Count | None = None
    """Rows of the embedding; null = the tokenizer's."""
    seq_length: Count
    """Tokens of one sample at most."""
    hidden_size: Count
    """Width of the residual stream."""
    num_hidden_layers: Annotated[Count, Le(10_000)]
    """Decoder layers."""
    num_attention_heads: Count
    """Query heads of each layer."""
    num_key_value_heads: Count | None = None
    """Key and value heads of each layer; null = as many as query heads."""
    head_dim: Count | None = None
    """Width of one head; null = `hidden_size` / `num_attention_heads`."""
    intermediate_size: Count | None = None
    """Width of the feed-forward layer; null = 4 x `hidden_size`, gated 8/3 x rounded up to a multiple of 64."""
    max_position_embeddings: Count | None = None
    """Positions the network can tell apart; null = `seq_length`."""
    tie_word_embeddings: bool | None = None
    """Use the embedding as the output layer; null = the family's."""
    attention_bias: bool | None = None
    """Biases of the attention projections (`qwen2`: of query, key and value only); null = the family's."""
    mlp_bias: bool | None = None
    """Biases of the feed-forward layer; null = the family's."""
    qk_layernorm: bool | None = None
    """Normalize queries and keys in each head; null = the family's."""
    sliding_window: Count | None = None
    """Tokens that a position sees, itself included; null = all before it."""
    position_embedding_type: Literal["rope", "learned_absolute"] | None = None
    """How positions enter; the family decides, and another value is refused."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Rotary positions beyond the length of the first training."""
    hidden_dropout: BelowOne = 0.0
    """Dropout after the embedding, attention and feed-forward layers."""
    attention_dropout: BelowOne = 0.0
    """Dropout of attention probabilities."""
    normalization: Text | None = None
    """Normalization layer, `RMSNorm` or `LayerNorm`; null = the family's."""
    fused_norm: bool = True
    """Use the fused normalization; false runs the reference implementation, for debugging."""
    hidden_act: Text | None = None
    """Activation of the feed-forward layer: `silu`, `fusedswiglu`, `gelu` or `gelu_tanh` (also accepted: `gelu_new`,
    `gelu_pytorch_tanh`); null = the family's."""
    layer_norm_epsilon: NonNegative | None = Field(None, validation_alias=AliasChoices(*EPSILON_NAMES))
    """Added to the variance in normalization; null = the family's. Also accepted: `rms_norm_eps`,
    `layernorm_epsilon`."""
    initializer_range: Positive = 0.02
    """Standard deviation of initial weights."""
    params_dtype: Dtype = "float32"
    """Stored weights. `bfloat16` and `float16` weights get float32 master copies."""
    compute_dtype: Dtype = "bfloat16"
    """Matrix products."""
    layernorm_compute_dtype: Dtype = "float32"
    """Normalization."""
    softmax_compute_dtype: Dtype = "float32"
    """Attention softmax."""
    rotary_dtype: Dtype = "float32"
    """Rotary position encoding."""
    gradient_dtype: WideDtype = "float32"
    """Accumulated gradients: float32 or float64."""
    reduce_dtype: WideDtype = "float32"
    """Gradient sums between ranks: float32 or float64."""
    loss_dtype: WideDtype = "float32"
    """Losses and their sums: float32 or float64."""


class CheckpointConfig(Section):
    """What is saved, and when."""

    enable_save: bool = True
    """Save checkpoints, the last one at the end of the run."""
    save_path: str = ""
    """Folder of the checkpoints; empty = `checkpoints` in `output_dir`."""
    save_max: Count = 5
    """Checkpoints of this run to keep."""
    save_interleaved_steps: Count = 1000
    """Training steps between checkpoints."""
    keep_best: bool = False
    """Save whenever the validation loss is the lowest so far, and keep that checkpoint besides `save_max`; `best.json`
    names it."""
    no_save_optim: bool = False
    """Save weights only; such a checkpoint cannot be resumed."""
    async_save: bool = False
    """Write while training goes on."""
    load_path: str = ""
    """Checkpoint to start from; empty = fresh weights, or the newest one of this run."""

    @model_validator(mode="after")
    def _best_is_saved(self) -> CheckpointConfig:
        if self.keep_best and not self.enable_save:
            raise ConfigError(
                "without checkpoints there is none to keep",
                field="checkpoint.keep_best",
                fix="write false, or enable_save: true",
            )
        return self


class TensorboardConfig(Section):
    """TensorBoard files in `output_dir`/tensorboard."""

    enable: bool = True
    """Write them."""
    log_interval: Count = 1
    """Training steps between points."""
    queue_size: Count = 1000
    """Points held in memory before they are written."""


class WandbConfig(Section):
    """Weights & Biases; needs `pip install "samestep[wandb]"`."""

    enable: bool = False
    """Send the numbers of the run."""
    project: Text = "samestep"
    """Project that the run belongs to."""
    name: Text | None = None
    """Name of the run; null = the last part of `output_dir`."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: write below `output_dir`/wandb only; `wandb sync` sends it later."""
    log_interval: Count = 1
    """Training steps between points."""


class MlflowConfig(Section):
    """MLflow; needs `pip install "samestep[mlflow]"`."""

    enable: bool = False
    """Send the numbers of the run."""
    tracking_uri: Text | None = None
    """Server, database or folder; null = the variable MLFLOW_TRACKING_URI, or MLflow's own default."""
    experiment: Text = "samestep"
    """Experiment that the run belongs to; made if it is missing."""
    log_interval: Count = 1
    """Training steps between points."""


class TrainStateConfig(Section):
    """Extra numbers of each step, in `metrics.jsonl` and wherever else numbers are sent."""

    local_norm: bool | str | list[str] = ""
    """Gradient norm of each parameter in each micro-batch: true = all parameters, or those whose name contains one of
    these texts."""
    local_loss: bool = False
    """Loss of each micro-batch of a rank: its sum / its own targets."""
    device_norm: bool = False
    """Gradient norm of each parameter over the whole step, before clipping."""
    device_loss: bool = False
    """Loss of a rank: sum / targets of its micro-batches."""


class MonitorConfig(Section):
    """What is shown while training."""

    log_interval: Count = 10
    """Training steps between progress lines when the output is not a terminal."""
    report: bool = True
    """Write `report.html` at the end of the run, where `samestep[report]` is installed."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """TensorBoard files."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""
    train_state: TrainStateConfig = TrainStateConfig()
    """Extra numbers of each step."""


class RecomputeConfig(Section):
    """Activations that are computed again in the backward pass to save memory."""

    mode: Literal["None", "full", "select"] = "None"
    """`None`: keep all activations; `full`: recompute whole layers; `select`: recompute chosen modules."""
    full_recompute_layer: list[str] | None = None
    """Layers to recompute, such as `["0-3", "7"]`."""
    select_module: dict[str, list[str]] | None = None
    """Modules to recompute: pattern of the name inside a layer -> layers."""
    exclude_op: dict[str, list[str]] | None = None
    """Operators not to recompute: pattern -> layers."""


class ProfilerConfig(Section):
    """Time and memory traces; these fields act only with `enable_profiling`."""

    enable_profiling: bool = False
    """Record a trace, `steps-A-B-rank-R.json.gz`, for ui.perfetto.dev or chrome://tracing."""
    start_step: Count = 1
    """First training step recorded."""
    end_step: Count = 1
    """Last training step recorded."""
    output_path: Text | None = None
    """Folder of the traces; null = `profile` in `output_dir`."""
    profiler_rank: list[Natural] | None = None
    """Ranks that record; null = all."""
    profiler_level: Literal[0, 1, 2] = 0
    """Detail of the trace: 1 adds the shapes of operands, 2 also FLOPs."""
    profile_memory: bool = False
    """Record memory."""
    profile_cpu: bool = True
    """Record CPU work."""
    with_stack: bool = True
    """Record call stacks."""

    @model_validator(mode="after")
    def _steps_in_order(self) -> ProfilerConfig:
        if self.start_step > self.end_step:
            raise ConfigError(
                f"start_step {self.start_step} is after end_step {self.end_step}",
                field="profiler.end_step",
                fix=f"write {self.start_step} or more",
            )
        return self


class Config(Section):
    """Everything a run needs to know."""

    output_dir: Text = "runs/default"
    """Folder of the run; relative to the current directory."""
    compile: bool = False
    """Compile the network."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    training: TrainingConfig = TrainingConfig()
    """The optimizer step and how many of them."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """How many ranks share the work, and how."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule."""
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    """The learning rate over the run."""
    train_dataset: TrainDatasetConfig
    """Training data."""
    eval_dataset: EvalDatasetConfig = EvalDatasetConfig()
    """Validation data."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When and how validation data is measured."""
    model: ModelConfig
    """The network and its number formats."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved, and when."""
    monitor: MonitorConfig = MonitorConfig()
    """What is shown while training."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Activations that are computed again."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Time and memory traces."""
    callbacks: list[Any] = []
    """Registered callbacks."""


# ---------------------------------------------------------------------------------------------------------------------
# Fields without effect
# ---------------------------------------------------------------------------------------------------------------------

_ACCELERATOR = "a switch of its own hardware"
_EXPERTS = "only mixture-of-experts models use it"
_LATENT = "only latent attention uses it"
_YARN = "yarn position encoding is set in model.rope_scaling"
_FAMILY = "the model family decides"
_FILES = "concerns only how its own checkpoint files are laid out"

FOREIGN: dict[str, str] = {
    "context": "set up its own launcher and hardware",
    "use_remove_redundant_dataset": "had no effect there either",
    "recompute_comm": "communication is never computed again",
    "swap": "activations are not moved off the device",
    "training.use_skip_step_on_nan": "non-finite steps are always skipped",
    "parallelism.data_parallel_shard_strategy": "had no effect there either",
    "parallelism.disable_gradient_division": "gradients are always summed, never averaged",
    "parallelism.context_parallel_async": _ACCELERATOR,
    "parallelism.pipeline_parallel_microbatch_size": "follows from training.global_batch_size",
    "parallelism.pipeline_parallel_overlap_*": _ACCELERATOR,
    "parallelism.pipeline_parallel_enable_dxdw_split": _ACCELERATOR,
    "parallelism.pipeline_parallel_p2p_transport": _ACCELERATOR,
    "parallelism.enable_mc2": _ACCELERATOR,
    "parallelism.enable_loss_parallel": "had no effect there either",
    "parallelism.npu_nums_per_device": _ACCELERATOR,
    "parallelism.moe_token_dispatcher_type": _EXPERTS,
    "parallelism.expert_parallel_*": _EXPERTS,
    "optimizer.enable_fused_opt": _ACCELERATOR,
    "optimizer.use_fused": _ACCELERATOR,
    "optimizer.use_fused_adamw": _ACCELERATOR,
    "optimizer.comm_strategy": _ACCELERATOR,
    "optimizer.*_batch_memory_gb": _ACCELERATOR,
    "optimizer.qk_clip_threshold": "acts only with qk_clip_enabled",
    "lr_scheduler.total_steps": "always training.steps",
    "*_dataset.drop_remainder": "use training.last_batch",
    "*_dataset.num_parallel_workers": "data is read without worker settings",
    "*_dataset.prefetch_size": "data is read without worker settings",
    "*_dataset.numa_enable": _ACCELERATOR,
    "*_dataset.use_distribute_dataset": "every rank reads its own samples",
    "*_dataset.balance_enabled": "the split does not change the step, so it is not a setting",
    "*_dataset.dataloader": "its loaders do not exist here; write `path: FILE` with a text file, a .jsonl file, "
    "a folder or a wildcard",
    "model.use_flash_attention": "the attention implementation is chosen by device and dtype",
    "model.input_layout": _ACCELERATOR,
    "model.sparse_mode": _ACCELERATOR,
    "model.apply_rope_fusion": "fused operators are chosen by device and dtype",
    "model.bias_swiglu_fusion": "fused operators are chosen by device and dtype",
    "model.use_fused_*": "fused operators are chosen by device and dtype",
    "model.gated_linear_unit": _FAMILY,
    "model.add_bias_linear": "see model.attention_bias and model.mlp_bias",
    "model.*_token_id": "the tokenizer decides",
    "model.embedding_params_dtype": "the embedding is stored in model.params_dtype",
    "model.chunk_loss_num": "logits are never kept at full size by a setting",
    "model.calculate_per_token_loss": "see training.loss_normalization",
    "model.moe_*": _EXPERTS,
    "model.router_dense_type": _EXPERTS,
    "model.routed_scaling_factor": _EXPERTS,
    "model.first_k_dense_replace": _EXPERTS,
    "model.num_experts_per_tok": _EXPERTS,
    "model.scoring_func": _EXPERTS,
    "model.norm_topk_prob": _EXPERTS,
    "model.topk_group": _EXPERTS,
    "model.n_group": _EXPERTS,
    "model.use_pad_tokens": _EXPERTS,
    "model.mla_qkv_concat": _LATENT,
    "model.qk_rope_head_dim": _LATENT,
    "model.qk_nope_head_dim": _LATENT,
    "model.v_head_dim": _LATENT,
    "model.mtp_loss_*": "only multi-token prediction uses it",
    "model.scaling_factor": _YARN,
    "model.beta_fast": _YARN,
    "model.beta_slow": _YARN,
    "model.mscale*": _YARN,
    "checkpoint.prefix": _FILES,
    "checkpoint.remove_redundancy": _FILES,
    "checkpoint.load_balanced": _FILES,
    "checkpoint.load_worker_number": _FILES,
    "checkpoint.save_global_layout_cache": _FILES,
    "checkpoint.reshard_worker_num": _FILES,
    "monitor.health_checkpoint": "had no effect there either",
    "monitor.tensorboard.output_dir": "always tensorboard in output_dir",
    "monitor.moe_monitor": _EXPERTS,
    "profiler.mstx": _ACCELERATOR,
}
"""Fields of a MindFormers file that mean nothing here -> why; wildcards allowed. Accepted, removed, named in one
warning."""

UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    "run_mode": ("train",),
    "compile": (False,),
    "callbacks": ([],),
    "lora_config": (None,),
    "inference": (None,),
    "swap.enable": (False,),
    "training.rampup_batch_size": (None,),
    "parallelism.reshard_after_forward_policy": ("default",),
    "parallelism.dense_fsdp_shard_size": (None,),
    "parallelism.cpu_offload": (False,),
    "parallelism.context_parallel_method": ("colossal",),
    "parallelism.context_parallel_mask_type": ("causal",),
    "parallelism.ulysses_degree_in_cp": (None,),
    "parallelism.pipeline_parallel_schedule": ("1f1b",),
    "parallelism.pipeline_parallel_layers_per_stage": ("auto", None),
    "parallelism.pipeline_parallel_interleave_num": (1,),
    "optimizer.amsgrad": (False,),
    "optimizer.maximize": (False,),
    "optimizer.enable_cpu_offload": (False,),
    "optimizer.qk_clip_enabled": (False,),
    "model.multi_latent_attention": (False, None),
    "model.kv_lora_rank": (None,),
    "model.q_lora_rank": (None,),
    "model.n_routed_experts": (None, 0),
    "model.num_moe_experts": (None, 0),
    "model.n_shared_experts": (None, 0),
    "model.num_nextn_predict_layers": (None, 0),
    "model.mtp_num_layers": (None, 0),
    "checkpoint.async_save": (False,),
    "checkpoint.load_path": ("",),
    "checkpoint.no_load_optim": (False,),
    "checkpoint.save_trainable_only": (False,),
    "checkpoint.base_load_path": ("",),
    "recompute.mode": ("None",),
    "recompute.full_recompute_layer": (None,),
    "recompute.select_module": (None,),
    "recompute.exclude_op": (None,),
}
"""Fields whose effect this version does not have -> the only values accepted. Those that are not in the schema are
fields of a MindFormers file that would change the result, so they cannot be ignored."""


def foreign_reason(field: str) -> str | None:
    """Why a dotted field means nothing here, or None if it is not in `FOREIGN`."""
    return next((reason for pattern, reason in FOREIGN.items() if fnmatchcase(field, pattern)), None)


# ---------------------------------------------------------------------------------------------------------------------
# Looking at the schema
# ---------------------------------------------------------------------------------------------------------------------


def section_class(info: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or None for a plain value."""
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted field below a section, sections themselves included."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        if inner := section_class(info):
            yield from walk(inner, f"{prefix}{name}.")


FIELDS: dict[str, FieldInfo] = dict(walk(Config))
"""Dotted field or section -> its description."""


def field_homes(name: str) -> list[str]:
    """Sections that have a field of this name (`""` is the top level)."""
    return [field.rpartition(".")[0] for field in (*FIELDS, *ALIASES) if field.rpartition(".")[2] == name]


def describe(info: FieldInfo) -> str:
    """The values a field takes, in words, such as `whole number > 0 or null`."""
    return _describe(info.annotation, info.metadata)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, UnionType):
        return " or ".join(_describe(argument, []) for argument in arguments)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        size = next((f"{rule.max_length} " for rule in metadata if isinstance(rule, MaxLen)), "")
        item = _describe(arguments[0], [])
        return (
            "list of text"
            if item == "text"
            else f"list of {size}values" + (f", each {item}" if item != "value" else "")
        )
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(annotation, "value") + _bounds(metadata)


def _bounds(metadata: list[Any]) -> str:
    signs = {Gt: "> {0.gt}", Ge: ">= {0.ge}", Lt: "< {0.lt}", Le: "<= {0.le}"}
    parts = [signs[type(rule)].format(rule) for rule in metadata if type(rule) in signs]
    return " " + " and ".join(parts) if parts else ""
