"""The fused operators. Each has a plain twin named `reference_...` (norms: the class without `Fused`)."""

from samestep.ops.activation import (
    ACTIVATION_MAP,
    GELU,
    FusedSwiGlu,
    SiLU,
    get_activation,
    reference_gelu,
    reference_silu,
    reference_swiglu,
    swiglu,
)
from samestep.ops.attention import attention, reference_attention
from samestep.ops.cross_entropy import linear_cross_entropy, logits, reference_linear_cross_entropy
from samestep.ops.dropout import attention_dropout_mask, dropout, dropout_mask, random_key, token_keys
from samestep.ops.embedding import embedding
from samestep.ops.norm import FusedLayerNorm, FusedRMSNorm, LayerNorm, RMSNorm, get_norm_cls
from samestep.ops.precision import Precision, has_native_matmul, linear, parse_dtype, reference_linear, wide
from samestep.ops.rope import apply_rope, dynamic_rope_tables, prepare_rope, reference_rope, rope_rows, rope_tables

__all__ = [
    "ACTIVATION_MAP",
    "GELU",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "FusedSwiGlu",
    "LayerNorm",
    "Precision",
    "RMSNorm",
    "SiLU",
    "apply_rope",
    "attention",
    "attention_dropout_mask",
    "dropout",
    "dropout_mask",
    "dynamic_rope_tables",
    "embedding",
    "get_activation",
    "get_norm_cls",
    "has_native_matmul",
    "linear",
    "linear_cross_entropy",
    "logits",
    "parse_dtype",
    "prepare_rope",
    "random_key",
    "reference_attention",
    "reference_gelu",
    "reference_linear",
    "reference_linear_cross_entropy",
    "reference_rope",
    "reference_silu",
    "reference_swiglu",
    "rope_rows",
    "rope_tables",
    "swiglu",
    "token_keys",
    "wide",
]
