"""Which implementation an operator runs: its reference twin, a Triton kernel, or PyTorch's own operators."""

from __future__ import annotations

import importlib.util
import os

import torch

# Read once: torch.compile cannot trace questions to the system, and Triton decides at its import, too.
_REFERENCE_OPS = os.environ.get("SAMESTEP_REFERENCE_OPS", "0") not in ("", "0")
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference_ops() -> bool:
    """Whether every operator runs its reference twin: `SAMESTEP_REFERENCE_OPS=1` in the environment."""
    return _REFERENCE_OPS


def use_triton(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether operands on `device`, and arithmetic, of `dtypes` go to the kernels of `triton_kernels`.

    They do on a GPU that Triton is installed for; on a CPU only inside of Triton's interpreter
    (`TRITON_INTERPRET=1`), which is slow and there for tests. Not for float64, and not while torch.compile traces: it
    fuses PyTorch's operators with what stands around them, which it cannot do with a kernel of somebody else.
    """
    here = device.type == "cuda" or (device.type == "cpu" and _INTERPRETED)
    if not here or not _HAS_TRITON or torch.compiler.is_compiling():
        return False
    return all(dtype in _KERNEL_DTYPES for dtype in dtypes)
