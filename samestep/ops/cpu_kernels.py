"""The operators as functions in C, which run on all threads that PyTorch may use.

Only called where `dispatch` says so. Operands are float32 on a CPU; no result depends on the number of threads.

Shape letters: N rows, D features, P positions of a table, R = D / 2, C tokens of a chunk, V vocabulary; in attention as
in that file, and E for the head dimension of values.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.ops.cpu_library import library

_LEAST = 1 << 14
"""Elements that are worth a second thread."""

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "rms_norm": [*[_POINTER] * 4, _LONG, _LONG, _FLOAT, _INT],
    "rms_norm_backward": [*[_POINTER] * 7, _LONG, _LONG, _INT],
    "layer_norm": [*[_POINTER] * 5, _LONG, _LONG, _FLOAT, _INT],
    "layer_norm_backward": [*[_POINTER] * 8, _LONG, _LONG, _INT],
    "swiglu": [*[_POINTER] * 3, _LONG, _FLOAT, _INT],
    "swiglu_backward": [*[_POINTER] * 5, _LONG, _FLOAT, _INT],
    "rope": [*[_POINTER] * 5, *[_LONG] * 6, _FLOAT, _INT],
    "token_losses": [*[_POINTER] * 5, _LONG, _LONG, _FLOAT, _FLOAT, _FLOAT, _INT, _INT, _INT],
    "attention_scratch": [_LONG],
    "attention": [*[_POINTER] * 7, *[_LONG] * 6, _FLOAT, _POINTER, _LONG, _INT],
    "attention_backward": [*[_POINTER] * 11, *[_LONG] * 6, _FLOAT, _POINTER, _LONG, _INT],
    "sums_of_squares": [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT],
}
_RESULTS = {"rope": _LONG, "attention_scratch": _LONG}


@functools.cache
def _functions() -> ctypes.CDLL:
    found, why = library()
    assert found is not None, why
    for name, arguments in _ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    return found


@functools.cache
def _constant(name: str) -> int:
    """Of `cpu_kernels.c`."""
    return _LONG.in_dll(_functions(), name).value


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _LEAST else 1


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> the normalized x, and `1 / rms` of each row `[..., 1]`. `compute` is float32: other kernels have
    others."""
    x, weight_D = x.contiguous(), weight_D.contiguous()
    y, scale, dim = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1), x.shape[-1]
    _functions().rms_norm(
        x.data_ptr(),
        weight_D.data_ptr(),
        y.data_ptr(),
        scale.data_ptr(),
        scale.numel(),
        dim,
        eps,
        _threads(x.numel()),
    )
    return y, scale


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, scale: Tensor, compute: torch.dtype, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight. `scale` as `rms_norm` returned it. `overwrite`: that of x may take the
    memory of `grad`."""
    grad, x, weight_D, scale = (tensor.contiguous() for tensor in (grad, x, weight_D, scale))
    rows, dim = scale.numel(), x.shape[-1]
    dx, dweight_D = grad if overwrite else torch.empty_like(x), torch.empty_like(weight_D)
    partial_BD = x.new_empty(-(-rows // _constant("block_rows")), dim)
    _functions().rms_norm_backward(
        grad.data_ptr(),
        x.data_ptr(),
        weight_D.data_ptr(),
        scale.data_ptr(),
        dx.data_ptr(),
        dweight_D.data_ptr(),
        partial_BD.data_ptr(),
        rows,
        dim,
        _threads(x.numel()),
    )
    return dx, dweight_D


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> the normalized x, and what the backward pass needs of each row `[..., 3]`."""
    x, weight_D, bias_D = x.contiguous(), weight_D.contiguous(), bias_D.contiguous()
    y, moments, dim = torch.empty_like(x), x.new_empty(*x.shape[:-1], 3), x.shape[-1]
    _functions().layer_norm(
        x.data_ptr(),
        weight_D.data_ptr(),
        bias_D.data_ptr(),
        y.data_ptr(),
        moments.data_ptr(),
        moments.numel() // 3,
        dim,
        eps,
        _threads(x.numel()),
    )
    return y, moments


