"""RMSNorm and LayerNorm: the input is cast to `compute_dtype`, normalized there, and cast back to its own dtype."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import torch_private
from samestep.errors import ConfigError
from samestep.ops.dispatch import cpu_kernels_again, cpu_kernels_for, kernels_for, reference_ops
from samestep.ops.first_order import first_order
from samestep.ops.precision import sum_rows, wide

LARGEST_ROW = 32768
"""Features that one program of a Triton kernel can hold."""


def _kernels(x: Tensor, weight_D: Tensor, compute: torch.dtype) -> Any:
    fits = weight_D.shape == x.shape[-1:] and x.shape[-1] <= LARGEST_ROW
    return kernels_for(x, weight_D, compute=compute) if fits else None


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm that saves only its input and one number a row; on a CPU it beats `F.rms_norm` (docs/measurements.md).

    With xh = x / rms(x) and u = g * w: dw = sum over rows of g * xh, dx = (u - xh * mean(u * xh)) / rms(x).
    A low `compute_dtype` rounds the operands and the result; the arithmetic between is float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, compute: torch.dtype) -> Tensor:
        ctx.compute = compute
        if (kernels := _kernels(x, weight_D, compute)) is not None:
            y, scale = kernels.rms_norm(x, weight_D, eps, compute)
            ctx.save_for_backward(x, weight_D, scale)
            return y
        math = wide(compute)
        x_wide = x.to(compute).to(math)
        # One buffer throughout: fresh memory costs as much as the arithmetic.
        y = torch.square(x_wide)
        scale = y.mean(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(x_wide, scale, out=y).mul_(weight_D.to(compute))
        ctx.save_for_backward(x, weight_D, scale)
        return y.to(compute).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, scale = ctx.saved_tensors
        if (kernels := _kernels(x, weight_D, ctx.compute)) is not None:
            return *kernels.rms_norm_backward(grad, x, weight_D, scale, ctx.compute), None, None
        math = scale.dtype
        x_wide, grad = x.to(ctx.compute).to(math), grad.to(math)
        weight = weight_D.to(ctx.compute).to(math)
        buffer = (grad * x_wide).mul_(scale)
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = sum_rows(buffer).to(weight_D.dtype)
        if ctx.needs_input_grad[0]:
            projection = (buffer @ weight).unsqueeze(-1).div_(weight.numel())
            torch.mul(grad, weight, out=buffer)
            dx = buffer.addcmul_(x_wide, projection.mul_(scale), value=-1).mul_(scale).to(x.dtype)
        return dx, dweight, None, None


class _LayerNormFunction(torch.autograd.Function):
    """LayerNorm that saves only its input and two or three numbers a row.

    With xh = (x - mean(x)) / std(x) and u = g * w: dw = sum over rows of g * xh, db = that of g,
    dx = (u - mean(u) - xh * mean(u * xh)) / std(x). Low dtypes as in RMSNorm. On a CPU PyTorch's own would add up dw
    and db row after row, in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, compute: torch.dtype) -> Tensor:
        ctx.compute = compute
        if (kernels := _cpu_kernels(x, weight_D, bias_D, compute)) is not None:
            y, moments = kernels.layer_norm(x, weight_D, bias_D, eps)
            ctx.save_for_backward(x, weight_D, bias_D, moments)
            return y
        x_wide, weight, bias = (t.to(compute).to(wide(compute)) for t in (x, weight_D, bias_D))
        y, mean, scale = torch.native_layer_norm(x_wide, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight_D, bias_D, mean, scale)
        return y.to(compute).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, bias_D, *moments = ctx.saved_tensors
        if len(moments) == 1:
            kernels = cpu_kernels_again(x, weight_D, bias_D)
            return *kernels.layer_norm_backward(grad, x, weight_D, moments[0]), None, None
        mean, scale = moments
        x_wide, weight, bias = (t.to(ctx.compute).to(scale.dtype) for t in (x, weight_D, bias_D))
        grad, wanted = grad.to(scale.dtype), ctx.needs_input_grad
        sums_itself = grad.device.type == "cpu"
        asked = wanted[0], wanted[1] and not sums_itself, wanted[2] and not sums_itself
        dx, dweight, dbias = torch_private.layer_norm_backward(grad, x_wide, mean, scale, weight, bias, asked)
        if sums_itself:
            dweight = sum_rows((x_wide - mean).mul_(scale).mul_(grad)) if wanted[1] else None
            dbias = sum_rows(grad) if wanted[2] else None
        gradients = zip((dx, dweight, dbias), (x, weight_D, bias_D), strict=True)
        return *(None if g is None else g.to(like.dtype) for g, like in gradients), None, None


