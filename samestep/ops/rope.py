"""Rotary position embedding (Su et al. 2021, eq. 34) in the halves convention: dimension i turns with i + D/2.

Shape letters: P positions of the table, R = D / 2 rotated pairs, B rows, S tokens a row, H heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samestep.families import RopeScaling
from samestep.ops.dispatch import kernels_for, reference_ops
from samestep.ops.first_order import first_order
from samestep.ops.precision import wide


def rope_tables(
    positions: int,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[P, R]` of `position * theta ** (-2 i / head_dim)`, with `scaling` of another frequency.

    The angles are float32, as published Llama checkpoints were trained with, whatever `dtype` the tables are stored
    in; only float64 tables have float64 angles.

    Raises:
        ValueError: an odd `head_dim`, or `dynamic` scaling, whose angles are not a function of the position alone.
    """
    if scaling is not None and scaling.type == "dynamic":
        raise ValueError("dynamic scaling goes by the length of each document: use dynamic_rope_tables")
    exponents_R = _exponents(head_dim, wide(dtype), device)
    frequencies_R = _frequencies(exponents_R, theta, scaling)
    angles_PR = torch.outer(torch.arange(positions, device=device).to(wide(dtype)), frequencies_R)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return (angles_PR.cos() * factor).to(dtype), (angles_PR.sin() * factor).to(dtype)


