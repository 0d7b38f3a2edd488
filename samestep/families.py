"""Model families: `model_type` -> fields, defaults, parameter shapes and FLOP counts. Imports no torch.

A `ModelSpec` is the resolved `model` section: every number that a decoder needs and nothing left to infer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from samestep.config.schema import ModelConfig
from samestep.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """What sets one `model_type` apart from the others."""

    name: str
    architecture: str
    hidden_act: str
    gated: bool
    norm_eps: float
    tied: bool
    without_effect: frozenset[str] = frozenset()
    """Fields of the `model` section that this family cannot use; setting one is an error."""


ACTIVATIONS = ("gelu", "silu", "fusedswiglu")
NORMALIZATIONS = ("RMSNorm", "LayerNorm")

FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", hidden_act="silu", gated=True, norm_eps=1e-5, tied=False),
}


@dataclass(frozen=True)
class ModelSpec:
    """The resolved architecture. Sizes are counts of features, heads, layers or tokens."""

    family: str
    vocab_size: int
    seq_length: int
    max_positions: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    normalization: str
    fused_norm: bool
    norm_eps: float
    hidden_act: str
    gated: bool
    tied: bool
    rope_theta: float
    hidden_dropout: float
    attention_dropout: float
    initializer_range: float


def resolve_model(model: ModelConfig, vocab_size: int | None = None) -> ModelSpec:
    """Resolve the `model` section.

    Args:
        model: the section as the user wrote it.
        vocab_size: the tokenizer's size, used where `model.vocab_size` is not given.

    Raises:
        ConfigError: a family that is not known, fields without effect for it, or sizes that do not fit together.
    """
    family = _family(model)
    for name in sorted(family.without_effect):
        # Not model_fields_set: a resolved file writes every field, and must load again.
        if getattr(model, name) != ModelConfig.model_fields[name].default:
            raise ConfigError(f"has no effect for model_type {family.name}", field=f"model.{name}", fix="remove it")
    hidden_act = (model.hidden_act or family.hidden_act).lower()
    _check_name("hidden_act", hidden_act, ACTIVATIONS)
    _check_name("normalization", model.normalization, NORMALIZATIONS)
    gated = family.gated or hidden_act == "fusedswiglu"
    kv_heads = model.num_key_value_heads or model.num_attention_heads
    _check_heads(model, kv_heads)
    size = model.vocab_size or vocab_size
    if size is None:
        raise ConfigError("is not known without a tokenizer", field="model.vocab_size", fix="write it, or a tokenizer")
    if vocab_size is not None and size < vocab_size:
        raise ConfigError(
            f"{size} is smaller than the tokenizer's vocabulary of {vocab_size}: some token ids have no embedding",
            field="model.vocab_size",
            fix=f"write {vocab_size} or more, or remove the field",
        )
    positions = model.max_position_embeddings or model.seq_length
    if positions < model.seq_length:
        raise ConfigError(
            f"{positions} is less than model.seq_length {model.seq_length}",
            field="model.max_position_embeddings",
            fix=f"write {model.seq_length} or more, or remove the field",
        )
    return ModelSpec(
        family=family.name,
        vocab_size=size,
        seq_length=model.seq_length,
        max_positions=positions,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size or _default_intermediate(model.hidden_size, gated),
        num_layers=model.num_hidden_layers,
        num_heads=model.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        normalization=model.normalization,
        fused_norm=model.fused_norm,
        norm_eps=family.norm_eps if model.layer_norm_epsilon is None else model.layer_norm_epsilon,
        hidden_act=hidden_act,
        gated=gated,
        tied=model.tie_word_embeddings,
        rope_theta=model.rope_theta,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        initializer_range=model.initializer_range,
    )


def _family(model: ModelConfig) -> Family:
    family = FAMILIES.get(model.model_type)
    if family is None:
        raise ConfigError(
            f"{model.model_type!r} is not a known model type",
            field="model.model_type",
            fix="write one of: " + ", ".join(sorted(FAMILIES)),
        )
    names = [model.architectures] if isinstance(model.architectures, str) else (model.architectures or [])
    if any(name != family.architecture for name in names):
        raise ConfigError(
            f"{', '.join(names)} does not belong to model_type {family.name}",
            field="model.architectures",
            fix=f"write {family.architecture}, or remove the field",
        )
    return family


def _check_name(field: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{name!r} is not known", field=f"model.{field}", fix=f"write one of: {', '.join(known)}")


def _check_heads(model: ModelConfig, kv_heads: int) -> None:
    heads = model.num_attention_heads
    if heads % kv_heads:
        raise ConfigError(
            f"{kv_heads} key-value heads do not divide {heads} attention heads",
            field="model.num_key_value_heads",
            fix="write one of: " + ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0),
        )
    if model.head_dim is None and model.hidden_size % heads:
        lower = model.hidden_size // heads * heads
        near = " or ".join(str(size) for size in (lower, lower + heads) if size)
        raise ConfigError(
            f"{heads} heads do not divide hidden_size {model.hidden_size}",
            field="model.num_attention_heads",
            fix=f"write head_dim, or a hidden_size of {near}",
        )
    head_dim = model.head_dim or model.hidden_size // heads
    if head_dim % 2:
        raise ConfigError(
            f"rotary position embedding turns pairs of features, but a head has {head_dim}",
            field="model.head_dim",
            fix=f"write an even head_dim such as {head_dim + 1}",
        )


def _default_intermediate(hidden_size: int, gated: bool) -> int:
    """8/3 of the hidden size, rounded up to 64, makes a gated MLP as large as an ungated one of 4x (Shazeer 2020)."""
    return 64 * math.ceil(8 * hidden_size / 3 / 64) if gated else 4 * hidden_size


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in the decoder's own order; a tied head is not listed twice."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        shapes |= _norm_shapes(prefix + "input_layernorm", spec)
        shapes[prefix + "self_attn.q_proj.weight"] = (queries, spec.hidden_size)
        shapes[prefix + "self_attn.k_proj.weight"] = (keys, spec.hidden_size)
        shapes[prefix + "self_attn.v_proj.weight"] = (keys, spec.hidden_size)
        shapes[prefix + "self_attn.o_proj.weight"] = (spec.hidden_size, queries)
        shapes |= _norm_shapes(prefix + "post_attention_layernorm", spec)
        if spec.gated:
            shapes[prefix + "mlp.gate_proj.weight"] = (spec.intermediate_size, spec.hidden_size)
        shapes[prefix + "mlp.up_proj.weight"] = (spec.intermediate_size, spec.hidden_size)
        shapes[prefix + "mlp.down_proj.weight"] = (spec.hidden_size, spec.intermediate_size)
    shapes |= _norm_shapes("norm", spec)
    if not spec.tied:
        shapes["loss_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _norm_shapes(name: str, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shape: tuple[int, ...] = (spec.hidden_size,)
    bias = {f"{name}.bias": shape} if spec.normalization == "LayerNorm" else {}
    return {f"{name}.weight": shape} | bias


def parameter_count(spec: ModelSpec) -> int:
    """Number of trained numbers; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(spec).values())


def flops_per_token(spec: ModelSpec, context: float) -> float:
    """Training FLOPs of one token: 6 per matrix-product weight, plus attention over `context` earlier tokens.

    Forward is 2 FLOPs a weight, backward twice that (Kaplan et al. 2020, section 2.1). Scores and their product with
    the values are 2 x 2 x heads x head_dim x context forward, three times that with the backward. The embedding look-up
    costs nothing; the head is a matrix product whether tied or not.

    Args:
        context: mean number of positions a token attends to; (row + 1) / 2 for a causal row.
    """
    weights = spec.hidden_size * spec.vocab_size
    for name, shape in parameter_shapes(spec).items():
        if len(shape) == 2 and name.startswith("layers."):
            weights += math.prod(shape)
    attention = 12 * spec.num_layers * spec.num_heads * spec.head_dim * context
    return 6 * weights + attention
