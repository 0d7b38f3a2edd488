"""The decoder against `transformers`, one document at a time, and against itself on other layouts and dtypes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.data.batch import Batch, collate
from samestep.data.rows import IGNORE, Sample
from samestep.errors import CheckpointError, ConfigError
from samestep.families import ModelSpec, parameter_shapes
from samestep.model import decoder as decoder_module
from samestep.model.decoder import Decoder
from samestep.model.init import first_value, initialize
from samestep.model.weights import from_hf, hf_shapes, to_hf
from samestep.ops import Precision, random_key
from samestep.ops import cross_entropy as cross_entropy_module
from samestep.ops.gradient_sink import GradientSink
from samestep.step.objective import DecoderObjective

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

SPEC = ModelSpec(
    family="llama",
    vocab_size=97,
    seq_length=24,
    max_positions=24,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    normalization="RMSNorm",
    fused_norm=True,
    norm_eps=1e-5,
    hidden_act="silu",
    gated=True,
    tied=False,
    rope_theta=1e4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    initializer_range=0.1,
)

SHAPES = {
    "nine heads on three": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 16, "hidden_size": 63, "rope_theta": 1e5},
    "multi-head, tied": {"num_heads": 4, "num_kv_heads": 4, "tied": True, "vocab_size": 101},
    "multi-query": {"num_heads": 4, "num_kv_heads": 1, "norm_eps": 0.01},
    "gelu": {"hidden_act": "gelu"},
    "fusedswiglu": {"hidden_act": "fusedswiglu", "vocab_size": 33},
    "plain norm": {"fused_norm": False},
    "LayerNorm": {"normalization": "LayerNorm"},
    "plain LayerNorm": {"normalization": "LayerNorm", "fused_norm": False},
}

# Lengths of the documents of each sample.
LENGTHS = [[7], [3, 9, 1], [24], [2, 2], [11]]


def samples(lengths=LENGTHS, vocabulary: int = 33) -> list[Sample]:
    """Samples of random tokens, about a third of them without a target."""
    random = np.random.default_rng(5)
    made = []
    for documents in lengths:
        total = sum(documents)
        labels = random.integers(0, vocabulary, total)
        labels[random.random(total) < 0.3] = IGNORE
        made.append(
            Sample(
                input_ids=random.integers(0, vocabulary, total),
                labels=labels,
                documents=np.repeat(np.arange(len(documents)), documents),
                positions=np.concatenate([np.arange(n) for n in documents]),
            )
        )
    return made


def documents(of: list[Sample]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels) of every document alone, each [1, length]."""
    parts = []
    for sample in of:
        for number in range(sample.documents[-1] + 1):
            here = sample.documents == number
            parts.append((torch.from_numpy(sample.input_ids[here])[None], torch.from_numpy(sample.labels[here])[None]))
    return parts


