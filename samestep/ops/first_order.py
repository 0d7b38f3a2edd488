"""Backward passes that cannot be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def first_order(backward: Callable[..., T]) -> Callable[..., T]:
    """A backward pass of an operator that refuses `create_graph=True`.

    `torch.autograd.function.once_differentiable` would only refuse where the gradient that comes in is to be
    differentiated: that of a loss is not, and the second order would be lost without a word.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> T:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("samestep's operators have no second derivative: create_graph=True is not possible")
        return backward(ctx, *grads)

    return run
