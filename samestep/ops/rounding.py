"""Stochastic rounding to bfloat16 with bits that are a pure function of what is rounded.

A number between two neighbours becomes the upper one with the probability that keeps its mean, so that many small
changes add up to what they are worth (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). Which of
the two is a hash of (key, place in the whole tensor): it does not depend on how the tensor is split over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.ops.dropout import random_words

# Elements rounded at once: what a core's cache holds; a GPU wants few large kernels.
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
_DROPPED_BITS = 16  # of a float32, whose upper half is a bfloat16


def round_stochastically(source: Tensor, target: Tensor, key: int, first: int = 0) -> None:
    """Fill `target` with `source` rounded to bfloat16; what bfloat16 holds already stays as it is.

    Args:
        source: float32.
        target: of the same shape, bfloat16 or wider; may be the source itself.
        key: from `random_key`.
        first: place of the first element in the whole tensor, row by row.
    """
    assert source.dtype is torch.float32
    numbers, places = source.reshape(-1), target.view(-1)
    size = _PIECE["cpu" if source.device.type == "cpu" else "cuda"]
    for start in range(0, numbers.numel(), size):
        piece = numbers[start : start + size]
        # One word has the bits of four elements, so that a piece may begin with any of them.
        word, lane = divmod(first + start, 4)
        words = random_words(key, word, -(-(lane + piece.numel()) // 4), piece.device)
        bits = words.view(torch.int16)[lane : lane + piece.numel()].to(torch.int32).bitwise_and_(0xFFFF)
        bits = bits.add_(piece.view(torch.int32)) >> _DROPPED_BITS
        rounded = bits.to(torch.int16).view(torch.bfloat16)
        places[start : start + size] = torch.where(piece.isfinite(), rounded, piece.to(torch.bfloat16))
