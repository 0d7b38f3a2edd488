"""The two halves of a decoder layer, each as one operator of float32 on a CPU: x + attention(norm(x)) and
x + feed_forward(norm(x)).

What they save over their parts is calls, which cost a small model as much as its arithmetic, and kept activations:
normalized rows and the product of SwiGLU are computed again by the backward pass. In that, the gradients of all weights
of a half are held at once. They run the same kernels and the same matrix products in the same order as their parts, and
so give the same bits; their twin is the layer part by part.

Shape letters: B rows, S tokens a row, N = B x S, C features, F inner features, D head dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.ops.attention import Span, as_tuples, kernels_fit, sequences_of
from samestep.ops.cpu_kernels import Sequences
from samestep.ops.dispatch import cpu_kernels_again, cpu_kernels_for, reference_ops, use_triton
from samestep.ops.first_order import first_order
from samestep.ops.norm import LARGEST_ROW

F32 = torch.float32


class Projection(NamedTuple):
    """A matrix product: weight `[O, I]`, bias `[O]` or None."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """An RMSNorm: weight `[C]`."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Tables `[P, D / 2]`, and the row of them for each token, `[B, S]`."""

    cosines: Tensor
    sines: Tensor
    position_ids: Tensor


def attention_block(
    x_BSC: Tensor,
    norm: Norm,
    projections: Sequence[Projection],
    head_norms: Sequence[Norm],
    rotary: Rotary,
    head_dim: int,
    spans: Sequence[Span] | None,
    window: int | None,
) -> Tensor | None:
    """`x + output(attention(rotary(head_norms(query, key of norm(x))), value of norm(x)))`.

    Takes float32; the dtypes of its parts are the caller's to check.

    Args:
        projections: of queries, keys, values and the output.
        head_norms: of queries and keys, over each head; empty: none.
        spans: as in `attention`.
        window: as in `attention`.

    Returns:
        `[B, S, C]`; None where the kernels do not serve these tensors, or they do not fit together: the parts know what
        to say of that.
    """
    weights = [tensor for projection in projections for tensor in projection]
    norms: Sequence[Tensor | None] = [norm.weight for norm in head_norms] or (None, None)
    tables = rotary.cosines, rotary.sines, rotary.position_ids
    heads = [len(projection.weight) // head_dim for projection in projections[:3]]
    fits = (
        _is_served(x_BSC, norm, *weights, *norms, *tables[:2])
        and kernels_fit(x_BSC.shape[1], x_BSC.shape[1], head_dim)
        and all(len(norm.weight) == head_dim for norm in head_norms)
        and all(table.shape[-1] == head_dim // 2 for table in tables[:2])
        and heads[0] % heads[1] == 0
        and (window is None or window > 0)
    )
    if not fits:
        return None
    how = _AttentionSettings(
        head_dim,
        norm.eps,
        [norm.eps for norm in head_norms],
        sequences_of(as_tuples(spans), *x_BSC.shape[:2], x_BSC.shape[1]),
        window,
    )
    return _AttentionBlock.apply(how, x_BSC, norm.weight, *norms, *tables, *weights)


@dataclass(frozen=True)
class _AttentionSettings:
    head_dim: int
    eps: float
    head_eps: Sequence[float]
    sequences: Sequences
    window: int | None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


def _is_served(x_BSC: Tensor, norm: Norm, *others: Tensor | None) -> bool:
    """Whether the kernels serve these, and no other operator would in the parts."""
    given = [x_BSC, norm.weight, *(tensor for tensor in others if tensor is not None)]
    if reference_ops() or torch.is_autocast_enabled("cpu") or use_triton(x_BSC.device, F32):
        return False
    fits = norm.weight.shape == x_BSC.shape[-1:] and x_BSC.shape[-1] <= LARGEST_ROW
    return fits and cpu_kernels_for(*given) is not None


def _without_autocast(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """A backward pass in the dtypes of the forward pass, wherever it is called."""

    @functools.wraps(backward)
    def run(ctx: Any, grad: Tensor) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return backward(ctx, grad)
        with torch.autocast("cpu", enabled=False):
            return backward(ctx, grad)

    return run


def _plus_product(x_BSC: Tensor, input_NI: Tensor, weight_CI: Tensor, bias_C: Tensor | None) -> Tensor:
    """`x + input @ weight.T + bias`, as a tensor that is no view: a hook may change it in place."""
    y_BSC = torch.empty_like(x_BSC)
    y_NC = y_BSC.view(-1, x_BSC.shape[-1])
    if bias_C is None:
        torch.mm(input_NI, weight_CI.t(), out=y_NC)
    else:
        torch.addmm(bias_C, input_NI, weight_CI.t(), out=y_NC)
    return y_BSC.add_(x_BSC)


class _AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: _AttentionSettings,
        x_BSC: Tensor,
        norm_C: Tensor,
        query_norm_D: Tensor | None,
        key_norm_D: Tensor | None,
        cosines: Tensor,
        sines: Tensor,
        position_ids_BS: Tensor,
        *projections: Any,
    ) -> Tensor:
        kernels = cpu_kernels_for(x_BSC)
        x_BSC = x_BSC.contiguous()
        normed_BSC, scale = kernels.rms_norm(x_BSC, norm_C, how.eps, F32)
        normed_NC = normed_BSC.view(-1, x_BSC.shape[-1])
        weight_q, bias_q, weight_k, bias_k, weight_v, bias_v, weight_o, bias_o = projections

        def heads(weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.linear(normed_NC, weight, bias).view(*x_BSC.shape[:2], len(weight) // how.head_dim, how.head_dim)

        q, k, v = heads(weight_q, bias_q), heads(weight_k, bias_k), heads(weight_v, bias_v)
        raw_q = raw_k = scale_q = scale_k = None
        if how.head_eps:
            raw_q, raw_k = q, k
            q, scale_q = kernels.rms_norm(raw_q, query_norm_D, how.head_eps[0], F32)
            k, scale_k = kernels.rms_norm(raw_k, key_norm_D, how.head_eps[1], F32)
        q = kernels.rope(q, cosines, sines, position_ids_BS, 1.0, overwrite=True)
        k = kernels.rope(k, cosines, sines, position_ids_BS, 1.0, overwrite=True)
        out, maxima = kernels.attention(q, k, v, how.sequences, how.window, how.scale)
        y_BSC = _plus_product(x_BSC, out.view(len(normed_NC), weight_o.shape[1]), weight_o, bias_o)
        ctx.how = how
        ctx.save_for_backward(
            x_BSC,
            norm_C,
            scale,
            *(q, k, v, out, maxima),
            *(raw_q, query_norm_D, scale_q, raw_k, key_norm_D, scale_k),
            *(cosines, sines, position_ids_BS),
            *(weight_q, weight_k, weight_v, weight_o),
        )
        return y_BSC

    @staticmethod
    @first_order
    @_without_autocast
    def backward(ctx: Any, grad_BSC: Tensor) -> tuple[Tensor | None, ...]:
        how = ctx.how
        x_BSC, norm_C, scale, *rest = ctx.saved_tensors
        q, k, v, out, maxima, raw_q, query_norm_D, scale_q, raw_k, key_norm_D, scale_k, *rest = rest
        cosines, sines, position_ids_BS, weight_q, weight_k, weight_v, weight_o = rest
        kernels = cpu_kernels_again(grad_BSC, x_BSC)
        grad_BSC = grad_BSC.contiguous()
        grad_NC = grad_BSC.view(-1, x_BSC.shape[-1])
        *needs, needs_weight_o, needs_bias_o = ctx.needs_input_grad[8:]

        dweight_o, dbias_o = _parameter_gradients(
            grad_NC, out.view(len(grad_NC), weight_o.shape[1]), needs_weight_o, needs_bias_o
        )
        dout = torch.mm(grad_NC, weight_o).view(out.shape)
        dq, dk, dv = kernels.attention_backward(dout, q, k, v, out, maxima, how.sequences, how.window, how.scale)
        del dout
        dq = kernels.rope(dq, cosines, sines, position_ids_BS, -1.0, overwrite=True)
        dk = kernels.rope(dk, cosines, sines, position_ids_BS, -1.0, overwrite=True)
        dquery_norm_D = dkey_norm_D = None
        if how.head_eps:
            dq, dquery_norm_D = kernels.rms_norm_backward(dq, raw_q, query_norm_D, scale_q, F32, overwrite=True)
            dk, dkey_norm_D = kernels.rms_norm_backward(dk, raw_k, key_norm_D, scale_k, F32, overwrite=True)
        # In the order in which autograd would add up what comes back of them.
        weights = weight_v, weight_k, weight_q
        grads = [x.view(len(grad_NC), len(weight)) for x, weight in zip((dv, dk, dq), weights, strict=True)]
        dx_BSC, dnorm_C, (dvalues, dkeys, dqueries) = _projections_backward(
            kernels,
            (x_BSC, norm_C, scale, how.eps),
            grads,
            weights,
            (needs[4:6], needs[2:4], needs[0:2]),
        )
        dx_BSC.add_(grad_BSC)
        norms = dnorm_C, dquery_norm_D, dkey_norm_D
        return None, dx_BSC, *norms, None, None, None, *dqueries, *dkeys, *dvalues, dweight_o, dbias_o


def _parameter_gradients(
    grad_NO: Tensor, x_NI: Tensor, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of weight and bias of a product with x."""
    return (
        torch.mm(grad_NO.t(), x_NI) if needs_weight else None,
        grad_NO.sum(0) if needs_bias else None,
    )


def _projections_backward(
    kernels: Any,
    normed: tuple[Tensor, Tensor, Tensor, float],
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    needs: Sequence[Sequence[bool]],
) -> tuple[Tensor, Tensor, list[tuple[Tensor | None, ...]]]:
    """Back through products that share a normalized input, which is computed again.

    Args:
        normed: input, weight, scale and eps of the norm.
        grads: of the products, `[N, O]` each.
        needs: for each whether the gradients of its weight and bias are wanted.

    Returns:
        Gradients of the norm's input and weight, and those of weight and bias of each product.
    """
    x_BSC, norm_C, scale, eps = normed
    is_read = any(weight for weight, _ in needs)
    normed_BSC = kernels.rms_norm(x_BSC, norm_C, eps, F32)[0] if is_read else torch.empty_like(x_BSC)
    buffer_NC = normed_BSC.view(-1, x_BSC.shape[-1])
    parameters = [_parameter_gradients(grad, buffer_NC, *need) for grad, need in zip(grads, needs, strict=True)]
    torch.mm(grads[0], weights[0], out=buffer_NC)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        buffer_NC.add_(torch.mm(grad, weight))
    dx_BSC, dnorm_C = kernels.rms_norm_backward(normed_BSC, x_BSC, norm_C, scale, F32, overwrite=True)
    return dx_BSC, dnorm_C, parameters


def feed_forward_block(x_BSC: Tensor, norm: Norm, projections: Sequence[Projection]) -> Tensor | None:
    """`x + down(silu(gate(norm(x))) * up(norm(x)))`, `[B, S, C]`, with `projections` gate, up and down; None where the
    kernels do not serve these tensors."""
    weights = [tensor for projection in projections for tensor in projection]
    if not _is_served(x_BSC, norm, *weights):
        return None
    return _FeedForwardBlock.apply(x_BSC, norm.weight, norm.eps, *weights)


class _FeedForwardBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, norm_C: Tensor, eps: float, *projections: Any) -> Tensor:
        kernels = cpu_kernels_for(x_BSC)
        x_BSC = x_BSC.contiguous()
        normed_BSC, scale = kernels.rms_norm(x_BSC, norm_C, eps, F32)
        normed_NC = normed_BSC.view(-1, x_BSC.shape[-1])
        weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = projections
        gate_NF, up_NF = F.linear(normed_NC, weight_gate, bias_gate), F.linear(normed_NC, weight_up, bias_up)
        y_BSC = _plus_product(x_BSC, kernels.swiglu(gate_NF, up_NF, None), weight_down, bias_down)
        ctx.eps = eps
        ctx.save_for_backward(x_BSC, norm_C, scale, gate_NF, up_NF, weight_gate, weight_up, weight_down)
        return y_BSC

    @staticmethod
    @first_order
    @_without_autocast
    def backward(ctx: Any, grad_BSC: Tensor) -> tuple[Tensor | None, ...]:
        x_BSC, norm_C, scale, gate_NF, up_NF, weight_gate, weight_up, weight_down = ctx.saved_tensors
        kernels = cpu_kernels_again(grad_BSC, x_BSC)
        grad_BSC = grad_BSC.contiguous()
        grad_NC = grad_BSC.view(-1, x_BSC.shape[-1])
        needs = ctx.needs_input_grad[3:]

        buffer_NF = kernels.swiglu(gate_NF, up_NF, None) if needs[4] else torch.empty_like(gate_NF)
        ddown = _parameter_gradients(grad_NC, buffer_NF, *needs[4:6])
        torch.mm(grad_NC, weight_down, out=buffer_NF)
        grads = kernels.swiglu_backward(buffer_NF, gate_NF, up_NF, None, overwrite=True)
        dx_BSC, dnorm_C, (dgate, dup) = _projections_backward(
            kernels, (x_BSC, norm_C, scale, ctx.eps), grads, (weight_gate, weight_up), (needs[0:2], needs[2:4])
        )
        dx_BSC.add_(grad_BSC)
        return dx_BSC, dnorm_C, None, *dgate, *dup, *ddown
