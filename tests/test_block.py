"""Halves of a decoder layer as one operator: the bits of their parts, and where they give way to these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY
from test_model import SPEC, samples
from torch import Tensor, nn

from samestep.config.load import from_dict
from samestep.data.batch import collate
from samestep.families import ModelSpec, RopeScaling, resolve_model
from samestep.model import activations, blocks
from samestep.model.attention import KeyValueCache
from samestep.model.decoder import Decoder, Layer, document_lengths
from samestep.model.init import initialize
from samestep.model.linear import Linear
from samestep.ops import Precision, cpu_library, dispatch, random_key
from samestep.pass_memory import activations as planned_activations
from samestep.recompute import recomputed_modules

pytestmark = pytest.mark.skipif(cpu_library.library()[0] is None, reason=cpu_library.library()[1])

F32, F64 = torch.float32, torch.float64
PLAIN = replace(SPEC, head_dim=16)
SPECS = {
    "grouped queries": PLAIN,
    "multi-head": replace(PLAIN, num_kv_heads=4),
    "biases": replace(PLAIN, attention_bias=True, output_bias=True, mlp_bias=True),
    "normalized heads": replace(PLAIN, qk_layernorm=True),
    "normalized heads, query bias": replace(PLAIN, qk_layernorm=True, attention_bias=True),
    "window": replace(PLAIN, sliding_window=5),
    "dynamic rotary scaling": replace(PLAIN, rope_scaling=RopeScaling("dynamic", 2.0, 8)),
    "heads larger than hidden": replace(PLAIN, num_heads=7, num_kv_heads=7, head_dim=24, hidden_size=40),
}


def build(spec: ModelSpec = PLAIN, precision: Precision | None = None) -> Decoder:
    model = Decoder(spec, precision or Precision().raised(F32))
    initialize(model, 1, spec.initializer_range)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of 1 and biases of 0 would hide mistakes
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model.train()


def part_by_part(model: nn.Module) -> nn.Module:
    """The same model, watched, so that every part of a layer is called."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module.register_forward_hook(lambda *call: None)
    return model


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often either half ran as one operator."""
    counts = {"attention_block": 0, "feed_forward_block": 0}

    def counting(name: str, function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def call(*arguments: Any) -> Tensor | None:
            found = function(*arguments)
            counts[name] += found is not None
            return found

        return call

    with monkeypatch.context() as patch:
        for name in counts:
            patch.setattr(blocks, name, counting(name, getattr(blocks, name)))
        yield counts


def step(model: nn.Module, layout: str = "padded", passes: int = 1) -> dict[str, Tensor]:
    """The loss and all gradients of a micro-batch."""
    batch = collate(samples(), range(5), layout)
    model.zero_grad()
    loss = model.losses(batch, 0.0)[0]
    for last in [False] * (passes - 1) + [True]:
        loss.backward(retain_graph=not last)
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bits_of_the_parts(spec: ModelSpec, layout: str, monkeypatch: pytest.MonkeyPatch):
    model = build(spec)
    with counted(monkeypatch) as counts:
        expected = step(part_by_part(model), layout)
        assert set(counts.values()) == {0}
        assert_same_bits(step(model, layout), expected)
        assert set(counts.values()) == {2}  # layers
    assert len(expected) == 1 + len(list(model.parameters()))


@pytest.fixture
def must_run_as_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with counted(monkeypatch) as counts:
        yield
    assert all(counts.values())


@pytest.mark.usefixtures("must_run_as_one")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_float64_truth(spec: ModelSpec):
    model = build(spec)
    truth = step(build(spec, Precision().raised(F64)).double())
    for name, value in step(model).items():
        assert (value.double() - truth[name]).norm() <= 2e-5 * truth[name].norm(), name


FROZEN = [
    ["self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.down_proj.weight", "input_layernorm.weight"],
    ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    ["mlp.gate_proj.weight", "mlp.up_proj.weight", "self_attn.o_proj.weight"],
]


@pytest.mark.usefixtures("must_run_as_one")
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_weights_get_no_gradient(frozen: list[str]):
    model = build(SPECS["biases"])
    layer = model.layers["1"]
    expected = step(model)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
        del expected[f"layers.1.{name}"]
    assert_same_bits(step(model), expected)


@pytest.mark.usefixtures("must_run_as_one")
def test_a_graph_may_be_kept():
    model = build(SPECS["normalized heads"])
    once, twice = step(model), step(model, passes=2)
    for name in once.keys() - {"loss"}:
        assert torch.equal(twice[name], 2 * once[name]), name


def test_a_second_derivative_is_refused():
    model = build()
    loss = model.losses(collate(samples(), range(5), "padded"), 0.0)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, model.embed_tokens.weight, create_graph=True)


def test_the_result_may_be_changed_in_place():
    model, watched = build(), part_by_part(build())
    for each in (model, watched):
        each.layers["0"].register_forward_hook(lambda module, inputs, out: out.add_(0.5))
        each.layers["1"].register_forward_pre_hook(lambda module, inputs: (inputs[0].mul_(0.5), *inputs[1:]))
    assert_same_bits(step(model), step(watched))


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (2, 3), (3, 8)])
def test_few_tokens(shape: tuple[int, int]):
    model = build()
    watched = part_by_part(model)
    ids = torch.arange(shape[0] * shape[1]).view(shape) % 7
    positions = torch.arange(shape[1]).expand(shape)
    context = model._context(positions, None)
    for layer, other in zip(model.layers.values(), watched.layers.values(), strict=True):
        x = model.embed_tokens(ids).detach().requires_grad_()
        outs = [m(x, context) for m in (layer, other)]
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
        assert torch.equal(*outs) and torch.equal(*grads)


@pytest.mark.parametrize("is_watched", [True, False])
def test_recomputation_runs_as_the_first_time(is_watched: bool):
    """The watchers of a forward pass may be gone, or new, when its layers run again."""
    model = build()
    expected = step(model)
    again = copy.deepcopy(model)
    activations.recompute(again, [("",)] * 2)
    batch = collate(samples(), range(5), "padded")

    def watch() -> list[Any]:
        return [m.register_forward_hook(lambda *call: None) for m in again.modules()]

    handles = watch() if is_watched else []
    loss = again.losses(batch, 0.0)[0]
    for handle in handles or watch():
        handle.remove() if is_watched else None
    loss.backward()
    assert_same_bits({n: p.grad for n, p in again.named_parameters()} | {"loss": loss.detach()}, expected)


# ---- where the parts are called


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


def hooked(name: str) -> Callable[[Layer], Any]:
    return lambda layer: layer.get_submodule(name).register_forward_pre_hook(lambda *call: None)


def replaced(name: str) -> Callable[[Layer], Any]:
    """With another `forward`, as recomputation and compilation give it."""

    def replace_forward(layer: Layer) -> None:
        module = layer.get_submodule(name)
        module.forward = module.forward

    return replace_forward


class OtherLinear(Linear):
    """As adapters put one into the place of a layer's."""


