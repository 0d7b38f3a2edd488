"""The only file that touches private PyTorch (names with a leading underscore, or `torch.ops`).

Checked with PyTorch 2.11 to 2.13, the range that pyproject.toml allows. When that range moves, check each function
here again: every one says what it relies on, and falls back to something slower but right where the name is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module


def cpu_has_bfloat16_units() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices with instructions of this CPU (AVX512-BF16, AMX, SVE).

    Without them a bfloat16 product still runs, but in a loop 5 to 90 times slower than float32. Public
    `torch.cpu.is_bf16_supported` does not exist, hence the private operator.
    """
    return _mkldnn_flag("_is_mkldnn_bf16_supported")


def cpu_has_float16_units() -> bool:
    """Whether oneDNN multiplies float16 matrices with instructions of this CPU; see `cpu_has_bfloat16_units`."""
    return _mkldnn_flag("_is_mkldnn_fp16_supported")


def _mkldnn_flag(name: str) -> bool:
    operator = getattr(torch.ops.mkldnn, name, None)
    return operator is not None and torch.backends.mkldnn.is_available() and bool(operator())


def silu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    """`grad * d silu(x) / dx` in place of `grad`, in one pass over the data; both tensors of one shape and dtype."""
    return torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)


def layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight_D: Tensor, bias_D: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias, those that are wanted, of `torch.native_layer_norm` over the last dimension."""
    function = torch.ops.aten.native_layer_norm_backward
    return function(grad, x, x.shape[-1:], mean, scale, weight_D, bias_D, list(wanted))


def has_hooks(tensor: Tensor) -> bool:
    """Whether somebody wants to see the gradient of a tensor while a backward pass runs."""
    return bool(tensor._backward_hooks)


def is_plain_call(module: nn.Module) -> bool:
    """Whether calling a module runs the `forward` of its class and nothing else: no hooks, its own or of all modules,
    no other function in its place, and not `module.compile()`."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        nn_module._global_forward_hooks,
        nn_module._global_forward_pre_hooks,
        nn_module._global_backward_hooks,
        nn_module._global_backward_pre_hooks,
    )
    return not any(hooks) and "forward" not in vars(module) and module._compiled_call_impl is None


def scale_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply every tensor in place by one number, in few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def graph_is_kept() -> bool:
    """Inside a backward: whether the caller asked for `retain_graph=True`.

    If not, the saved tensors are read for the last time and may be overwritten. Unknown counts as kept.
    """
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else bool(query())


def compile_seconds() -> float:
    """What torch.compile has taken in this process so far, in seconds of wall time; 0 where it does not tell.

    `torch.compiler` has no public count. Relies on `calculate_time_spent`, whose `total_wall_time` adds up tracing and
    compiling of forward and backward graphs.
    """
    from torch._dynamo import utils  # heavy, and loaded already where anything was compiled

    report = getattr(utils, "calculate_time_spent", None)
    return 0.0 if report is None else float(report().get("total_wall_time", 0.0))


_ALLOCATORS = ("DefaultCPUAllocator", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of messages of a plain RuntimeError that mean no memory: CPU, CPU on Windows, workspace of cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had. Relies on the words of PyTorch's allocators, since only those
    of accelerators raise an error of its own kind."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATORS)


@contextmanager
def watch_operators(
    before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Call `before(name, arguments)` and `after(name, arguments, result)` around each operator that runs inside, with
    names such as `aten.mm`; what they run themselves is not told. Operators inside of a compiled graph, and kernels
    that are no operators, such as Triton's, are not seen.

    Relies on `TorchDispatchMode`, whose module is private while its use as a base class is documented.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Else the compiler would be imported, which takes a second. Older versions do not ask.
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func).rsplit(".", 1)[0]
            before(name, args)
            result = func(*args, **(kwargs or {}))
            after(name, args, result)
            return result

    with Watcher():
        yield