def make_hf(spec: ModelSpec):
    """A llama of `transformers` whose weights are large enough for mistakes to show."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        hidden_act="silu" if spec.hidden_act == "fusedswiglu" else spec.hidden_act,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tied,
        use_cache=False,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    if spec.normalization == "LayerNorm":
        for layer in model.model.layers:
            layer.input_layernorm = nn.LayerNorm(spec.hidden_size, spec.norm_eps)
            layer.post_attention_layernorm = nn.LayerNorm(spec.hidden_size, spec.norm_eps)
        model.model.norm = nn.LayerNorm(spec.hidden_size, spec.norm_eps)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1 if parameter.ndim > 1 else 0.3)
    return model


def decoder(spec: ModelSpec = SPEC, dtype: torch.dtype = F32, precision: Precision | None = None) -> Decoder:
    """A model with its first values, all in `dtype` unless a precision is given."""
    model = Decoder(spec, precision or Precision().raised(dtype))
    initialize(model, 1, spec.initializer_range)
    return model


def copied(hf, spec: ModelSpec) -> Decoder:
    model = Decoder(spec, Precision().raised(F32))
    model.load_state_dict(from_hf(hf.state_dict(), spec), strict=not spec.tied)
    return model


def distance(got: torch.Tensor, truth: torch.Tensor) -> float:
    truth = truth.double()
    return ((got.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def summed(model: Decoder, batches: list[Batch], count: int, z_loss_weight: float = 0.0) -> torch.Tensor:
    """The loss over micro-batches, with gradients in `.grad`."""
    model.zero_grad()
    objective = DecoderObjective(z_loss_weight)
    total = torch.zeros((), dtype=F64)
    for batch in batches:
        (term,) = (objective.sums(model, batch)[name] for name, weight in objective.weights.items() if weight)
        (term / count).backward()
        total += term.detach() / count
    return total


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------------------------------- transformers


@cache
def truth_of(shape: str):
    """The model of `transformers`; its logits, loss and gradients over every document alone."""
    spec = replace(SPEC, **SHAPES[shape])
    hf = make_hf(spec)
    parts = documents(samples())
    count = sum(int((labels != IGNORE).sum()) for _, labels in parts)
    logits, total = [], torch.zeros(())
    for input_ids, labels in parts:
        logits.append(hf(input_ids=input_ids, use_cache=False).logits[0])
        total = total + F.cross_entropy(logits[-1], labels[0], ignore_index=IGNORE, reduction="sum") / count
    total.backward()
    grads = from_hf({name: p.grad for name, p in hf.named_parameters()}, spec)
    return spec, hf, count, torch.cat(logits).detach(), total.detach(), grads


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers_on_each_document_alone(shape, layout):
    spec, hf, count, logits, loss, grads = truth_of(shape)
    model = copied(hf, spec)
    batch = collate(samples(), range(len(LENGTHS)), layout)
    assert batch.input_ids.shape == ((1, 59) if layout == "packed" else (5, 24))
    with torch.no_grad():
        got = model.loss_head.logits(model(batch).hidden)[batch.document_ids >= 0]
    assert (got - logits).abs().max() <= 1e-5
    assert logits.std() > 0.5  # random weights of the usual size would hide mistakes

    assert abs(summed(model, [batch], count) - loss) <= 1e-5 * loss
    ours = gradients(model)
    assert ours.keys() == grads.keys() == parameter_shapes(spec).keys()
    for name, truth in grads.items():
        assert distance(ours[name], truth) <= 1e-5, name


def test_rows_of_one_document_need_no_spans():
    spec, hf, *_ = truth_of("nine heads on three")
    model, alone = copied(hf, spec), samples([[7], [24], [1], [13]])
    batch = collate(alone, range(4), "padded")
    assert batch.spans is None
    with torch.no_grad():
        got = model.loss_head.logits(model(batch).hidden)
        for row, (input_ids, _) in enumerate(documents(alone)):
            truth = hf(input_ids=input_ids, use_cache=False).logits[0]
            assert (got[row, : input_ids.shape[1]] - truth).abs().max() <= 1e-5


@pytest.mark.parametrize("shape", ["nine heads on three", "multi-head, tied"])
def test_weights_go_to_transformers_and_back(shape, tmp_path):
    spec, hf, _, _, _, _ = truth_of(shape)
    model = decoder(spec)
    tensors = to_hf({name: parameter.detach() for name, parameter in model.named_parameters()}, spec)
    other = type(hf)(copy.deepcopy(hf.config))
    missing = other.load_state_dict(tensors, strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == (["lm_head.weight"] if spec.tied else [])
    other.save_pretrained(tmp_path)
    other = type(hf).from_pretrained(tmp_path)
    batch = collate(samples([[24]]), [0], "padded")
    with torch.no_grad():
        got = model.loss_head.logits(model(batch).hidden)
        truth = other(input_ids=batch.input_ids, use_cache=False).logits
    assert (got - truth).abs().max() <= 1e-5
    again = from_hf(other.state_dict(), spec)
    assert again.keys() == parameter_shapes(spec).keys()
    assert all(torch.equal(again[name], p) for name, p in model.named_parameters())


def test_from_hf_names_what_does_not_fit():
    tensors = to_hf({name: torch.zeros(shape) for name, shape in parameter_shapes(SPEC).items()}, SPEC)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == hf_shapes(SPEC)
    assert (
        from_hf(tensors | {"model.rotary_emb.inv_freq": torch.zeros(6)}, SPEC).keys() == parameter_shapes(SPEC).keys()
    )

    def message(changed, spec=SPEC) -> str:
        with pytest.raises(CheckpointError) as caught:
            from_hf(changed, spec)
        return str(caught.value)

    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: value for key, value in tensors.items() if key != name}
    assert "missing: " + name in message(without)
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in message(
        tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}
    )
    text = message(tensors | {name: torch.zeros(80, 47)})
    assert name in text
    assert "[80, 47]" in text
    assert "[80, 48]" in text
    headless = {key: value for key, value in tensors.items() if key != "lm_head.weight"}
    assert "missing: lm_head.weight" in message(headless)
    # A name without its prefix is not taken for the one with it.
    assert "unexpected: norm.weight" in message(tensors | {"norm.weight": torch.zeros(48)})


def test_a_tied_model_refuses_another_head():
    spec = replace(SPEC, tied=True)
    tensors = to_hf({name: torch.ones(shape) for name, shape in parameter_shapes(spec).items()}, spec)
    same = from_hf(tensors | {"lm_head.weight": torch.ones(97, 48)}, spec)
    assert same.keys() == parameter_shapes(spec).keys()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*\n.*tie_word_embeddings"):
        from_hf(tensors | {"lm_head.weight": torch.zeros(97, 48)}, spec)


# ---------------------------------------------------------------------------------------------- variants


def test_wrong_names_list_the_choices():
    with pytest.raises(ConfigError, match="gelu, silu, fusedswiglu") as caught:
        decoder(replace(SPEC, hidden_act="relu6"))
    assert caught.value.field == "model.hidden_act"
    with pytest.raises(ConfigError, match="LayerNorm and RMSNorm") as caught:
        decoder(replace(SPEC, normalization="BatchNorm"))
    assert caught.value.field == "model.normalization"


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_fusedswiglu_is_silu(dtype):
    batch, losses = collate(samples(), range(5), "packed"), []
    for hidden_act in ("silu", "fusedswiglu"):
        model = decoder(replace(SPEC, hidden_act=hidden_act), precision=Precision(compute=dtype))
        losses.append((summed(model, [batch], 7), gradients(model)))
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(torch.equal(value, losses[1][1][name]) for name, value in losses[0][1].items())


@pytest.mark.parametrize(("hidden_act", "function"), [("gelu", F.gelu), ("silu", F.silu)])
def test_an_ungated_mlp(hidden_act, function):
    spec = replace(SPEC, gated=False, hidden_act=hidden_act)
    mlp = decoder(spec, F64).layers["0"].mlp
    assert [name for name, _ in mlp.named_parameters()] == ["up_proj.weight", "down_proj.weight"]
    x = torch.randn(2, 3, 48, dtype=F64)
    truth = function(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T
    assert distance(mlp(x), truth.detach()) <= 1e-14


@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"gated": False, "hidden_act": "gelu"}, {"normalization": "LayerNorm"}]
)
def test_parameters_are_those_of_the_plan(changes):
    spec = replace(SPEC, **changes)
    assert {name: tuple(p.shape) for name, p in decoder(spec).named_parameters()} == parameter_shapes(spec)


# ---------------------------------------------------------------------------------------------- first values


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_first_values_depend_on_seed_and_name_alone():
    torch.manual_seed(0)
    first = values(decoder())
    torch.manual_seed(1)
    torch.rand(3)
    deeper = values(decoder(replace(SPEC, num_layers=4)))
    assert all(torch.equal(value, deeper[name]) for name, value in first.items())
    wide = values(decoder(dtype=F64))
    assert all(torch.equal(value.double(), wide[name]) for name, value in first.items())
    other = decoder()
    initialize(other, 2, SPEC.initializer_range)
    assert not any(torch.equal(value, values(other)[name]) for name, value in first.items() if value.ndim > 1)
    matrices = [value.flatten()[:100] for value in first.values() if value.ndim > 1]
    assert len({tuple(value.tolist()) for value in matrices}) == len(matrices)


def test_first_values_are_made_in_float32_on_the_cpu():
    truth = first_value("layers.0.mlp.up_proj.weight", torch.Size([8, 4]), 1, 0.02)
    torch.set_default_dtype(F64)
    try:
        with torch.device("meta"):
            got = [
                first_value(name, truth.shape[:n], 1, 0.02)
                for n, name in ((2, "layers.0.mlp.up_proj.weight"), (1, "norm.weight"))
            ]
    finally:
        torch.set_default_dtype(F32)
    assert torch.equal(got[0], truth)
    assert {value.dtype for value in got} == {F32}
    assert {value.device.type for value in got} == {"cpu"}


def test_size_of_first_values():
    spec = replace(SPEC, normalization="LayerNorm", vocab_size=4001, initializer_range=0.03)
    for name, value in values(decoder(spec)).items():
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
        elif name.endswith(".bias"):
            assert (value == 0).all(), name
        else:
            n = value.numel()
            assert abs(value.mean()) <= 4 * 0.03 / math.sqrt(n), name
            assert abs(value.std() / 0.03 - 1) <= 4 / math.sqrt(2 * n), name


def test_a_model_built_on_the_meta_device():
    truth = decoder()
    with torch.device("meta"):
        model = Decoder(SPEC, Precision().raised(F32))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(math.nan)  # what was left in that memory
    model.reset_buffers()
    initialize(model, 1, SPEC.initializer_range)
    batch = collate(samples(), range(5), "padded")
    assert torch.equal(model(batch).hidden, truth(batch).hidden)


# ---------------------------------------------------------------------------------------------- dropout

DROPPED = replace(SPEC, hidden_dropout=0.2, attention_dropout=0.3)


def sample_losses(model: Decoder, batch: Batch) -> torch.Tensor:
    """Cross-entropy [samples] of a batch, in float64, from all of its logits."""
    logits = model.loss_head.logits(model(batch).hidden)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="none")
    places = batch.sample_ids.flatten().clamp(min=0)
    return torch.zeros(5, dtype=F64).index_add(0, places, losses)


@pytest.mark.parametrize(
    "changes",
    [{}, {"hidden_dropout": 0.0}, {"attention_dropout": 0.0}],
    ids=["both", "attention alone", "hidden alone"],
)
def test_dropout_is_the_same_in_any_split(changes):
    model, key = decoder(replace(DROPPED, **changes), F64), random_key(42, 3)
    all_samples, places = samples(), [0, 1, 2, 3, 4]
    splits = [
        ([[0, 1, 2, 3, 4]], "padded"),
        ([[0, 1, 2, 3, 4]], "packed"),
        ([[3, 1], [4], [2, 0]], "packed"),
        ([[0], [1], [2], [3], [4]], "padded"),
        ([[4, 3, 2], [1, 0]], "padded"),
    ]
    found = []
    for groups, layout in splits:
        model.zero_grad()
        batches = [collate([all_samples[i] for i in g], [places[i] for i in g], layout, key) for g in groups]
        losses = torch.stack([sample_losses(model, batch) for batch in batches]).sum(0)
        losses.sum().backward()
        found.append((losses.detach(), gradients(model)))
        for name, gradient in gradients(model).items():
            assert distance(gradient, found[0][1][name]) <= 1e-12, (groups, layout, name)
        assert distance(losses.detach(), found[0][0]) <= 1e-12, (groups, layout)

    def losses_with(other_key: int, first: int = 0) -> torch.Tensor:
        batch = collate(all_samples, [first + i for i in places], "padded", other_key)
        return sample_losses(model, replace(batch, sample_ids=batch.sample_ids.clamp(max=4))).detach()

    with torch.no_grad():
        for other in (random_key(42, 4), random_key(43, 3)):
            assert ((losses_with(other) - found[0][0]).abs() > 1e-3).all()
        # The same text at another place in the order of the run has a mask of its own.
        moved = model(collate(all_samples, [5, 6, 7, 8, 9], "padded", key)).hidden
        assert distance(moved, model(collate(all_samples, places, "padded", key)).hidden) > 1e-2

        model.eval()
        off = sample_losses(model, collate(all_samples, places, "packed", key))
        plain = sample_losses(decoder(SPEC, F64), collate(all_samples, places, "padded"))
        assert distance(off, plain) <= 1e-12


def test_equal_documents_of_a_sample_have_masks_of_their_own():
    twice = Sample(np.tile([3, 1, 4, 1], 2), np.full(8, 2), np.repeat([0, 1], 4), np.tile(np.arange(4), 2))
    batch = collate([twice], [0], "padded", random_key(42, 3))
    for spec, differ in ((SPEC, False), (DROPPED, True)):
        first, second = decoder(spec, F64)(batch).hidden[0].detach().split(4)
        assert distance(first, second) > 1e-2 if differ else distance(first, second) <= 1e-12


def test_every_site_drops_by_a_key_of_its_own(monkeypatch):
    keys = []

    def record(x, p, key, token_keys):
        assert p == 0.2
        keys.append(key)
        return x

    monkeypatch.setattr(decoder_module, "dropout", record)
    batch = collate(samples(), range(5), "padded", random_key(42, 3))
    decoder(replace(SPEC, hidden_dropout=0.2))(batch)
    assert len(set(keys)) == len(keys) == 1 + 2 * SPEC.num_layers
    decoder(SPEC)(batch)
    assert len(keys) == 5


# ---------------------------------------------------------------------------------------------- losses


def test_z_loss_against_its_closed_form():
    model, batch = decoder(dtype=F64), collate(samples(), range(5), "packed")
    objective = DecoderObjective(z_loss_weight=0.01)
    sums = objective.sums(model, batch)
    counted = batch.labels[0] != IGNORE
    assert objective.counts(batch) == dict.fromkeys(("loss", "cross_entropy", "z_loss"), int(counted.sum()))
    logits = (model(batch).hidden[0] @ model.loss_head.weight.T)[counted]
    log_sum = logits.exp().sum(1).log()
    cross_entropy = (log_sum - logits.gather(1, batch.labels[0][counted][:, None])[:, 0]).sum()
    z_loss = (log_sum**2).sum()
    truth = {"loss": cross_entropy + 0.01 * z_loss, "cross_entropy": cross_entropy, "z_loss": z_loss}
    assert sums.keys() == truth.keys()
    assert all(distance(sums[name].detach(), value.detach()) <= 1e-13 for name, value in truth.items())
    assert [sums[name].requires_grad for name in truth] == [True, False, False]
    wanted = torch.autograd.grad(truth["loss"], list(model.parameters()))
    got = torch.autograd.grad(sums["loss"], list(model.parameters()))
    assert all(distance(g, w) <= 1e-12 for g, w in zip(got, wanted, strict=True))


class Largest(TorchDispatchMode):
    """Remembers the largest number of elements that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_training_never_holds_all_logits(monkeypatch):
    spec = replace(SPEC, vocab_size=5003, hidden_size=16)
    model, batch = decoder(spec), collate(samples([[24]] * 4), range(4), "packed")
    monkeypatch.setitem(cross_entropy_module._CHUNK_BYTES, "cpu", 4 * 5003 * 8)
    with Largest() as largest:
        summed(model, [batch], 1)
    assert largest.elements == 5003 * 16  # the table itself; 96 tokens of logits would be six times that


