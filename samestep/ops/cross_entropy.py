"""The head and the loss in one: logits exist only for a chunk of tokens at a time.

Shape letters: T tokens, N tokens with a label that counts, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import torch_private
from samestep.ops.dispatch import kernels_for, reference_ops
from samestep.ops.first_order import first_order
from samestep.ops.precision import in_bfloat16_units, linear, rounded, wide, wide_matmul

# What a chunk of logits takes at most, with its derivative if they are capped. A GPU reads and writes the whole weight
# gradient once a chunk, so it wants fewer of them. Free memory must not decide: the last bits of a run would go by it.
_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class _Terms:
    z_loss_weight: float
    label_smoothing: float
    softcap: float | None


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    compute_dtype: torch.dtype,
    z_loss_weight: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    weights_T: Tensor | None = None,
    ignore_index: int = -100,
    loss_dtype: torch.dtype = torch.float32,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the tokens whose label counts, with logits = hidden @ weight.T, each token times its weight.

        cross_entropy = sum(w * (logsumexp(logits) - (1 - s) * logits[label] - s * mean(logits)))
        z_loss        = sum(w * logsumexp(logits) ** 2)              (Chowdhery et al. 2022, section 5)
        total         = cross_entropy + z_loss_weight * z_loss

    with s = label_smoothing (Szegedy et al. 2016, section 7). Tokens with an ignored label, or with weight 0, never
    reach the head. Gradients are formed together with the loss, chunk by chunk, and only where autograd will ask for
    them; backward multiplies them by the gradient of `total`.

    Args:
        hidden_TD: any floating dtype.
        weight_VD: the head, any floating dtype.
        labels_T: int64; already shifted.
        compute_dtype: operands of the products are rounded to it; the logits themselves are not.
        z_loss_weight: 0 leaves the z-loss out of `total`; it is still measured.
        label_smoothing: share of the target that is spread evenly over the vocabulary, 0 to 1.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, section 2); None leaves them as they are.
        weights_T: of the targets, any floating dtype, constant; None = 1.
        ignore_index: the label that does not count.
        loss_dtype: dtype of logits, softmax and results; below float32 only the results are rounded to it.
        chunk_tokens: tokens a chunk; None takes as many as fit a fixed memory. Moves results only by rounding.

    Returns:
        `(total, cross_entropy, z_loss)`, scalars of `loss_dtype`; only `total` is differentiable. All are 0, with
        gradients of 0, where no label counts.

    Raises:
        ValueError: shapes that do not fit; weights that require a gradient; a smoothing or a cap out of range.
        IndexError: a label outside the vocabulary (checked on a CPU; a GPU asserts by itself).
    """
    _check(hidden_TD, weight_VD, labels_T, ignore_index)
    _check_terms(labels_T, weights_T, label_smoothing, softcap)
    if reference_ops():
        return reference_linear_cross_entropy(
            hidden_TD,
            weight_VD,
            labels_T,
            compute_dtype=compute_dtype,
            z_loss_weight=z_loss_weight,
            label_smoothing=label_smoothing,
            softcap=softcap,
            weights_T=weights_T,
            ignore_index=ignore_index,
            loss_dtype=loss_dtype,
        )
    # All products are in its forward pass. Those that are summed in float64 stay as they are.
    narrow = compute_dtype if wide(loss_dtype, compute_dtype) is torch.float32 else torch.float64
    with in_bfloat16_units(narrow, hidden_TD.device) as rounds:
        return _LinearCrossEntropy.apply(
            hidden_TD,
            weight_VD,
            labels_T,
            weights_T,
            _Terms(float(z_loss_weight), float(label_smoothing), softcap),
            ignore_index,
            compute_dtype,
            loss_dtype,
            chunk_tokens,
            rounds,
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


def _check_terms(labels_T: Tensor, weights_T: Tensor | None, label_smoothing: float, softcap: float | None) -> None:
    if weights_T is not None and (weights_T.shape != labels_T.shape or weights_T.requires_grad):
        raise ValueError(
            f"weights {tuple(weights_T.shape)} must be constants, one for each of the labels {tuple(labels_T.shape)}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not between 0 and 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap {softcap} is not above 0")


def _token_losses_(
    logits_CV: Tensor,
    labels_C1: Tensor,
    weights_C1: Tensor | None,
    terms: _Terms,
    gradient_CV: Tensor | None,
    rounds: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and logsumexp [C, 1] of each token, unweighted. `logits_CV` is overwritten.

    `gradient_CV` receives the gradient of `total` by the logits before the cap. It may be `logits_CV`, which then holds
    logits, their exponentials and the gradient in turn; None: no gradient is wanted. `rounds`: its numbers are rounded
    to bfloat16.
    """
    kernels = kernels_for(logits_CV, compute=logits_CV.dtype)
    if kernels is not None:
        return kernels.token_losses_(
            logits_CV,
            labels_C1,
            weights_C1,
            gradient_CV,
            z_loss_weight=terms.z_loss_weight,
            label_smoothing=terms.label_smoothing,
            softcap=terms.softcap,
            rounds=rounds,
        )
    slope_CV = None
    if terms.softcap is not None:
        logits_CV.div_(terms.softcap).tanh_()
        slope_CV = logits_CV.square().neg_().add_(1) if gradient_CV is not None else None
        logits_CV.mul_(terms.softcap)
    smoothing = terms.label_smoothing
    expected_C1 = logits_CV.gather(1, labels_C1)
    if smoothing:
        expected_C1 = expected_C1 * (1 - smoothing) + logits_CV.mean(1, keepdim=True) * smoothing
    largest_C1 = logits_CV.amax(1, keepdim=True)
    exponentials_CV = logits_CV.sub_(largest_C1).exp_()
    total_C1 = exponentials_CV.sum(1, keepdim=True)
    logsumexp_C1 = total_C1.log().add_(largest_C1)
    if gradient_CV is not None:
        token_C1 = 1.0 if weights_C1 is None else weights_C1
        scale_C1 = (1 + 2 * terms.z_loss_weight * logsumexp_C1) * token_C1
        exact_CV = exponentials_CV.mul_(scale_C1 / total_C1)
        exact_CV.scatter_(1, labels_C1, exact_CV.gather(1, labels_C1) - (1 - smoothing) * token_C1)
        if smoothing:
            exact_CV.sub_(token_C1 * (smoothing / logits_CV.shape[1]))
        if slope_CV is not None:
            exact_CV.mul_(slope_CV)
        if gradient_CV is not exact_CV:
            gradient_CV.copy_(exact_CV)
        if rounds:
            gradient_CV.copy_(gradient_CV.bfloat16())
    return logsumexp_C1 - expected_C1, logsumexp_C1


def _most_tokens(device: torch.device, row_bytes: int, terms: _Terms) -> int:
    """Tokens of a chunk."""
    buffers = 1 if terms.softcap is None else 2
    return max(1, _CHUNK_BYTES["cpu" if device.type == "cpu" else "cuda"] // (buffers * row_bytes))


def _plus_product(total: Tensor | None, a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`total + a @ b`, in the memory of `total` once there is one."""
    if total is None:
        return wide_matmul(a_MK, b_KN)
    return total.addmm_(a_MK, b_KN) if total.dtype == a_MK.dtype else total.add_(wide_matmul(a_MK, b_KN))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        weights_T: Tensor | None,
        terms: _Terms,
        ignore_index: int,
        compute: torch.dtype,
        loss_dtype: torch.dtype,
        chunk_tokens: int | None,
        rounds: bool,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, vocabulary = hidden_TD.device, weight_VD.shape[0]
        sum_dtype = wide(loss_dtype, compute)
        # A GPU multiplies bfloat16 and sums in float32; so do the units of a CPU, which are given float32. Elsewhere
        # the rounded operands are multiplied in float32; also for float16, in which small unscaled gradients of logits
        # would vanish.
        low = device.type == "cuda" and compute is torch.bfloat16 and sum_dtype is torch.float32
        operand = compute if low else sum_dtype
        head_VD = weight_VD.to(compute).to(operand)
        want_hidden = grad_enabled and ctx.needs_input_grad[0]
        want_weight = grad_enabled and ctx.needs_input_grad[1]
        dhidden_TD = torch.zeros(hidden_TD.shape, dtype=sum_dtype, device=device) if want_hidden else None
        dweight_VD: Tensor | None = None

        counts_T = labels_T != ignore_index
        if weights_T is not None:
            counts_T &= weights_T != 0
        tokens_N = counts_T.nonzero().squeeze(1)
        labels_N1 = labels_T[tokens_N].unsqueeze(1)
        weights_N1 = None if weights_T is None else weights_T[tokens_N].to(sum_dtype).unsqueeze(1)
        cross_entropy_N1 = torch.empty(labels_N1.shape, dtype=sum_dtype, device=device)
        logsumexp_N1 = torch.empty_like(cross_entropy_N1)
        if chunk_tokens is None:
            chunk_tokens = _most_tokens(device, vocabulary * sum_dtype.itemsize, terms)
        # On a CPU the logits of all chunks lie in the same memory: the system clears every page that it hands out.
        rows = 0 if low else min(chunk_tokens, len(tokens_N))
        room_CV = torch.empty(rows, vocabulary, dtype=sum_dtype, device=device)
        for start in range(0, len(tokens_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            tokens_C = tokens_N[chunk]
            hidden_CD = hidden_TD[tokens_C].to(compute).to(operand)
            if low:
                logits_CV = wide_matmul(hidden_CD, head_VD.t())
            else:
                logits_CV = torch.mm(hidden_CD, head_VD.t(), out=room_CV[: len(tokens_C)])
            dlogits_CV = None
            if want_hidden or want_weight:
                dlogits_CV = torch.empty_like(logits_CV, dtype=operand) if low else logits_CV
            cross_entropy_N1[chunk], logsumexp_N1[chunk] = _token_losses_(
                logits_CV,
                labels_N1[chunk],
                None if weights_N1 is None else weights_N1[chunk],
                terms,
                dlogits_CV,
                rounds,
            )
            if dlogits_CV is None:
                continue
            if dhidden_TD is not None:
                dhidden_TD.index_copy_(0, tokens_C, wide_matmul(dlogits_CV, head_VD))
            if want_weight:
                dweight_VD = _plus_product(dweight_VD, dlogits_CV.t(), hidden_CD)
        if want_weight and dweight_VD is None:
            dweight_VD = torch.zeros(weight_VD.shape, dtype=sum_dtype, device=device)

        squares_N1 = logsumexp_N1.square()
        if weights_N1 is not None:
            cross_entropy_N1, squares_N1 = cross_entropy_N1 * weights_N1, squares_N1 * weights_N1
        cross_entropy, z_loss = cross_entropy_N1.sum(), squares_N1.sum()
        total = cross_entropy + terms.z_loss_weight * z_loss
        ctx.save_for_backward(dhidden_TD, dweight_VD)
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype)
        results = total.to(loss_dtype), cross_entropy.to(loss_dtype, copy=True), z_loss.to(loss_dtype, copy=True)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # The weight gradient is as large as the head: it is copied only if somebody will read it again.
        kept = torch_private.graph_is_kept()

        def scaled(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if gradient is None:
                return None
            factor = grad.to(gradient.dtype)
            return (gradient * factor if kept else gradient.mul_(factor)).to(dtype)

        dhidden_TD, dweight_VD = ctx.saved_tensors
        return scaled(dhidden_TD, ctx.dtypes[0]), scaled(dweight_VD, ctx.dtypes[1]), *[None] * 9


def reference_linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    compute_dtype: torch.dtype,
    z_loss_weight: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    weights_T: Tensor | None = None,
    ignore_index: int = -100,
    loss_dtype: torch.dtype = torch.float32,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of `linear_cross_entropy`: all logits at once, in float64. `chunk_tokens` has no meaning here."""
    counted_T = labels_T != ignore_index
    logits_NV = rounded(hidden_TD, compute_dtype)[counted_T] @ rounded(weight_VD, compute_dtype).T
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    weights_N = 1.0 if weights_T is None else weights_T[counted_T].double()
    losses_N = F.cross_entropy(logits_NV, labels_T[counted_T], reduction="none", label_smoothing=label_smoothing)
    cross_entropy = (losses_N * weights_N).sum()
    z_loss = (logits_NV.logsumexp(1).square() * weights_N).sum()
    total = cross_entropy + z_loss_weight * z_loss
    return total.to(loss_dtype), cross_entropy.detach().to(loss_dtype), z_loss.detach().to(loss_dtype)


def logits(hidden: Tensor, weight_VD: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """`hidden @ weight.T` for all of `hidden` `[..., D]`: for generation, or a loss of one's own. Differentiable.

    Returns:
        `[..., V]` in float32 (float64 where `compute_dtype` is), not rounded to `compute_dtype`.
    """
    return linear(hidden, weight_VD, None, compute_dtype, out_dtype=wide(compute_dtype))
