"""Model families: `model_type` -> fields, defaults, parameter shapes and FLOP counts. Imports no torch.

A `ModelSpec` is the resolved `model` section: every number that a decoder needs and nothing left to infer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.config.kinds import ACTIVATION_ALIASES
from samestep.config.schema import ModelConfig, RopeScalingConfig
from samestep.errors import ConfigError

_DENSE = {"router_dense_type": "only a mixture of experts has a router, and this model is dense"}
_LEARNED = "its positions are learned, not rotary"


@dataclass(frozen=True)
class Family:
    """What sets one `model_type` apart from the others.

    Attributes:
        architecture: class name in a Hugging Face configuration.
        attention_bias, mlp_bias, qk_layernorm, tied: where the `model` section says null.
        output_bias: whether attention biases include that of the output projection.
        learned_positions: a table of positions added to the embedding, instead of rotary positions.
        without_effect: fields of the `model` section that this family cannot use -> why; setting one is an error.
    """

    name: str
    architecture: str
    hidden_act: str = "silu"
    gated: bool = True
    normalization: str = "RMSNorm"
    norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = True
    mlp_bias: bool = False
    qk_layernorm: bool = False
    learned_positions: bool = False
    without_effect: Mapping[str, str] = field(default_factory=lambda: _DENSE)

    @property
    def position_embedding_type(self) -> str:
        return "learned_absolute" if self.learned_positions else "rope"


ACTIVATIONS = ("gelu", "silu", "fusedswiglu", "gelu_tanh")
NORMALIZATIONS = ("RMSNorm", "LayerNorm")

FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("qwen2", "Qwen2ForCausalLM", norm_eps=1e-6, attention_bias=True, output_bias=False),
        Family("qwen3", "Qwen3ForCausalLM", norm_eps=1e-6, qk_layernorm=True),
        Family("mistral", "MistralForCausalLM"),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            hidden_act="gelu_tanh",
            gated=False,
            normalization="LayerNorm",
            tied=True,
            attention_bias=True,
            mlp_bias=True,
            learned_positions=True,
            without_effect=_DENSE
            | {
                "rope_theta": _LEARNED,
                "rope_scaling": _LEARNED,
                "rotary_dtype": _LEARNED,
                "sliding_window": "its attention sees all tokens before",
                "qk_layernorm": "it does not normalize queries and keys",
            },
        ),
    )
}


@dataclass(frozen=True)
class RopeScaling:
    """Resolved `model.rope_scaling`; what `type` does not use has no meaning. See `ops.rope` for the formulas."""

    type: str
    factor: float
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


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
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_layernorm: bool = False
    learned_positions: bool = False
    sliding_window: int | None = None
    rope_scaling: RopeScaling | None = None


def resolve_model(model: ModelConfig, vocab_size: int | None = None) -> ModelSpec:
    """Resolve the `model` section.

    Args:
        model: the section as the user wrote it.
        vocab_size: the tokenizer's size, used where `model.vocab_size` is not given.

    Raises:
        ConfigError: a family that is not known, fields without effect for it, or sizes that do not fit together.
    """
    family = _family(model)
    for name, why in sorted(family.without_effect.items()):
        # Not model_fields_set: a resolved file writes every field, and must load again.
        if getattr(model, name) != ModelConfig.model_fields[name].default:
            raise ConfigError(
                f"has no effect for model_type {family.name}: {why}", field=f"model.{name}", fix="remove it"
            )
    hidden_act = (model.hidden_act or family.hidden_act).lower()
    hidden_act = ACTIVATION_ALIASES.get(hidden_act, hidden_act)
    _check_name("hidden_act", hidden_act, ACTIVATIONS)
    normalization = family.normalization if model.normalization is None else model.normalization
    _check_name("normalization", normalization, NORMALIZATIONS)
    if model.position_embedding_type is not None:
        _check_name("position_embedding_type", model.position_embedding_type, (family.position_embedding_type,))
    gated = family.gated or hidden_act == "fusedswiglu"
    kv_heads = model.num_key_value_heads or model.num_attention_heads
    _check_heads(model, kv_heads, rotary=not family.learned_positions)
    attention_bias = _own_or_family(model.attention_bias, family.attention_bias)
    size = model.vocab_size or vocab_size
    if size is None:
        raise ConfigError("is not known without a tokenizer", field="model.vocab_size", fix="write it, or a tokenizer")
    if vocab_size is not None and size < vocab_size:
        raise ConfigError(
            f"{size} is smaller than the tokenizer's vocabulary of {vocab_size}: some token ids have no embedding",
            field="model.vocab_size",
            fix="use the tokenizer of the pretrained weights: remove the section `tokenizer`"
            if model.pretrained
            else f"write {vocab_size} or more, or remove the field",
        )
    positions = model.max_position_embeddings or model.seq_length
    if positions < model.seq_length:
        raise ConfigError(
            f"{positions} is less than model.seq_length {model.seq_length}",
            field="model.seq_length" if model.pretrained else "model.max_position_embeddings",
            fix=f"write model.seq_length: {positions} or less"
            if model.pretrained
            else f"write {model.seq_length} or more, or remove the field",
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
        normalization=normalization,
        fused_norm=model.fused_norm,
        norm_eps=family.norm_eps if model.layer_norm_epsilon is None else model.layer_norm_epsilon,
        hidden_act=hidden_act,
        gated=gated,
        tied=_own_or_family(model.tie_word_embeddings, family.tied),
        rope_theta=model.rope_theta,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        initializer_range=model.initializer_range,
        attention_bias=attention_bias,
        output_bias=attention_bias and family.output_bias,
        mlp_bias=_own_or_family(model.mlp_bias, family.mlp_bias),
        qk_layernorm=_own_or_family(model.qk_layernorm, family.qk_layernorm),
        learned_positions=family.learned_positions,
        sliding_window=model.sliding_window,
        rope_scaling=_rope_scaling(model.rope_scaling, positions),
    )


def _own_or_family(own: bool | None, family: bool) -> bool:
    return family if own is None else own


_SCALING_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
        }
    ),
}
"""Fields that each `model.rope_scaling.type` uses."""


def _rope_scaling(config: RopeScalingConfig, positions: int) -> RopeScaling | None:
    """Resolve `model.rope_scaling` of a model with `positions` positions; None where nothing is scaled.

    Raises:
        ConfigError: a field that the type needs is missing, or one that it does not use is set.
    """
    used = _SCALING_FIELDS[config.type]
    for name in type(config).model_fields:
        if name != "type" and name not in used and getattr(config, name) is not None:
            raise _scaling_error(name, f"has no effect for rope_scaling.type {config.type}", "remove it")
    if config.type == "default":
        return None
    original = config.original_max_position_embeddings
    if original is None and "original_max_position_embeddings" in used:
        raise _scaling_error(
            "original_max_position_embeddings",
            f"is needed for rope_scaling.type {config.type}",
            "write the number of positions that the model was first trained with",
        )
    factor = config.factor
    if factor is None and (config.type != "yarn" or original is None):
        raise _scaling_error("factor", f"is needed for rope_scaling.type {config.type}", "write a number >= 1")
    if factor is None:
        assert original is not None
        factor = max(1.0, positions / original)
    low, high = config.low_freq_factor or 1.0, config.high_freq_factor or 4.0
    if low >= high:
        raise _scaling_error(
            "low_freq_factor", f"{low} is not below high_freq_factor {high}", f"write less than {high}"
        )
    return RopeScaling(
        type=config.type,
        factor=factor,
        original_positions=original or 0,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=config.beta_fast or 32.0,
        beta_slow=config.beta_slow or 1.0,
        attention_factor=_attention_factor(config, factor) if config.type == "yarn" else 1.0,
    )


def _attention_factor(config: RopeScalingConfig, factor: float) -> float:
    """The root of yarn's 1 / temperature (Peng et al. 2023, eq. 22), or a ratio of two (DeepSeek-V3)."""
    given = config.mscale is not None, config.mscale_all_dim is not None
    if given[0] != given[1]:
        name, other = ("mscale", "mscale_all_dim") if given[0] else ("mscale_all_dim", "mscale")
        raise _scaling_error(name, f"has no effect without {other}", f"write {other} too, or remove it")
    if config.attention_factor is not None:
        if config.mscale is not None:
            raise _scaling_error("mscale", "has no effect beside attention_factor", "keep one of the two")
        return config.attention_factor

    def root(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if config.mscale is not None and config.mscale_all_dim is not None:
        return root(config.mscale) / root(config.mscale_all_dim)
    return root(1.0)


def _scaling_error(name: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(reason, field=f"model.rope_scaling.{name}", fix=fix)


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


def _check_heads(model: ModelConfig, kv_heads: int, rotary: bool) -> None:
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
    if rotary and head_dim % 2:
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
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab_size, hidden)}
    if spec.learned_positions:
        shapes["embed_positions.weight"] = (spec.max_positions, hidden)
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        shapes |= _norm_shapes(prefix + "input_layernorm", hidden, spec)
        shapes |= _attention_shapes(prefix + "self_attn.", spec)
        shapes |= _norm_shapes(prefix + "post_attention_layernorm", hidden, spec)
        for name, outputs, inputs in (
            *([("gate_proj", spec.intermediate_size, hidden)] if spec.gated else []),
            ("up_proj", spec.intermediate_size, hidden),
            ("down_proj", hidden, spec.intermediate_size),
        ):
            shapes |= _linear_shapes(f"{prefix}mlp.{name}", outputs, inputs, spec.mlp_bias)
    shapes |= _norm_shapes("norm", hidden, spec)
    if not spec.tied:
        shapes["loss_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _attention_shapes(prefix: str, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = (
        _linear_shapes(prefix + "q_proj", queries, hidden, spec.attention_bias)
        | _linear_shapes(prefix + "k_proj", keys, hidden, spec.attention_bias)
        | _linear_shapes(prefix + "v_proj", keys, hidden, spec.attention_bias)
        | _linear_shapes(prefix + "o_proj", hidden, queries, spec.output_bias)
    )
    if spec.qk_layernorm:
        shapes |= _norm_shapes(prefix + "q_norm", spec.head_dim, spec)
        shapes |= _norm_shapes(prefix + "k_norm", spec.head_dim, spec)
    return shapes