def layer_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias. `moments` as `layer_norm` returned them."""
    grad, x, weight_D, moments = (tensor.contiguous() for tensor in (grad, x, weight_D, moments))
    rows, dim = moments.numel() // 3, x.shape[-1]
    dx, dweight_D, dbias_D = torch.empty_like(x), torch.empty_like(weight_D), torch.empty_like(weight_D)
    partial_BD = x.new_empty(2 * -(-rows // _constant("block_rows")), dim)
    _functions().layer_norm_backward(
        grad.data_ptr(),
        x.data_ptr(),
        weight_D.data_ptr(),
        moments.data_ptr(),
        dx.data_ptr(),
        dweight_D.data_ptr(),
        dbias_D.data_ptr(),
        partial_BD.data_ptr(),
        rows,
        dim,
        _threads(x.numel()),
    )
    return dx, dweight_D, dbias_D


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """`silu(gate) * up`, clamped as in `activation.swiglu`."""
    gate, up = gate.contiguous(), up.contiguous()
    y, count = torch.empty_like(gate), gate.numel()
    _functions().swiglu(gate.data_ptr(), up.data_ptr(), y.data_ptr(), count, _bound(limit), _threads(count))
    return y


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, limit: float | None, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up. `overwrite`: that of the gate may take the memory of `grad`."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup, count = grad if overwrite else torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _functions().swiglu_backward(
        grad.data_ptr(),
        gate.data_ptr(),
        up.data_ptr(),
        dgate.data_ptr(),
        dup.data_ptr(),
        count,
        _bound(limit),
        _threads(count),
    )
    return dgate, dup


def _bound(limit: float | None) -> float:
    return math.inf if limit is None else limit


def rope(
    x_BSHD: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    position_ids_BS: Tensor,
    direction: float,
    overwrite: bool = False,
) -> Tensor:
    """Turns x by its positions, or back where `direction` is -1. The result is contiguous; `overwrite`: it may take
    the memory of x.

    Raises:
        IndexError: a position that is not in the tables.
    """
    batch, tokens, heads, dim = x_BSHD.shape
    x_BSHD = _with_one_stride(x_BSHD)
    cos_PR, sin_PR = cos_PR.contiguous(), sin_PR.contiguous()
    position_ids_BS = position_ids_BS.expand(batch, tokens).to(torch.int64).contiguous()
    y_BSHD = x_BSHD if overwrite and x_BSHD.is_contiguous() else x_BSHD.new_empty(x_BSHD.shape)
    missing = _functions().rope(
        x_BSHD.data_ptr(),
        cos_PR.data_ptr(),
        sin_PR.data_ptr(),
        position_ids_BS.data_ptr(),
        y_BSHD.data_ptr(),
        len(cos_PR),
        batch * tokens,
        heads,
        dim,
        *x_BSHD.stride()[1:3],
        direction,
        _threads(x_BSHD.numel()),
    )
    if missing:
        raise IndexError(f"{missing} tokens have a position beyond the {len(cos_PR)} of the rotary tables")
    return y_BSHD


def token_losses_(
    logits_CV: Tensor,
    labels_C1: Tensor,
    weights_C1: Tensor | None,
    gradient_CV: Tensor | None,
    *,
    z_loss_weight: float,
    label_smoothing: float,
    softcap: float | None,
    rounds: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and logsumexp `[C, 1]` of each token, unweighted. The gradient of the weighted loss by the logits
    is written over them where `gradient_CV` is `logits_CV`; None: not wanted. `rounds`: its numbers are rounded to
    bfloat16. Labels must be in the vocabulary."""
    assert logits_CV.is_contiguous() and (gradient_CV is None or gradient_CV is logits_CV)
    labels_C1 = labels_C1.to(torch.int64).contiguous()
    weights_C1 = None if weights_C1 is None else weights_C1.contiguous()
    cross_entropy_C1, logsumexp_C1 = logits_CV.new_empty(2, len(logits_CV), 1)
    _functions().token_losses(
        logits_CV.data_ptr(),
        labels_C1.data_ptr(),
        None if weights_C1 is None else weights_C1.data_ptr(),
        cross_entropy_C1.data_ptr(),
        logsumexp_C1.data_ptr(),
        *logits_CV.shape,
        z_loss_weight,
        label_smoothing,
        softcap or 0.0,
        gradient_CV is not None,
        rounds,
        _threads(logits_CV.numel()),
    )
    return cross_entropy_C1, logsumexp_C1


