"""Kinds of values in the schema: bounds, other spellings, and the base of all sections."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from samestep.errors import ConfigError

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64", "fp8": "float8"}
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
ACTIVATION_ALIASES = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
HUB_PREFIX = "hf://datasets/"
"""Before the OWNER/NAME of a data set on the Hugging Face Hub, as its own file system writes it."""
EPSILON_NAMES = ("layer_norm_epsilon", "rms_norm_eps", "layernorm_epsilon")
PEAK_NAMES = ("learning_rate", "base_lr")
LR_END_NAMES = ("lr_end", "lr_end1", "eta_min", "min_lr")
BETAS_NAMES = ("betas", "adamw_betas")
EPS_NAMES = ("eps", "adamw_eps")
ROUTER_NAMES = ("router_dense_type", "moe_router_dtype")
ALIASES = {f"model.{name}": f"model.{EPSILON_NAMES[0]}" for name in EPSILON_NAMES[1:]} | {
    "model.rope_scaling.rope_type": "model.rope_scaling.type"
}
ALIASES |= {f"lr_scheduler.{name}": "lr_scheduler.learning_rate" for name in PEAK_NAMES[1:]}
ALIASES |= {f"lr_scheduler.{name}": "lr_scheduler.lr_end" for name in LR_END_NAMES[1:]}
ALIASES |= {f"model.{name}": "model.router_dense_type" for name in ROUTER_NAMES[1:]}
ALIASES |= {f"optimizer.{name}": "optimizer.betas" for name in BETAS_NAMES[1:]}
ALIASES |= {f"optimizer.{name}": "optimizer.eps" for name in EPS_NAMES[1:]}
"""Other accepted spellings of a dotted field."""


def whole(value: Any) -> Any:
    """`1e3` is a float in YAML; it is taken where 1000 is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def long_dtype(value: Any) -> Any:
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def schedule(value: Any) -> Any:
    if isinstance(value, str) and value in REFUSED_SCHEDULES:
        raise ConfigError(f"`{value}`: {REFUSED_SCHEDULES[value]}", fix="write one of the other schedules")
    return SCHEDULE_NAMES.get(value, value) if isinstance(value, str) else value


def decay_shape(value: Any) -> Any:
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


def wide(value: str) -> str:
    if value not in ("float32", "float64"):
        raise ConfigError(
            f"{value} is too narrow for sums over micro-batches: each addition loses low bits, and the error grows "
            "with the number of accumulation steps",
            fix="write float32 or float64",
        )
    return value


def clip_threshold(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or (math.isfinite(value) and value > 0):
        return value
    if value == 0:
        why = "0 would scale every gradient to zero"
    elif value < 0:
        why = "a negative value would reverse every gradient"
    else:
        why = f"{value} is not a finite number"
    raise ConfigError(f"{why}; the largest gradient norm must be > 0", fix="write null to measure without clipping")


def power_of_two(value: float) -> float:
    if not 2.0**-126 <= value <= 2.0**127:
        raise ConfigError(f"{value:g} is out of the range of float32", fix="write 65536, or remove it")
    if math.frexp(value)[0] != 0.5:
        nearest = 2.0 ** round(math.log2(value))
        raise ConfigError(f"{value:g} is no power of two, so it would round every gradient", fix=f"write {nearest:g}")
    return value


def shard_degree(value: int) -> int:
    if value == 0:
        raise ConfigError("0 ranks cannot hold a shard", fix="write -1 for all data-parallel ranks, or 1 not to shard")
    return value


def layer_ranges(value: list[str]) -> list[str]:
    """Refuses what is not layers in ascending order, each once: `["0-3", "7"]`."""
    fix = 'write layers in ascending order, such as ["0-3", "7"]'
    last = -1
    for text in value:
        if not re.fullmatch(r"\d+(-\d+)?", text):
            raise ConfigError(f"`{text}` is neither a layer nor a range of layers", fix=fix)
        first, stop = range_ends(text)
        if first <= last or stop < first:
            raise ConfigError(f"`{text}` is not in ascending order", fix=fix)
        last = stop
    if not value:
        raise ConfigError("names no layer", fix=fix)
    return value


def range_ends(text: str) -> tuple[int, int]:
    """`"2-5"` -> 2, 5; `"7"` -> 7, 7."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def layer_numbers(ranges: Sequence[str]) -> list[int]:
    """`["0-2", "7"]` -> 0, 1, 2, 7."""
    return [layer for first, last in map(range_ends, ranges) for layer in range(first, last + 1)]


def patterns(value: dict[str, Any]) -> dict[str, Any]:
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"`{pattern}` is no regular expression: {error}") from None
    return value


Int = Annotated[int, BeforeValidator(whole)]
Count = Annotated[int, BeforeValidator(whole), Gt(0)]
Natural = Annotated[int, BeforeValidator(whole), Ge(0)]
Positive = Annotated[float, Gt(0)]
PowerOfTwo = Annotated[Positive, AfterValidator(power_of_two)]
NonNegative = Annotated[float, Ge(0)]
Ratio = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Between = Annotated[float, Gt(0), Lt(1)]
Text = Annotated[str, MinLen(1)]
Paths = Text | Annotated[list[Text], MinLen(1)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16", "float64"], BeforeValidator(long_dtype)]
ComputeDtype = Annotated[Literal["float32", "bfloat16", "float16", "float64", "float8"], BeforeValidator(long_dtype)]
WideDtype = Annotated[Dtype, AfterValidator(wide)]
LayerRanges = Annotated[list[str], AfterValidator(layer_ranges)]
ModuleLayers = Annotated[dict[str, LayerRanges], AfterValidator(patterns)]


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
