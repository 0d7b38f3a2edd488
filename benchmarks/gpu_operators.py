"""Operators on a GPU against their alternatives in bfloat16, forward and backward: one markdown table.

Times are the median of 50 runs, by CUDA events, each after the cache was overwritten. An operator that is bound by
memory is measured against a copy of 1 GiB (read and written), one that is bound by products against a bfloat16 product
of 8192 x 8192 x 8192, both on the same device. Its bytes are those that it cannot do without: inputs, outputs and
gradients once each; its operations are those of its products. Memory is the peak beyond the inputs and the gradients.

python benchmarks/gpu_operators.py [--dry-run] [rms_norm swiglu rope adamw linear_cross_entropy attention]

`--dry-run` takes tiny shapes on the CPU: it checks the script and says nothing about speed.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import ops

DRY = "--dry-run" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda")
ROUNDS = 2 if DRY else 50
BF16 = torch.bfloat16
Candidates = dict[str, Callable[[], Any]]


@dataclass
class Case:
    """An operator and its implementations; ours comes first. Each does its forward and backward pass."""

    title: str
    candidates: Candidates
    bytes: int = 0
    operations: int = 0


def size(real: int, tiny: int) -> int:
    return tiny if DRY else real


def draw(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE).mul_(scale).to(dtype).requires_grad_()


def compiled(function: Callable) -> Callable:
    return function if DRY else torch.compile(function)


def differentiated(function: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Both passes, with a gradient of ones that the first run makes."""
    gradients: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        out = function(*leaves)
        if not gradients:
            gradients.append(torch.ones_like(out))
        return torch.autograd.grad(out, leaves, gradients[0])

    return run


def liger() -> Any:
    """Liger's functions, or None where it is not installed. It overwrites what it was given, so it comes last."""
    if DRY:
        return None
    try:
        return importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None


# ---------------------------------------------------------------- the operators


def rms_norm() -> Case:
    rows, features = size(8192, 6), size(4096, 10)
    x, weight = draw(rows, features), torch.ones(features, device=DEVICE, dtype=BF16, requires_grad=True)
    ours, twin = (cls(features, params_dtype=BF16).to(DEVICE) for cls in (ops.FusedRMSNorm, ops.RMSNorm))
    run_twin = compiled(twin)
    candidates = {
        "samestep": differentiated(lambda x, _: ours(x), x, ours.weight),
        "F.rms_norm": differentiated(lambda x, w: F.rms_norm(x, (features,), w, 1e-5), x, weight),
        "twin, compiled": differentiated(lambda x, _: run_twin(x), x, twin.weight),
    }
    if (functions := liger()) is not None:
        candidates["Liger"] = differentiated(lambda x, w: functions.liger_rms_norm(x, w, 1e-5), x, weight)
    return Case(f"RMSNorm {rows} x {features}", candidates, bytes=5 * x.nbytes)


def swiglu() -> Case:
    rows, features = size(8192, 6), size(14336, 10)
    gate, up = draw(rows, features), draw(rows, features)
    candidates = {
        "samestep": differentiated(ops.swiglu, gate, up),
        "F.silu(gate) * up": differentiated(lambda gate, up: F.silu(gate) * up, gate, up),
        "twin, compiled": differentiated(compiled(ops.reference_swiglu), gate, up),
    }
    if (functions := liger()) is not None:
        candidates["Liger"] = differentiated(functions.liger_swiglu, gate, up)
    return Case(f"SwiGLU {rows} x {features}", candidates, bytes=8 * gate.nbytes)


def rope() -> Case:
    batch, tokens, heads, dim = size(4, 2), size(4096, 5), size(32, 2), size(128, 6)
    x = draw(batch, tokens, heads, dim)
    cos, sin = ops.rope_tables(tokens, dim, 1e4, torch.float32, DEVICE)
    positions = torch.arange(tokens, device=DEVICE).expand(batch, tokens)
    half = dim // 2

    def halves(x: Tensor) -> Tensor:
        c, s = (torch.cat([table, table], -1)[positions].unsqueeze(2) for table in (cos, sin))
        return (x * c + torch.cat([-x[..., half:], x[..., :half]], -1) * s).to(x.dtype)

    candidates = {
        "samestep": differentiated(lambda x: ops.apply_rope(x, cos, sin, positions), x),
        "rotate_half": differentiated(halves, x),
        "rotate_half, compiled": differentiated(compiled(halves), x),
    }
    if (functions := liger()) is not None:
        c, s = (torch.cat([table, table], -1).to(BF16).unsqueeze(0) for table in (cos, sin))

        def of_liger(x: Tensor) -> Tensor:
            # It turns queries and keys together: half of the heads are called keys, and nothing is copied.
            q, k = x.transpose(1, 2).chunk(2, 1)
            return torch.cat(functions.liger_rope(q, k, c, s), 1)

        candidates["Liger, and joined again"] = differentiated(of_liger, x)
    return Case(f"RoPE {batch} x {tokens} x {heads} x {dim}", candidates, bytes=4 * x.nbytes)


def adamw() -> Case:
    tensors, each = size(100, 3), size(10_000_000, 7)

    def stepper(**kind: bool) -> Callable[[], None]:
        """Its weights are made in the first call, so that only one candidate's are in memory."""
        optimizers: list[torch.optim.Optimizer] = []

        def step() -> None:
            if not optimizers:
                weights = [draw(each, dtype=torch.float32) for _ in range(tensors)]
                for weight in weights:
                    weight.grad = torch.full_like(weight, 1e-3)
                optimizers.append(torch.optim.AdamW(weights, lr=1e-4, **kind))
            optimizers[0].step()

        return step

    candidates: Candidates = {"samestep (fused)": stepper(fused=True), "foreach": stepper(foreach=True)}
    return Case(f"AdamW {tensors * each:,} parameters, float32", candidates, bytes=7 * 4 * tensors * each)


