"""The head and the loss in one: logits exist only for a chunk of tokens at a time.

Shape letters: T tokens, N tokens with a label that counts, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep import torch_private
from samestep.ops.precision import linear, rounded, wide, wide_matmul

# A chunk of logits takes at most this much. A GPU reads and writes the whole weight gradient once a chunk, so it
# wants fewer of them.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    compute_dtype: torch.dtype,
    z_loss_weight: float = 0.0,
    ignore_index: int = -100,
    loss_dtype: torch.dtype = torch.float32,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the tokens whose label counts, with logits = hidden @ weight.T.

        cross_entropy = sum(logsumexp(logits) - logits[label])
        z_loss        = sum(logsumexp(logits) ** 2)                  (Chowdhery et al. 2022, section 5)
        total         = cross_entropy + z_loss_weight * z_loss

    Tokens with an ignored label never reach the head. Gradients are formed together with the loss, chunk by chunk,
    and only where autograd will ask for them; backward multiplies them by the gradient of `total`.

    Args:
        hidden_TD: any floating dtype.
        weight_VD: the head, any floating dtype.
        labels_T: int64; already shifted.
        compute_dtype: operands of the products are rounded to it; the logits themselves are not.
        z_loss_weight: 0 leaves the z-loss out of `total`; it is still measured.
        ignore_index: the label that does not count.
        loss_dtype: dtype of logits, softmax and results; below float32 only the results are rounded to it.
        chunk_tokens: tokens a chunk; None picks them by memory. Moves results only by rounding.

    Returns:
        `(total, cross_entropy, z_loss)`, scalars of `loss_dtype`; only `total` is differentiable. All are 0, with
        gradients of 0, where no label counts.

    Raises:
        ValueError: shapes that do not fit.
        IndexError: a label outside the vocabulary (checked on a CPU; a GPU asserts by itself).
    """
    _check(hidden_TD, weight_VD, labels_T, ignore_index)
    return _LinearCrossEntropy.apply(
        hidden_TD,
        weight_VD,
        labels_T,
        float(z_loss_weight),
        ignore_index,
        compute_dtype,
        loss_dtype,
        chunk_tokens,
        torch.is_grad_enabled(),
    )


