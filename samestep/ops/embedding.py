"""Rows of a table by number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Lookup(torch.autograd.Function):
    """Its gradient names the rows that were looked up, and no others: a dense one is as large as the table, and costs
    as much for one token as for all of them."""

    @staticmethod
    def forward(ctx: Any, table_VC: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = table_VC.shape
        return F.embedding(ids, table_VC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows = grad.reshape(-1, ctx.shape[1])
        return torch.sparse_coo_tensor(ids.reshape(1, -1), rows, ctx.shape, check_invariants=False), None


def embedding(table_VC: Tensor, ids: Tensor, *, sparse: bool = False) -> Tensor:
    """`table[ids]`, int64 `[...]` -> `[..., C]`.

    Args:
        sparse: the gradient of the table is a sparse tensor, which whoever adds up gradients must be able to take. For
            CPUs: a GPU would be asked for the number of its rows.
    """
    return _Lookup.apply(table_VC, ids) if sparse else F.embedding(ids, table_VC)
