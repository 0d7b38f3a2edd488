"""Sums of floating-point numbers that do not depend on the order of the summands.

A number is cut to a whole multiple of 2^-bits and added as an int64: integers add without rounding, so the sum is the
same for every order and grouping (fixed-point accumulation; Kulisch 2013 has the idea in hardware). It is right as long
as it fits: the largest summand times their number must stay below 2^62 units, which `bits_for` sees to. The sum of n
numbers is off by less than n units.
"""

from __future__ import annotations

import math

import torch

FINEST_BITS = 48
"""Unless numbers are too large, they are cut to multiples of 2^-48 = 3.6e-15. A larger unit would show in AdamW, which
divides by |g| + 1e-8: one summand's cut is at most 3.6e-7 of the update, about the rounding of float32. A smaller one
would leave less room: with it, 16 summands may reach 512 each, and 1024 of them 8."""


def to_fixed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 or float64 -> int64 multiples of 2^-bits, cut towards zero. What does not fit gives any number."""
    return (numbers * 2.0**bits).to(torch.int64)


def add_fixed_(total: torch.Tensor, numbers: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    """`total += to_fixed(numbers, bits)`, piece by piece so that what is written stays in the cache.

    Args:
        total: int64, flat.
        numbers: float32, flat, as long. Destroyed.
        scratch: int64; its length is that of a piece.
    """
    size = len(scratch)
    for sums, piece in zip(total.split(size), numbers.split(size), strict=True):
        sums.add_(scratch[: len(piece)].copy_(piece.mul_(2.0**bits)))


def from_fixed(total: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """int64 -> `dtype`, by way of float64."""
    return total.to(torch.float64).mul_(2.0**-bits).to(dtype)


def bits_for(largest: float, summands: int) -> int:
    """The finest bits, at most `FINEST_BITS`, with which `summands` finite numbers up to `largest` can be added."""
    _, exponent = math.frexp(largest)  # largest < 2^exponent
    return min(FINEST_BITS, 62 - exponent - summands.bit_length())
