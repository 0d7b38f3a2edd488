"""Operators against their alternatives on a CPU, forward and backward.

Times are of interleaved runs: the median, and the median ratio to the first. Memory is the peak of the resident set
beyond the inputs and the gradients that are left, in MiB; needs Linux with glibc.

python benchmarks/operators.py [norms activations rope attention cross_entropy large_head linears]
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import ops

ROUNDS = 15
Candidates = dict[str, Callable[[], Tensor]]


def compare(title: str, leaves: list[Tensor], candidates: Candidates, rounds: int = ROUNDS) -> None:
    """Print time and memory of each candidate.

    Args:
        leaves: what the candidates differentiate by.
        rounds: timed ones; one warms up before them if there are several, and one measures memory.
    """
    for run in candidates.values() if rounds > 1 else ():
        backward(run)
    extra = {name: peak_extra(run, leaves) for name, run in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            times[name].append(1e3 * backward(run))
    first = times[next(iter(times))]
    for name, values in times.items():
        ratio = statistics.median(value / base for value, base in zip(values, first, strict=True))
        print(  # noqa: T201
            f"{title:<46} {name:<24} {statistics.median(values):9.2f} ms  x{ratio:.2f} {extra[name]:8.1f} MiB",
            flush=True,
        )


def backward(run: Callable[[], Tensor]) -> float:
    """Seconds of a forward and a backward pass."""
    start = time.perf_counter()
    out = run()
    middle = time.perf_counter()
    ones = torch.ones_like(out)
    begin = time.perf_counter()
    out.backward(ones)
    return time.perf_counter() - begin + middle - start


def peak_extra(run: Callable[[], Tensor], leaves: list[Tensor]) -> float:
    """MiB at the peak of a forward and a backward pass, beyond what was there before and the gradients of `leaves`."""
    for leaf in leaves:
        leaf.grad = None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    backward(run)
    left = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    return (resident("VmHWM") - before - left) / 2**20


def resident(name: str) -> int:
    """Bytes of the line `name` of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def norms() -> None:
    x = torch.randn(4096, 1024, requires_grad=True)
    fused, plain = ops.FusedRMSNorm(1024), ops.RMSNorm(1024)
    compiled, compiled_own = torch.compile(plain), torch.compile(fused)
    compare(
        "RMSNorm 4096 x 1024",
        [x, fused.weight, plain.weight],
        {
            "samestep": lambda: fused(x),
            "F.rms_norm": lambda: F.rms_norm(x, (1024,), fused.weight, 1e-5),
            "twin": lambda: plain(x),
            "twin, compiled": lambda: compiled(x),
            "samestep, compiled": lambda: compiled_own(x),
        },
    )
    fused_layer, plain_layer = ops.FusedLayerNorm(1024), ops.LayerNorm(1024)
    compiled_layer, compiled_own_layer = torch.compile(plain_layer), torch.compile(fused_layer)
    compare(
        "LayerNorm 4096 x 1024",
        [x, *fused_layer.parameters(), *plain_layer.parameters()],
        {
            "samestep": lambda: fused_layer(x),
            "F.layer_norm": lambda: F.layer_norm(x, (1024,), fused_layer.weight, fused_layer.bias, 1e-5),
            "twin": lambda: plain_layer(x),
            "twin, compiled": lambda: compiled_layer(x),
            "samestep, compiled": lambda: compiled_own_layer(x),
        },
    )


def activations() -> None:
    gate, up = (torch.randn(4096, 1408, requires_grad=True) for _ in range(2))
    gelu, silu = ops.GELU("tanh"), ops.SiLU()
    compiled_gelu, compiled_silu = torch.compile(gelu), torch.compile(silu)
    compare(
        "GELU, tanh, 4096 x 1408",
        [gate],
        {
            "samestep (F.gelu)": lambda: gelu(gate),
            "twin": lambda: ops.reference_gelu(gate, "tanh"),
            "F.gelu, compiled": lambda: compiled_gelu(gate),
        },
    )
    compare(
        "SiLU 4096 x 1408",
        [gate],
        {
            "samestep (F.silu)": lambda: silu(gate),
            "twin": lambda: ops.reference_silu(gate),
            "F.silu, compiled": lambda: compiled_silu(gate),
        },
    )
    compiled = torch.compile(lambda gate, up: F.silu(gate) * up)
    compiled_own = torch.compile(ops.swiglu)
    compare(
        "SwiGLU 4096 x 1408",
        [gate, up],
        {
            "samestep": lambda: ops.swiglu(gate, up),
            "F.silu(gate) * up": lambda: F.silu(gate) * up,
            "twin": lambda: ops.reference_swiglu(gate, up),
            "F.silu * up, compiled": lambda: compiled(gate, up),
            "samestep, compiled": lambda: compiled_own(gate, up),
        },
    )
    compare(
        "SwiGLU clamped at 7",
        [gate, up],
        {"samestep": lambda: ops.swiglu(gate, up, 7.0), "twin": lambda: ops.reference_swiglu(gate, up, 7.0)},
    )


