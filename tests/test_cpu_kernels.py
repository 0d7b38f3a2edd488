"""The kernels for CPUs: no less exact than plain float32 arithmetic, whatever the layout and the number of threads; and
the library they are in, which is compiled where and when it can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import ops
from samestep.ops import cpu_kernels, cpu_library, dispatch
from samestep.run import trainer
from samestep.run.trainer import Trainer
from samestep.step.clip import squares

F32 = torch.float32
pytestmark = pytest.mark.skipif(cpu_library.library()[0] is None, reason=cpu_library.library()[1])


def results(function, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What a function gives, and the gradients of its inputs for an output gradient that is always the same."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def strided(x: Tensor) -> Tensor:
    """The same numbers, every second place of its memory left out."""
    return torch.stack([x, x], -1)[..., 0]


def norm(x: Tensor, w: Tensor) -> Tensor:
    module = ops.FusedRMSNorm(len(w), 1e-6, x.dtype)
    return torch.func.functional_call(module, {"weight": w}, (x,))


def plain_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    module = ops.FusedLayerNorm(len(w), 1e-6, x.dtype)
    return torch.func.functional_call(module, {"weight": w, "bias": b}, (x,))


def plain_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6) * w + b


def plain_swiglu(limit: float | None):
    def function(gate: Tensor, up: Tensor) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return F.silu(gate) * up

    return function


POSITIONS = torch.tensor([[5, 0, 3, 1, 2, 6, 4], [0, 1, 2, 3, 4, 5, 6]])


def rope(x: Tensor, function=ops.apply_rope) -> Tensor:
    return function(x, *ops.rope_tables(7, x.shape[-1], 100.0, x.dtype), POSITIONS)


def plain_rope(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = (table[POSITIONS].unsqueeze(2) for table in ops.rope_tables(7, 2 * half, 100.0, x.dtype))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def loss(function, **terms):
    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        labels = torch.arange(len(hidden)) * 7 % len(weight)
        labels[::5] = -100
        return function(hidden, weight, labels, compute_dtype=hidden.dtype, loss_dtype=hidden.dtype, **terms)[0]

    return total


def plain_loss(z_loss_weight=0.0, label_smoothing=0.0, softcap=None):
    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        labels = torch.arange(len(hidden)) * 7 % len(weight)
        labels[::5] = -100
        logits = hidden @ weight.T
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
        return entropy + z_loss_weight * logits[labels != -100].logsumexp(1).square().sum()

    return total


LOSSES = [
    {},
    {"z_loss_weight": 1e-2},
    {"label_smoothing": 0.1},
    {"softcap": 2.0},
    {"softcap": 30.0, "label_smoothing": 0.2, "z_loss_weight": 1e-3},
]
CASES = {
    **{f"norm {n}x{d}": (norm, plain_norm, [draw(n, d), draw(d, seed=1)]) for n, d in ((1, 1), (33, 7), (70, 300))},
    **{
        f"layer norm {n}x{d}": (layer_norm, plain_layer_norm, [3 + draw(n, d), draw(d, seed=1), draw(d, seed=2)])
        for n, d in ((33, 7), (70, 300), (1, 64))
    },
    "norm of large and small": (norm, plain_norm, [draw(40, 24) * torch.logspace(-3, 9, 40)[:, None], draw(24)]),
    **{
        f"swiglu {limit}": (
            lambda g, u, limit=limit: ops.swiglu(g, u, limit),
            plain_swiglu(limit),
            [10 * draw(19, 13), 3 * draw(19, 13, seed=1)],
        )
        for limit in (None, 2.5)
    },
    **{f"rope {d}": (rope, plain_rope, [draw(2, 7, 3, d)]) for d in (2, 6, 16)},
    **{
        f"loss {terms}": (
            loss(ops.linear_cross_entropy, **terms),
            plain_loss(**terms),
            [2 * draw(23, 12), draw(5003, 12, seed=1)],
        )
        for terms in LOSSES
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_no_less_exact_than_plain_float32(case, layout):
    function, plain, inputs = CASES[case]
    inputs = [strided(x) for x in inputs] if layout == "strided" else inputs
    truth = results(plain, inputs, torch.float64)
    eager = results(plain, inputs, torch.float32)
    calls = []
    with dispatch.watch_kernels(lambda name, *_: calls.append(name)):
        ours = results(function, inputs, torch.float32)
    assert calls
    for own, other, true in zip(ours, eager, truth, strict=True):
        room = 3e-8 if own.ndim else 1.2e-7  # a number alone may fall to the other side of a rounding
        assert error(own, true) <= 1.1 * error(other, true) + room


ATTENTION = {  # rows, queries, keys, heads, key heads, dim, value dim, window
    "square": (2, 64, 64, 4, 4, 32, 32, None),
    "grouped": (1, 77, 77, 6, 2, 40, 24, None),
    "of a cache": (2, 50, 130, 4, 2, 64, 64, None),
    "window": (1, 300, 300, 2, 1, 64, 64, 20),
    "window of a cache": (1, 200, 260, 2, 2, 16, 8, 100),
    "window of 2": (3, 97, 97, 1, 1, 8, 8, 2),
    "several parts": (1, 1100, 1100, 2, 2, 16, 16, None),
    "several parts and a window": (1, 1100, 1300, 2, 1, 16, 16, 700),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_no_less_exact_than_plain_float32(case):
    rows, queries, keys, heads, key_heads, dim, value_dim, window = ATTENTION[case]
    inputs = [
        draw(rows, queries, heads, dim),
        draw(rows, keys, key_heads, dim, seed=1),
        draw(rows, keys, key_heads, value_dim, seed=2),
    ]
    truth = results(lambda *x: ops.reference_attention(*x, window=window), inputs, torch.float64)
    eager = results(lambda *x: ops.reference_attention(*x, window=window), inputs, torch.float32)
    calls = []
    with dispatch.watch_kernels(lambda name, *_: calls.append(name)):
        ours = results(lambda *x: ops.attention(*x, window=window), inputs, torch.float32)
    assert calls == ["attention", "attention_backward"]
    for own, other, true in zip(ours, eager, truth, strict=True):
        assert error(own, true) <= 1.1 * error(other, true) + 3e-8


def test_attention_with_scores_far_apart():
    """Weights of 0 and 1, later keys with ever larger scores: what was summed before is rescaled in every part."""
    queries, keys, values = torch.ones(1, 1500, 1, 8), draw(1, 1500, 1, 8), draw(1, 1500, 1, 8, seed=1)
    keys[0, :, 0] = torch.linspace(-40, 40, 1500)[:, None]
    ours, truth = (results(ops.attention, [queries, keys, values], dtype) for dtype in (torch.float32, torch.float64))
    assert all(error(a, b) < 2e-5 for a, b in zip(ours[:1] + ours[3:], truth[:1] + truth[3:], strict=True))
    assert all(torch.isfinite(x).all() for x in ours)


def test_attention_with_scores_without_digits_after_the_point():
    """The largest weight is 1 however large its score is, also where the scale is no power of two."""
    for size in (1e6, 1e10, 1e14):
        queries, keys, values = size * draw(1, 40, 1, 24), draw(1, 40, 1, 24, seed=1), draw(1, 40, 1, 24, seed=2)
        out = ops.attention(queries, keys, values)
        scores = torch.einsum("bshd,bthd->bhst", queries, keys).masked_fill(
            torch.ones(40, 40).triu(1).bool(), -torch.inf
        )
        best = scores.argmax(-1)[0, 0]
        assert torch.equal(out[0, :, 0], values[0, best, 0])


@pytest.mark.parametrize("case", ["norm", "layer norm", "swiglu", "rope", "loss", "attention", "squares"])
def test_the_number_of_threads_moves_no_bit(case):
    functions = {
        "norm": (norm, [draw(333, 80), draw(80)]),
        "layer norm": (layer_norm, [draw(333, 80), draw(80), draw(80)]),
        "swiglu": (ops.swiglu, [draw(333, 80), draw(333, 80, seed=1)]),
        "rope": (rope, [draw(2, 7, 40, 64)]),
        "attention": (ops.attention, [draw(3, 130, 4, 32), draw(3, 130, 2, 32), draw(3, 130, 2, 32)]),
    }

    def take() -> list[Tensor]:
        if case == "squares":
            return [squares([draw(123_457), draw(5), torch.zeros(0)], lambda x, _: x, torch.device("cpu"))]
        if case == "loss":  # without its products: those of MKL may go by the number of threads
            logits, labels = draw(40, 999), torch.arange(40).unsqueeze(1)
            terms = {"z_loss_weight": 1e-3, "label_smoothing": 0.1, "softcap": None}
            return [*cpu_kernels.token_losses_(logits, labels, None, logits, **terms), logits]
        return results(*functions[case], torch.float32)

    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(take())
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_what_is_not_a_number_stays_visible():
    for bad in (torch.nan, torch.inf):
        x = draw(3, 16)
        x[1, 4] = bad
        assert not norm(x, torch.ones(16))[1].isfinite().all() and norm(x, torch.ones(16))[0].isfinite().all()
        normed = layer_norm(x, torch.ones(16), torch.zeros(16))
        assert not normed[1].isfinite().any() and normed[0].isfinite().all()
        assert not ops.swiglu(x, torch.ones(3, 16))[1, 4].isfinite()
        assert not squares([x], lambda g, _: g, torch.device("cpu")).isfinite()
        heads = x.view(1, 3, 2, 8)
        out = ops.attention(heads, heads, heads)
        assert not out[0, 1:, 0].isfinite().all(-1).any() and out[0, :, 1].isfinite().all()
        assert not ops.linear_cross_entropy(x, draw(9, 16), torch.arange(3), compute_dtype=torch.float32)[0].isfinite()


def test_gradients_of_logits_are_rounded_to_bfloat16_as_pytorch_rounds():
    logits, labels = 9 * draw(40, 999), torch.arange(40).unsqueeze(1)
    logits[3, 5], logits[4, 6] = torch.nan, torch.inf
    terms = {"z_loss_weight": 1e-3, "label_smoothing": 0.1, "softcap": None}
    exact, rounded = logits.clone(), logits.clone()
    for x in (exact, rounded):
        cpu_kernels.token_losses_(x, labels, None, x, **terms, rounds=x is rounded)
    assert torch.equal(rounded.nan_to_num(7), exact.bfloat16().float().nan_to_num(7))
    assert not torch.equal(rounded.nan_to_num(7), exact.nan_to_num(7))


def test_of_nothing():
    for function, inputs in (
        (norm, [draw(0, 8), draw(8)]),
        (layer_norm, [draw(0, 8), draw(8), torch.zeros(8)]),
        (ops.swiglu, [draw(0, 8), draw(0, 8)]),
        (ops.attention, [draw(0, 8, 2, 8), draw(0, 8, 2, 8), draw(0, 8, 2, 8)]),
    ):
        out, *gradients = results(function, inputs, torch.float32)
        assert out.shape == inputs[0].shape and all((g == 0).all() for g in gradients)
    assert squares([], lambda x, _: x, torch.device("cpu")).shape == (0,)


def test_exponentials_of_every_size():
    """Through `swiglu`, where up is 1: from where a sigmoid is 0 to where it is 1."""
    x = torch.linspace(-95, 95, 200_001)
    ours = ops.swiglu(x, torch.ones_like(x)).double()
    truth = x.double() * torch.sigmoid(x.double())
    usual = truth.abs() > 1e-36
    assert ((ours - truth).abs() <= 4e-7 * truth.abs())[usual].all() and (ours[~usual].abs() < 1e-35).all()


def test_only_plain_tensors_of_this_device_reach_the_kernels():
    x, heads = draw(3, 8), draw(1, 9, 2, 8)
    for refused in (torch.empty(3, 8, device="meta"), x.double(), x.as_subclass(Labelled)):
        assert dispatch.cpu_kernels_for(x, refused) is None and dispatch.kernels_for(refused, x) is None
    ops.swiglu(x, x.to("meta"))  # which PyTorch lets pass; nothing may be read
    ops.FusedRMSNorm(8).to("meta")(x)
    another = ops.FusedRMSNorm(8)
    another.weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError):
        another(x)
    with torch.device("meta"):  # where tensors are made unless told otherwise
        out = ops.attention(heads, heads, heads)
        assert squares([x], lambda g, _: g, x.device).item() == pytest.approx(float(x.double().square().sum()))
    assert torch.equal(out, ops.attention(heads, heads, heads))


class Labelled(Tensor):
    pass


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_any_width(dtype):
    hidden, weight, labels = draw(6, 8), draw(11, 8), torch.arange(6)
    truth = results(
        lambda h, w: ops.linear_cross_entropy(h, w, labels, compute_dtype=h.dtype)[0], [hidden, weight], F32
    )
    again = results(
        lambda h, w: ops.linear_cross_entropy(h, w, labels.to(dtype), compute_dtype=h.dtype)[0], [hidden, weight], F32
    )
    assert all(torch.equal(a, b) for a, b in zip(truth, again, strict=True))
    tables = ops.rope_tables(7, 8, 100.0, F32)
    x = draw(2, 7, 3, 8)
    assert torch.equal(ops.apply_rope(x, *tables, POSITIONS), ops.apply_rope(x, *tables, POSITIONS.to(dtype)))
    with pytest.raises(ValueError, match="do not fit"):
        ops.apply_rope(x, tables[0], tables[1][:5], POSITIONS)
    assert error(ops.apply_rope(x, tables[0], tables[1].double(), POSITIONS), plain_rope(x).double()) < 1e-6


@pytest.mark.usefixtures("either_implementation")
def test_scores_of_a_negative_scale():
    inputs = [draw(1, 700, 2, 32), draw(1, 700, 2, 32, seed=1), draw(1, 700, 2, 32, seed=2)]
    ours = results(lambda *x: ops.attention(*x, scale=-2.0), inputs, F32)
    truth = results(lambda *x: ops.reference_attention(*x, scale=-2.0), inputs, torch.float64)
    assert all(error(a, b) < 5e-5 for a, b in zip(ours, truth, strict=True))


def test_saved_tensors_may_come_back_in_another_layout():
    cases = [(norm, [draw(9, 16), draw(16)]), (ops.attention, [draw(1, 9, 2, 8, seed=seed) for seed in range(3)])]
    for function, inputs in cases:
        truth = results(function, inputs, F32)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, strided):
            again = results(function, inputs, F32)
        assert all(torch.equal(a, b) for a, b in zip(truth, again, strict=True))


# ---- the library


def load(folder: Path, **variables: str) -> str:
    """Loads it in a process of its own with a cache of its own; the reason if there is none, else its path."""
    program = f"""if True:
        import runpy
        found, why = runpy.run_path({cpu_library.__file__!r})["library"]()
        print(found._name if found else why)"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), **variables}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_compiled_once_and_again_where_the_file_is_damaged(tmp_path):
    path = Path(load(tmp_path))
    assert path.parent == tmp_path / "samestep" and [path] == list(path.parent.iterdir())
    made = path.stat().st_mtime_ns
    assert load(tmp_path) == str(path) and path.stat().st_mtime_ns == made
    path.write_text("not a library")
    assert load(tmp_path) == str(path) and path.stat().st_mtime_ns > made