# ---------------------------------------------------------------------------------------------- dtypes

ALL_F32 = Precision().raised(F32)


def test_bfloat16_products_give_float32_gradients():
    batch = collate(samples(), range(5), "packed")
    exact, low = decoder(dtype=F64), decoder(precision=Precision(compute=BF16))
    loss = summed(exact, [batch], 7)
    assert abs(summed(low, [batch], 7) - loss) <= 5e-3 * loss
    assert low(batch).hidden.dtype is BF16
    assert low.loss_head.logits(low(batch).hidden).dtype is F32
    truth = gradients(exact)
    for name, gradient in gradients(low).items():
        assert gradient.dtype is F32
        assert distance(gradient, truth[name]) <= 0.03, name
        assert not torch.equal(gradient, gradient.bfloat16().float()), f"{name} was rounded"


def test_bfloat16_parameters_accumulate_in_float32():
    spec = replace(SPEC, normalization="LayerNorm")
    micro_batches = [collate([s], [i], "padded") for i, s in enumerate(samples([[24]] * 8))]
    low = decoder(spec, precision=Precision(params=BF16, compute=BF16))
    assert {p.dtype for p in low.parameters()} == {BF16}
    exact = decoder(spec, F64)
    exact.load_state_dict(low.state_dict())
    summed(exact, micro_batches, 7)
    truth = gradients(exact)
    summed(low, micro_batches, 7)
    rounded = gradients(low)
    low.zero_grad()
    sink = GradientSink(low.named_parameters(), low.precision.gradient)
    summed(low, micro_batches, 7)
    found = sink.gradients()
    assert found.keys() == truth.keys()
    assert {gradient.dtype for gradient in found.values()} == {F32}
    assert all(p.grad is None for p in low.parameters())

    def error(these) -> float:
        return math.sqrt(sum(distance(these[name], truth[name]) ** 2 for name in truth) / len(truth))

    assert error(found) < 0.02
    # What is left is the rounding of the products, the same in both.
    assert error(found) < 0.97 * error(rounded)