ATTENTION = ["input_layernorm", "self_attn", "self_attn.attention_core", "self_attn.k_proj", "self_attn.q_norm"]
FEED_FORWARD = ["post_attention_layernorm", "mlp", "mlp.down_proj", "mlp.activation"]


@pytest.mark.parametrize("change", [hooked, replaced])
@pytest.mark.parametrize("name", ATTENTION + FEED_FORWARD)
def test_a_watched_or_replaced_part_is_called(name: str, change, monkeypatch: pytest.MonkeyPatch):
    model = build(SPECS["normalized heads"])
    expected = step(model)
    change(name)(model.layers["1"])
    with counted(monkeypatch) as counts:
        assert_same_bits(step(model), expected)
    assert counts == {"attention_block": 1 + (name in FEED_FORWARD), "feed_forward_block": 1 + (name in ATTENTION)}


def test_other_classes_are_called(monkeypatch: pytest.MonkeyPatch):
    model = build()
    model.layers["0"].mlp.up_proj.__class__ = model.layers["1"].self_attn.o_proj.__class__ = OtherLinear
    with counted(monkeypatch) as counts:
        step(model)
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("of_all_modules", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_every_kind_of_hook(hook: str, of_all_modules: bool, monkeypatch: pytest.MonkeyPatch):
    model, seen = build(), []
    owner, prefix = (nn.modules.module, "register_module_") if of_all_modules else (model.layers["0"].mlp, "register_")

    def see(module: nn.Module, *call: Any) -> None:
        seen.append(module)

    expected = step(model)
    handle = getattr(owner, prefix + hook)(see)
    try:
        with counted(monkeypatch) as counts:
            assert_same_bits(step(model), expected)
    finally:
        handle.remove()
    assert model.layers["0"].mlp in seen
    assert counts == (
        {"attention_block": 0, "feed_forward_block": 0}
        if of_all_modules
        else {"attention_block": 2, "feed_forward_block": 1}
    )


class Wrapper(nn.Module):
    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside, self.calls = inside, 0

    def forward(self, *inputs: Any) -> Tensor:
        self.calls += 1
        return self.inside(*inputs)


@pytest.mark.parametrize("name", ["self_attn", "self_attn.attention_core", "mlp", "mlp.up_proj", "input_layernorm"])
def test_another_module_in_the_place(name: str):
    model = build()
    expected = step(model)["loss"]
    parent, _, member = f"layers.0.{name}".rpartition(".")
    setattr(model.get_submodule(parent), member, Wrapper(model.layers["0"].get_submodule(name)))
    assert torch.equal(step(model)["loss"], expected)
    assert model.layers["0"].get_submodule(name).calls == 1


def test_a_patched_class_is_called(monkeypatch: pytest.MonkeyPatch):
    model, seen, forward = build(), [], Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: seen.append(self) or forward(self, x))
    step(model)
    assert len(seen) == 2 * 7


