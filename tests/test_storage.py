"""What weights, masters and optimizer state are stored in, against float64."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from test_step import Setting
from torch import nn

from samestep.config.optimization import OptimizerConfig
from samestep.errors import ConfigError
from samestep.model.linear import Linear, cast_once
from samestep.ops.rounding import round_stochastically
from samestep.parallel.mesh import Mesh
from samestep.plan import make_plan
from samestep.run.setup import build_step, stored_weights
from samestep.step.update import Updater

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
ONE = torch.tensor(1.0, dtype=F64)
NO, YES = torch.tensor(False), torch.tensor(True)


def updater(weight: torch.Tensor, rate: float = 1e-4, **settings) -> Updater:
    config = OptimizerConfig(**{"weight_decay": 0.0, **settings})
    return Updater([("norm.weight", nn.Parameter(weight))], config, lambda _: rate, seed=3)


def truth(weight: torch.Tensor, rate: float = 1e-4, **settings) -> torch.optim.Optimizer:
    """PyTorch's AdamW in float64."""
    return torch.optim.AdamW([nn.Parameter(weight.double())], lr=rate, weight_decay=0.0, **settings)


def small(tiny, size: int, *settings: str) -> Setting:
    """One layer, micro-batches of `size` of 512 samples."""
    shape = ("model.hidden_size=16", "model.num_attention_heads=2", "model.num_key_value_heads=1")
    shape += ("model.seq_length=4", "model.intermediate_size=24", "model.num_hidden_layers=1")
    batch = ("training.global_batch_size=512", f"training.local_batch_size={size}")
    return Setting(tiny(*shape, *batch, *settings))


# ---- stochastic rounding


def test_stochastic_rounding_keeps_the_mean_and_goes_by_the_place_in_the_whole_tensor():
    numbers = torch.randn(1003, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 1003)
    whole, sums = torch.empty(1003, dtype=BF16), torch.zeros(1003, dtype=F64)
    for key in range(2000):
        round_stochastically(numbers, whole, key)
        sums += whole.double()
    unit = numbers.double().abs() * 2**-7  # at least as large as a step of bfloat16
    error = (sums / 2000 - numbers.double()) / unit
    assert error.abs().max() < 5 * 0.5 / math.sqrt(2000)
    assert abs(error.mean()) < 5 * 0.5 / math.sqrt(2000 * 1003)
    for first, last in ((0, 1), (1, 6), (6, 511), (511, 1003)):
        part = torch.empty(last - first, dtype=BF16)
        round_stochastically(numbers[first:last].clone(), part, 1999, first)
        assert torch.equal(part, whole[first:last])


def test_what_bfloat16_holds_is_not_rounded():
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, math.inf, -math.inf, math.nan, 3e38, 1e-40]).bfloat16()
    for key in range(20):
        found = held.float()
        round_stochastically(found, found, key)
        assert torch.equal(found.bfloat16().view(torch.int16), held.view(torch.int16))


# ---- weights stored in 16 bits


@pytest.mark.parametrize(("sign", "about"), [(1.0, 20), (-1.0, 40)])
def test_a_norm_weight_changes_in_storage_when_float64_says(sign: float, about: int):
    """A step of bfloat16 at 1.0 is 2^-8 downward and 2^-7 upward, and each update moves by about 1e-4."""
    gradient = sign * torch.rand(64, generator=torch.Generator().manual_seed(2)).add(0.5)
    ones = torch.ones(64, dtype=BF16)
    kept, lost, drawn = (updater(ones.clone(), master_weights=m) for m in ("float32", "none", "stochastic_rounding"))
    wanted = truth(ones, betas=(0.9, 0.95))
    exact = wanted.param_groups[0]["params"][0]
    first: dict[str, int] = {}
    for step in range(1, 61):
        exact.grad = gradient.double()
        wanted.step()
        for one in (kept, lost, drawn):
            one.apply({"norm.weight": gradient}, ONE, NO)
            one.updates += 1
        for name, stored in (("found", kept.parameters["norm.weight"]), ("wanted", exact.bfloat16())):
            if not torch.equal(stored.data, ones):
                first.setdefault(name, step)
    assert first["found"] == first["wanted"] == pytest.approx(about, abs=1)
    assert torch.equal(kept.parameters["norm.weight"].data, kept.masters["norm.weight"].bfloat16())
    assert torch.equal(lost.parameters["norm.weight"].data, ones) and not lost.masters
    moved = (drawn.parameters["norm.weight"].double() - 1).mean() / (exact - 1).mean()
    assert abs(moved.item() - 1) < 0.4 and not drawn.masters  # 64 draws


