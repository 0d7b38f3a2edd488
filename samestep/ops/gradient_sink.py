"""Where the gradients of a step add up: in `gradient_dtype`, whatever the dtype a parameter is stored in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class GradientSink:
    """Accumulates gradients over the micro-batches of a step.

    A parameter stored in `dtype` accumulates in its own `.grad`. Any other gets a buffer of `dtype`: as soon as
    autograd has finished its gradient of one micro-batch, that is added to the buffer and freed, so that the running
    sum is never rounded to the storage dtype.

    Args:
        parameters: (name, parameter) pairs; frozen ones are passed over.
        dtype: float32 or wider.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype):
        self.dtype = dtype
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self._buffers: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype != dtype:
                parameter.register_post_accumulate_grad_hook(self._adder(name))

    def _adder(self, name: str):
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if name in self._buffers:
                self._buffers[name].add_(parameter.grad)
            else:
                self._buffers[name] = parameter.grad.to(self.dtype)
            parameter.grad = None

        return add

    def gradients(self) -> dict[str, torch.Tensor]:
        """Name -> sum so far, in `dtype`; a parameter that took no part in the step is absent."""
        found = {}
        for name, parameter in self.parameters.items():
            gradient = self._buffers.get(name) if parameter.dtype != self.dtype else parameter.grad
            if gradient is not None:
                found[name] = gradient
        return found

    def zero(self) -> None:
        """Forget all sums and free their memory."""
        self._buffers.clear()
        for parameter in self.parameters.values():
            parameter.grad = None
