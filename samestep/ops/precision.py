"""Which dtype each part of the model computes in, and the linear layer that obeys it.

Dtypes travel as a `Precision` value, never through globals or autocast.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import torch_private
from samestep.errors import ConfigError
from samestep.ops import float8
from samestep.ops.dispatch import reference_ops
from samestep.ops.first_order import first_order
from samestep.ops.float8 import FLOAT8

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
    "fp64": torch.float64,
}
_LOW = (torch.bfloat16, torch.float16)
# Asked once, at import: torch.compile cannot trace the question.
_CPU_HAS_UNITS = {
    torch.bfloat16: torch_private.cpu_has_bfloat16_units(),
    torch.float16: torch_private.cpu_has_float16_units(),
}


def parse_dtype(name: str, field: str | None = None) -> torch.dtype:
    """The dtype of a name such as `bfloat16` or `bf16`.

    Args:
        name: one of the names that a configuration may hold.
        field: dotted name of the configuration field, for the message.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise ConfigError(f"{name!r} is not a dtype", field=field, fix=f"write one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def is_narrow(dtype: torch.dtype) -> bool:
    """bfloat16 or float16: weights stored in it need float32 masters."""
    return dtype in _LOW


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: float32, or float64 where one of `dtypes` is float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def sum_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`[..., D]` -> `[D]`, the sum of all rows, in `dtype` where it is given.

    A sum that `torch.compile` makes for a CPU adds row after row, by which float32 would lose a digit over a thousand
    of them; it is formed in float64 then, in the same time.
    """
    x_ND = x.reshape(-1, x.shape[-1])
    if _adds_row_after_row(x):
        return x_ND.sum(0, dtype=torch.float64).to(x.dtype if dtype is None else dtype)
    return x_ND.sum(0, dtype=dtype)


def _adds_row_after_row(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"


class _AddToRows(torch.autograd.Function):
    """x `[..., D]` + bias, whose gradient is a `sum_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_D: Tensor) -> Tensor:
        return x + bias_D

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, sum_rows(grad)


@dataclass(frozen=True)
class Precision:
    """The dtypes of one model.

    Args:
        params: storage of the parameters.
        compute: operands of the matrix products.
        layernorm: inside RMSNorm and LayerNorm.
        softmax: attention scores and their softmax.
        rotary: rotation tables and their application.
        gradient: accumulation of the gradients.
        reduce: reduction of the gradients over ranks.
        loss: logits, their softmax and the loss.
        embedding: storage of the embedding tables, of a head tied to them too; None = `params`.
        linear: operands of the linear layers' products, where it is another than `compute`: float8.
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    layernorm: torch.dtype = torch.float32
    softmax: torch.dtype = torch.float32
    rotary: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    loss: torch.dtype = torch.float32
    embedding: torch.dtype = None  # type: ignore[assignment]  # filled in below
    linear: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.embedding is None:
            object.__setattr__(self, "embedding", self.params)

    @classmethod
    def from_config(cls, model_config: Any) -> Precision:
        """Reads `params_dtype`, `compute_dtype`, `layernorm_compute_dtype`, ... (strings) of a model section.

        An attribute that is missing or None keeps its default.

        Raises:
            ConfigError: a string that is no dtype.
        """
        named: dict[str, torch.dtype] = {}
        for name, attribute in _CONFIG_FIELDS.items():
            text = getattr(model_config, attribute, None)
            if name == "compute" and text == float8.NAME:
                named |= {"compute": float8.RESULT, "linear": FLOAT8}
            elif text is not None:
                named[name] = parse_dtype(text, field=f"model.{attribute}")
        return cls(**named)

    def raised(self, dtype: torch.dtype) -> Precision:
        """The same model with every part in `dtype`: float64 or float32, to judge its logic without rounding."""
        return Precision(**{field.name: dtype for field in fields(self)})


_CONFIG_FIELDS = {
    "params": "params_dtype",
    "compute": "compute_dtype",
    "layernorm": "layernorm_compute_dtype",
    "softmax": "softmax_compute_dtype",
    "rotary": "rotary_dtype",
    "gradient": "gradient_dtype",
    "reduce": "reduce_dtype",
    "loss": "loss_dtype",
    "embedding": "embedding_params_dtype",
}


def has_native_matmul(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether `device` multiplies matrices of `dtype` in hardware, so that a plain product is the fast one."""
    return torch.device(device).type != "cpu" or _CPU_HAS_UNITS.get(dtype, True)


def _cpu_products() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # this module is another one once it is imported


def cpu_rounds_to_bfloat16() -> bool:
    """Whether float32 operands of products on a CPU are rounded to bfloat16 now; see `in_bfloat16_units`."""
    return _cpu_products().fp32_precision == "bf16"


@contextmanager
def in_bfloat16_units(dtype: torch.dtype, device: torch.device) -> Iterator[bool]:
    """Inside, a CPU with units for bfloat16 uses them for products of float32 operands, if `dtype` is bfloat16; gives
    whether it does.

    Operands must be numbers of bfloat16: others would be rounded to it in large products, and not in small ones. Sums
    are float32. It holds for the whole process: nobody may multiply other numbers in another thread.
    """
    if not _in_units(dtype, device):
        yield False
        return
    _units.enter()
    try:
        yield True
    finally:
        _units.leave()


class _Units:
    """Threads that are in the units at once: the first one sets what the last one takes back."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, "none"

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = _cpu_products().fp32_precision
                if self._before != "bf16":
                    _cpu_products().fp32_precision = "bf16"
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._before != "bf16":
                _cpu_products().fp32_precision = self._before


_units = _Units()


def _in_units(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype is torch.bfloat16 and device.type == "cpu" and _CPU_HAS_UNITS[dtype]


def _product_in_units(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    with in_bfloat16_units(a_MK.dtype, a_MK.device):
        return a_MK.float() @ b_KN.float()


# For torch.compile, which cannot trace a setting that comes and goes.
_compiled_product_in_units = torch.library.custom_op(
    "samestep::product_in_bfloat16_units", _product_in_units, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)


@_compiled_product_in_units.register_fake
def _(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_KN.shape[1], dtype=torch.float32)


def wide_matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b`, both of one dtype, with the product kept in `wide(dtype)`: no rounding to bfloat16 or float16."""
    if is_narrow(a_MK.dtype) and a_MK.device.type == "cuda":
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    if _in_units(a_MK.dtype, a_MK.device):
        multiply = _compiled_product_in_units if torch.compiler.is_compiling() else _product_in_units
        return multiply(a_MK, b_KN)
    dtype = wide(a_MK.dtype)
    return a_MK.to(dtype) @ b_KN.to(dtype)


def _matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b` in their common dtype, or in float32 where the device has no units for that dtype."""
    return a_MK @ b_KN if has_native_matmul(a_MK.dtype, a_MK.device) else wide_matmul(a_MK, b_KN)


class _LowLinear(torch.autograd.Function):
    """A linear layer whose operands are rounded to bfloat16 or float16 and whose sums are formed in float32.

    The product is rounded once, to `out_dtype`. Saved for backward: x in the compute dtype and the weight itself (its
    rounded copy is made again, unless the caller keeps one). The weight gradient reaches a float32 weight without a
    rounding on the way, so that accumulation over micro-batches adds float32 numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        compute: torch.dtype,
        out: torch.dtype,
        rounded_OI: Tensor | None,
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).to(compute)
        weight_IO = (weight_OI.to(compute) if rounded_OI is None else rounded_OI).t()
        bias = None if bias_O is None else bias_O.to(compute)
        if out == compute and has_native_matmul(compute, x.device):
            product_NO = F.linear(x_NI, weight_IO.t(), bias)
        else:
            product_NO = wide_matmul(x_NI, weight_IO)
            if bias is not None:
                product_NO += bias
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.x_like, ctx.rounded_OI = (x.shape, x.dtype), rounded_OI
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype
        return product_NO.to(out).view(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        shape, dtype = ctx.x_like
        compute = x_NI.dtype
        grad_NO = grad.reshape(-1, grad.shape[-1])
        # A float32 gradient is used as it is where the product runs in float32 anyway, and always for float16, whose
        # range is too small for an unscaled gradient.
        narrow = grad_NO.dtype == compute or (compute is torch.bfloat16 and has_native_matmul(compute, grad.device))
        operand = compute if narrow else wide(grad_NO.dtype)
        grad_NO = grad_NO.to(operand)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            multiply = _matmul if dtype == operand else wide_matmul
            rounded_OI = weight_OI.to(compute) if ctx.rounded_OI is None else ctx.rounded_OI
            dx = multiply(grad_NO, rounded_OI.to(operand)).to(dtype).view(shape)
        if ctx.needs_input_grad[1]:
            multiply = _matmul if weight_OI.dtype == operand else wide_matmul
            dweight = multiply(grad_NO.t(), x_NI.to(operand)).to(weight_OI.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_rows(grad_NO, wide(operand)).to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None


class _Float8Linear(torch.autograd.Function):
    """A linear layer whose product, and that of its input's gradient, are of float8 operands.

    The gradient of the weight is a product of bfloat16 operands: its rows would be scaled by all the tokens of a
    micro-batch, so that it would depend on how the batch is split. It is not rounded on its way to a float32 weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).to(float8.RESULT)
        product_NO = float8.product(x_NI, weight_OI)
        if bias_O is not None:
            product_NO += bias_O.to(float8.RESULT)
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.x_like = x.shape, x.dtype
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype
        return product_NO.view(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        shape, dtype = ctx.x_like
        grad_NO = grad.reshape(-1, grad.shape[-1]).to(float8.RESULT)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = float8.product(grad_NO, weight_OI.t()).to(dtype).view(shape)
        if ctx.needs_input_grad[1]:
            dweight = wide_matmul(grad_NO.t(), x_NI).to(weight_OI.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_rows(grad_NO, torch.float32).to(ctx.bias_dtype)
        return dx, dweight, dbias


def prepare_float8() -> None:
    """Load what float8 products need. Before anything is compiled: loading cannot be traced."""
    float8.prepare()
    # torchao's layer, inside of a function with a backward of its own, cannot be traced.
    torch.compiler.allow_in_graph(_Float8Linear)


def linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    compute_dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
    rounded_OI: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` with all three rounded to `compute_dtype` first.

    On a CPU without bfloat16 / float16 units the values are still rounded to `compute_dtype`, but the product runs in
    float32, which is several times faster and no less exact.

    Args:
        x: `[..., I]`, any floating dtype.
        weight_OI: any floating dtype, usually that of `Precision.params`.
        bias_O: or None.
        compute_dtype: dtype of the operands. float8 (e4m3): of `x` and weight, whose rows are scaled; see `ops.float8`.
        out_dtype: dtype of the result; `compute_dtype` unless told, and always bfloat16 with float8. A wider one keeps
            the product unrounded.
        rounded_OI: the weight in `compute_dtype` (bfloat16 or float16) where the caller has it already.

    Returns:
        `[..., O]`. Gradients come in the dtype of their inputs; those of the parameters are not rounded to a dtype
        narrower than the parameter's.
    """
    if reference_ops():
        return reference_linear(x, weight_OI, bias_O, compute_dtype, out_dtype=out_dtype)
    if compute_dtype is FLOAT8:
        return _Float8Linear.apply(x, weight_OI, bias_O)
    out_dtype = compute_dtype if out_dtype is None else out_dtype
    if is_narrow(compute_dtype):
        return _LowLinear.apply(x, weight_OI, bias_O, compute_dtype, out_dtype, rounded_OI)
    x, weight_OI = x.to(compute_dtype), weight_OI.to(compute_dtype)
    bias = None if bias_O is None else bias_O.to(compute_dtype)
    if bias is not None and _adds_row_after_row(x):
        return _AddToRows.apply(F.linear(x, weight_OI), bias).to(out_dtype)
    return F.linear(x, weight_OI, bias).to(out_dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in float64 with its values rounded to `dtype`, and a gradient that passes unrounded. For the twins."""
    x64 = x.double()
    return x64 + (x64.to(dtype).double() - x64).detach()


def reference_linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    compute_dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Twin of `linear`: the rounded operands multiplied in float64, the result rounded once."""
    if compute_dtype is FLOAT8:
        product = float8.rounded_rows(x.to(float8.RESULT)) @ float8.rounded_rows(weight_OI).T
        compute_dtype = out_dtype = float8.RESULT
    else:
        product = rounded(x, compute_dtype) @ rounded(weight_OI, compute_dtype).T
    if bias_O is not None:
        product = product + rounded(bias_O, compute_dtype)
    return product.to(compute_dtype if out_dtype is None else out_dtype)
