"""Activations computed again, and compiled layers: the same numbers, in less memory, for any batch shape."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY
from torch._dynamo.testing import CompileCounterWithBackend

from samestep.config.load import from_dict
from samestep.data.batch import Batch, collate
from samestep.data.rows import Sample
from samestep.errors import ConfigError
from samestep.launch import run_ranks
from samestep.model import activations
from samestep.model.decoder import Decoder
from samestep.ops import random_key
from samestep.ops.gradient_sink import GradientSink
from samestep.parallel.mesh import Mesh, join
from samestep.plan import make_plan, resolve_layout
from samestep.recompute import MODULES, recomputed_modules
from samestep.run.setup import build_model
from samestep.run.trainer import Trainer
from samestep.verify import parity
from samestep.verify.layouts import parse_layouts

pytestmark = pytest.mark.usefixtures("workers")

CHOICES = {
    "full": {"mode": "full"},
    "last layer": {"mode": "full", "full_recompute_layer": ["2"]},
    "mlp": {"mode": "select", "select_module": {"mlp": ["0-2"]}},
    "attention core": {"mode": "select", "select_module": {r".*\.attention_core": ["0", "2"]}},
    "norms, and attention in one": {
        "mode": "select",
        "select_module": {".*_layernorm": ["0-2"], "self_attn": ["1"]},
    },
    "everything by name": {"mode": "select", "select_module": {".*": ["0-2"]}},
    "one whole, the others in parts": {
        "mode": "select",
        "full_recompute_layer": ["0"],
        "select_module": {"mlp|self_attn": ["0-2"]},
    },
}


def config_of(recompute: dict[str, Any] | None = None, layers: int = 3, **sections: Any):
    model = {**TINY["model"], "num_hidden_layers": layers, "vocab_size": 61, **sections.pop("model", {})}
    data = {"train_dataset": {"path": "x.txt"}, "model": model, "recompute": recompute or {}, **sections}
    return from_dict(data).config


def batch_of(*lengths: int, layout: str = "padded") -> Batch:
    draw = torch.Generator().manual_seed(sum(lengths))
    samples = []
    for length in lengths:
        tokens = torch.randint(61, (length + 1,), generator=draw).numpy()
        samples.append(Sample(tokens[:-1], tokens[1:], np.zeros(length, np.int64), np.arange(length)))
    return collate(samples, range(len(lengths)), layout, random_key(1))


def gradients(model: Decoder, batches: list[Batch]) -> dict[str, torch.Tensor]:
    sink = GradientSink(model.named_parameters(), model.precision.gradient)
    for batch in batches:
        model.losses(batch, 0.0)[0].backward()
    return sink.gradients()


def build(config) -> Decoder:
    return build_model(config, 61, Mesh.alone()).train()


# ---- the same numbers


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_equal_to_the_bit(choice: str, layout: str):
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
    batches = [batch_of(9, 5, layout=layout), batch_of(4, layout=layout)]
    kept = gradients(build(config_of(model=dropout)), batches)
    again = gradients(build(config_of(CHOICES[choice], model=dropout)), batches)
    assert list(again) == list(kept), "names of parameters do not change"
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_the_masks_of_the_first_pass_are_drawn_again():
    """Else the test above would prove nothing of dropout."""
    batch = batch_of(9, 5)
    model = build(config_of(CHOICES["full"], model={"hidden_dropout": 0.2}))
    first = gradients(model, [batch])
    model.zero_grad()
    other = gradients(model, [replace(batch, dropout_key=2)])
    assert not torch.equal(first["norm.weight"], other["norm.weight"])


def shard_gradients(choices: list[dict[str, Any]]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """In a worker: loss and gradients of two micro-batches on sharded weights, for each choice."""
    world = join(timeout=60)
    found = []
    for recompute in choices:
        config = config_of(recompute)
        mesh = Mesh(resolve_layout(config.parallelism, world.size), world, torch.device("cpu"))
        model = build_model(config, 61, mesh).train()
        total = 0.0
        for lengths in ((9, 5), (3 + world.rank, 7)):
            loss = model.losses(batch_of(*lengths), 0.0)[0]
            loss.backward()
            total += loss.item()
        found.append((total, {name: p.grad.full_tensor() for name, p in model.named_parameters()}))
    return found


def test_sharded_weights_give_the_same_bits():
    for found in run_ranks(shard_gradients, 2, [{}, CHOICES["full"], CHOICES["mlp"]], timeout=120):
        (wanted_loss, wanted), *others = found
        for loss, gradient in others:
            assert loss == wanted_loss
            assert all(torch.equal(gradient[name], wanted[name]) for name in wanted)


def test_a_run_takes_the_same_steps(tiny):
    def rows(*overrides: str):
        config = tiny("training.steps=3", *overrides)
        Trainer(config).train()
        with open(f"{config.output_dir}/metrics.jsonl", encoding="utf-8") as file:
            found = [json.loads(line) for line in file]
        return [(row.get("loss"), row.get("grad_norm"), row.get("eval_loss")) for row in found]

    for number, mode in enumerate(("recompute.mode=full", 'recompute={mode: select, select_module: {mlp: ["0-1"]}}')):
        here = f"output_dir={tiny().output_dir}{number}"
        exact = ["training.exact=true"] if number else []
        assert rows(*exact, mode, f"{here}a") == rows(*exact, f"{here}b")


def test_verify_passes_with_recomputation(tiny):
    config = tiny("recompute.mode=full", "model.hidden_dropout=0.1")
    layouts = parse_layouts("ga=3 packed+ga=2")
    report = parity.run(config, layouts=layouts, cases=["even", "skewed"], dtype="float64")
    assert report.passed, report


# ---- less memory


def kept_bytes(config) -> int:
    """Of all tensors that autograd keeps for a backward pass, each storage once, without the weights."""
    storages: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        storages[address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    model = build(config)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.losses(batch_of(16, 16, 16), 0.0)[0].backward()
    weights = {address(weight) for weight in model.parameters()}
    return sum(size for place, size in storages.items() if place not in weights)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_fewer_bytes_are_kept():
    """What stays of a layer computed again is its input: tokens x hidden x 4 bytes."""
    by_layers = [kept_bytes(config_of(CHOICES["full"] | {"full_recompute_layer": None}, layers=n)) for n in (1, 2, 3)]
    assert by_layers[1] - by_layers[0] == by_layers[2] - by_layers[1] == 3 * 16 * 32 * 4
    none, mlp, last = (kept_bytes(config_of(CHOICES[c] if c else {})) for c in (None, "mlp", "last layer"))
    assert by_layers[2] < mlp < none and by_layers[2] < last < none
    # Of the MLP gate and up go; its input, the output of a norm, stays, which one operator with the norm does not keep.
    assert none - mlp == 3 * 3 * 16 * (2 * 48 - 32) * 4


def test_nothing_is_computed_again_without_gradients():
    calls = []
    model = build(config_of(CHOICES["full"]))
    for layer in model.layers.values():
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model.losses(batch_of(5), 0.0)
    assert len(calls) == 3
    model.losses(batch_of(5), 0.0)[0].backward()
    assert len(calls) == 3 + 2 * 3


def test_the_plan_follows():
    """Against the formula of a layer kept and of a layer computed again, whose parts are there one module at a time."""

    def planned(recompute: dict[str, Any]) -> int:
        return make_plan(config_of(recompute, layers=4), 1).memory.activations

    tokens, inner, hidden = 16, 48 * 4, 32 * 4
    temporaries = 3 * hidden + 2 * inner  # of the backward of one layer
    none, saved = planned({}), 2 * inner - hidden  # an MLP of its own has the output of the norm as its input
    again = hidden + 2 * inner + 3 * inner  # its temporaries, and what is computed again
    every = planned({"mode": "select", "select_module": {"mlp": ["0-3"]}})
    assert none - every == tokens * (4 * saved + temporaries - again)
    one = planned({"mode": "select", "select_module": {"mlp": ["1"]}})
    assert none - one == tokens * saved, "later layers are gone by then"
    whole = (none - tokens * (hidden + temporaries)) // 4
    assert none - planned({"mode": "full"}) == 3 * (whole - tokens * hidden)
    assert planned({"mode": "full", "full_recompute_layer": ["0-1"]}) == none - 2 * (whole - tokens * hidden)


# ---- what can be chosen


def test_modules_are_those_of_a_layer():
    assert set(MODULES) <= set(dict(build(config_of()).layers["0"].named_modules()))


@pytest.mark.parametrize(
    ("recompute", "wanted"),
    [
        ({}, [(), (), ()]),
        ({"mode": "None", "full_recompute_layer": ["1"]}, [(), (), ()]),
        ({"mode": "full"}, [("",), ("",), ("",)]),
        ({"mode": "full", "full_recompute_layer": ["0", "2"]}, [("",), (), ("",)]),
        ({"mode": "select", "select_module": {"self_attn.*": ["1-2"]}}, [(), ("self_attn",), ("self_attn",)]),
        (
            {"mode": "select", "full_recompute_layer": ["0"], "select_module": {"mlp": ["0-1"]}},
            [("",), ("mlp",), ()],
        ),
    ],
)
def test_which_modules(recompute: dict[str, Any], wanted: list[tuple[str, ...]]):
    assert recomputed_modules(config_of(recompute).recompute, 3) == wanted


@pytest.mark.parametrize(
    ("recompute", "field", "text"),
    [
        ({"mode": "full", "full_recompute_layer": ["1-x"]}, "full_recompute_layer", "neither a layer nor a range"),
        ({"mode": "full", "full_recompute_layer": ["2", "1"]}, "full_recompute_layer", "not in ascending order"),
        ({"mode": "full", "full_recompute_layer": []}, "full_recompute_layer", "names no layer"),
        ({"mode": "full", "full_recompute_layer": ["0-3"]}, "full_recompute_layer", "no layer 3 in a model of 3"),
        ({"mode": "select"}, "select_module", "no module is chosen"),
        ({"mode": "select", "select_module": {"(": ["0"]}}, "select_module", "no regular expression"),
        ({"mode": "select", "select_module": {"mlp": ["2-1"]}}, "select_module", "not in ascending order"),
        ({"mode": "select", "select_module": {"feed": ["0"]}}, "select_module", "no module of a layer"),
    ],
)
def test_mistakes(recompute: dict[str, Any], field: str, text: str):
    with pytest.raises(ConfigError, match=text) as caught:
        make_plan(config_of(recompute), 1)
    assert caught.value.field == f"recompute.{field}"


# ---- swap


def test_swap_has_no_effect_on_a_cpu():
    config = config_of(swap={"enable": True})
    assert any("on a CPU device it has no effect" in note for note in make_plan(config, 1).notes)
    assert all("forward" not in vars(layer) for layer in build(config).layers.values())


def test_moving_to_cpu_memory_changes_nothing():
    """The hooks themselves, which copy on a CPU as well."""
    batch, config = batch_of(9, 5), config_of(CHOICES["mlp"])
    moved = build(config)
    activations.keep_in_cpu_memory(moved)
    found, wanted = gradients(moved, [batch]), gradients(build(config), [batch])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_are_not_moved(monkeypatch):
    """A layer whose tokens are few keeps less than its weights are."""
    copied = 0
    empty_like = torch.empty_like

    def count(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal copied
        copied += tensor.nbytes if "pin_memory" in options else 0
        return empty_like(tensor, **options)

    model = build(config_of(layers=1))
    activations.keep_in_cpu_memory(model)
    monkeypatch.setattr(torch, "empty_like", count)
    model.losses(batch_of(1), 0.0)
    assert 0 < copied < 2 * 48 * 32 * 4


# ---- compile


def test_exact_mode_refuses_compiled_kernels():
    with pytest.raises(ConfigError, match="another order") as caught:
        config_of(compile=True, training={"exact": True})
    assert caught.value.field == "compile"


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no `no-such-compiler`"):
        build(config_of(compile=True))


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

SHAPES = [((7, 5), "padded"), ((9, 4, 3), "padded"), ((11, 6), "padded"), ((8, 5), "packed"), ((3, 9), "packed"),
          ((13,), "padded")]  # fmt: skip


@needs_compiler
def test_one_compilation_serves_all_shapes(monkeypatch):
    """Norm, projections and feed-forward: once for many rows, once for one row (packed), whatever layer and length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    gradients(build(config_of(CHOICES["full"], compile=True)), [batch_of(*lengths, layout=k) for lengths, k in SHAPES])
    assert counter.frame_count == 3 * 2


@needs_compiler
def test_compiled_layers_agree_with_eager_ones():
    torch._dynamo.reset()
    batches = [batch_of(7, 5), batch_of(9, 4, 3)]
    wanted = gradients(build(config_of(layers=1)), batches)
    recompute = {"mode": "select", "select_module": {"mlp": ["0"]}}
    found = gradients(build(config_of(recompute, layers=1, compile=True)), batches)
    for name, truth in wanted.items():
        assert (found[name] - truth).norm() <= 1e-5 * truth.norm(), name


@needs_compiler
def test_a_run_says_how_long_it_compiled(tiny, monkeypatch, capsys):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = tiny("training.steps=2", "compile=true", "train_dataset.split=null")
    Trainer(config).train()
    with open(f"{config.output_dir}/events.jsonl", encoding="utf-8") as file:
        compiled = [event for event in map(json.loads, file) if event["event"] == "compiled"]
    assert compiled[0]["step"] == 1 and compiled[0]["seconds"] > 0
    assert "step 1: compiling took" in capsys.readouterr().out
