"""A matrix product in the compute dtype, with its weight stored in the parameter dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from samestep.ops import Precision, linear
from samestep.ops.dispatch import reference_ops
from samestep.ops.float8 import FLOAT8
from samestep.ops.precision import is_narrow, prepare_float8
from samestep.torch_private import is_out_of_memory


class Linear(nn.Module):
    """x [..., in_features] -> [..., out_features] in the compute dtype; of float8 operands, in bfloat16."""

    def __init__(self, in_features: int, out_features: int, precision: Precision, bias: bool = False):
        super().__init__()
        self.compute_dtype = precision.linear or precision.compute
        if self.compute_dtype is FLOAT8:
            prepare_float8()
        self.cast: torch.Tensor | None = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=precision.params))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=precision.params)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.compute_dtype, rounded_OI=self.cast)


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Inside, the weights of linear layers are cast to the compute dtype once, not in every pass; they must not
    change. Takes the memory of these copies; where there is none, they are cast in every pass as ever."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    try:
        if not reference_ops():
            _cast(layers)
        yield
    finally:
        _forget(layers)


def _cast(layers: Sequence[Linear]) -> None:
    try:
        for layer in layers:
            if is_narrow(layer.compute_dtype) and layer.weight.dtype != layer.compute_dtype:
                layer.cast = layer.weight.detach().to(layer.compute_dtype)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _forget(layers)


def _forget(layers: Sequence[Linear]) -> None:
    for layer in layers:
        layer.cast = None