def _check(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, ignore_index: int) -> None:
    if hidden_TD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1] or labels_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden_TD.shape)}, weight {tuple(weight_VD.shape)} and labels {tuple(labels_T.shape)} "
            "do not fit [T, D], [V, D] and [T]"
        )
    if labels_T.device.type == "cpu":
        vocabulary = weight_VD.shape[0]
        bad_T = (labels_T != ignore_index) & ((labels_T < 0) | (labels_T >= vocabulary))
        if bad_T.any():
            where = int(bad_T.nonzero()[0])
            raise IndexError(
                f"label {int(labels_T[where])} of token {where} is outside the vocabulary of {vocabulary} "
                f"(and is not ignore_index={ignore_index})"
            )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        z_loss_weight: float,
        ignore_index: int,
        compute: torch.dtype,
        loss_dtype: torch.dtype,
        chunk_tokens: int | None,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, vocabulary = hidden_TD.device, weight_VD.shape[0]
        sum_dtype = wide(loss_dtype, compute)
        # A GPU multiplies bfloat16 and sums in float32. Elsewhere the rounded operands are multiplied in float32;
        # also for float16, in which small unscaled gradients of logits would vanish.
        low = device.type == "cuda" and compute is torch.bfloat16 and sum_dtype is torch.float32
        operand = compute if low else sum_dtype
        head_VD = weight_VD.to(compute).to(operand)
        want_hidden = grad_enabled and ctx.needs_input_grad[0]
        want_weight = grad_enabled and ctx.needs_input_grad[1]
        dhidden_TD = torch.zeros(hidden_TD.shape, dtype=sum_dtype, device=device) if want_hidden else None
        dweight_VD = torch.zeros(weight_VD.shape, dtype=sum_dtype, device=device) if want_weight else None

        tokens_N = (labels_T != ignore_index).nonzero().squeeze(1)
        labels_N = labels_T[tokens_N]
        logsumexp_N = torch.empty(tokens_N.shape, dtype=sum_dtype, device=device)
        chosen_N = torch.empty_like(logsumexp_N)
        if chunk_tokens is None:
            budget = _CHUNK_BYTES["cpu" if device.type == "cpu" else "cuda"]
            chunk_tokens = max(1, budget // (vocabulary * sum_dtype.itemsize))
        for start in range(0, tokens_N.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            tokens_C, labels_C1 = tokens_N[chunk], labels_N[chunk, None]
            hidden_CD = hidden_TD[tokens_C].to(compute).to(operand)
            logits_CV = wide_matmul(hidden_CD, head_VD.t())
            chosen_N[chunk] = logits_CV.gather(1, labels_C1).squeeze(1)
            # From here on the one buffer holds logits, then their exponentials, then their gradients.
            largest_C1 = logits_CV.amax(1, keepdim=True)
            exponentials_CV = logits_CV.sub_(largest_C1).exp_()
            total_C1 = exponentials_CV.sum(1, keepdim=True)
            logsumexp_C1 = total_C1.log().add_(largest_C1)
            logsumexp_N[chunk] = logsumexp_C1.squeeze(1)
            if not (want_hidden or want_weight):
                continue
            dlogits_CV = exponentials_CV.mul_((1 + 2 * z_loss_weight * logsumexp_C1) / total_C1)
            dlogits_CV.scatter_(1, labels_C1, dlogits_CV.gather(1, labels_C1) - 1)
            dlogits_CV = dlogits_CV.to(operand)
            if dhidden_TD is not None:
                dhidden_TD.index_copy_(0, tokens_C, wide_matmul(dlogits_CV, head_VD))
            if dweight_VD is not None:
                if operand == sum_dtype:
                    dweight_VD.addmm_(dlogits_CV.t(), hidden_CD)
                else:
                    dweight_VD.add_(wide_matmul(dlogits_CV.t(), hidden_CD))

        cross_entropy = (logsumexp_N - chosen_N).sum()
        z_loss = logsumexp_N.square().sum()
        total = cross_entropy + z_loss_weight * z_loss
        ctx.save_for_backward(dhidden_TD, dweight_VD)
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype)
        results = total.to(loss_dtype), cross_entropy.to(loss_dtype, copy=True), z_loss.to(loss_dtype, copy=True)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # The weight gradient is as large as the head: it is copied only if somebody will read it again.
        kept = torch_private.graph_is_kept()

        def scaled(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if gradient is None:
                return None
            factor = grad.to(gradient.dtype)
            return (gradient * factor if kept else gradient.mul_(factor)).to(dtype)

        dhidden_TD, dweight_VD = ctx.saved_tensors
        return scaled(dhidden_TD, ctx.dtypes[0]), scaled(dweight_VD, ctx.dtypes[1]), *[None] * 7


def reference_linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    compute_dtype: torch.dtype,
    z_loss_weight: float = 0.0,
    ignore_index: int = -100,
    loss_dtype: torch.dtype = torch.float32,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of `linear_cross_entropy`: all logits at once, in float64. `chunk_tokens` has no meaning here."""
    logits_TV = rounded(hidden_TD, compute_dtype) @ rounded(weight_VD, compute_dtype).T
    cross_entropy = F.cross_entropy(logits_TV, labels_T, ignore_index=ignore_index, reduction="sum")
    z_loss = logits_TV[labels_T != ignore_index].logsumexp(1).square().sum()
    total = cross_entropy + z_loss_weight * z_loss
    return total.to(loss_dtype), cross_entropy.detach().to(loss_dtype), z_loss.detach().to(loss_dtype)


def logits(hidden: Tensor, weight_VD: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """`hidden @ weight.T` for all of `hidden` `[..., D]`: for generation, or a loss of one's own. Differentiable.

    Returns:
        `[..., V]` in float32 (float64 where `compute_dtype` is), not rounded to `compute_dtype`.
    """
    return linear(hidden, weight_VD, None, compute_dtype, out_dtype=wide(compute_dtype))