def test_every_master_moves_in_training(tiny):
    settings = ("model.params_dtype=bfloat16", "training.steps=100", "lr_scheduler.learning_rate=1e-4")
    setting = small(tiny, 6, *settings, "training.global_batch_size=6")
    masters = setting.step.updater.masters
    before = {name: master.detach().clone() for name, master in masters.items()}
    for number in range(1, 101):
        setting.step(setting.batches(number))
    assert before.keys() == dict(setting.model.named_parameters()).keys()
    for name, master in masters.items():
        assert (master != before[name]).float().mean() > 0.99, name


def test_tables_have_their_own_dtype(tiny):
    setting = Setting(tiny("model.params_dtype=bfloat16", "model.embedding_params_dtype=float32"))
    tied = Setting(tiny("model.embedding_params_dtype=float16", "model.tie_word_embeddings=true"))
    for one, tables, others in ((setting, F32, BF16), (tied, torch.float16, F32)):
        wanted = {name: tables if name == "embed_tokens.weight" else others for name in stored_weights(one.model)}
        assert {name: tensor.dtype for name, tensor in stored_weights(one.model).items()} == wanted
        assert one.step.updater.masters.keys() == {name for name, dtype in wanted.items() if dtype != F32}
        for number in (1, 2):
            assert one.step(one.batches(number)).skipped is None
        assert {name: p.dtype for name, p in one.model.named_parameters()} == wanted
    assert tied.model.loss_head.weight.dtype == torch.float16


# ---- optimizer state


def test_moments_in_bfloat16_follow_float64():
    """Rounded to the nearest, a second moment with a decay of 0.999 stands still: its changes are under half a step."""
    weight = torch.linspace(-1, 1, 512)
    generator = torch.Generator().manual_seed(4)
    ours = updater(weight.clone(), 1e-2, betas=[0.9, 0.999], state_dtype="bfloat16")
    wanted = truth(weight, 1e-2, betas=(0.9, 0.999))
    exact = wanted.param_groups[0]["params"][0]
    nearest = torch.zeros(512, dtype=BF16)
    for size in [1.0] * 60 + [0.1] * 240:
        gradient = size * (torch.rand(512, generator=generator) + 0.5)
        exact.grad = gradient.double()
        wanted.step()
        ours.apply({"norm.weight": gradient}, ONE, NO)
        ours.updates += 1
        nearest = (nearest.float() * 0.999 + gradient.square() * 0.001).bfloat16()
    state = ours.state()
    assert state["exp_avg.norm.weight"].dtype == state["exp_avg_sq.norm.weight"].dtype == BF16
    second = wanted.state[exact]["exp_avg_sq"]
    assert state["exp_avg_sq.norm.weight"].double().mean() / second.mean() == pytest.approx(1, abs=0.01)
    assert nearest.double().mean() / second.mean() > 1.15
    moved = ours.parameters["norm.weight"].double() - weight
    assert (moved - (exact - weight)).norm() / (exact - weight).norm() < 0.01


SETTINGS = [
    {"state_dtype": "bfloat16"},
    {"master_weights": "none", "state_dtype": "bfloat16"},
    {"master_weights": "stochastic_rounding"},
    {"master_weights": "stochastic_rounding", "type": "Muon"},
    {"master_weights": "none", "type": "SGD", "momentum": 0.9},
    {"state_dtype": "int8"},
    {"state_dtype": "int8", "master_weights": "none"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s.values()) if len(s) < 3 else "sgd")