def _cpu_kernels(x: Tensor, weight_D: Tensor, bias_D: Tensor, compute: torch.dtype) -> Any:
    fits = weight_D.shape == bias_D.shape == x.shape[-1:] and compute is torch.float32
    return cpu_kernels_for(x, weight_D, bias_D) if fits else None


class _Norm(nn.Module, ABC):
    """What the four classes share.

    Args:
        dim: size of the last dimension of the input.
        eps: added to the mean square (RMSNorm) or the variance (LayerNorm).
        compute_dtype: dtype inside.
        params_dtype: dtype of the stored weight (ones) and bias (zeros, LayerNorm only).
    """

    has_bias = False

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        compute_dtype: torch.dtype = torch.float32,
        params_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.dim, self.eps, self.compute_dtype = dim, eps, compute_dtype
        self.weight = nn.Parameter(torch.ones(dim, dtype=params_dtype))
        if self.has_bias:
            self.bias = nn.Parameter(torch.zeros(dim, dtype=params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., dim]` -> the same shape and dtype. ValueError where the last dimension is another."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"{type(self).__name__} of {self.dim} features got an input with {x.shape[-1]}")
        return self._normalize(x)

    @abstractmethod
    def _normalize(self, x: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, compute_dtype={self.compute_dtype}"


class RMSNorm(_Norm):
    """`x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich 2019, eq. 4), in plain arithmetic: the twin."""

    def _normalize(self, x: Tensor) -> Tensor:
        c, math = self.compute_dtype, wide(self.compute_dtype)
        x_wide = x.to(c).to(math)
        y = x_wide / torch.sqrt((x_wide * x_wide).mean(-1, keepdim=True) + self.eps) * self.weight.to(c).to(math)
        return y.to(c).to(x.dtype)


class LayerNorm(_Norm):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, biased variance (Ba et al. 2016, eq. 4): the twin."""

    has_bias = True

    def _normalize(self, x: Tensor) -> Tensor:
        c, math = self.compute_dtype, wide(self.compute_dtype)
        x_wide = x.to(c).to(math)
        centred = x_wide - x_wide.mean(-1, keepdim=True)
        unit = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + self.eps)
        return (unit * self.weight.to(c).to(math) + self.bias.to(c).to(math)).to(c).to(x.dtype)


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` in one operator."""

    def _normalize(self, x: Tensor) -> Tensor:
        if reference_ops():
            return super()._normalize(x)
        if x.device.type == "cpu" or _kernels(x, self.weight, self.compute_dtype) is not None:
            return _RMSNormFunction.apply(x, self.weight, self.eps, self.compute_dtype)
        c = self.compute_dtype
        return F.rms_norm(x.to(c), (self.dim,), self.weight.to(c), self.eps).to(x.dtype)


class FusedLayerNorm(LayerNorm):
    """`LayerNorm` in one operator."""

    def _normalize(self, x: Tensor) -> Tensor:
        if reference_ops():
            return super()._normalize(x)
        return _LayerNormFunction.apply(x, self.weight, self.bias, self.eps, self.compute_dtype)


_CLASSES: dict[tuple[str, bool], type[_Norm]] = {
    ("LayerNorm", True): FusedLayerNorm,
    ("LayerNorm", False): LayerNorm,
    ("RMSNorm", True): FusedRMSNorm,
    ("RMSNorm", False): RMSNorm,
}


def get_norm_cls(normalization: str = "RMSNorm", fused_norm: bool = True) -> type[_Norm]:
    """The norm class of `model.normalization`; the plain twin where `fused_norm` is false.

    Raises:
        ConfigError: another name than LayerNorm or RMSNorm.
    """
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ConfigError(
            f"{normalization!r} is not a normalization; only LayerNorm and RMSNorm are",
            field="model.normalization",
            fix="write LayerNorm or RMSNorm",
        )
    return _CLASSES[normalization, bool(fused_norm)]