def _linear_shapes(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    return weight | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm_shapes(name: str, size: int, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shape: tuple[int, ...] = (size,)
    bias = {f"{name}.bias": shape} if spec.normalization == "LayerNorm" else {}
    return {f"{name}.weight": shape} | bias


def parameter_count(spec: ModelSpec) -> int:
    """Number of trained numbers; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(spec).values())


def attended(length: int, sliding_window: int | None) -> int:
    """Positions that the tokens of one causal row see, each itself included, summed over the row."""
    seen = length if sliding_window is None else min(length, sliding_window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def flops_per_token(spec: ModelSpec, context: float) -> float:
    """Training FLOPs of one token: 6 per matrix-product weight, plus attention over `context` earlier tokens.

    Forward is 2 FLOPs a weight, backward twice that (Kaplan et al. 2020, section 2.1). Scores and their product with
    the values are 2 x 2 x heads x head_dim x context forward, three times that with the backward. The embedding look-up
    costs nothing; the head is a matrix product whether tied or not.

    Args:
        context: mean number of positions a token attends to; `attended(row) / row` for a causal row.
    """
    weights = spec.hidden_size * spec.vocab_size
    for name, shape in parameter_shapes(spec).items():
        if len(shape) == 2 and name.startswith("layers."):
            weights += math.prod(shape)
    attention = 12 * spec.num_layers * spec.num_heads * spec.head_dim * context
    return 6 * weights + attention