def linear_cross_entropy() -> Case:
    tokens, features, vocabulary = size(8192, 6), size(4096, 10), size(128_000, 40)
    hidden, head = draw(tokens, features), draw(vocabulary, features, scale=0.02)
    labels = torch.randint(0, vocabulary, (tokens,), device=DEVICE)

    def full(hidden: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ head.T).float(), labels, reduction="sum")

    def ours(hidden: Tensor, head: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden, head, labels, compute_dtype=BF16)[0]

    candidates = {
        "samestep": differentiated(ours, hidden, head),
        "full logits": differentiated(full, hidden, head),
        "full logits, compiled": differentiated(compiled(full), hidden, head),
    }
    if (functions := liger()) is not None:

        def of_liger(hidden: Tensor, head: Tensor) -> Tensor:
            out = functions.liger_fused_linear_cross_entropy(hidden, head, labels, reduction="sum")
            return out[0] if isinstance(out, tuple) else out

        candidates["Liger"] = differentiated(of_liger, hidden, head)
    title = f"linear cross-entropy {tokens} x {features} x {vocabulary}"
    return Case(title, candidates, operations=3 * 2 * tokens * features * vocabulary)


def attention() -> Case:
    batch, tokens, heads, keys, dim = size(4, 2), size(4096, 6), size(32, 4), size(8, 2), size(128, 8)
    inputs = draw(batch, tokens, heads, dim), draw(batch, tokens, keys, dim), draw(batch, tokens, keys, dim)

    def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    twin = compiled(ops.reference_attention)
    candidates = {
        "samestep": differentiated(ops.attention, *inputs),
        "F.scaled_dot_product_attention": differentiated(native, *inputs),
        "twin, compiled": differentiated(lambda *inputs: twin(*inputs), *inputs),
    }
    # Two products forward and five backward (one is that of the scores again), half of each masked.
    operations = 7 * 2 * batch * heads * tokens * tokens * dim // 2
    return Case(f"attention, causal, {batch} x {tokens}, {heads} / {keys} x {dim}", candidates, operations=operations)


# ---------------------------------------------------------------- measuring


def timed(run: Callable[[], Any]) -> float:
    """Median seconds."""
    if DEVICE.type == "cpu":
        return statistics.median(_cpu_seconds(run) for _ in range(ROUNDS))
    for _ in range(3):
        run()
    # Clearing it empties the cache, and keeps the GPU busy while Python launches what is timed.
    cache = torch.empty(1 << 30, dtype=torch.int8, device=DEVICE)
    events = []
    for _ in range(ROUNDS):
        cache.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3


def _cpu_seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def peak_extra(run: Callable[[], Any]) -> float:
    """MiB at the peak of a run, beyond what was there before and what it returns."""
    if DEVICE.type == "cpu":
        return 0.0
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    left = sum(gradient.nbytes for gradient in run() or ())
    return (torch.cuda.max_memory_allocated() - before - left) / 2**20


def limits() -> tuple[float, float]:
    """Bytes a second of a copy, and operations a second of a product."""
    source = torch.empty(size(1 << 30, 1 << 10), dtype=torch.int8, device=DEVICE)
    target, side = torch.empty_like(source), size(8192, 16)
    a, b = (draw(side, side).detach() for _ in range(2))
    return 2 * source.nbytes / timed(lambda: target.copy_(source)), 2 * side**3 / timed(lambda: a @ b)


def rows(case: Case, bandwidth: float, throughput: float) -> Iterator[str]:
    """Lines of the table. A candidate is let go before the next."""
    first = None
    while case.candidates:
        name = next(iter(case.candidates))
        run = case.candidates.pop(name)
        try:
            seconds, memory = timed(run), peak_extra(run)
        except torch.OutOfMemoryError:
            yield f"| {case.title} | {name} | out of memory | | | | |"
            continue
        first = first or seconds
        if case.bytes:
            rate, limit, unit, scale = case.bytes / seconds, bandwidth, "GB/s", 1e9
        else:
            rate, limit, unit, scale = case.operations / seconds, throughput, "TFLOP/s", 1e12
        yield (
            f"| {case.title} | {name} | {1e3 * seconds:.3f} | x{seconds / first:.2f} | {rate / scale:.0f} {unit} "
            f"| {rate / limit:.0%} | {memory:.1f} |"
        )


def main(names: Sequence[str]) -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: run it on a GPU, or check the script with --dry-run")
    torch.manual_seed(0)
    bandwidth, throughput = limits()
    device = "CPU, dry run: no measurement" if DRY else torch.cuda.get_device_name()
    print(  # noqa: T201
        f"{device}; PyTorch {torch.__version__}; copy {bandwidth / 1e9:.0f} GB/s, product {throughput / 1e12:.0f} "
        "TFLOP/s\n\n| operator | implementation | ms | to ours | rate | of the limit | extra MiB |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    for make in (rms_norm, swiglu, rope, adamw, linear_cross_entropy, attention):
        if not names or make.__name__ in names:
            for row in rows(make(), bandwidth, throughput):
                print(row, flush=True)  # noqa: T201


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if not word.startswith("--")])
