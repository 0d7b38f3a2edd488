"""Weights and configuration to and from Hugging Face checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from samestep.config.huggingface import ROPE_KEYS, spec_from_hf
from samestep.config.schema import ModelConfig
from samestep.errors import CheckpointError, ConfigError
from samestep.families import FAMILIES, ModelSpec, RopeScaling, parameter_shapes, resolve_model

_HEAD = "loss_head.weight"
_HF_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"

# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HfPlace:
    """Where a Hugging Face checkpoint keeps one of our parameters.

    Attributes:
        transposed: a matrix stored as [inputs, outputs].
        first: first output of ours within a tensor that several parameters share, in the order of `parameter_shapes`;
            None where the tensor is ours alone.
    """

    name: str
    transposed: bool = False
    first: int | None = None


_GPT2_NAMES = {
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")
_ROPE_BUFFER = "rotary_emb.inv_freq"


def hf_place(name: str, spec: ModelSpec) -> HfPlace:
    """Where a Hugging Face checkpoint of the spec's family keeps the parameter `name`."""
    if name == _HEAD:
        return HfPlace(_HF_HEAD)
    return _gpt2_place(name, spec) if spec.family == "gpt2" else HfPlace(f"model.{name}")


def _gpt2_place(name: str, spec: ModelSpec) -> HfPlace:
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"transformer.h.{layer}."
    theirs = _GPT2_NAMES.get(module)
    if theirs is None:
        raise CheckpointError(
            f"{name} has no place in a Hugging Face gpt2 checkpoint\n  fix: use an ungated model.hidden_act"
        )
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    firsts = {"self_attn.q_proj": 0, "self_attn.k_proj": queries, "self_attn.v_proj": queries + keys}
    projection = module.endswith("_proj")
    return HfPlace(f"{prefix}{theirs}.{kind}", projection and kind == "weight", firsts.get(module))


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face checkpoint of this model; a tied head is not listed."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        place = hf_place(name, spec)
        if place.first:  # grows the tensor by the parameters after the first
            shape = (place.first + shape[0], *shape[1:])
        shapes[place.name] = shape
    transposed = {place.name for place in (hf_place(n, spec) for n in parameter_shapes(spec)) if place.transposed}
    return {name: shape[::-1] if name in transposed else shape for name, shape in shapes.items()}


def from_hf(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Tensors of a Hugging Face causal language model under our names and in our shapes, not copied.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape, or a head differs from the embedding
            that it is tied to; the message names it.
    """
    found = _without_buffers(tensors, spec)
    head = found.pop(_HF_HEAD, None) if spec.tied else None
    check_tensors({name: tuple(tensor.shape) for name, tensor in found.items()}, hf_shapes(spec))
    embedding = hf_place(_EMBEDDING, spec).name
    if head is not None and not torch.equal(head, found[embedding].to(head.dtype)):
        raise CheckpointError(
            f"the given weights: {_HF_HEAD} differs from {embedding}, but the model ties them\n"
            "  fix: set model.tie_word_embeddings to false"
        )
    own = {}
    for name, shape in parameter_shapes(spec).items():
        place = hf_place(name, spec)
        tensor = found[place.name].T if place.transposed else found[place.name]
        own[name] = tensor if place.first is None else tensor.narrow(0, place.first, shape[0])
    return own


def _without_buffers(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Without what older checkpoints hold besides weights, and gpt2's prefix where the bare model was saved."""
    if spec.family != "gpt2":
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(_ROPE_BUFFER)}
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(_GPT2_BUFFERS)}
    if any(name.startswith("transformer.") for name in found):
        return found
    return {name if name == _HF_HEAD else f"transformer.{name}": tensor for name, tensor in found.items()}


