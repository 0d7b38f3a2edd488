"""Where the gradients of a step add up: in `gradient_dtype`, whatever the dtype a parameter is stored in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from samestep.ops.exact_sum import FINEST_BITS, add_fixed_, from_fixed


class GradientSink:
    """Accumulates gradients over the micro-batches of a step.

    A parameter stored in `dtype` accumulates in its own `.grad`. Any other gets a buffer of `dtype`: as soon as
    autograd has finished its gradient of one micro-batch, that is added to the buffer and freed, so that the running
    sum is never rounded to the storage dtype.

    A backward pass that breaks off has added the gradients of some parameters already, and nothing can take them out
    again. They need not be: they are those of the whole micro-batch. So the sink notes which they are (`watch`), and
    passes over them while the micro-batch is run again in parts (`beyond`). No memory is set aside for that.

    Args:
        parameters: (name, parameter) pairs; frozen ones are passed over.
        dtype: float32 or wider.
        can_resume: whether a pass that breaks off will be run again in parts. Noting gradients takes a hook on each
            parameter, and makes FSDP wait for copies of offloaded ones. Only then may gradients be sparse.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype, *, can_resume: bool = True):
        self.dtype = dtype
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self._buffers: dict[str, torch.Tensor] = {}
        self._reached: set[str] = set()
        self._complete: set[str] = set()
        self._hooks = []
        for name, parameter in self.parameters.items():
            if parameter.dtype != dtype:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._adder(name)))
            elif can_resume:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._noter(name)))

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _noter(self, name: str):
        def note(parameter: torch.Tensor) -> None:
            if name in self._complete:
                parameter.grad = None
                return
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:  # autograd adds those that follow to it in place
                parameter.grad = None  # what is not in memory has not been reached
                parameter.grad = gradient.to_dense()
            self._reached.add(name)

        return note

    def _adder(self, name: str):
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if name not in self._complete:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                if name in self._buffers:
                    self._buffers[name].add_(gradient)
                else:
                    self._buffers[name] = gradient.to(self.dtype)
                self._reached.add(name)
            parameter.grad = None

        return add

    def watch(self) -> None:
        """A backward pass begins: none of its gradients has been added so far."""
        self._reached.clear()

    @contextmanager
    def beyond(self) -> Iterator[None]:
        """The pass watched last has broken off. Passes in here add nothing to the parameters whose gradients it had
        added."""
        reached, before = set(self._reached), set(self._complete)
        kept: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype != self.dtype:
                parameter.grad = None  # one that could not be added
            elif name in reached:
                assert parameter.grad is not None
                kept[name], parameter.grad = parameter.grad, None
        self._complete |= reached
        try:
            yield
        finally:
            self._complete = before
            for name, gradient in kept.items():
                self.parameters[name].grad = gradient

    def gradients(self) -> dict[str, torch.Tensor]:
        """Name -> sum so far, in `dtype`; a parameter that took no part in the step is absent."""
        found = {}
        for name, parameter in self.parameters.items():
            gradient = self._buffers.get(name) if parameter.dtype != self.dtype else parameter.grad
            if gradient is not None:
                found[name] = gradient
        return found

    def begin(self, names: Iterable[str]) -> None:
        """A sum of zero for those of these parameters that took no part so far: they did on another rank."""
        for name in names:
            parameter = self.parameters[name]
            if parameter.dtype != self.dtype:
                self._buffers.setdefault(name, torch.zeros_like(parameter, dtype=self.dtype))
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def zero(self) -> None:
        """Forget all sums and free their memory."""
        self._buffers.clear()
        for parameter in self.parameters.values():
            parameter.grad = None


class ExactSink:
    """Accumulates gradients so that the sum does not depend on the order of the passes: as int64, see `exact_sum`.

    The gradient of each backward pass is taken over as soon as autograd has finished it, and freed. The sums keep their
    memory from step to step: 8 bytes a parameter.

    Args:
        parameters: (name, parameter) pairs; frozen ones are passed over.
        device: of the parameters.

    Attributes:
        bits: the unit of the sums is 2^-bits.
        largest: absolute value of a summand since `zero`, a scalar; NaN or infinite once one was not finite.
        total: the sums of all parameters end to end, int64.
    """

    dtype = torch.float32

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], device: torch.device):
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.bits = FINEST_BITS
        self.largest = torch.zeros((), device=device)
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.total = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._sums = dict(zip(self.parameters, self.total.split(sizes), strict=True))
        self._found: set[str] = set()
        piece = _PIECE["cpu" if device.type == "cpu" else "cuda"]
        self._scratch = torch.empty(min(piece, max(sizes, default=1)), dtype=torch.int64, device=device)
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._adder(name))

    def _adder(self, name: str):
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.to(self.dtype).reshape(-1)
            low, high = torch.aminmax(gradient)
            self.largest = torch.maximum(self.largest, torch.maximum(-low, high))
            add_fixed_(self._sums[name], gradient, self.bits, self._scratch)
            self._found.add(name)
            parameter.grad = None

        return add

    def gradients(self) -> dict[str, torch.Tensor]:
        """Name -> sum so far, float32: rounded here for the first time. NaN where a summand was not finite."""
        spoilt = torch.where(self.largest.isfinite(), 0.0, math.nan)
        return {
            name: from_fixed(self._sums[name].view_as(parameter), self.bits, self.dtype).add_(spoilt)
            for name, parameter in self.parameters.items()
            if name in self._found
        }

    def zero(self) -> None:
        """Forget all sums."""
        self.total.zero_()
        self._found.clear()
        self.largest = torch.zeros_like(self.largest)
        self.bits = FINEST_BITS
        for parameter in self.parameters.values():
            parameter.grad = None


_PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements converted at once: half a megabyte of int64, which a core's cache holds; a GPU wants few large kernels."""
