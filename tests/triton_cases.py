"""Runs the operators and prints their errors as JSON; `test_triton.py` starts it.

With TRITON_INTERPRET=1 on the CPU, else on a GPU; a process of its own, since Triton reads that at its import. Each
case has an operator of the package, the same in plain PyTorch in float32, and the twin in float64; the error of each
result and gradient is its distance to the twin's.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import ops
from samestep.ops import triton_kernels

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
F32, F64 = torch.float32, torch.float64
Function = Callable[..., Tensor]
calls: Counter[str] = Counter()


def count_calls(name: str) -> None:
    kernel = getattr(triton_kernels, name)

    def counted(*args, **kwargs):
        calls[name] += 1
        return kernel(*args, **kwargs)

    setattr(triton_kernels, name, counted)


def results(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Its value and the gradients of a fixed combination of it. The outer gradient is not contiguous."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    generator = torch.Generator(DEVICE).manual_seed(1)
    grad = torch.randn(out.shape[::-1], generator=generator, dtype=F64).to(out.dtype)
    grad = grad.permute(tuple(range(out.ndim))[::-1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) if b.numel() else 0.0


def compare(name: str, fused: Function, eager: Function, twin: Function, inputs: list[Tensor]) -> dict:
    truth = results(twin, [x.double() for x in inputs])
    ours, theirs = results(fused, inputs), results(eager, inputs)
    assert [x.shape for x in ours] == [x.shape for x in truth] and all(x.dtype is F32 for x in ours)
    return {
        "name": name,
        "fused": [distance(a, b) for a, b in zip(ours, truth, strict=True)],
        "eager": [distance(a, b) for a, b in zip(theirs, truth, strict=True)],
        "sizes": [b.numel() for b in truth],
    }


def rms_norm(shape: tuple[int, ...]) -> dict:
    def module(cls: type, dtype: torch.dtype) -> Function:
        norm = cls(shape[-1], 1e-5, dtype, dtype)
        return lambda x, w: torch.func.functional_call(norm, {"weight": w}, x)

    x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2] * 3
    inputs = [x, torch.randn(shape[-1])]
    return compare(
        f"RMSNorm {shape}", module(ops.FusedRMSNorm, F32), module(ops.RMSNorm, F32), module(ops.RMSNorm, F64), inputs
    )


def rms_norm_rounded() -> dict:
    """With operands rounded to float16 the kernel and PyTorch's arithmetic must round the same numbers."""
    norm = ops.FusedRMSNorm(200, 1e-5, torch.float16)
    inputs = [torch.randn(9, 200) * 3, torch.randn(200)]

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": w}, x)

    ours = results(function, inputs)
    before, ops.norm.kernels_for = ops.norm.kernels_for, lambda *_, **__: None
    truth = results(function, inputs)
    ops.norm.kernels_for = before

    return {"name": "RMSNorm float16", "rounded": [distance(a, b.double()) for a, b in zip(ours, truth, strict=True)]}


def swiglu(shape: tuple[int, ...], limit: float | None) -> dict:
    def eager(gate: Tensor, up: Tensor) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return F.silu(gate) * up

    return compare(
        f"SwiGLU {shape} {limit}",
        lambda gate, up: ops.swiglu(gate, up, limit),
        eager,
        lambda gate, up: ops.reference_swiglu(gate, up, limit),
        list((torch.randn(*shape, 2) * 4).unbind(-1)),
    )


def rope(batch: int, tokens: int, heads: int, dim: int) -> dict:
    cos, sin = ops.rope_tables(50, dim, 1e4, F32)
    positions = torch.randint(0, 50, (batch, tokens))
    half = dim // 2

    def eager(x: Tensor) -> Tensor:
        c, s = (torch.cat([t, t], -1)[positions].unsqueeze(2) for t in (cos, sin))
        return x * c + torch.cat([-x[..., half:], x[..., :half]], -1) * s

    x = torch.randn(batch, heads, tokens, dim).transpose(1, 2)
    return compare(
        f"RoPE {tuple(x.shape)}",
        lambda x: ops.apply_rope(x, cos, sin, positions),
        eager,
        lambda x: ops.reference_rope(x, cos, sin, positions),
        [x],
    )