def dynamic_rope_tables(
    position_ids_BS: Tensor, lengths_BS: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B * S, R]` of every token, with a base that grows with its document ("dynamic NTK").

    `theta * (factor * length / original - (factor - 1)) ** (head_dim / (head_dim - 2))` where a document is longer
    than the original positions, else `theta`: what `transformers` computes for that document alone. The length is that
    of the document, not of the longest one in the micro-batch, so that the step does not depend on the split.

    Args:
        position_ids_BS: position inside the document.
        lengths_BS: tokens of the document of each token.

    Raises:
        ValueError: an odd `head_dim`, or one of 2.
    """
    if head_dim == 2:
        raise ValueError("dynamic scaling needs a head_dim of 4 or more")
    exponents_R = _exponents(head_dim, wide(dtype), position_ids_BS.device)
    lengths_N1 = lengths_BS.reshape(-1, 1).double().clamp_min(scaling.original_positions)
    growth_N1 = scaling.factor * lengths_N1 / scaling.original_positions - (scaling.factor - 1)
    bases_N1 = (theta * growth_N1 ** (head_dim / (head_dim - 2))).to(wide(dtype))
    angles_NR = position_ids_BS.reshape(-1, 1).to(wide(dtype)) * (1.0 / bases_N1**exponents_R)
    return angles_NR.cos().to(dtype), angles_NR.sin().to(dtype)


def _exponents(head_dim: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    if head_dim % 2:
        raise ValueError(f"rotary embedding turns pairs of dimensions, and head_dim {head_dim} is odd")
    return torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim


def _frequencies(exponents_R: Tensor, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position. The order of operations is that of `transformers`: far positions magnify every last bit."""
    frequencies_R = 1.0 / (theta**exponents_R)
    if scaling is None:
        return frequencies_R
    if scaling.type == "llama3":
        return _llama3(frequencies_R, scaling)
    if scaling.type == "yarn":
        return _yarn(exponents_R, theta, scaling)
    assert scaling.type == "linear", scaling.type
    return frequencies_R / scaling.factor


def _llama3(frequencies_R: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths above original / low divided by the factor, below original / high kept, a ramp between."""
    original, low, high = scaling.original_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths_R = 2 * math.pi / frequencies_R
    divided_R = frequencies_R / scaling.factor
    kept_R = (original / wavelengths_R - low) / (high - low)
    between_R = (1 - kept_R) * frequencies_R / scaling.factor + kept_R * frequencies_R
    scaled_R = torch.where(wavelengths_R > original / low, divided_R, frequencies_R)
    middle_R = (wavelengths_R >= original / high) & (wavelengths_R <= original / low)
    return torch.where(middle_R, between_R, scaled_R)


def _yarn(exponents_R: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Peng et al. 2023, eq. 19 to 21, with its ramp over the number of the pair as published models have it."""
    head_dim = 2 * len(exponents_R)

    def pair_of(turns: float) -> float:
        """The pair that turns so many times within the original positions."""
        return head_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_of(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_of(scaling.beta_slow)), head_dim - 1)
    width = last - first if last != first else 0.001
    pairs_R = torch.arange(len(exponents_R), dtype=exponents_R.dtype, device=exponents_R.device)
    kept_R = 1 - ((pairs_R - first) / width).clamp(0, 1)
    powers_R = theta**exponents_R
    return 1.0 / (scaling.factor * powers_R) * (1 - kept_R) + 1.0 / powers_R * kept_R


def rope_rows(cos_PR: Tensor, sin_PR: Tensor, position_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the tables for each token, `[B, S, D]`: cosines twice, and sines with the sign of each half."""
    cos_BSR, sin_BSR = cos_PR[position_ids_BS], sin_PR[position_ids_BS]
    return torch.cat([cos_BSR, cos_BSR], -1), torch.cat([-sin_BSR, sin_BSR], -1)


def prepare_rope(
    cos_PR: Tensor, sin_PR: Tensor, position_ids_BS: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """(cosines, sines) and positions as `apply_rope` takes them, for all layers of a micro-batch whose heads are of
    `dtype`: rows are looked up once where no kernel does so by itself."""
    if _kernels(cos_PR, sin_PR, compute=dtype) is None:
        return rope_rows(cos_PR, sin_PR, position_ids_BS), None
    return (cos_PR, sin_PR), position_ids_BS


def _kernels(cos: Tensor, sin: Tensor, *others: Tensor, compute: torch.dtype = torch.float32) -> Any:
    # Tables of a low dtype ask for arithmetic that rounds to it, which kernels do not do.
    return kernels_for(cos, sin, *others, compute=compute) if cos.dtype is sin.dtype is torch.float32 else None


def _rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor, position_ids_BS: Tensor | None, backwards: bool) -> Tensor:
    if position_ids_BS is not None:
        if (kernels := _kernels(cos, sin, x_BSHD)) is not None:
            return kernels.rope(x_BSHD, cos, sin, position_ids_BS, -1.0 if backwards else 1.0)
        cos, sin = rope_rows(cos, sin, position_ids_BS)
    x_wide = x_BSHD.to(cos.dtype)
    signed_BS1D = (-sin if backwards else sin).unsqueeze(2)
    # Whole rows: on halves of them, the loops inside of PyTorch are too short.
    out_BSHD = x_wide.roll(x_BSHD.shape[-1] // 2, -1).mul_(signed_BS1D).addcmul_(x_wide, cos.unsqueeze(2))
    return out_BSHD.to(x_BSHD.dtype)


class _Rope(torch.autograd.Function):
    """Saves the tables and the positions, which all layers share; the gradient turns back by the same angle."""

    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos: Tensor, sin: Tensor, position_ids_BS: Tensor | None) -> Tensor:
        ctx.save_for_backward(cos, sin, position_ids_BS)
        return _rotate(x_BSHD, cos, sin, position_ids_BS, backwards=False)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_BSHD: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, position_ids_BS = ctx.saved_tensors
        return _rotate(grad_BSHD, cos, sin, position_ids_BS, backwards=True), None, None, None


def apply_rope(x_BSHD: Tensor, cos: Tensor, sin: Tensor, position_ids_BS: Tensor | None) -> Tensor:
    """Turns every head of every token by its position.

    Args:
        x_BSHD: queries or keys, any floating dtype.
        cos: `[P, R]` from `rope_tables`, or `[B, S, D]` from `rope_rows`; its dtype is the dtype of the arithmetic.
        sin: likewise.
        position_ids_BS: int64 rows of the tables, below P; None with `rope_rows`.

    Returns:
        `[B, S, H, D]` in the dtype of x.

    Raises:
        ValueError: the head dimension does not fit the tables, or these not each other.
        IndexError: a position beyond the tables (on a CPU; a kernel on a GPU makes the token NaN).
    """
    if cos.shape != sin.shape:
        raise ValueError(f"cosines {tuple(cos.shape)} and sines {tuple(sin.shape)} do not fit")
    pairs = cos.shape[-1] if position_ids_BS is not None else cos.shape[-1] // 2
    if x_BSHD.shape[-1] != 2 * pairs:
        raise ValueError(f"head dimension {x_BSHD.shape[-1]} does not fit tables of {pairs} pairs")
    if reference_ops():
        return reference_rope(x_BSHD, cos, sin, position_ids_BS)
    return _Rope.apply(x_BSHD, cos, sin, position_ids_BS)


def reference_rope(x_BSHD: Tensor, cos: Tensor, sin: Tensor, position_ids_BS: Tensor | None) -> Tensor:
    """Twin of `apply_rope`: one 2 x 2 rotation matrix a pair, in float64."""
    half = x_BSHD.shape[-1] // 2
    if position_ids_BS is None:
        cos_BSR, sin_BSR = cos[..., half:].double(), sin[..., half:].double()
    else:
        cos_BSR, sin_BSR = cos[position_ids_BS].double(), sin[position_ids_BS].double()
    rows = [torch.stack([cos_BSR, -sin_BSR], -1), torch.stack([sin_BSR, cos_BSR], -1)]
    rotation_BSRij = torch.stack(rows, -2)
    pairs_BSHRj = torch.stack([x_BSHD[..., :half], x_BSHD[..., half:]], -1).double()
    turned_BSHRi = torch.einsum("bsrij,bshrj->bshri", rotation_BSRij, pairs_BSHRj)
    return torch.cat([turned_BSHRi[..., 0], turned_BSHRi[..., 1]], -1).to(x_BSHD.dtype)