def sums_of_squares(tensors: Sequence[Tensor]) -> list[float]:
    """Of each tensor, in float64 throughout."""
    tensors = [x.contiguous() for x in tensors]
    count, sizes = len(tensors), [x.numel() for x in tensors]
    totals = (ctypes.c_double * count)()
    piece = _constant("piece_elements")
    squares = torch.empty(sum(-(-size // piece) for size in sizes), dtype=torch.float64, device="cpu")
    pointers = (ctypes.c_void_p * count)(*(x.data_ptr() for x in tensors))
    counts = (ctypes.c_int64 * count)(*sizes)
    _functions().sums_of_squares(pointers, counts, count, squares.data_ptr(), totals, _threads(sum(sizes)))
    return list(totals)


@dataclass(frozen=True)
class Sequences:
    """Attention is causal within each of these and none crosses; a token in none has output 0 and gradient 0.

    Attributes:
        table_N4: int64, longest first: numbers of the first query and of how many there are, and the same of keys,
            among the tokens of all rows. The queries are the last of the keys.
        complete: every token is in one.
    """

    table_N4: Tensor
    complete: bool

    def room(self, like: Tensor, *shape: int) -> Tensor:
        """Memory for a result, zero where no sequence writes."""
        return like.new_empty(shape) if self.complete else like.new_zeros(shape)


def attention(
    q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, sequences: Sequences, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The output `[B, S, H, E]`, and what the backward pass needs to know of each query, `[B, S, H, 2]`."""
    q_BSHD, k_BTKD, v_BTKE = (_with_one_stride(x) for x in (q_BSHD, k_BTKD, v_BTKE))
    out = sequences.room(q_BSHD, *q_BSHD.shape[:3], v_BTKE.shape[3])
    maxima = q_BSHD.new_empty(*q_BSHD.shape[:3], 2)
    _attend(_functions().attention, (q_BSHD, k_BTKD, v_BTKE, out, maxima), sequences, window, scale)
    return out, maxima


def attention_backward(
    grad: Tensor,
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKE: Tensor,
    out: Tensor,
    maxima: Tensor,
    sequences: Sequences,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from what `attention` was given and gave."""
    grad, out, maxima = grad.contiguous(), out.contiguous(), maxima.contiguous()
    q_BSHD, k_BTKD, v_BTKE = (_with_one_stride(x) for x in (q_BSHD, k_BTKD, v_BTKE))
    dq, dk, dv = (sequences.room(x, *x.shape) for x in (q_BSHD, k_BTKD, v_BTKE))
    tensors = (q_BSHD, k_BTKD, v_BTKE, out, maxima, grad, dq, dk, dv)
    _attend(_functions().attention_backward, tensors, sequences, window, scale)
    return dq, dk, dv


def _with_one_stride(x: Tensor) -> Tensor:
    """x with one distance between all neighbouring tokens, also those of two rows."""
    flat = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if flat else x.contiguous()


def _attend(function: Any, tensors: tuple[Tensor, ...], sequences: Sequences, window: int | None, scale: float) -> None:
    q_BSHD, k_BTKD, v_BTKE = tensors[:3]
    strides = (ctypes.c_int64 * 6)(*(stride for x in tensors[:3] for stride in x.stride()[1:3]))
    heads, key_heads, dim, value_dim = q_BSHD.shape[2], k_BTKD.shape[2], q_BSHD.shape[3], v_BTKE.shape[3]
    longest, threads = k_BTKD.shape[1], _threads(q_BSHD.numel())
    size = _functions().attention_scratch(max(dim, value_dim))
    scratch = q_BSHD.new_empty(threads * size)
    function(
        *(x.data_ptr() for x in tensors),
        strides,
        sequences.table_N4.data_ptr(),
        len(sequences.table_N4),
        heads,
        key_heads,
        dim,
        value_dim,
        longest if window is None else min(window, longest),
        scale,
        scratch.data_ptr(),
        size,
        threads,
    )
