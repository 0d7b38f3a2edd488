"""Operators against their alternatives, forward and backward: interleaved, median of the ratios to the first.

python benchmarks/operators.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from samestep import ops

ROUNDS = 15


def compare(title: str, candidates: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Print the median milliseconds of each candidate and the median ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(ROUNDS + 2):
        for name, run in candidates.items():
            start = time.perf_counter()
            run().backward()
            if round_ >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    first = times[next(iter(times))]
    for name, values in times.items():
        ratio = statistics.median(value / base for value, base in zip(values, first, strict=True))
        print(f"{title:<42} {name:<22} {statistics.median(values):8.2f} ms  x{ratio:.2f}")  # noqa: T201


def norms() -> None:
    x = torch.randn(4096, 1024, requires_grad=True)
    fused, plain = ops.FusedRMSNorm(1024), ops.RMSNorm(1024)
    fused_layer, plain_layer = ops.FusedLayerNorm(1024), ops.LayerNorm(1024)
    compare(
        "RMSNorm 4096 x 1024",
        {
            "samestep": lambda: fused(x).sum(),
            "F.rms_norm": lambda: F.rms_norm(x, (1024,), fused.weight, 1e-5).sum(),
            "twin": lambda: plain(x).sum(),
        },
    )
    compare(
        "LayerNorm 4096 x 1024",
        {"samestep (F.layer_norm)": lambda: fused_layer(x).sum(), "twin": lambda: plain_layer(x).sum()},
    )


def activations() -> None:
    gate, up = (torch.randn(4096, 1408, requires_grad=True) for _ in range(2))
    compare(
        "SwiGLU 4096 x 1408",
        {"samestep": lambda: ops.swiglu(gate, up).sum(), "F.silu(gate) * up": lambda: (F.silu(gate) * up).sum()},
    )


def rope() -> None:
    x = torch.randn(4, 512, 8, 64, requires_grad=True)
    cos, sin = ops.rope_tables(512, 64, 1e4, torch.float32)
    positions = torch.arange(512).expand(4, 512)

    def halves() -> torch.Tensor:
        c, s = (torch.cat([t, t], -1)[positions].unsqueeze(2) for t in (cos, sin))
        rotated = torch.cat([-x[..., 32:], x[..., :32]], -1)
        return (x * c + rotated * s).sum()

    compare(
        "rotary embedding 4 x 512 x 8 x 64",
        {"samestep": lambda: ops.apply_rope(x, cos, sin, positions).sum(), "rotate_half": halves},
    )


def attention() -> None:
    q = torch.randn(2, 512, 9, 64, requires_grad=True)
    k, v = (torch.randn(2, 512, 3, 64, requires_grad=True) for _ in range(2))
    spans = [(row, start, start + 64) for row in range(2) for start in range(0, 512, 64)]
    compare(
        "causal attention 2 x 512, 9 / 3 heads",
        {
            "samestep": lambda: ops.attention(q, k, v, softmax_dtype=torch.float32).sum(),
            "twin": lambda: ops.reference_attention(q, k, v, softmax_dtype=torch.float32).sum(),
        },
    )
    compare(
        "... of 16 documents of 64",
        {
            "samestep": lambda: ops.attention(q, k, v, spans=spans, softmax_dtype=torch.float32).sum(),
            "twin": lambda: ops.reference_attention(q, k, v, spans=spans, softmax_dtype=torch.float32).sum(),
        },
    )


def cross_entropy() -> None:
    hidden = torch.randn(512, 256, requires_grad=True)
    weight = torch.randn(16384, 256).mul_(0.02).requires_grad_()
    labels = torch.randint(0, 16384, (512,))

    def fused() -> torch.Tensor:
        return ops.linear_cross_entropy(hidden, weight, labels, compute_dtype=torch.float32)[0]

    compare(
        "head and cross-entropy 512 x 256 x 16384",
        {"samestep": fused, "full logits": lambda: F.cross_entropy(hidden @ weight.T, labels, reduction="sum")},
    )


def linears() -> None:
    x = torch.randn(2048, 512, requires_grad=True)
    weight = torch.randn(512, 512, requires_grad=True)
    compare(
        "linear 2048 x 512 x 512",
        {
            "float32": lambda: ops.linear(x, weight, None, torch.float32).sum(),
            "bfloat16": lambda: ops.linear(x, weight, None, torch.bfloat16).sum(),
        },
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    for benchmark in (norms, activations, rope, attention, cross_entropy, linears):
        benchmark()