def test_a_compiled_part_is_called():
    model, seen = build(), []
    model.layers["1"].mlp.compile(backend=lambda graph, inputs: seen.append(graph) or graph.forward)
    step(model)
    assert seen


def test_what_does_not_fit_is_told_by_the_parts():
    model = build()
    model.layers["0"].input_layernorm.weight = nn.Parameter(torch.ones(30))
    with pytest.raises(RuntimeError):
        step(model)
    model = build()
    model.rope_cos = model.rope_sin = torch.ones(24, 4)
    with pytest.raises(ValueError, match="does not fit tables of 4 pairs"):
        step(model)
    model = build()
    model.layers["0"].self_attn.attention_core.window = 0
    with pytest.raises(ValueError, match="window of 0"):
        step(model)


def test_spans_may_be_lists():
    model, batch = build(), collate(samples(), range(5), "packed")
    lists = replace(batch, spans=[list(span) for span in batch.spans])
    assert torch.equal(model.losses(lists, 0.0)[0], model.losses(batch, 0.0)[0])


@pytest.mark.usefixtures("must_run_as_one")
def test_a_backward_pass_under_autocast():
    model = build()
    hidden = model(collate(samples(), range(5), "padded")).hidden
    (hidden_grad,) = torch.autograd.grad(hidden.square().sum(), model.embed_tokens.weight, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (under,) = torch.autograd.grad(hidden.square().sum(), model.embed_tokens.weight)
    torch.testing.assert_close(under, hidden_grad)


@pytest.mark.parametrize(
    ("why", "attention", "feed_forward"),
    [
        ("other dtypes", 0, 0),
        ("a norm in another dtype", 0, 0),
        ("another softmax", 0, 2),
        ("no kernels", 0, 0),
        ("autocast", 0, 0),
        ("hidden dropout", 0, 0),
        ("attention dropout", 0, 2),
        ("dropout while evaluating", 2, 2),
        ("plain norm", 0, 0),
        ("LayerNorm", 0, 0),
        ("gelu", 2, 0),
        ("heads of 12", 0, 2),
    ],
)
def test_other_cases_are_computed_part_by_part(
    why: str, attention: int, feed_forward: int, monkeypatch: pytest.MonkeyPatch
):
    float32 = Precision().raised(F32)
    precisions = {
        "other dtypes": Precision().raised(F64),
        "a norm in another dtype": replace(float32, layernorm=F64),
        "another softmax": replace(float32, softmax=F64),
    }
    changes: dict[str, dict[str, Any]] = {
        "hidden dropout": {"hidden_dropout": 0.1},
        "attention dropout": {"attention_dropout": 0.1},
        "dropout while evaluating": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        "plain norm": {"fused_norm": False},
        "LayerNorm": {"normalization": "LayerNorm"},
        "gelu": {"hidden_act": "gelu"},
        "heads of 12": {"head_dim": 12},
    }
    model = build(replace(PLAIN, **changes.get(why, {})), precisions.get(why))
    if why == "no kernels":
        monkeypatch.setattr(dispatch, "library", lambda: (None, "none wanted"))
    if why == "dropout while evaluating":
        model.eval()
    with counted(monkeypatch) as counts, torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        model(collate(samples(), range(5), "padded", random_key(1)))
    assert counts == {"attention_block": attention, "feed_forward_block": feed_forward}


def test_a_cache_is_filled_part_by_part(monkeypatch: pytest.MonkeyPatch):
    model, cache = build().eval(), KeyValueCache()
    ids = torch.arange(20).view(1, 20)
    with torch.no_grad(), counted(monkeypatch) as counts:
        first = model.decode(ids, cache)
        assert cache.length == 20 and counts["attention_block"] == 0
        batch = collate(samples([[20]]), range(1), "padded")
        whole = model.loss_head.logits(model(replace(batch, input_ids=ids)).hidden[:, -1])
        assert counts["attention_block"] == 2
    torch.testing.assert_close(first, whole)


# ---- what is kept


def kept(model: Decoder, layout: str) -> int:
    """Bytes that the layers keep for the backward pass, weights and what all layers share aside."""
    batch = collate(samples([[24]] * 4), range(4), layout)
    context = model._context(batch.position_ids, document_lengths(batch))
    context.spans = batch.spans
    shared = [*model.parameters(), model.rope_cos, model.rope_sin, batch.position_ids, context.rope_ids]
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = model.embed_tokens(batch.input_ids)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in model.layers.values():
            x = layer(x, context)
    assert x.requires_grad  # and holds the graph, so that no memory was used twice
    return sum(found.values())


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ({}, {}),
        ({"attention_bias": True}, {}),
        ({"hidden_act": "gelu"}, {}),
        ({"fused_norm": False}, {}),
        ({"model_type": "qwen3", "head_dim": 16}, {}),
        ({}, {"mode": "full"}),
        ({}, {"mode": "select", "select_module": {"mlp": ["0-1"]}}),
        ({}, {"mode": "select", "select_module": {"self_attn": ["0-1"]}}),
        ({}, {"mode": "select", "select_module": {".*attention_core": ["0-1"]}}),
    ],
)
def test_the_plan_knows_what_is_kept(model: dict[str, Any], recompute: dict[str, Any], layout: str):
    section = TINY["model"] | {"num_hidden_layers": 2, "vocab_size": 61, "seq_length": 24, "hidden_size": 48}
    section |= {"num_attention_heads": 3, "num_key_value_heads": 1} | model
    config = from_dict(
        {
            "train_dataset": {"path": "x.txt"},
            "model": section,
            "recompute": recompute,
            "training": {"micro_batch": layout},
        }
    ).config
    spec = resolve_model(config.model, 61)
    built = build(spec, Precision.from_config(config.model)).eval()
    activations.recompute(built, recomputed_modules(config.recompute, 2))
    planned = planned_activations(config, spec, 96)
    # The plan counts the input of the last norm, which is no layer's.
    expected = sum(planned.kept) - 96 * spec.hidden_size * 4
    assert kept(built, layout) == pytest.approx(expected, rel=0.01)