def test_without_a_library_there_is_a_reason(tmp_path):
    assert load(tmp_path, SAMESTEP_CPU_KERNELS="0") == "SAMESTEP_CPU_KERNELS is 0"
    assert load(tmp_path, CC="no-such-compiler") == "no C compiler: no-such-compiler is not a program"
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'error: out of ideas' >&2\nexit 3\n")
    broken.chmod(0o755)
    assert load(tmp_path, CC=str(broken)) == f"{broken} failed: error: out of ideas"
    assert list((tmp_path / "samestep").iterdir()) == []
    assert Path(load(tmp_path, CC="cc -DUNUSED")).exists()
    assert load(tmp_path, CC='cc "') == "No closing quotation"
    broken.write_bytes(b"#!/bin/sh\necho 'warning: \xe9' >&2\necho 'an error at last' >&2\nexit 3\n")
    assert load(tmp_path, CC=str(broken)) == f"{broken} failed: an error at last"


def test_a_home_that_cannot_be_written_to(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    path = Path(load(blocked, TMPDIR=str(tmp_path)))
    assert path.parent.parent == tmp_path and path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path):
    theirs = tmp_path / "samestep"
    theirs.mkdir()
    theirs.chmod(0o777)
    made = Path(load(tmp_path, TMPDIR=str(tmp_path)))
    assert made.parent != theirs and list(theirs.iterdir()) == []
    made.parent.chmod(0o777)
    assert load(tmp_path, TMPDIR=str(tmp_path)).endswith("is a folder that only this user may write to")


def test_a_run_without_the_kernels_says_so_and_takes_the_same_steps(tiny, tmp_path, monkeypatch, capsys):
    def losses(name: str) -> list[float]:
        Trainer(tiny("training.steps=3").model_copy(update={"output_dir": str(tmp_path / name)})).train()
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    ours = losses("with")
    assert "operators run instead" not in capsys.readouterr().out
    monkeypatch.setattr(dispatch, "library", lambda: (None, "no C compiler"))
    monkeypatch.setattr(trainer, "library", lambda: (None, "no C compiler"))
    assert losses("without") == pytest.approx(ours, rel=1e-6)
    assert "samestep's faster ones (no C compiler)" in capsys.readouterr().out
