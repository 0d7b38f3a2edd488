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


_FORWARDS: dict[type[nn.Module], object] = {
    kind: kind.forward for kind in (Attention, AttentionCore, FeedForward, Linear, FusedRMSNorm, SiLU)
}
_PROJECT = Attention.project


def attend(norm: nn.Module, attention: Attention, x_BSC: torch.Tensor, context: Context) -> torch.Tensor | None:
    """`x + attention(norm(x))`, to the same bits; None where it must be computed part by part."""
    if not _is_known(Attention, attention) or not _is_known(AttentionCore, attention.attention_core):
        return None
    core = attention.attention_core
    head_norms: list[nn.Module] = [m for m in (attention.q_norm, attention.k_norm) if m is not None]
    linears, norms = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj], [norm, *head_norms]
    if getattr(attention.project, "__func__", None) is not _PROJECT or len(head_norms) == 1:
        return None
    if context.rope is None or context.rope_ids is None or context.cache is not None:
        return None
    if core.softmax_dtype is not torch.float32 or (core.dropout and context.token_keys is not None):
        return None
    if not _are_float32(linears, norms) or not _may_run_as_one(context, [attention, core, *linears, *norms]):
        return None
    first, *others = _norms(norms)
    rotary, projections = Rotary(*context.rope, context.rope_ids), _projections(linears)
    return attention_block(x_BSC, first, projections, others, rotary, attention.head_dim, context.spans, core.window)


def feed(norm: nn.Module, mlp: FeedForward, x_BSC: torch.Tensor, context: Context) -> torch.Tensor | None:
    """`x + mlp(norm(x))`, to the same bits; None where it must be computed part by part."""
    if not _is_known(FeedForward, mlp) or mlp.gate_proj is None or not _is_known(SiLU, mlp.activation):
        return None
    linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not _are_float32(linears, [norm]) or not _may_run_as_one(context, [norm, mlp, mlp.activation, *linears]):
        return None
    return feed_forward_block(x_BSC, _norms([norm])[0], _projections(linears))


def _is_known(kind: type[nn.Module], module: nn.Module) -> bool:
    """Whether a module is of this very class, which is as it was written: the operators stand for that."""
    return type(module) is kind and kind.forward is _FORWARDS[kind]


def _are_float32(linears: Sequence[nn.Module], norms: Sequence[nn.Module]) -> bool:
    found = [*(_is_known(Linear, m) for m in linears), *(_is_known(FusedRMSNorm, m) for m in norms)]
    return all(found) and all(m.compute_dtype is torch.float32 for m in (*linears, *norms))


def _may_run_as_one(context: Context, modules: Sequence[nn.Module]) -> bool:
    return all(map(is_plain_call, modules)) if context.runs_as_one is None else context.runs_as_one


def _projections(linears: Sequence[Linear]) -> list[Projection]:
    return [Projection(m.weight, m.bias) for m in linears]


def _norms(modules: Sequence[nn.Module]) -> list[Norm]:
    return [Norm(m.weight, m.eps) for m in cast(Sequence[FusedRMSNorm], modules)]
