"""The dtypes that each kind of module is stored, computed, summed and updated in. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from samestep.config.schema import Config, ModelConfig
from samestep.errors import ConfigError
from samestep.families import ModelSpec, parameter_shapes

EMBEDDING, STREAM, NORM, HEAD_NORM = "embedding", "hidden states", "norm", "q/k norm"
ATTENTION, ROTARY, SOFTMAX = "attention products", "rotary", "attention softmax"
MLP, HEAD, LOSS = "mlp", "head", "loss"
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NARROW = {"bfloat16", "float16"}
PRODUCTS = (ATTENTION, MLP, HEAD)
"""Kinds that multiply matrices."""
_FLOAT8 = "float8"
_FLOAT8_BLOCK = 16
"""Rows and columns of the matrices that units for float8 take are multiples of it."""
_INT8_BLOCK, _LEAST_INT8 = 256, 4096
_EXACT = "int64"
"""What gradients add up in with `training.exact`."""


@dataclass(frozen=True)
class KindDtypes:
    """The dtypes of one kind of module, by name; None where there is nothing of that sort.

    Attributes:
        compute: that operands are rounded to.
        weights: storage.
        gradients: accumulation over micro-batches.
        reduction: sums of gradients over ranks.
        masters: copies that the optimizer updates instead of the weights.
        state: of the optimizer, between two updates.
        products: that linear layers and the head multiply in, where it is another than `compute`: a wider one on a
            device without units for that, or float8.
    """

    kind: str
    compute: str
    weights: str | None = None
    gradients: str | None = None
    reduction: str | None = None
    masters: str | None = None
    state: str | None = None
    products: str | None = None


def takes_int8(numbers: int) -> bool:
    """Whether torchao keeps the moments of a weight of so many numbers in int8: in whole blocks of 256, and not those
    of fewer than 4096 (its rule since Dettmers et al. 2022); others stay float32."""
    return numbers >= _LEAST_INT8 and numbers % _INT8_BLOCK == 0


def check_sizes(config: Config, spec: ModelSpec) -> None:
    """The weights have shapes that their dtypes can be used with.

    Raises:
        ConfigError: `compute_dtype` is float8, and a projection has rows or columns that are no whole blocks; or
            `state_dtype` is int8, which no weight is large enough for.
    """
    _check_float8(config.model, spec)
    if config.optimizer.state_dtype == "int8" and not any(map(takes_int8, _sizes(spec).values())):
        raise ConfigError(
            f"int8 has no effect: state is kept in it of weights of {_LEAST_INT8} numbers or more, in whole blocks of "
            f"{_INT8_BLOCK}, and the model has none",
            field="optimizer.state_dtype",
            fix="write bfloat16 or float32",
        )


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in parameter_shapes(spec).items()}


def _check_float8(model: ModelConfig, spec: ModelSpec) -> None:
    widths = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads * spec.head_dim,
        "num_key_value_heads": spec.num_kv_heads * spec.head_dim,
    }
    for name, width in widths.items():
        if model.compute_dtype == _FLOAT8 and width % _FLOAT8_BLOCK:
            heads = " x head_dim" if name.endswith("heads") else ""
            raise ConfigError(
                f"{name}{heads} = {width} is no multiple of {_FLOAT8_BLOCK}, which products in float8 need",
                field=f"model.{name}",
                fix=f"write a multiple of {_FLOAT8_BLOCK}, or model.compute_dtype: bfloat16",
            )


def kind_of(name: str) -> str | None:
    """The kind of a parameter or a module of the decoder, by its name; None for what holds several kinds."""
    if name.startswith("embed_"):
        return EMBEDDING
    if name.startswith("loss_head"):
        return HEAD
    inside = name.split(".", 2)[2] if name.startswith("layers.") and name.count(".") > 1 else name
    if ".q_norm" in inside or ".k_norm" in inside:
        return HEAD_NORM
    if "norm" in inside:
        return NORM
    if inside.startswith("self_attn."):
        return ATTENTION
    return MLP if inside.startswith("mlp") else None


def expected_dtypes(config: Config, spec: ModelSpec, ranks: int) -> tuple[KindDtypes, ...]:
    """A row for each kind of module that the model has.

    Args:
        ranks: data-parallel ones, over which gradients are summed.
    """
    model = config.model
    tables = model.embedding_storage
    storage = {EMBEDDING: tables, HEAD: tables if spec.tied else model.params_dtype}
    compute = {
        EMBEDDING: wide(tables),
        STREAM: model.working_dtype,
        NORM: model.layernorm_compute_dtype,
        HEAD_NORM: model.layernorm_compute_dtype,
        ATTENTION: model.working_dtype,
        ROTARY: model.rotary_dtype,
        SOFTMAX: model.softmax_compute_dtype,
        MLP: model.working_dtype,
        HEAD: model.working_dtype,
        LOSS: wide(model.loss_dtype, model.working_dtype),
    }
    absent = {HEAD_NORM: not spec.qk_layernorm, ROTARY: spec.learned_positions}
    has_weights = (EMBEDDING, NORM, HEAD_NORM, ATTENTION, MLP, HEAD)
    rows = []
    for kind, dtype in compute.items():
        if absent.get(kind):
            continue
        weights = storage.get(kind, model.params_dtype) if kind in has_weights else None
        products = _FLOAT8 if model.compute_dtype == _FLOAT8 and kind in (ATTENTION, MLP) else None
        training = _training(config, weights, ranks) if weights else {}
        if training.get("state") == "int8" and not _has_int8(spec, kind):
            training["state"] = "float32"
        rows.append(KindDtypes(kind, dtype, **training, products=products))
    return tuple(rows)


def _has_int8(spec: ModelSpec, kind: str) -> bool:
    kind = EMBEDDING if kind == HEAD and spec.tied else kind
    return any(takes_int8(size) for name, size in _sizes(spec).items() if kind_of(name) == kind)


def wide(*dtypes: str) -> str:
    """The dtype that sums are formed in."""
    return "float64" if "float64" in dtypes else "float32"


def _training(config: Config, weights: str, ranks: int) -> dict[str, str | None]:
    """What happens to weights of a dtype, and to their gradients."""
    exact = config.training.exact
    masters = "float32" if weights in NARROW and config.optimizer.master_weights == "float32" else None
    return {
        "weights": weights,
        "gradients": _EXACT if exact else config.model.gradient_dtype,
        "reduction": None if ranks == 1 else _EXACT if exact else config.model.reduce_dtype,
        "masters": masters,
        "state": _state(config, weights),
    }


def _state(config: Config, weights: str) -> str | None:
    optimizer = config.optimizer
    if optimizer.type == "SGD" and not optimizer.setting("momentum"):
        return None
    if weights == "float64":
        return weights
    return optimizer.state_dtype if optimizer.type == "AdamW" else "float32"
