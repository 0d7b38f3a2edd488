"""A matrix product in the compute dtype, with its weight stored in the parameter dtype."""

from __future__ import annotations

import torch
from torch import nn

from samestep.ops import Precision, linear


class Linear(nn.Module):
    """x [..., in_features] -> [..., out_features] in the compute dtype."""

    def __init__(self, in_features: int, out_features: int, precision: Precision, bias: bool = False):
        super().__init__()
        self.compute_dtype = precision.compute
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=precision.params))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=precision.params)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.compute_dtype)
