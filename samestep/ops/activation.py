"""GELU, SiLU and SwiGLU. Input and output have one dtype; float16 and bfloat16 are computed in float32 inside."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import torch_private
from samestep.errors import ConfigError
from samestep.ops.dispatch import kernels_for, reference_ops
from samestep.ops.first_order import first_order
from samestep.ops.precision import wide


class GELU(nn.Module):
    """`x * Phi(x)` (Hendrycks and Gimpel 2016).

    Args:
        approximate: `none` (erf) or `tanh` (their approximation).

    Raises:
        ConfigError: another value of `approximate`.
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ConfigError(
                f"approximate={approximate!r} is not a form of GELU", field="model.hidden_act", fix="use none or tanh"
            )
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        if reference_ops():
            return reference_gelu(x, self.approximate)
        return F.gelu(x, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(nn.Module):
    """`x * sigmoid(x)` (Elfwing et al. 2017).

    Args:
        inplace: overwrite the input with the result. As always in PyTorch, the input may then not be a leaf that
            requires a gradient.
    """

    def __init__(self, inplace: bool = False):
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        if reference_ops():
            # Of a copy where x is overwritten: the twin keeps its input for the backward pass.
            return x.copy_(reference_silu(x.clone())) if self.inplace else reference_silu(x)
        return F.silu(x, inplace=self.inplace)

    def extra_repr(self) -> str:
        return f"inplace={self.inplace}"


class _SwiGlu(torch.autograd.Function):
    """Saves its two inputs and nothing else: silu(gate) is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        if (kernels := kernels_for(gate, up, compute=gate.dtype)) is not None:
            return kernels.swiglu(gate, up, limit)
        # silu of a float32 copy for low dtypes: rounding silu(gate) before the product would double the error.
        gate_wide = gate.to(wide(gate.dtype))
        if limit is not None:
            gate_wide, up = gate_wide.clamp(max=limit), up.to(gate_wide.dtype).clamp(-limit, limit)
        return F.silu(gate_wide).mul_(up).to(gate.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dtype, limit = gate.dtype, ctx.limit
        if (kernels := kernels_for(gate, up, compute=dtype)) is not None:
            return *kernels.swiglu_backward(grad, gate, up, limit), None
        gate, grad = gate.to(wide(dtype)), grad.to(wide(dtype))
        if limit is not None:
            up = up.to(wide(dtype))
            gate_is_out, up_is_out = gate > limit, up.abs() > limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        dgate = dup = None
        if ctx.needs_input_grad[0]:
            dgate = torch_private.silu_backward_(grad * up, gate)
            dgate = (dgate if limit is None else dgate.masked_fill_(gate_is_out, 0)).to(dtype)
        if ctx.needs_input_grad[1]:
            dup = F.silu(gate).mul_(grad)
            dup = (dup if limit is None else dup.masked_fill_(up_is_out, 0)).to(dtype)
        return dgate, dup, None


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020, eq. 6), both of one shape and dtype.

    Args:
        limit: gate is clamped to at most this, up to within plus and minus this, as gpt-oss does; what is clamped gets
            no gradient. None: no clamping.

    Raises:
        ValueError: shapes or dtypes differ, or a limit not above 0.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must have one shape and dtype"
        )
    if limit is not None and not limit > 0:
        raise ValueError(f"limit {limit} is not above 0")
    if reference_ops():
        return reference_swiglu(gate, up, limit)
    return _SwiGlu.apply(gate, up, limit)


class FusedSwiGlu(nn.Module):
    """`silu(first half) * second half` along a dimension.

    Args:
        limit: as in `swiglu`.
    """

    def __init__(self, limit: float | None = None):
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor, dim: int = -1) -> Tensor:
        """x with an even size along `dim` -> half that size. ValueError where the size is odd."""
        if x.shape[dim] % 2:
            raise ValueError(f"SwiGLU halves dimension {dim}, whose size {x.shape[dim]} is odd")
        gate, up = x.chunk(2, dim)
        return swiglu(gate, up, self.limit)

    def extra_repr(self) -> str:
        return "" if self.limit is None else f"limit={self.limit}"


ACTIVATION_MAP: dict[str, Callable[..., nn.Module]] = {
    "gelu": GELU,
    "silu": SiLU,
    "fusedswiglu": FusedSwiGlu,
    "gelu_tanh": functools.partial(GELU, approximate="tanh"),
}


def get_activation(name: str, **kwargs: Any) -> nn.Module:
    """The module of `model.hidden_act`, case ignored; `kwargs` go to its constructor.

    Raises:
        ConfigError: a name that is not in `ACTIVATION_MAP`.
    """
    cls = ACTIVATION_MAP.get(str(name).lower())
    if cls is None:
        raise ConfigError(
            f"{name!r} is not an activation",
            field="model.hidden_act",
            fix=f"write one of {', '.join(ACTIVATION_MAP)}",
        )
    return cls(**kwargs)


def reference_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Twin of `GELU`."""
    z = x.to(wide(x.dtype))
    if approximate == "tanh":
        y = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    else:
        y = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
    return y.to(x.dtype)


def reference_silu(x: Tensor) -> Tensor:
    """Twin of `SiLU`."""
    z = x.to(wide(x.dtype))
    return (z / (1 + torch.exp(-z))).to(x.dtype)


def reference_swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """Twin of `swiglu`."""
    z, u = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    if limit is not None:
        z, u = z.clamp(max=limit), u.clamp(-limit, limit)
    return (z * torch.sigmoid(z) * u).to(gate.dtype)
