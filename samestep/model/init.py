"""First values of parameters: a function of (seed, parameter name) alone, so equal on any layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    initializer_range: float,
    place: Callable[[str, torch.Tensor, torch.Tensor], object] | None = None,
) -> None:
    """Fill every parameter: matrices N(0, initializer_range^2), norm weights 1, biases 0.

    Drawn on the CPU in float32 whatever the parameter's dtype, so that a float64 model starts from the same numbers.

    Args:
        place: (name, parameter, whole first value in float32 on the CPU) -> puts it, or the part of it that this rank
            holds, into the parameter; None copies it.
    """
    for name, parameter in model.named_parameters():
        value = first_value(name, parameter.shape, seed, initializer_range)
        if place is None:
            parameter.copy_(value)
        else:
            place(name, parameter, value)


def first_value(name: str, shape: torch.Size, seed: int, initializer_range: float) -> torch.Tensor:
    """The whole first value of one parameter, float32 on the CPU."""
    # Named, because a default device or dtype may be set while a model is built.
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    if name.endswith(".bias"):
        return value.zero_()
    if len(shape) == 1:
        return value.fill_(1.0)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return value.normal_(0.0, initializer_range, generator=generator)
