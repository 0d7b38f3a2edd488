"""float8: what is refused where there are no units for it, and its numbers where torchao can emulate them."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from test_parallel import DOUBLE
from test_step import Setting
from test_storage import error, small

from samestep.config.load import dump
from samestep.errors import ConfigError
from samestep.ops import Precision, float8, linear, reference_linear
from samestep.plan import make_plan
from samestep.run.setup import open_run
from samestep.run.trainer import Trainer
from samestep.verify import parity

FLOAT8 = "model.compute_dtype=float8"
SIZED = ("model.vocab_size=65",)
EPSILON = 2.0**-4
"""Half of the distance of neighbours in e4m3 (3 bits after the point), relative to them: one rounding at most."""
E4M3, BF16, F64 = torch.float8_e4m3fn, torch.bfloat16, torch.float64


# ---- what is refused


def test_a_cpu_is_refused_before_anything_is_read(tiny, tmp_path):
    config = tiny(FLOAT8)
    (tmp_path / "text.txt").unlink()
    for start in (lambda: Trainer(config), lambda: parity.run(config)):
        with pytest.raises(ConfigError, match="a CPU, which has no units for float8") as caught:
            start()
        assert (caught.value.field, caught.value.fix) == ("model.compute_dtype", "write bfloat16")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("capability", "package", "match", "fix"),
    [
        ((8, 0), object(), "A100 has no units for float8; GPUs of compute capability 8.9 have", "write bfloat16"),
        ((7, 5), None, "A100 has no units", "write bfloat16"),
        ((8, 9), None, "torchao, which is not", 'run `pip install "samestep[lowbit]"`, or write bfloat16'),
        ((9, 0), object(), None, None),
    ],
)
def test_a_gpu_needs_units_and_torchao(monkeypatch, capability, package, match, fix):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    found = None if package is None else SimpleNamespace(__spec__=object())
    monkeypatch.setitem(sys.modules, "torchao", found)
    float8.check_float8("bfloat16", torch.device("cuda"))
    if match is None:
        float8.check_float8("float8", torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=match) as caught:
        float8.check_float8("float8", torch.device("cuda"))
    assert (caught.value.field, caught.value.fix) == ("model.compute_dtype", fix)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["model.hidden_size=40"], "hidden_size"),
        (["model.intermediate_size=56"], "intermediate_size"),
        (["model.head_dim=6"], "num_attention_heads"),
        (["model.head_dim=4"], "num_key_value_heads"),
    ],
)
def test_sizes_that_the_units_do_not_take(tiny, settings, field):
    make_plan(tiny(*SIZED, *settings))
    with pytest.raises(ConfigError, match="no multiple of 16") as caught:
        make_plan(tiny(*SIZED, FLOAT8, *settings))
    assert caught.value.field == f"model.{field}"


def test_only_compute_dtype_may_be_float8(tiny):
    assert tiny("model.compute_dtype=fp8").model.compute_dtype == "float8"
    for field in ("params_dtype", "softmax_compute_dtype", "layernorm_compute_dtype", "gradient_dtype"):
        with pytest.raises(ConfigError, match="must be one of"):
            tiny(f"model.{field}=float8")


# ---- what is planned and kept


def test_the_plan_shows_float8_and_the_memory_of_bfloat16(tiny, cli, tmp_path):
    plain, plan = (make_plan(tiny(*SIZED, f"model.compute_dtype={name}")) for name in ("bfloat16", "float8"))
    shown = {row.kind: (row.compute, row.products) for row in plan.dtypes}
    for kind, (compute, products) in shown.items():
        assert products == ("float8" if kind in ("attention products", "mlp") else None)
        assert compute == next(row.compute for row in plain.dtypes if row.kind == kind)
    assert plain.casts_once and not plan.casts_once
    assert plan.memory.activations == plain.memory.activations
    file = tmp_path / "run.yaml"
    file.write_text(dump(tiny(*SIZED, FLOAT8)), encoding="utf-8")
    code, out, _ = cli("plan", file)
    assert code == 0 and "bf16 in fp8" in out


def test_a_run_is_opened_in_bfloat16_where_there_are_no_units(tiny, tmp_path):
    Trainer(tiny("model.compute_dtype=bfloat16", "training.steps=2")).train()
    opened = open_run(tmp_path / "run", [FLOAT8])
    assert opened.config.model.compute_dtype == "float8"
    assert opened.model.precision == open_run(tmp_path / "run").model.precision
    assert Precision.from_config(opened.config.model).linear is E4M3


# ---- its numbers, emulated


@pytest.fixture
def torchao():
    pytest.importorskip("torchao")


def operands(tokens: int, inputs: int = 64, outputs: int = 48) -> list[torch.Tensor]:
    """x, weight, bias; tokens of very different sizes, as activations are."""
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=draw) * torch.logspace(-3, 3, tokens).unsqueeze(1)
    weight = torch.randn(outputs, inputs, generator=draw)
    bias = torch.randn(outputs, generator=draw)
    return [t.requires_grad_() for t in (x.to(BF16), weight, bias)]


def gradients(y: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    return torch.autograd.grad(y, inputs, torch.randn(y.shape, generator=draw).to(y.dtype))


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


@pytest.mark.usefixtures("torchao")
def test_a_product_is_that_of_rows_rounded_under_scales_of_their_own():
    x, weight, bias = operands(33)
    found, twin = linear(x, weight, bias, E4M3), reference_linear(x, weight, bias, E4M3)
    assert found.dtype == twin.dtype == BF16
    assert far(found, twin) <= 2 * 2**-8
    exact = x.double() @ weight.double().T + bias.double()
    per_token = (found.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert per_token.max() <= EPSILON  # of small tokens too
    assert far(found, exact) >= EPSILON / 4, "nothing was rounded to float8"


@pytest.mark.usefixtures("torchao")
def test_gradients_are_those_of_float64_but_for_roundings():
    """Of the input within the rounding of float8; of weight and bias as exact as in bfloat16, in float32."""
    inputs = operands(33)
    found = gradients(linear(*inputs, E4M3), inputs)
    x, weight, bias = inputs
    wanted = gradients(x.double() @ weight.double().T + bias.double(), inputs)
    plain = gradients(linear(*inputs, BF16), inputs)
    assert [g.dtype for g in found] == [BF16, torch.float32, torch.float32]
    assert EPSILON / 4 <= far(found[0], wanted[0]) <= EPSILON
    for ours, narrow in zip(found[1:], plain[1:], strict=True):
        assert far(ours, narrow) <= 1e-6


@pytest.mark.usefixtures("torchao")
def test_a_token_does_not_depend_on_those_beside_it():
    """One scale for a whole tensor would: the largest token is a million times the smallest."""
    x, weight, bias = operands(33)
    whole = linear(x, weight, bias, E4M3)
    for part in (slice(0, 1), slice(1, 9), slice(9, 33)):
        alone = linear(x[part], weight, bias, E4M3)
        assert ((alone - whole[part]).norm(dim=1) <= 2**-8 * whole[part].norm(dim=1)).all()
        assert (alone == whole[part]).double().mean() > 0.99


@pytest.mark.usefixtures("torchao")
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_it_compiles_as_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: linear(*inputs, E4M3), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (9, 33):
        inputs = operands(tokens)
        found, wanted = compiled(*inputs), linear(*inputs, E4M3)
        assert far(found, wanted) <= 2**-8
        for ours, plain in zip(gradients(found, inputs), gradients(wanted, inputs), strict=True):
            assert far(ours, plain) <= 2**-8


@pytest.mark.usefixtures("torchao")
def test_the_error_of_a_step_does_not_grow_with_accumulation(tiny):
    exact = small(tiny, 512, *DOUBLE)
    gradients_of: dict[object, dict[str, torch.Tensor]] = {}

    def take(setting: Setting, name: object) -> None:
        found = gradients_of[name] = {}
        setting.step(setting.batches(), on_gradients=lambda g: found.update({n: t.clone() for n, t in g.items()}))

    for ga in (1, 8, 64):
        setting = small(tiny, 512 // ga, FLOAT8)
        if ga == 1:
            with torch.no_grad():
                for wide, narrow in zip(exact.model.parameters(), setting.model.parameters(), strict=True):
                    wide.copy_(narrow)
            take(exact, "exact")
        take(setting, ga)
    errors = {ga: error(gradients_of[ga], gradients_of["exact"]) for ga in (1, 8, 64)}
    assert max(errors.values()) <= 1.1 * errors[1] <= 1.1 * EPSILON, errors
    assert error(gradients_of[64], {n: t.double() for n, t in gradients_of[1].items()}) <= 2**-9
