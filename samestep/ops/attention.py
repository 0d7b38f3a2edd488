"""Causal attention with grouped queries over whole rows, packed documents, or a cache.

Shape letters: B rows, S queries a row, T keys a row, H query heads, K key heads, D head dimension, W window.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.ops.cpu_kernels import Sequences
from samestep.ops.dispatch import cpu_kernels_again, cpu_kernels_for, reference_ops
from samestep.ops.dropout import attention_dropout_mask
from samestep.ops.first_order import first_order
from samestep.ops.precision import wide

Span = tuple[int, int, int]


def attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    spans: Sequence[Span] | None = None,
    window: int | None = None,
    softmax_dtype: torch.dtype | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: int = 0,
    token_keys_BS: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """Causal softmax attention (Vaswani et al. 2017, eq. 1) with grouped queries (Ainslie et al. 2023).

    float32 on a CPU runs in `cpu_kernels`, which forms no S x T matrix and passes over what no query sees. All else is
    `F.scaled_dot_product_attention`, once for each length of document, which forms none where its own kernel can avoid
    it. The softmax of both is in float32, for float64 input in float64. Another `softmax_dtype`, or dropout, goes
    through `reference_attention`, which is slow and needs S x T memory.

    torch.compile treats `spans` as constants and would compile again for each packing: where rows are packed, leave
    the call out of the graph with `torch.compiler.disable`.

    Args:
        q_BSHD: queries.
        k_BTKD: keys; H is a multiple of K, and query head h reads key head `h // (H / K)`.
        v_BTKD: values; their head dimension may differ.
        spans: documents as (row, start, stop). Attention is causal within each and none crosses; S must equal T. A
            token in no span has output 0 and gradient 0. None: every row is one causal sequence, whose S queries
            are its last ones where S < T (a cache).
        window: keys that a query sees at most, its own included (`sliding_window` of `transformers`): key j of query
            i where `i - window < j <= i`. Runs in blocks of queries, so that no mask grows with S x T. None: all
            keys up to its own.
        softmax_dtype: dtype of the scores and their softmax; None is what the fused kernel does.
        scale: of the scores; 1 / sqrt(D) unless told.
        dropout_p: probability to drop an attention weight.
        dropout_key: from `random_key`.
        token_keys_BS: from `token_keys`, one for each of the T keys; needed where `dropout_p` > 0.
        first_head: number of the first query head, where a rank holds only some of them; moves only dropout.

    Returns:
        `[B, S, H, D of v]` in the dtype of q.

    Raises:
        ValueError: shapes or spans that do not fit, a window of 0, or dropout without `token_keys_BS`.
    """
    _check_shapes(q_BSHD, k_BTKD, v_BTKD, spans, window)
    softmax_dtype = wide(q_BSHD.dtype) if softmax_dtype is None else softmax_dtype
    if reference_ops() or dropout_p > 0 or softmax_dtype != wide(q_BSHD.dtype):
        return reference_attention(
            q_BSHD,
            k_BTKD,
            v_BTKD,
            spans=spans,
            window=window,
            softmax_dtype=softmax_dtype,
            scale=scale,
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            token_keys_BS=token_keys_BS,
            first_head=first_head,
        )
    if scale is not None and scale < 0:  # the largest score is looked for before it is scaled, by PyTorch as well
        q_BSHD, scale = -q_BSHD, -scale
    spans = as_tuples(spans)
    if (kernels := _kernels(q_BSHD, k_BTKD, v_BTKD)) is not None:
        sequences = sequences_of(spans, *q_BSHD.shape[:2], k_BTKD.shape[1])
        scale = 1 / math.sqrt(q_BSHD.shape[-1]) if scale is None else scale
        return _Attention.apply(kernels, q_BSHD, k_BTKD, v_BTKD, sequences, window, scale)
    if spans is None:
        return _fused(q_BSHD, k_BTKD, v_BTKD, scale, window)
    return _fused_spans(q_BSHD, k_BTKD, v_BTKD, spans, scale, window)


def _check_shapes(
    q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, spans: Sequence[Span] | None, window: int | None
) -> None:
    batch, queries, heads, dim = q_BSHD.shape
    keys, key_heads = k_BTKD.shape[1:3]
    if k_BTKD.shape[0] != batch or k_BTKD.shape[:3] != v_BTKD.shape[:3] or k_BTKD.shape[3] != dim:
        raise ValueError(
            f"queries {tuple(q_BSHD.shape)}, keys {tuple(k_BTKD.shape)}, values {tuple(v_BTKD.shape)} do not fit"
        )
    if heads % key_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {key_heads} key heads")
    if queries > keys or (spans is not None and queries != keys):
        raise ValueError(f"{queries} queries a row do not fit {keys} keys a row" + (" with spans" if spans else ""))
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys leaves nothing to see")


_LEAST_QUERIES = 8
"""A row of fewer, as in generation, is not worth what the kernel does with its keys beforehand."""


def _kernels(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Any:
    dims = q_BSHD.shape[3], v_BTKD.shape[3]
    return cpu_kernels_for(q_BSHD, k_BTKD, v_BTKD) if kernels_fit(q_BSHD.shape[1], k_BTKD.shape[1], *dims) else None


def kernels_fit(queries: int, keys: int, *dims: int) -> bool:
    """Whether the kernels for CPUs serve these sizes of a row and of a head; their shortest vector has 8 numbers."""
    return queries >= min(_LEAST_QUERIES, keys) and all(dim and dim % 8 == 0 for dim in dims)


def as_tuples(spans: Sequence[Span] | None) -> tuple[Span, ...] | None:
    return None if spans is None else tuple((int(row), int(start), int(stop)) for row, start, stop in spans)


@functools.lru_cache(maxsize=32)
def sequences_of(spans: tuple[Span, ...] | None, batch: int, queries: int, keys: int) -> Sequences:
    """Spans, or rows where there are none, longest first: so no thread waits for one that began late. Cached, since all
    layers ask for the same."""
    if spans is None:
        found = [(row * queries, queries, row * keys, keys) for row in range(batch)]
    else:
        _check_spans(spans, batch, queries)
        found = [(row * queries + start, stop - start) * 2 for row, start, stop in spans]
    found.sort(key=lambda sequence: -sequence[1])
    table_N4 = torch.tensor(found, dtype=torch.int64, device="cpu").view(-1, 4)
    return Sequences(table_N4, sum(size for _, size, _, _ in found) == batch * queries)


class _Attention(torch.autograd.Function):
    """In `cpu_kernels`: saves its inputs, its output and two numbers a query and head."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Any,
        q_BSHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        sequences: Sequences,
        window: int | None,
        scale: float,
    ) -> Tensor:
        out, maxima = kernels.attention(q_BSHD, k_BTKD, v_BTKD, sequences, window, scale)
        ctx.save_for_backward(q_BSHD, k_BTKD, v_BTKD, out, maxima)
        ctx.how = sequences, window, scale
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: recomputation gives them out a single time
        return None, *cpu_kernels_again(*saved[:3]).attention_backward(grad, *saved, *ctx.how), None, None, None


