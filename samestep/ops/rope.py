"""Rotary position embedding (Su et al. 2021, eq. 34) in the halves convention: dimension i turns with i + D/2.

Shape letters: P positions of the table, R = D / 2 rotated pairs, B rows, S tokens a row, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.ops.precision import wide


def rope_tables(
    positions: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[P, R]` of `position * theta ** (-2 i / head_dim)`.

    The angles are float32, as published Llama checkpoints were trained with, whatever `dtype` the tables are stored
    in; only float64 tables have float64 angles.

    Raises:
        ValueError: an odd `head_dim`.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding turns pairs of dimensions, and head_dim {head_dim} is odd")
    angle_dtype = wide(dtype)
    exponents_R = torch.arange(0, head_dim, 2, device=device).to(angle_dtype) / head_dim
    frequencies_R = 1.0 / (theta**exponents_R)
    angles_PR = torch.outer(torch.arange(positions, device=device).to(angle_dtype), frequencies_R)
    return angles_PR.cos().to(dtype), angles_PR.sin().to(dtype)


def _rotate(x_BSHD: Tensor, cos_BS1R: Tensor, sin_BS1R: Tensor, direction: float) -> Tensor:
    x_BSHD, dtype = x_BSHD.to(cos_BS1R.dtype), x_BSHD.dtype
    first, second = x_BSHD.chunk(2, -1)
    out_BSHD = x_BSHD.clone(memory_format=torch.contiguous_format)
    out_first, out_second = out_BSHD.chunk(2, -1)
    out_first.mul_(cos_BS1R).addcmul_(second, sin_BS1R, value=-direction)
    out_second.mul_(cos_BS1R).addcmul_(first, sin_BS1R, value=direction)
    return out_BSHD.to(dtype)


class _Rope(torch.autograd.Function):
    """Saves the tables and the positions, which all layers share; the gradient turns back by the same angle."""

    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_ids_BS: Tensor) -> Tensor:
        ctx.save_for_backward(cos_PR, sin_PR, position_ids_BS)
        return _rotate(x_BSHD, cos_PR[position_ids_BS].unsqueeze(2), sin_PR[position_ids_BS].unsqueeze(2), 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHD: Tensor) -> tuple[Tensor | None, ...]:
        cos_PR, sin_PR, position_ids_BS = ctx.saved_tensors
        turned = _rotate(grad_BSHD, cos_PR[position_ids_BS].unsqueeze(2), sin_PR[position_ids_BS].unsqueeze(2), -1.0)
        return turned, None, None, None


def apply_rope(x_BSHD: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_ids_BS: Tensor) -> Tensor:
    """Turns every head of every token by its position.

    Args:
        x_BSHD: queries or keys, any floating dtype.
        cos_PR: from `rope_tables`; its dtype is the dtype of the arithmetic.
        sin_PR: likewise.
        position_ids_BS: int64, below P.

    Returns:
        `[B, S, H, D]` in the dtype of x.

    Raises:
        ValueError: the head dimension does not fit the tables.
        IndexError: a position beyond the tables (on a CPU).
    """
    if x_BSHD.shape[-1] != 2 * cos_PR.shape[-1]:
        raise ValueError(f"head dimension {x_BSHD.shape[-1]} does not fit tables of {cos_PR.shape[-1]} pairs")
    return _Rope.apply(x_BSHD, cos_PR, sin_PR, position_ids_BS)


def reference_rope(x_BSHD: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_ids_BS: Tensor) -> Tensor:
    """Twin of `apply_rope`: one 2 x 2 rotation matrix a pair, in float64."""
    cos_BSR, sin_BSR = cos_PR[position_ids_BS].double(), sin_PR[position_ids_BS].double()
    rows = [torch.stack([cos_BSR, -sin_BSR], -1), torch.stack([sin_BSR, cos_BSR], -1)]
    rotation_BSRij = torch.stack(rows, -2)
    half = x_BSHD.shape[-1] // 2
    pairs_BSHRj = torch.stack([x_BSHD[..., :half], x_BSHD[..., half:]], -1).double()
    turned_BSHRi = torch.einsum("bsrij,bshrj->bshri", rotation_BSRij, pairs_BSHRj)
    return torch.cat([turned_BSHRi[..., 0], turned_BSHRi[..., 1]], -1).to(x_BSHD.dtype)