def rope() -> None:
    x = torch.randn(4, 512, 8, 64, requires_grad=True)
    cos, sin = ops.rope_tables(512, 64, 1e4, torch.float32)
    positions = torch.arange(512).expand(4, 512)

    def halves() -> Tensor:
        c, s = (torch.cat([t, t], -1)[positions].unsqueeze(2) for t in (cos, sin))
        rotated = torch.cat([-x[..., 32:], x[..., :32]], -1)
        return x * c + rotated * s

    compiled = torch.compile(halves)
    compare(
        "rotary embedding 4 x 512 x 8 x 64",
        [x],
        {
            "samestep": lambda: ops.apply_rope(x, cos, sin, positions),
            "rotate_half": halves,
            "rotate_half, compiled": lambda: compiled(),
            "twin": lambda: ops.reference_rope(x, cos, sin, positions),
        },
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def attention() -> None:
    for rows, length, heads, key_heads, dim in (
        (12, 64, 4, 4, 32),
        (2, 512, 8, 8, 64),
        (2, 512, 9, 3, 64),
        (1, 2048, 8, 2, 128),
        (1, 8192, 2, 2, 64),
    ):
        q = torch.randn(rows, length, heads, dim, requires_grad=True)
        k, v = (torch.randn(rows, length, key_heads, dim, requires_grad=True) for _ in range(2))
        candidates: Candidates = {
            "samestep": lambda q=q, k=k, v=v: ops.attention(q, k, v),
            "PyTorch's": lambda q=q, k=k, v=v: sdpa(q, k, v),
        }
        if length <= 512:
            candidates["twin"] = lambda q=q, k=k, v=v: ops.reference_attention(q, k, v)
        compare(f"attention {rows} x {length}, {heads} / {key_heads} heads of {dim}", [q, k, v], candidates)
    q, k, v = (torch.randn(1, 4096, 8, 64, requires_grad=True) for _ in range(3))
    ends = torch.randperm(4095, generator=torch.Generator().manual_seed(0))[:31].add(1).sort().values.tolist()
    spans = list(zip([0] * 32, [0, *ends], [*ends, 4096], strict=True))
    numbers = torch.zeros(4096, dtype=torch.int64).index_fill_(0, torch.tensor(ends), 1).cumsum(0)
    documents = (numbers[:, None] == numbers) & torch.ones(4096, 4096, dtype=torch.bool).tril()
    near = documents.new_ones(4096, 4096).tril().triu(-255)
    compare(
        "attention of 32 documents in 4096, 8 heads of 64",
        [q, k, v],
        {"samestep": lambda: ops.attention(q, k, v, spans=spans), "PyTorch's, mask": lambda: sdpa(q, k, v, documents)},
    )
    compare(
        "attention 1 x 4096, window of 256, 8 heads of 64",
        [q, k, v],
        {"samestep": lambda: ops.attention(q, k, v, window=256), "PyTorch's, mask": lambda: sdpa(q, k, v, near)},
    )


def cross_entropy() -> None:
    hidden = torch.randn(512, 256, requires_grad=True)
    weight = torch.randn(16384, 256).mul_(0.02).requires_grad_()
    labels = torch.randint(0, 16384, (512,))
    smooth_and_capped = {"label_smoothing": 0.1, "softcap": 30.0}

    def capped() -> Tensor:
        logits = 30 * torch.tanh(hidden @ weight.T / 30)
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)

    compare(
        "head and cross-entropy 512 x 256 x 16384",
        [hidden, weight],
        {
            "samestep": lambda: fused_head(hidden, weight, labels),
            "full logits": lambda: F.cross_entropy(hidden @ weight.T, labels, reduction="sum"),
        },
    )
    compare(
        "... smoothed and capped",
        [hidden, weight],
        {"samestep": lambda: fused_head(hidden, weight, labels, **smooth_and_capped), "full logits": capped},
    )


def fused_head(hidden: Tensor, weight: Tensor, labels: Tensor, **terms: float) -> Tensor:
    return ops.linear_cross_entropy(hidden, weight, labels, compute_dtype=torch.float32, **terms)[0]


def large_head() -> None:
    """Takes minutes, and 7 GB for the full logits."""
    hidden = torch.randn(4096, 512, requires_grad=True)
    weight = torch.randn(128_000, 512).mul_(0.02).requires_grad_()
    labels = torch.randint(0, 128_000, (4096,))

    def full_logits() -> Tensor:
        return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")

    candidates: Candidates = {
        "samestep": lambda: fused_head(hidden, weight, labels),
        "full logits": full_logits,
        "full logits, compiled": torch.compile(full_logits),
    }
    if hasattr(F, "linear_cross_entropy"):  # PyTorch 2.13
        options = torch.nn.LinearCrossEntropyOptions()
        candidates["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", options=options
        )
    compare("head and cross-entropy 4096 x 512 x 128000", [hidden, weight], candidates, rounds=1)


def linears() -> None:
    x = torch.randn(2048, 512, requires_grad=True)
    weight = torch.randn(512, 512, requires_grad=True)
    compare(
        "linear 2048 x 512 x 512",
        [x, weight],
        {
            "float32": lambda: ops.linear(x, weight, None, torch.float32),
            "bfloat16": lambda: ops.linear(x, weight, None, torch.bfloat16),
        },
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    benchmarks = (norms, activations, rope, attention, cross_entropy, large_head, linears)
    for benchmark in benchmarks:
        if benchmark.__name__ in sys.argv[1:] or len(sys.argv) == 1:
            benchmark()