def test_it_goes_on_to_the_same_bits_and_a_skip_changes_none(settings):
    if settings.get("state_dtype") == "int8":
        pytest.importorskip("torchao")

    def gradient(step: int) -> dict[str, torch.Tensor]:
        return {"norm.weight": torch.randn(64, 96, generator=torch.Generator().manual_seed(step))}

    def bits(one: Updater) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in {**one.parameters, **one.state()}.items()}

    def take(one: Updater, steps: range) -> None:
        for step in steps:
            one.apply(gradient(step), ONE * 0.5, NO)
            one.updates += 1

    start = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    first = updater(start.clone(), 1e-2, **settings)
    take(first, range(1, 4))
    saved = bits(first)
    bad = {"norm.weight": torch.full((64, 96), math.nan)}
    first.apply(bad, ONE, YES)
    after = bits(first)
    assert saved.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in saved.items())
    again = updater(saved.pop("norm.weight").clone(), 1e-2, **settings)
    again.load_state(saved, 3)
    for one in (first, again):
        take(one, range(4, 7))
    wanted, found = bits(first), bits(again)
    assert wanted.keys() == found.keys() and all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    if "master_weights" not in settings:
        wide = updater(start.clone(), 1e-2)
        take(wide, range(1, 7))
        moved = (wide.trained("norm.weight") - start.float()).norm()
        assert (first.trained("norm.weight") - wide.trained("norm.weight")).norm() < 0.1 * moved


def test_int8_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match="torchao, which is not installed"):
        updater(torch.ones(4), state_dtype="int8")


# ---- accumulation


def error(found, wanted) -> float:
    square = sum((found[name].double() - wanted[name]).square().sum() for name in wanted)
    return math.sqrt(square / sum(tensor.square().sum() for tensor in wanted.values()))


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_the_gradient_error_does_not_grow_with_accumulation(tiny, storage: str):
    """A sum in bfloat16, made here, does: its roundings add up like a random walk."""
    double = [f"model.{name}=float64" for name in ("params_dtype", "compute_dtype", "gradient_dtype", "loss_dtype")]
    double += [f"model.{name}_dtype=float64" for name in ("layernorm_compute", "softmax_compute", "rotary")]
    exact = small(tiny, 512, *double)
    settings = ("model.compute_dtype=bfloat16", f"model.params_dtype={storage}")
    first = small(tiny, 512, *settings)
    with torch.no_grad():
        for wide, narrow in zip(exact.model.parameters(), first.model.parameters(), strict=True):
            wide.copy_(narrow)
    wanted: dict[str, torch.Tensor] = {}
    exact.step(exact.batches(), on_gradients=lambda g: wanted.update({n: t.clone() for n, t in g.items()}))
    ours, narrow = {}, {}
    for ga in (1, 8, 64, 512):
        setting = small(tiny, 512 // ga, *settings)
        running: dict[str, torch.Tensor] = {}
        before: dict[str, torch.Tensor] = {}

        def add(_index, _sums, setting=setting, running=running, before=before):
            for name, total in setting.step.sink.gradients().items():
                own = total - before[name] if name in before else total.clone()
                before[name] = total.clone()
                running[name] = (running[name] + own.bfloat16()) if name in running else own.bfloat16()

        found: dict[str, torch.Tensor] = {}
        batches = setting.batches()
        assert len(batches) == ga
        setting.step(batches, add, lambda g, found=found: found.update({n: t.clone() for n, t in g.items()}))
        ours[ga], narrow[ga] = error(found, wanted), error(running, wanted)
    assert max(ours.values()) <= min(3e-2, 1.1 * ours[1]), ours
    walk = math.sqrt(narrow[512] ** 2 - narrow[1] ** 2) / math.sqrt(narrow[8] ** 2 - narrow[1] ** 2)
    assert 8 / 2 < walk < 8 * 2, narrow


# ---- casts


def test_weights_cast_once_a_step_give_the_same_bits(tiny):
    settings = ("model.compute_dtype=bfloat16", "recompute.mode=full")
    often, once = Setting(tiny(*settings)), Setting(tiny(*settings))
    once.step = build_step(once.config, once.model, Mesh.alone(), "once_per_step", casts_once=True)
    for number in (1, 2):
        for one in (often, once):
            assert one.step(one.batches(number)).skipped is None
    wanted, found = often.bits(), once.bits()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    linear = once.model.layers["0"].mlp.up_proj
    with cast_once(once.model):
        assert linear.cast.dtype == BF16
    assert linear.cast is None


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_without_memory_for_the_casts_there_are_none(tiny, monkeypatch, error):
    model = Setting(tiny("model.compute_dtype=bfloat16")).model
    asked = []

    def third_fails(dtype):
        asked.append(dtype)
        if len(asked) == 3:
            raise error
        return True

    monkeypatch.setattr("samestep.model.linear.is_narrow", third_fails)
    with cast_once(model):
        assert len(asked) == 3
        assert all(module.cast is None for module in model.modules() if isinstance(module, Linear))


def test_the_plan_casts_once_where_there_is_memory(tiny):
    config = tiny("model.compute_dtype=bfloat16")
    plain = make_plan(tiny("model.compute_dtype=bfloat16", "training.cast_weights=every_micro_batch", *SIZED))
    config = tiny("model.compute_dtype=bfloat16", *SIZED)
    plan = make_plan(config)
    shapes = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)  # two layers: q and o, k and v, the feed-forward
    assert (plan.casts_once, plan.memory.casts) == (True, 2 * shapes)
    assert plan.memory.total - plain.memory.total <= 2 * shapes
    assert not make_plan(config, memory_limit=plain.memory.total).casts_once
    assert not make_plan(config, world_size=2).casts_once
    once = tiny("model.compute_dtype=bfloat16", "training.cast_weights=once_per_step", *SIZED)
    assert any("cast_weights once_per_step has no effect" in note for note in make_plan(once, world_size=2).notes)