def rope_beyond() -> dict:
    cos, sin = ops.rope_tables(4, 8, 1e4, F32)
    out = ops.apply_rope(torch.ones(1, 3, 2, 8), cos, sin, torch.tensor([[3, 4, -1]]))
    return {"name": "RoPE beyond", "nan": out.isnan().flatten(2).all(2).tolist()[0]}


def cross_entropy(tokens: int, vocabulary: int, weighted: bool = False, **terms: float) -> dict:
    hidden, head = torch.randn(tokens, 24), torch.randn(vocabulary, 24)
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[::5] = -100
    weights = torch.rand(tokens) * 2 if weighted else None
    z, smoothing, cap = (terms.get(key) for key in ("z_loss_weight", "label_smoothing", "softcap"))

    def eager(hidden: Tensor, head: Tensor) -> Tensor:
        counted = labels != -100
        logits = hidden[counted] @ head.T
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        each = F.cross_entropy(logits, labels[counted], reduction="none", label_smoothing=smoothing or 0)
        each = each + (z or 0) * logits.logsumexp(1).square()
        return (each if weights is None else each * weights[counted]).sum()

    def ours(hidden: Tensor, head: Tensor) -> Tensor:
        kwargs = {"compute_dtype": F32, "weights_T": weights, "chunk_tokens": 3, **terms}
        return ops.linear_cross_entropy(hidden, head, labels, **kwargs)[0]

    def twin(hidden: Tensor, head: Tensor) -> Tensor:
        kwargs = {"compute_dtype": F64, "loss_dtype": F64, "weights_T": weights, **terms}
        return ops.reference_linear_cross_entropy(hidden, head, labels, **kwargs)[0]

    name = f"cross-entropy {tokens} x {vocabulary} {'weighted ' * weighted}{terms}"
    return compare(name, ours, eager, twin, [hidden, head])


def gradient_in_float16() -> dict:
    """Into a buffer of its own, as on a GPU that multiplies in a low dtype next."""
    logits, labels, terms = torch.randn(5, 90), torch.arange(5).unsqueeze(1), ops.cross_entropy._Terms(0.0, 0.1, None)
    expected, low = logits.clone(), torch.empty(5, 90, dtype=torch.float16)
    ops.cross_entropy._token_losses_(expected, labels, None, terms, expected)
    ops.cross_entropy._token_losses_(logits.clone(), labels, None, terms, low)
    truth = (logits.double().softmax(1) - 0.1 / 90).scatter_add(1, labels, torch.full((5, 1), -0.9, dtype=F64))
    return {"name": "gradient in float16", "rounded": [distance(expected, truth), distance(low, expected.half())]}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_device(DEVICE)
    for name in ("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rope", "token_losses_"):
        count_calls(name)
    cases = [rms_norm(shape) for shape in ((3, 5, 3), (7, 33), (2, 3, 200), (130, 64), (23, 1500), (0, 8))]
    cases.append(rms_norm_rounded())
    cases += [swiglu(shape, limit) for shape in ((5, 7), (3, 2, 700), (0, 4)) for limit in (None, 3.0)]
    cases += [rope(*shape) for shape in ((2, 5, 3, 10), (1, 1, 1, 2), (3, 4, 40, 128), (2, 0, 2, 4))]
    cases.append(rope_beyond())
    every = {"z_loss_weight": 0.01, "label_smoothing": 0.1, "softcap": 6.0}
    cases += [cross_entropy(11, 37), cross_entropy(4, 8500, True, **every), cross_entropy(7, 1)]
    cases += [cross_entropy(11, 100, **{key: value}) for key, value in every.items()]
    cases += [cross_entropy(11, 100, True, **every)]
    cases.append(gradient_in_float16())
    json.dump({"cases": cases, "calls": calls}, sys.stdout)


if __name__ == "__main__":
    main()
