"""Products of matrices in float8 (e4m3), through torchao.

Every row of an operand has a scale of its own, a power of two, made from the row as it comes: torchao's `rowwise`
recipe. So what a token is multiplied with does not depend on the tokens beside it, and a global batch may be split in
any way. Imports torchao where it is used.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn
from torch.func import functional_call

from samestep.errors import ConfigError

NAME = "float8"
"""Of the dtype in a configuration."""
FLOAT8 = torch.float8_e4m3fn
RESULT = torch.bfloat16
"""What a product of float8 matrices is rounded to."""
_FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs with units for float8."""
_LEAST = 1e-12
"""What torchao takes for the largest number of a row of smaller ones."""
_PRODUCTS: dict[bool, nn.Module] = {}
"""Whether it is emulated -> torchao's layer, whose weight is given anew for each product."""


def lack_of_float8(device: torch.device) -> str | None:
    """Why nothing can be multiplied in float8 on a device; None where it can be."""
    if device.type != "cuda":
        return f"the device is a {device.type.upper()}, which has no units for float8"
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no units for float8; GPUs of compute capability 8.9 have them"
    if importlib.util.find_spec("torchao") is None:
        return "float8 products need the package torchao, which is not installed"
    return None


def check_float8(compute_dtype: str, device: torch.device) -> None:
    """Find out before a run begins that it cannot compute in what it was told to.

    Args:
        compute_dtype: `model.compute_dtype`.

    Raises:
        ConfigError: it is float8, and the device has no units for it, or torchao is missing.
    """
    reason = lack_of_float8(device) if compute_dtype == NAME else None
    if reason is not None:
        install = 'run `pip install "samestep[lowbit]"`, or ' if "torchao" in reason else ""
        raise ConfigError(reason, field="model.compute_dtype", fix=f"{install}write bfloat16")


def prepare() -> None:
    """Load torchao."""
    if _PRODUCTS:
        return
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, convert_to_float8_training
    from torchao.float8.config import Float8GemmConfig

    rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=FLOAT8)
    for is_emulated in (False, True):
        config = Float8LinearConfig(
            cast_config_input=rows,
            cast_config_weight=rows,
            cast_config_grad_output=rows,
            gemm_config_output=Float8GemmConfig(use_fast_accum=False),  # it sums in fewer bits than float32
            round_scales_to_power_of_2=True,
            emulate=is_emulated,
        )
        layer = nn.Linear(16, 16, bias=False, device="meta")
        _PRODUCTS[is_emulated] = convert_to_float8_training(layer, config=config)


def product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """`a @ b.T` with each row of both rounded to float8 under its own scale, summed in float32, rounded to bfloat16.

    On a CPU the rounded operands are multiplied in float32.

    Args:
        a_MK: bfloat16.
        b_NK: any floating dtype.
    """
    prepare()
    return functional_call(_PRODUCTS[a_MK.device.type == "cpu"], {"weight": b_NK}, (a_MK,))


def rounded_rows(x: Tensor) -> Tensor:
    """x in float64 with each row rounded to float8 under its own scale, and a gradient that passes unrounded. For the
    twin of `product`: the scale is the largest power of two that keeps the row within the range of float8."""
    x64 = x.double()
    largest = x64.detach().abs().amax(-1, keepdim=True).clamp(min=_LEAST)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(FLOAT8).max / largest)))
    return x64 + ((x64 * scale).to(FLOAT8).double() / scale - x64).detach()