SIZED = ("model.vocab_size=65",)


def test_the_plan_counts_what_is_stored(tiny):
    def memory(*settings):
        return make_plan(tiny(*SIZED, *settings)).memory

    plain, table = memory(), 65 * 32
    count = plain.parameters // 4
    mixed = memory("model.params_dtype=bfloat16", "model.embedding_params_dtype=float32")
    assert mixed.parameters == 2 * count + 2 * table and mixed.masters == 4 * (count - table)
    assert memory("model.params_dtype=bfloat16", "optimizer.master_weights=none").masters == 0
    assert memory("optimizer.state_dtype=bfloat16").optimizer == plain.optimizer / 2
    large = memory("model.hidden_size=64")
    assert memory("model.hidden_size=64", "optimizer.state_dtype=int8").optimizer == math.ceil(
        large.optimizer * (0.25 + 1 / 256)
    )


# ---- fields without effect


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["model.router_dense_type=float32"], "mixture of experts"),
        (["model.moe_router_dtype=fp32"], "mixture of experts"),
        (["model.model_type=gpt2", "model.num_key_value_heads=null", "model.rotary_dtype=bf16"], "learned, not rotary"),
    ],
)
def test_a_dtype_that_nothing_reads_is_refused(tiny, settings, match):
    with pytest.raises(ConfigError, match=match):
        make_plan(tiny(*SIZED, *settings))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["optimizer.master_weights=none"], "no weight is stored in bfloat16 or float16"),
        (["model.params_dtype=fp16", "optimizer.master_weights=stochastic_rounding"], "stored in float16"),
        (["optimizer.type=Lion", "optimizer.state_dtype=bfloat16"], "only AdamW"),
        (["training.cast_weights=once_per_step"], "no effect: nothing is cast to 16 bits with params_dtype float32"),
        (["training.cast_weights=every_micro_batch"], "no effect: nothing is cast"),
        (["training.cast_weights=once_per_step", "model.compute_dtype=float8"], "compute_dtype float8"),
        (["training.cast_weights=once_per_step", "model.compute_dtype=fp16", "compile=true"], "compiled layers cast"),
        (["training.exact=true", "model.reduce_dtype=float64"], "adds gradients as integers"),
    ],
)
def test_choices_without_effect_are_refused(tiny, settings, match):
    with pytest.raises(ConfigError, match=match):
        tiny(*settings)


def test_int8_state_needs_whole_weights(tiny):
    with pytest.raises(ConfigError, match=r"optimizer.state_dtype.*blocks of 256"):
        make_plan(tiny(*SIZED, "optimizer.state_dtype=int8"), world_size=2)
