"""The dtypes that each kind of module is stored, computed, summed and updated in. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.config.schema import Config
from samestep.families import ModelSpec

EMBEDDING, STREAM, NORM, HEAD_NORM = "embedding", "hidden states", "norm", "q/k norm"
ATTENTION, ROTARY, SOFTMAX = "attention products", "rotary", "attention softmax"
MLP, HEAD, LOSS = "mlp", "head", "loss"
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NARROW = {"bfloat16", "float16"}
PRODUCTS = (ATTENTION, MLP, HEAD)
"""Kinds that multiply matrices."""
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
        products: that matrix products of the rounded operands run in, where it is another than `compute`.
    """

    kind: str
    compute: str
    weights: str | None = None
    gradients: str | None = None
    reduction: str | None = None
    masters: str | None = None
    state: str | None = None
    products: str | None = None


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
        STREAM: model.compute_dtype,
        NORM: model.layernorm_compute_dtype,
        HEAD_NORM: model.layernorm_compute_dtype,
        ATTENTION: model.compute_dtype,
        ROTARY: model.rotary_dtype,
        SOFTMAX: model.softmax_compute_dtype,
        MLP: model.compute_dtype,
        HEAD: model.compute_dtype,
        LOSS: wide(model.loss_dtype, model.compute_dtype),
    }
    absent = {HEAD_NORM: not spec.qk_layernorm, ROTARY: spec.learned_positions}
    has_weights = (EMBEDDING, NORM, HEAD_NORM, ATTENTION, MLP, HEAD)
    rows = []
    for kind, dtype in compute.items():
        if absent.get(kind):
            continue
        weights = storage.get(kind, model.params_dtype) if kind in has_weights else None
        rows.append(KindDtypes(kind, dtype, **(_training(config, weights, ranks) if weights else {})))
    return tuple(rows)


def wide(*dtypes: str) -> str:
    """The dtype that sums are formed in."""
    return "float64" if "float64" in dtypes else "float32"


def _training(config: Config, weights: str, ranks: int) -> Mapping[str, str | None]:
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