def to_hf(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Our tensors under Hugging Face's names and in its shapes.

    Give them as `named_parameters` does, without a second name for a tied head: `save_pretrained` leaves it out too.
    """
    parts: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        place = hf_place(name, spec)
        parts[place.name].append((place.first or 0, tensor.T if place.transposed else tensor))
    joined = {}
    for name, shared in parts.items():
        ordered = [tensor for _, tensor in sorted(shared, key=lambda part: part[0])]
        joined[name] = torch.cat(ordered, -1) if len(ordered) > 1 else ordered[0].contiguous()
    return joined


def check_tensors(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str = "the given weights"
) -> None:
    """Raise CheckpointError unless both name the same tensors with the same shapes."""
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        parts = [
            f"{title}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for title, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointError(f"{where}: tensors do not match the model; " + "; ".join(parts))
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(f"{where}: {name} has shape {list(found[name])}, but the model needs {list(shape)}")


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------

_CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "hidden_act": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_range",
}
_GPT2_CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "attention_dropout": "attn_pdrop",
    "initializer_range": "initializer_range",
}
"""Attribute of a spec -> key of a `config.json`."""

_FAMILY_KEYS = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "mistral": ("sliding_window",),
}
"""Keys that are called as the attributes are, and that only these families have."""
_FIELD_NAMES = {"gated": "hidden_act", "output_bias": "attention_bias", "learned_positions": "position_embedding_type"}
"""Attribute of a spec -> field of the `model` section that decides it, where no key of a `config.json` does."""


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a model: its architecture, without token ids and dtype.

    `spec_from_hf` reads the same model from it, but for what only training or speed depends on: `seq_length`,
    `fused_norm`, and `hidden_dropout` outside of gpt2.

    Raises:
        ConfigError: `transformers` has no such model; names the field.
    """
    names = _GPT2_CONFIG_NAMES if spec.family == "gpt2" else _CONFIG_NAMES
    config: dict[str, Any] = {"architectures": [FAMILIES[spec.family].architecture], "model_type": spec.family}
    config |= {theirs: getattr(spec, own) for own, theirs in names.items()}
    config |= {key: getattr(spec, key) for key in _FAMILY_KEYS.get(spec.family, ())}
    config[names["hidden_act"]] = _hf_activation(spec)
    if spec.family == "gpt2":
        config |= {"embd_pdrop": spec.hidden_dropout, "resid_pdrop": spec.hidden_dropout}
    else:
        config["rope_theta"] = spec.rope_theta
        if spec.rope_scaling is not None:
            config |= _hf_scaling(spec.rope_scaling)
    if spec.family in ("qwen2", "qwen3") and spec.sliding_window is not None:
        config |= {"use_sliding_window": True, "sliding_window": spec.sliding_window, "max_window_layers": 0}
    _check_same(spec, resolve_model(ModelConfig(seq_length=1, **spec_from_hf(config))))
    return config


def _hf_activation(spec: ModelSpec) -> str:
    tanh = "gelu_new" if spec.family == "gpt2" else "gelu_pytorch_tanh"
    return {"fusedswiglu": "silu", "gelu_tanh": tanh}.get(spec.hidden_act, spec.hidden_act)


def _hf_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Keys of a `config.json`; `dynamic` counts positions as before the scaling."""
    values = {key: getattr(scaling, key) for key in ROPE_KEYS[scaling.type]}
    if scaling.type == "dynamic":
        return {
            "max_position_embeddings": scaling.original_positions,
            "rope_scaling": {"rope_type": scaling.type, **values},
        }
    if scaling.type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_positions
    return {"rope_scaling": {"rope_type": scaling.type, **values}}


def _check_same(spec: ModelSpec, theirs: ModelSpec) -> None:
    """What `transformers` makes of a written configuration is the model that was meant."""
    own = replace(
        spec,
        seq_length=theirs.seq_length,
        fused_norm=theirs.fused_norm,
        hidden_act="silu" if spec.hidden_act == "fusedswiglu" else spec.hidden_act,
    )
    if spec.family != "gpt2":
        own = replace(own, hidden_dropout=theirs.hidden_dropout)
    if spec.rope_scaling is not None and spec.rope_scaling.type == "dynamic":
        own = replace(own, max_positions=theirs.max_positions)  # there it has no limit
    for attribute in (field.name for field in fields(ModelSpec)):
        wanted, got = getattr(own, attribute), getattr(theirs, attribute)
        if wanted != got:
            raise ConfigError(
                f"a Hugging Face {spec.family} has {attribute} {got}, but this model has {wanted}: it cannot be "
                "written as a Hugging Face folder",
                field=f"model.{_FIELD_NAMES.get(attribute) or _CONFIG_NAMES.get(attribute, attribute)}",
                fix="train without that field, or with another model_type that has it",
            )
