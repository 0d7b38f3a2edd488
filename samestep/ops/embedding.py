"""Rows of a table by number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.ops.first_order import first_order

_AT_ONCE = 1 << 20
"""Elements that are widened at once."""


class _Lookup(torch.autograd.Function):
    """Occurrences of a row are added up in float64: in float32 thousands of the same letter would lose a digit. A
    sparse gradient names the rows that were looked up, and no others: a dense one is as large as the table, and costs
    as much for one token as for all of them."""

    @staticmethod
    def forward(ctx: Any, table_VC: Tensor, ids: Tensor, padding_idx: int | None, sparse: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx, ctx.sparse = table_VC.shape, padding_idx, sparse
        return F.embedding(ids, table_VC)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids_N, rows_NC = ctx.saved_tensors[0].flatten(), grad.reshape(-1, ctx.shape[1])
        if ctx.padding_idx is not None:
            rows_NC = rows_NC.masked_fill((ids_N == ctx.padding_idx)[:, None], 0)
        named_K, place_N = ids_N.unique(return_inverse=True)
        sums_KC = rows_NC.new_zeros(len(named_K), ctx.shape[1], dtype=torch.float64)
        count = max(1, _AT_ONCE // max(1, ctx.shape[1]))
        for places, rows in zip(place_N.split(count), rows_NC.split(count), strict=True):
            sums_KC.index_add_(0, places, rows.double())
        sums_KC = sums_KC.to(grad.dtype)
        named_K = named_K.long()
        if ctx.sparse:
            named_1K = named_K[None]
            gradient = torch.sparse_coo_tensor(named_1K, sums_KC, ctx.shape, check_invariants=False, is_coalesced=True)
        else:
            gradient = grad.new_zeros(ctx.shape).index_copy_(0, named_K, sums_KC)
        return gradient, None, None, None


def embedding(table_VC: Tensor, ids: Tensor, *, padding_idx: int | None = None, sparse: bool = False) -> Tensor:
    """`table[ids]`, int64 `[...]` -> `[..., C]`.

    Args:
        padding_idx: a row that gets no gradient, as of `torch.nn.Embedding`.
        sparse: the gradient of the table is a sparse tensor, which whoever adds up gradients must be able to take. For
            CPUs: a GPU would be asked for the number of its rows.
    """
    if sparse or table_VC.device.type == "cpu":
        padding_idx = None if padding_idx is None else padding_idx % len(table_VC)
        return _Lookup.apply(table_VC, ids, padding_idx, sparse)
    return F.embedding(ids, table_VC, padding_idx=padding_idx)