def test_a_token_that_occurs_often_keeps_its_gradient():
    """A sum in bfloat16 stands still at 256 additions of 1."""
    model = decoder(replace(SPEC, max_positions=3000, num_layers=1), precision=Precision(params=BF16, compute=BF16))
    model.layers = nn.ModuleDict()
    model.norm = nn.Identity()
    often = Sample(np.full(3000, 5), np.full(3000, 7), np.zeros(3000, dtype=int), np.arange(3000))
    model(collate([often], [0], "padded")).hidden.sum().backward()
    gradient = model.embed_tokens.weight.grad
    assert gradient.dtype is BF16
    assert ((gradient[5] - 3000).abs() <= 8).all()
    assert (gradient[:5] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("field", ["params", "compute", "layernorm", "softmax", "rotary"])
def test_every_low_dtype_moves_the_loss_a_little(field, dtype):
    batch = collate(samples(), range(5), "packed")
    changed = {field: dtype} | ({"embedding": dtype} if field == "params" else {})
    plain, low = decoder(precision=ALL_F32), decoder(precision=replace(ALL_F32, **changed))
    loss, moved = (summed(model, [batch], 7) for model in (plain, low))
    assert 1e-9 < abs(moved - loss) / loss < (5e-3 if dtype is BF16 else 1e-3)
    wanted = gradients(plain)
    for name, gradient in gradients(low).items():
        assert gradient.dtype is (dtype if field == "params" else F32)
        assert distance(gradient, wanted[name]) < (0.05 if dtype is BF16 else 0.01), name


def test_dtypes_of_sums():
    """`loss` and `gradient` widen sums; `reduce` is for sums between ranks, of which one process has none."""
    batch = collate(samples(), range(5), "packed")
    found = {}
    for field in ("loss", "gradient", "reduce"):
        model = decoder(precision=replace(ALL_F32, **{field: F64}))
        sink = GradientSink(model.named_parameters(), model.precision.gradient)
        loss = DecoderObjective().sums(model, batch)["cross_entropy"]
        loss.backward()
        found[field] = loss.detach(), sink.gradients()["norm.weight"]
    assert [value.dtype for value, _ in found.values()] == [F64, F32, F32]
    assert [gradient.dtype for _, gradient in found.values()] == [F32, F64, F32]
    truth = summed(decoder(dtype=F64), [batch], 1)
    assert 0 < distance(found["loss"][0], truth) < 1e-6
    assert torch.equal(found["reduce"][0], found["gradient"][0])
    assert torch.equal(found["reduce"][1].double(), found["gradient"][1])
