"""Which implementation an operator runs: its reference twin, a kernel of our own, or PyTorch's operators."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.ops.cpu_library import library

# Read once: torch.compile cannot trace questions to the system, and Triton decides at its import, too.
_REFERENCE_OPS = os.environ.get("SAMESTEP_REFERENCE_OPS", "0") not in ("", "0")
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_PLAIN = (Tensor, nn.Parameter)
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


def cpu_kernels_for(*tensors: Tensor) -> Any:
    """`cpu_kernels`, which read memory as it is, if these are all plain float32 tensors on the CPU and there is a C
    compiler; else, and while torch.compile traces, None."""
    if torch.compiler.is_compiling():
        return None
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype is not torch.float32:
            return None
    return _kernels("cpu_kernels") if library()[0] is not None else None


def cpu_kernels_again(*tensors: Tensor) -> Any:
    """The same in a backward pass, whose forward pass they served.

    Raises:
        RuntimeError: while compiled autograd traces it.
    """
    kernels = cpu_kernels_for(*tensors)
    if kernels is None:
        raise RuntimeError("compiled autograd cannot trace samestep's kernels for CPUs: set SAMESTEP_CPU_KERNELS=0")
    return kernels


def kernels_for(*tensors: Tensor, compute: torch.dtype = torch.float32) -> Any:
    """The module that has `rms_norm`, `swiglu`, `rope` and `token_losses_` for them, or None: PyTorch's operators.

    Args:
        compute: dtype of the arithmetic, or of a further operand.
    """
    if use_triton(tensors[0].device, compute, *(tensor.dtype for tensor in tensors)):
        return _kernels("triton_kernels")
    return cpu_kernels_for(*tensors) if compute is torch.float32 else None


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"samestep.ops.{name}")  # late: not everybody has Triton


_watchers: list[Callable[[str, tuple[Any, ...], Any], None]] = []


def _kernels(name: str) -> Any:
    return _Watched(_module(name)) if _watchers else _module(name)


class _Watched:
    """A module of kernels of which the watchers are told every call."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = getattr(self._module, name)(*arguments, **options)
            for tell in _watchers:
                tell(name, arguments, result)
            return result

        return call


@contextmanager
def watch_kernels(tell: Callable[[str, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Call `tell(name, arguments, result)` after every kernel that is run in here; PyTorch does not see them."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)
