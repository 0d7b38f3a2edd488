"""Which parts of which layers are computed again in the backward pass. Imports no torch."""

from __future__ import annotations

import re

from samestep.config.kinds import layer_numbers
from samestep.config.schema import RecomputeConfig
from samestep.errors import ConfigError

WHOLE = ""
"""Name of a layer inside itself."""
MODULES = ("input_layernorm", "self_attn", "self_attn.attention_core", "post_attention_layernorm", "mlp")
"""Parts of a layer that can be chosen. A linear layer keeps nothing but its input: to choose it would save nothing."""


def recomputed_modules(recompute: RecomputeConfig, layers: int) -> list[tuple[str, ...]]:
    """Of each layer the modules to recompute, none of them inside another.

    Raises:
        ConfigError: a layer that the model has not, or a pattern that is no module's name.
    """
    if recompute.mode == "None":
        return [()] * layers
    whole = recompute.full_recompute_layer
    if whole is not None:
        chosen = set(_layers(whole, layers, "full_recompute_layer"))
    else:
        chosen = set(range(layers)) if recompute.mode == "full" else set()
    selected: list[set[str]] = [set() for _ in range(layers)]
    if recompute.mode == "select":
        for pattern, ranges in (recompute.select_module or {}).items():
            for layer in _layers(ranges, layers, "select_module"):
                selected[layer].update(_matching(pattern))
    return [(WHOLE,) if layer in chosen else _outermost(names) for layer, names in enumerate(selected)]


def _layers(ranges: list[str], layers: int, field: str) -> list[int]:
    numbers = layer_numbers(ranges)
    if numbers[-1] >= layers:
        raise ConfigError(
            f"there is no layer {numbers[-1]} in a model of {layers}",
            field=f"recompute.{field}",
            fix=f"write layers from 0 to {layers - 1}",
        )
    return numbers


def _matching(pattern: str) -> list[str]:
    names = [name for name in MODULES if re.fullmatch(pattern, name)]
    if not names:
        raise ConfigError(
            f"`{pattern}` is no module of a layer that can be recomputed",
            field="recompute.select_module",
            fix=f"write one of {', '.join(MODULES)}, or a regular expression that matches some of them",
        )
    return names


def _outermost(names: set[str]) -> tuple[str, ...]:
    return tuple(name for name in MODULES if name in names and name.rpartition(".")[0] not in names)
