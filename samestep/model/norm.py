"""The normalization of a model."""

from __future__ import annotations

from torch import nn

from samestep.families import ModelSpec
from samestep.ops import Precision, get_norm_cls


def make_norm(spec: ModelSpec, precision: Precision, size: int | None = None) -> nn.Module:
    """The spec's norm over the last `size` features; None: the hidden size."""
    norm = get_norm_cls(spec.normalization, spec.fused_norm)
    return norm(
        size or spec.hidden_size, eps=spec.norm_eps, compute_dtype=precision.layernorm, params_dtype=precision.params
    )
