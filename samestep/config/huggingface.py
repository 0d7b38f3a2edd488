"""A Hugging Face `config.json` as fields of the `model` section. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.errors import ConfigError

_NEEDED = object()
_COMMON: dict[str, Any] = {
    "vocab_size": _NEEDED,
    "hidden_size": _NEEDED,
    "intermediate_size": _NEEDED,
    "num_hidden_layers": _NEEDED,
    "num_attention_heads": _NEEDED,
    "max_position_embeddings": _NEEDED,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
    "head_dim": None,
}
_HF_FIELDS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"attention_bias": False, "mlp_bias": False},
    "qwen2": _COMMON | {"num_key_value_heads": 32},
    "qwen3": _COMMON | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "mistral": _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
    "gpt2": {
        "vocab_size": _NEEDED,
        "n_embd": _NEEDED,
        "n_layer": _NEEDED,
        "n_head": _NEEDED,
        "n_positions": _NEEDED,
        "n_inner": None,
        "activation_function": "gelu_new",
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
}
"""Family -> the keys of its `config.json` that are read, with what transformers takes where a key is left out."""

_OWN_NAMES = {
    "rms_norm_eps": "layer_norm_epsilon",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "attn_pdrop": "attention_dropout",
}
_MUST_BE: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}
"""Keys of a `config.json` that would change the numbers -> the only value that exists here."""


def spec_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face `config.json` as fields of the `model` section, all but `seq_length`.

    A key that is left out has the value that `transformers` gives it. Both forms of rotary settings are read:
    `rope_parameters`, and `rope_theta` with `rope_scaling`.

    Raises:
        ConfigError: a model type that is not known, a key that is missing, or a feature that does not exist here.
    """
    family = config.get("model_type")
    if family not in _HF_FIELDS:
        raise _hf_error("model_type", f"{family!r} is not known", "use a checkpoint of: " + ", ".join(_HF_FIELDS))
    for key, only in _MUST_BE.items():
        if config.get(key, only) not in (only, None):
            raise _hf_error(key, f"{config[key]!r} is not available", "use a checkpoint without it")
    fields: dict[str, Any] = {"model_type": family}
    for key, default in _HF_FIELDS[family].items():
        value = config.get(key, default)
        if default is _NEEDED and not isinstance(value, int):
            reason = "is missing" if value in (_NEEDED, None) else f"{value!r} is no whole number"
            raise _hf_error(key, reason, "use the config.json that came with the weights")
        fields[_OWN_NAMES.get(key, key)] = value
    if family == "gpt2":
        return fields | {"hidden_dropout": _gpt2_dropout(config)}
    if family in ("qwen2", "qwen3"):
        fields["sliding_window"] = _qwen_window(config, fields["num_hidden_layers"])
    return fields | _rope_fields(config, fields)


def _gpt2_dropout(config: Mapping[str, Any]) -> float:
    embedding, residual = config.get("embd_pdrop", 0.1), config.get("resid_pdrop", 0.1)
    if embedding != residual:
        raise _hf_error("embd_pdrop", f"{embedding} differs from resid_pdrop {residual}", "write the same for both")
    return residual


def _qwen_window(config: Mapping[str, Any], layers: int) -> int | None:
    """Which layers have the window is a setting there; here all have it or none."""
    if not config.get("use_sliding_window", False):
        return None
    kinds = config.get("layer_types")
    if kinds is None:
        full = max(0, min(config.get("max_window_layers", 28), layers))
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if len(set(kinds)) > 1:
        raise _hf_error("max_window_layers", "a window in some of the layers is not available", "use it in all or none")
    return config.get("sliding_window", 4096) if "sliding_attention" in kinds else None


ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
}
"""Keys of each kind of scaling that are taken as they are; transformers ignores the others."""


def _rope_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise _hf_error("rope_type", f"{kind!r} is not available", "use one of: " + ", ".join(ROPE_KEYS))
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise _hf_error("partial_rotary_factor", "is not available", "use a checkpoint without it")
    if kind == "yarn" and not rope.get("truncate", True):
        raise _hf_error("truncate", "false is not available for yarn", "use a checkpoint without it")
    scaling = {key: rope[key] for key in ROPE_KEYS[kind] if rope.get(key) is not None}
    # transformers lets both act only together, and only where nothing else decides.
    if kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim") and "attention_factor" not in scaling:
        scaling |= {"mscale": rope["mscale"], "mscale_all_dim": rope["mscale_all_dim"]}
    positions = fields["max_position_embeddings"]
    result: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": {"type": kind, **scaling}}
    if kind == "dynamic":
        # There the number of positions is the original one, and longer rows are allowed.
        result["rope_scaling"]["original_max_position_embeddings"] = positions
        result["max_position_embeddings"] = int(positions * scaling.get("factor", 1))
    elif kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        result["rope_scaling"]["original_max_position_embeddings"] = original or positions
    return result


def _hf_error(key: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(reason, field=key, where="config.json", fix=fix)