def _fused(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scale: float | None, window: int | None) -> Tensor:
    queries, keys = q_BSHD.shape[1], k_BTKD.shape[1]
    if window is not None and window < keys:
        return _fused_window(q_BSHD, k_BTKD, v_BTKD, scale, window)
    mask_ST = _causal(queries, keys, None, q_BSHD.device) if 1 < queries < keys else None
    return _sdpa(q_BSHD, k_BTKD, v_BTKD, mask_ST, queries == keys, scale)


_LEAST_BLOCK, _LARGEST_BLOCK = 128, 1024


def _fused_window(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scale: float | None, window: int) -> Tensor:
    """Blocks of queries, each with the keys that any of them sees: the work is S x (window + block), not S x T."""
    queries, keys = q_BSHD.shape[1], k_BTKD.shape[1]
    block = min(max(window, _LEAST_BLOCK), _LARGEST_BLOCK)
    outputs, stop = [], keys - queries
    for q in q_BSHD.split(block, 1):
        size = q.shape[1]
        start, stop = max(0, stop - window + 1), stop + size
        k, v = k_BTKD[:, start:stop], v_BTKD[:, start:stop]
        seen = stop - start
        if seen <= window:
            outputs.append(_fused(q, k, v, scale, None))
        else:
            mask_ST = _causal(size, seen, window, q.device)
            outputs.append(_sdpa(q, k, v, mask_ST, False, scale))
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool `[S, T]`: which keys the last `queries` of `keys` tokens see."""
    mask_ST = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask_ST if window is None else mask_ST.triu(keys - queries - window + 1)


def _sdpa(
    q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, mask_ST: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    group = q_BSHD.shape[2] // k_BTKD.shape[2]
    grouped = mask_ST is None and q_BSHD.dtype in (torch.bfloat16, torch.float16)
    if group > 1 and q_BSHD.device.type == "cuda" and not grouped:
        # Only the 16-bit CUDA kernels without a mask group queries; enable_gqa would form the S x T matrix elsewhere.
        k_BTKD, v_BTKD, group = k_BTKD.repeat_interleave(group, 2), v_BTKD.repeat_interleave(group, 2), 1
    return F.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2),
        k_BTKD.transpose(1, 2),
        v_BTKD.transpose(1, 2),
        attn_mask=mask_ST,
        is_causal=causal,
        scale=scale,
        enable_gqa=group > 1,
    ).transpose(1, 2)


def _check_spans(spans: tuple[Span, ...], batch: int, length: int) -> None:
    end_of_last = dict.fromkeys(range(batch), 0)
    for row, start, stop in sorted(spans):
        if not (0 <= row < batch and 0 <= start < stop <= length):
            raise ValueError(f"span {(row, start, stop)} does not fit {batch} rows of {length} tokens")
        if start < end_of_last[row]:
            raise ValueError(f"span {(row, start, stop)} overlaps the one before it")
        end_of_last[row] = stop


@functools.lru_cache(maxsize=32)
def _span_plan(
    spans: tuple[Span, ...], batch: int, length: int, device: torch.device
) -> tuple[Tensor | None, tuple[tuple[int, int], ...]]:
    """Spans sorted by length: flat token numbers in that order, and (how many spans, their length) a group.

    The numbers are None where they would be 0, 1, 2, ... with no token left out. Cached because every layer of a
    micro-batch asks for the same spans.
    """
    _check_spans(spans, batch, length)
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, start, stop in sorted(spans):
        by_length[stop - start].append(row * length + start)
    groups = tuple((len(starts), size) for size, starts in by_length.items())
    order = [first + i for size, starts in by_length.items() for first in starts for i in range(size)]
    if order == list(range(batch * length)):
        return None, groups
    # Cached, so it must not become a tensor of inference mode, which autograd refuses to save later.
    with torch.inference_mode(False):
        return torch.tensor(order, dtype=torch.int64, device=device), groups


class _Gather(torch.autograd.Function):
    """`x[index]` for an index without repeats; its backward copies instead of adding, which is faster."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, index_M: Tensor) -> Tensor:
        ctx.save_for_backward(index_M)
        ctx.rows = x_N.shape[0]
        return x_N.index_select(0, index_M)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        (index_M,) = ctx.saved_tensors
        return grad_M.new_zeros(ctx.rows, *grad_M.shape[1:]).index_copy_(0, index_M, grad_M), None


