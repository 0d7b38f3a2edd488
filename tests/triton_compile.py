"""Compiles every Triton kernel for an H100, which needs no GPU; `test_triton.py` starts this.

The interpreter takes programs that the compiler refuses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from samestep.ops import triton_kernels as kernels

POINTERS = {"label_ptr": "*i64", "position_ptr": "*i64"} | dict.fromkeys(
    (
        *("scale_ptr", "dweight_ptr", "cos_ptr", "sin_ptr"),
        *("logits_ptr", "label_logit_ptr", "weight_ptr", "cross_entropy_ptr", "logsumexp_ptr"),
    ),
    "*fp32",
)
FLOATS = ("eps", "limit", "direction", "z_loss_weight", "smoothing", "softcap")


def build(kernel: triton.JITFunction, warps: int, **constants: object) -> None:
    signature = {}
    for name in kernel.arg_names:
        pointer = POINTERS.get(name, "*bf16") if name.endswith("_ptr") else None
        signature[name] = "constexpr" if name in constants else pointer or ("fp32" if name in FLOATS else "i32")
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]


build(kernels._rms_norm_forward, 8, COMPUTE=tl.float32, ROWS=1, FEATURES=4096)
build(kernels._rms_norm_backward, 16, COMPUTE=tl.float32, ROWS=1, FEATURES=4096)
build(kernels._swiglu_forward, 4, CLAMPED=True, SIZE=1024)
build(kernels._swiglu_backward, 4, CLAMPED=True, SIZE=1024)
build(kernels._rope, 4, HEADS=32, PAIRS=64)
build(kernels._token_losses, 16, CAPPED=True, WEIGHTED=True, GRADIENT=True, SIZE=8192)
