"""Where a half of a decoder layer may run as one operator (`ops.block`): while nobody watches or replaces its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from samestep.model.attention import Attention, AttentionCore, Context
from samestep.model.feed_forward import FeedForward
from samestep.model.linear import Linear
from samestep.ops import FusedRMSNorm, SiLU
from samestep.ops.block import Norm, Projection, Rotary, attention_block, feed_forward_block
from samestep.torch_private import is_plain_call


def are_watched(layer: nn.Module) -> bool:
    """Whether calling some part of a layer runs more than its own `forward`."""
    return not all(is_plain_call(module) for module in layer.modules() if module is not layer)


def attend(norm: nn.Module, attention: Attention, x_BSC: torch.Tensor, context: Context) -> torch.Tensor | None:
    """`x + attention(norm(x))`, to the same bits; None where it must be computed part by part."""
    core, drops = attention.attention_core, context.token_keys is not None
    if context.rope is None or context.rope_ids is None or context.cache is not None or (drops and core.dropout):
        return None
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    norms = [norm, *(m for m in (attention.q_norm, attention.k_norm) if m is not None)]
    if type(attention) is not Attention or type(core) is not AttentionCore or "project" in vars(attention):
        return None
    if core.softmax_dtype is not torch.float32 or not _are_float32(linears, norms):
        return None
    if not _may_run_as_one(context, [attention, core, *linears, *norms]):
        return None
    own, *head_norms = _norms(norms)
    rotary = Rotary(*context.rope, context.rope_ids)
    projections = _projections(linears)
    return attention_block(x_BSC, own, projections, head_norms, rotary, attention.head_dim, context.spans, core.window)


def feed(norm: nn.Module, mlp: FeedForward, x_BSC: torch.Tensor, context: Context) -> torch.Tensor | None:
    """`x + mlp(norm(x))`, to the same bits; None where it must be computed part by part."""
    if mlp.gate_proj is None or type(mlp) is not FeedForward or type(mlp.activation) is not SiLU:
        return None
    linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not _are_float32(linears, [norm]) or not _may_run_as_one(context, [norm, mlp, mlp.activation, *linears]):
        return None
    return feed_forward_block(x_BSC, _norms([norm])[0], _projections(linears))


def _are_float32(linears: Sequence[Linear], norms: Sequence[nn.Module]) -> bool:
    """Whether these are of the very classes that the operators stand for, in float32."""
    are_known = all(type(m) is Linear for m in linears) and all(type(m) is FusedRMSNorm for m in norms)
    return are_known and all(m.compute_dtype is torch.float32 for m in (*linears, *norms))


def _may_run_as_one(context: Context, modules: Sequence[nn.Module]) -> bool:
    return all(map(is_plain_call, modules)) if context.runs_as_one is None else context.runs_as_one


def _projections(linears: Sequence[Linear]) -> list[Projection]:
    return [Projection(m.weight, m.bias) for m in linears]


def _norms(modules: Sequence[nn.Module]) -> list[Norm]:
    return [Norm(m.weight, m.eps) for m in cast(Sequence[FusedRMSNorm], modules)]