def _fused_spans(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    spans: tuple[Span, ...],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Spans of equal length are one batch of `_fused`: no mask, and no work between documents."""
    batch, length, heads = q_BSHD.shape[:3]
    index, groups = _span_plan(spans, batch, length, q_BSHD.device)
    flat = [x.flatten(0, 1) for x in (q_BSHD, k_BTKD, v_BTKD)]
    if index is not None:
        flat = [_Gather.apply(x, index) for x in flat]
    sizes = [count * size for count, size in groups]
    outputs = []
    for group, parts in zip(groups, zip(*(x.split(sizes) for x in flat), strict=True), strict=True):
        q, k, v = (part.unflatten(0, group) for part in parts)
        outputs.append(_fused(q, k, v, scale, window).flatten(0, 1))
    out_shape = (batch, length, heads, v_BTKD.shape[-1])
    if not outputs:
        # Sums of nothing: zeros that still hang on the inputs, so that their gradients are zeros and not missing.
        return q_BSHD.new_zeros(out_shape) + sum(x.sum() for x in flat)
    packed = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if index is not None:
        packed = packed.new_zeros(batch * length, *packed.shape[1:]).index_copy(0, index, packed)
    return packed.view(out_shape)


def _visible(
    batch: int, queries: int, keys: int, spans: Sequence[Span] | None, window: int | None, device: torch.device
) -> Tensor:
    """bool `[B, S, T]`: which key each query may read."""
    causal_ST = _causal(queries, keys, window, device)
    if spans is None:
        return causal_ST.expand(batch, -1, -1)
    visible_BST = torch.zeros(batch, queries, keys, dtype=torch.bool, device=device)
    for row, start, stop in spans:
        visible_BST[row, start:stop, start:stop] = causal_ST[start:stop, start:stop]
    return visible_BST


def reference_attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    spans: Sequence[Span] | None = None,
    window: int | None = None,
    softmax_dtype: torch.dtype | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: int = 0,
    token_keys_BS: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """Twin of `attention`, and the only path with dropout or another softmax dtype.

    Products are summed in float32 (float64 for float64 input). Scores are rounded to `softmax_dtype` before the
    softmax, and probabilities to the dtype of q after it.
    """
    _check_shapes(q_BSHD, k_BTKD, v_BTKD, spans, window)
    batch, queries, heads, dim = q_BSHD.shape
    keys, group = k_BTKD.shape[1], heads // k_BTKD.shape[2]
    dtype, sum_dtype = q_BSHD.dtype, wide(q_BSHD.dtype)
    softmax_dtype = sum_dtype if softmax_dtype is None else softmax_dtype
    q_BHSD = q_BSHD.transpose(1, 2).to(sum_dtype)
    k_BHTD = k_BTKD.repeat_interleave(group, 2).transpose(1, 2).to(sum_dtype)
    v_BHTD = v_BTKD.repeat_interleave(group, 2).transpose(1, 2).to(sum_dtype)

    scale = 1 / math.sqrt(dim) if scale is None else scale
    scores_BHST = (q_BHSD @ k_BHTD.transpose(-1, -2) * scale).to(softmax_dtype)
    hidden_B1ST = ~_visible(batch, queries, keys, spans, window, q_BSHD.device).unsqueeze(1)
    # The lowest finite number and a second fill, not -inf: a query that sees nothing gets zeros instead of NaN.
    scores_BHST = scores_BHST.masked_fill(hidden_B1ST, torch.finfo(softmax_dtype).min)
    weights_BHST = scores_BHST.softmax(-1).masked_fill(hidden_B1ST, 0.0)
    if dropout_p > 0:
        if token_keys_BS is None or token_keys_BS.shape != (batch, keys):
            raise ValueError(f"attention dropout needs token_keys_BS of shape {(batch, keys)}")
        weights_BHST = weights_BHST * attention_dropout_mask(
            dropout_p,
            dropout_key,
            token_keys_BS[:, keys - queries :],
            token_keys_BS,
            heads,
            first_head=first_head,
            dtype=softmax_dtype,
        )
    return (weights_BHST.to(dtype).to(sum_dtype) @ v_BHTD).to(dtype).transpose(1, 2)
