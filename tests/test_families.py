"""The model families against `transformers`: weights, logits, gradients, rotary tables, generation; and parity."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.flop_counter
from ruamel.yaml import YAML
from test_model import F32, F64, documents, gradients, samples, summed

from samestep.config.huggingface import spec_from_hf
from samestep.config.load import dump, from_dict
from samestep.config.schema import ModelConfig, RopeScalingConfig
from samestep.data.batch import collate
from samestep.data.dataset import load_data
from samestep.data.rows import IGNORE
from samestep.errors import CheckpointError, ConfigError
from samestep.families import (
    FAMILIES,
    ModelSpec,
    RopeScaling,
    attended,
    flops_per_token,
    parameter_count,
    parameter_shapes,
    resolve_model,
)
from samestep.model.attention import KeyValueCache
from samestep.model.decoder import Decoder, document_lengths
from samestep.model.weights import from_hf, hf_shapes, to_hf
from samestep.ops import Precision, dynamic_rope_tables, rope_tables
from samestep.parallel.mesh import Mesh
from samestep.run.generate import generate
from samestep.verify import parity
from samestep.verify.judge import noise_alone
from samestep.verify.layouts import parse_layouts

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 63,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 40,
}
EVEN = COMMON | {"hidden_size": 72}
# The tests' documents have up to 24 tokens.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", EVEN | {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": (
        "Llama",
        EVEN
        | {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "dynamic rope": (
        "Llama",
        EVEN | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 10},
    ),
    "qwen2": ("Qwen2", EVEN | {"rms_norm_eps": 1e-3}),
    "qwen2 window": ("Qwen2", EVEN | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 10}),
    "qwen3 yarn": (
        "Qwen3",
        COMMON
        | {
            "head_dim": 10,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10},
        },
    ),
    "mistral": ("Mistral", COMMON | {"head_dim": 16, "sliding_window": 5, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 54, "n_layer": 2, "n_head": 9, "n_positions": 40, "n_inner": 70}),
}


def make_hf(case: str):
    """A model of `transformers` whose weights, norms and biases are large enough for mistakes to show."""
    name, fields = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        **fields, attn_implementation="eager", use_cache=False, eos_token_id=None, bos_token_id=None
    )
    torch.manual_seed(3)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.1 if parameter.ndim > 1 else 0.3)
    return model


def fields_of(config: Any) -> dict[str, Any]:
    return spec_from_hf(config.to_dict())


def spec_of(hf, **changes: Any) -> ModelSpec:
    spec = resolve_model(ModelConfig(seq_length=24, **fields_of(hf.config)))
    # What is compared is the evaluation: dropout masks of `transformers` are of other random numbers.
    return replace(spec, hidden_dropout=0.0, attention_dropout=0.0, **changes)


def copied(hf, spec: ModelSpec) -> Decoder:
    model = Decoder(spec, Precision().raised(F32))
    model.load_state_dict(from_hf(hf.state_dict(), spec), strict=not spec.tied)
    return model


@cache
def truth_of(case: str):
    """The model of `transformers`; its logits, loss and gradients over every document alone."""
    hf = make_hf(case)
    spec, parts = spec_of(hf), documents(samples())
    count = sum(int((labels != IGNORE).sum()) for _, labels in parts)
    logits, total = [], torch.zeros(())
    for input_ids, labels in parts:
        logits.append(hf(input_ids=input_ids, use_cache=False).logits[0])
        total = total + F.cross_entropy(logits[-1], labels[0], ignore_index=IGNORE, reduction="sum") / count
    total.backward()
    grads = from_hf({name: p.grad for name, p in hf.named_parameters()}, spec)
    return spec, hf, count, torch.cat(logits).detach(), total.detach(), grads


# ---------------------------------------------------------------------------------------------- the decoder


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_on_each_document_alone(case, layout):
    spec, hf, count, logits, loss, grads = truth_of(case)
    model = copied(hf, spec)
    batch = collate(samples(), range(5), layout)
    with torch.no_grad():
        got = model.loss_head.logits(model(batch).hidden)[batch.document_ids >= 0]
    assert (got - logits).abs().max() <= 1e-5
    assert logits.std() > 0.5
    assert abs(summed(model, [batch], count) - loss) <= 1e-5 * loss
    ours = gradients(model)
    assert ours.keys() == grads.keys() == parameter_shapes(spec).keys()
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in grads.values()))
    for name, truth in grads.items():
        # A key bias has no true gradient without rotary positions: it moves all scores of a query by the same amount.
        assert (ours[name] - truth).norm() <= max(1e-5 * float(truth.norm()), 1e-8 * total), name


@pytest.mark.parametrize("case", ["mistral", "dynamic rope", "gpt2"])
def test_rows_of_one_document_need_no_spans(case):
    spec, hf, *_ = truth_of(case)
    alone = samples([[7], [24], [1], [13]])
    batch = collate(alone, range(4), "padded")
    assert batch.spans is None
    with torch.no_grad():
        got = (model := copied(hf, spec)).loss_head.logits(model(batch).hidden)
        for row, (input_ids, _) in enumerate(documents(alone)):
            truth = hf(input_ids=input_ids, use_cache=False).logits[0]
            assert (got[row, : input_ids.shape[1]] - truth).abs().max() <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_counts_are_those_of_the_decoder_and_of_transformers(case):
    spec, hf, *_ = truth_of(case)
    model = Decoder(spec, Precision().raised(F32))
    assert list(parameter_shapes(spec).items()) == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert hf_shapes(spec) == {name: tuple(p.shape) for name, p in hf.named_parameters()}
    assert parameter_count(spec) == hf.num_parameters()
    # Every multiply-add of the matrix products, counted while `transformers` runs forward.
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        hf(input_ids=torch.zeros(1, 24, dtype=torch.int64), use_cache=False)
    whole_square = 24  # the eager attention computes what the mask hides too
    assert flops_per_token(spec, whole_square) * 24 == 3 * counter.get_total_flops()


def test_attended_positions():
    for length in (1, 4, 9):
        for window in (None, 1, 3, 9, 20):
            seen = sum(min(position + 1, window or length) for position in range(length))
            assert attended(length, window) == seen


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_weights_go_to_transformers_and_back(case, tmp_path):
    spec, hf, *_ = truth_of(case)
    own = from_hf(hf.state_dict(), spec)
    tensors = to_hf(own, spec)
    names = {name for name, _ in hf.named_parameters()}
    assert tensors.keys() == names
    assert all(torch.equal(tensors[name], hf.state_dict()[name]) and tensors[name].is_contiguous() for name in names)
    hf.save_pretrained(tmp_path)
    again = from_hf(type(hf).from_pretrained(tmp_path).state_dict(), spec)
    assert again.keys() == parameter_shapes(spec).keys()
    assert all(torch.equal(again[name], own[name]) for name in own)


def test_gpt2_as_it_was_published():
    """The bare model's names, without a prefix and with the causal mask among the weights."""
    spec, hf, *_ = truth_of("gpt2")
    tensors = {name.removeprefix("transformer."): value for name, value in hf.state_dict().items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 40, 40), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    own, truth = from_hf(tensors, spec), from_hf(hf.state_dict(), spec)
    assert all(torch.equal(own[name], value) for name, value in truth.items())
    del tensors["h.1.mlp.c_fc.bias"]
    with pytest.raises(CheckpointError, match=r"missing: transformer\.h\.1\.mlp\.c_fc\.bias"):
        from_hf(tensors, spec)
    gated = replace(spec, gated=True, hidden_act="silu")
    with pytest.raises(CheckpointError, match="no place in a Hugging Face gpt2"):
        hf_shapes(gated)


# ---------------------------------------------------------------------------------------------- rotary tables

SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, betas": {"factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn, factor": {"factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.7},
}


def hf_tables(kind: str, fields: dict[str, Any], positions: int, length: int | None = None, theta: float = 5e5):
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **fields},
    )
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    frequencies, factor = init(config, device="cpu", seq_len=length)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def scaling_of(kind: str, fields: dict[str, Any], positions: int = 1024) -> RopeScaling:
    model = ModelConfig(
        seq_length=positions,
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=9,
        rope_scaling={"type": kind, **fields},
    )
    scaling = resolve_model(model).rope_scaling
    assert scaling is not None
    return scaling


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_tables_are_those_of_transformers(name):
    kind, fields = name.partition(",")[0], SCALINGS[name]
    got = rope_tables(1024, 64, 5e5, F32, scaling=scaling_of(kind, fields))
    for table, truth in zip(got, hf_tables(kind, fields, 1024), strict=True):
        assert (table - truth).abs().max() <= 1e-6
    plain = rope_tables(1024, 64, 5e5, F32)
    assert (got[0] - plain[0]).abs().max() > 0.1
    # float64 tables are the same function, without the rounding of far positions' angles.
    double = rope_tables(1024, 64, 5e5, F64, scaling=scaling_of(kind, fields))
    assert double[0].dtype is F64 and (double[0] - got[0]).abs().max() <= 3e-4


@pytest.mark.parametrize("length", [5, 1024, 1025, 1500, 4096])
def test_dynamic_tables_are_those_of_transformers_for_that_length(length):
    scaling = scaling_of("dynamic", {"factor": 4.0, "original_max_position_embeddings": 1024}, 4096)
    positions = torch.arange(length)[None]
    got = dynamic_rope_tables(positions, torch.full_like(positions, length), 64, 5e5, F32, scaling)
    for table, truth in zip(got, hf_tables("dynamic", {"factor": 4.0}, length, length), strict=True):
        assert (table - truth).abs().max() <= 1e-6
    if length <= 1024:
        assert torch.equal(got[0], rope_tables(length, 64, 5e5, F32)[0])
    with pytest.raises(ValueError, match="dynamic_rope_tables"):
        rope_tables(8, 64, 5e5, F32, scaling=scaling)


def test_dynamic_lengths_are_those_of_the_documents():
    for layout in ("padded", "packed"):
        batch = collate(samples([[3, 9, 1], [2, 2]]), range(2), layout)
        real = batch.document_ids >= 0
        assert document_lengths(batch)[real].tolist() == [3] * 3 + [9] * 9 + [1] + [2] * 4
    batch = collate(samples([[3], [5]]), range(2), "padded")
    assert document_lengths(batch)[batch.document_ids >= 0].tolist() == [3] * 3 + [5] * 5


def test_yarn_without_a_factor_goes_by_the_positions():
    scaling = scaling_of("yarn", {"original_max_position_embeddings": 256})
    assert scaling.factor == 4.0
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


# ---------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("case", ["mistral", "gpt2", "qwen3"])
def test_greedy_generation_equals_transformers(case):
    """25 tokens from 7: five times the window of mistral."""
    _, hf, *_ = truth_of(case)
    prompt = [5, 17, 80, 2, 33, 61, 9]
    got = list(generate(copied(hf, spec_of(hf)), prompt, max_new_tokens=25, temperature=0))
    truth = hf.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False, use_cache=True, pad_token_id=0)
    assert [*prompt, *got] == truth[0].tolist()


@pytest.mark.parametrize("case", ["qwen2", "qwen2 window", "qwen3 yarn", "mistral", "gpt2"])
def test_a_cache_gives_the_logits_of_the_whole(case):
    spec, hf, *_ = truth_of(case)
    cache, model = KeyValueCache(), Decoder(spec, Precision().raised(F64))
    model.load_state_dict(from_hf({n: t.double() for n, t in hf.state_dict().items()}, spec), strict=not spec.tied)
    ids = torch.arange(26).view(2, 13) % 11
    with torch.no_grad():
        for part in ids.split([6, 1, 4, 2], 1):
            got = model.decode(part, cache)
        truth = model.decode(ids, KeyValueCache())
    assert (got - truth).abs().max() <= 1e-12


# ---------------------------------------------------------------------------------------------- parity

TINY_FAMILIES = {
    "qwen2": ["model.model_type=qwen2"],
    "qwen3": ["model.model_type=qwen3", "model.head_dim=10"],
    "mistral": ["model.model_type=mistral", "model.sliding_window=5"],
    "gpt2": ["model.model_type=gpt2", "model.num_key_value_heads=4"],
    "dynamic rope": [
        "model.rope_scaling={type: dynamic, factor: 2, original_max_position_embeddings: 5}",
        "train_dataset.rows=pack_documents",
        'train_dataset.document_separator="\\n\\n"',
    ],
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_step_does_not_depend_on_the_split(tiny, family, dtype, dropout):
    config = tiny(*TINY_FAMILIES[family], f"model.hidden_dropout={dropout}", f"model.attention_dropout={dropout}")
    report = parity.run(config, layouts=parse_layouts("ga=1 ga=3 packed"), cases=["even", "skewed"], dtype=dtype)
    assert report.passed, [c for c in report.comparisons if c.failures]


def test_only_noise_is_left_out_of_the_comparison(tiny):
    config = tiny(*TINY_FAMILIES["gpt2"])
    job = parity.Job(parity.VerifyLayout("ga=3", accumulation=3), "even", Precision().raised(F64), 1)
    trace = parity.trace(config, load_data(config), job, Mesh.alone())
    noise = noise_alone(trace.gradients, trace.gradients)
    assert noise == ("layers.0.self_attn.k_proj.bias", "layers.1.self_attn.k_proj.bias")


# ---------------------------------------------------------------------------------------------- fields


def model_of(**fields: Any) -> ModelConfig:
    usual = {"seq_length": 16, "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return ModelConfig(**usual | fields)


def test_null_is_the_family():
    def facts(name: str):
        spec = resolve_model(model_of(model_type=name))
        assert spec.family == name
        biases = spec.attention_bias, spec.output_bias, spec.mlp_bias
        return biases, spec.qk_layernorm, spec.tied, spec.normalization, spec.hidden_act, spec.gated, spec.norm_eps

    none = (False, False, False)
    assert facts("llama") == (none, False, False, "RMSNorm", "silu", True, 1e-5)
    assert facts("mistral") == (none, False, False, "RMSNorm", "silu", True, 1e-5)
    assert facts("qwen2") == ((True, False, False), False, False, "RMSNorm", "silu", True, 1e-6)
    assert facts("qwen3") == (none, True, False, "RMSNorm", "silu", True, 1e-6)
    assert facts("gpt2") == ((True, True, True), False, True, "LayerNorm", "gelu_tanh", False, 1e-5)


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"attention_bias": True}, {"attention_bias": True, "output_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"qk_layernorm": True}, {"qk_layernorm": True}),
        ({"sliding_window": 4}, {"sliding_window": 4}),
        ({"tie_word_embeddings": True}, {"tied": True}),
        ({"normalization": "LayerNorm"}, {"normalization": "LayerNorm"}),
        ({"model_type": "qwen3", "qk_layernorm": False}, {"qk_layernorm": False}),
        ({"model_type": "qwen2", "attention_bias": False}, {"attention_bias": False}),
        ({"model_type": "gpt2", "mlp_bias": False}, {"mlp_bias": False}),
        ({"model_type": "gpt2", "attention_bias": False}, {"attention_bias": False, "output_bias": False}),
        ({"model_type": "gpt2", "tie_word_embeddings": False}, {"tied": False}),
        ({"model_type": "gpt2", "hidden_act": "gelu"}, {"hidden_act": "gelu"}),
        ({"position_embedding_type": "rope"}, {}),
        ({"model_type": "gpt2", "position_embedding_type": "learned_absolute"}, {}),
    ],
)
def test_a_field_wins_over_the_family(fields, changed):
    spec = resolve_model(model_of(**fields))
    assert spec == replace(resolve_model(model_of(model_type=spec.family)), **changed)
    assert parameter_shapes(spec) == {
        name: tuple(p.shape) for name, p in Decoder(spec, Precision().raised(F32)).named_parameters()
    }


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "GELU_tanh"])
def test_names_of_the_tanh_gelu(name):
    spec = resolve_model(model_of(hidden_act=name))
    assert spec.hidden_act == "gelu_tanh"
    assert Decoder(spec, Precision()).layers["0"].mlp.activation.approximate == "tanh"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rope_theta": 5e5}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"position_embedding_type": "rope"}, "position_embedding_type"),
    ],
)
def test_gpt2_refuses_what_it_cannot_use(fields, name):
    with pytest.raises(ConfigError) as caught:
        resolve_model(model_of(model_type="gpt2", **fields))
    assert caught.value.field == f"model.{name}"
    assert resolve_model(model_of(model_type="gpt2", hidden_size=28)).head_dim == 7  # nothing turns pairs there


SCALED = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"factor": 2.0}, "factor"),
        ({"type": "linear"}, "factor"),
        ({"type": "dynamic", "original_max_position_embeddings": 8}, "factor"),
        ({"type": "dynamic", "factor": 2.0}, "original_max_position_embeddings"),
        ({"type": "llama3", "factor": 2.0}, "original_max_position_embeddings"),
        ({"type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 8}, "original_max_position_embeddings"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
        (SCALED | {"low_freq_factor": 2.0}, "low_freq_factor"),
        (SCALED | {"type": "llama3", "low_freq_factor": 4.0}, "low_freq_factor"),
        (SCALED | {"mscale": 1.0}, "mscale"),
        (SCALED | {"mscale_all_dim": 1.0}, "mscale_all_dim"),
        (SCALED | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}, "mscale"),
    ],
)
def test_scaling_fields_that_do_not_fit_their_type(scaling, field):
    with pytest.raises(ConfigError) as caught:
        resolve_model(model_of(rope_scaling=scaling))
    assert caught.value.field == f"model.rope_scaling.{field}"
    assert caught.value.fix


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resolved_file_loads_again(family, tiny):
    overrides = [f"model.model_type={family}", "model.num_key_value_heads=null"]
    if family != "gpt2":
        overrides.append("model.rope_scaling={rope_type: linear, factor: 3}")
    config = tiny(*overrides)
    again = from_dict(YAML(typ="safe").load(dump(config))).config
    assert again == config
    assert resolve_model(again.model, 50) == resolve_model(config.model, 50)
    assert (again.model.rope_scaling.type == "linear") == (family != "gpt2")


def test_no_scaling_can_be_written_as_null(tiny):
    assert tiny("model.rope_scaling=null").model.rope_scaling == RopeScalingConfig()
    with pytest.raises(ConfigError, match="given twice"):
        tiny("model.rope_scaling={rope_type: linear, type: linear, factor: 2}")


# ---------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "GPT2"])
def test_what_a_config_json_leaves_out_is_what_transformers_takes(name):
    config = getattr(transformers, f"{name}Config")()
    whole = config.to_dict()
    needed = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    needed |= {"max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "model_type"}
    bare = spec_from_hf({key: value for key, value in whole.items() if key in needed})
    full = spec_from_hf(whole)
    size, heads = full["hidden_size"], full["num_attention_heads"]
    for fields in (bare, full):
        fields["head_dim"] = fields.get("head_dim") or size // heads
        fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
    assert bare == full
    resolve_model(ModelConfig(seq_length=8, **full))


def test_both_forms_of_rotary_settings():
    base = transformers.LlamaConfig().to_dict() | {"max_position_embeddings": 4096}
    base.pop("rope_parameters")
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 512
    old = spec_from_hf(base | {"rope_theta": 5e5, "rope_scaling": llama3})
    new = spec_from_hf(base | {"rope_parameters": llama3 | {"rope_theta": 5e5}})
    assert old == new
    assert (old["rope_theta"], old["rope_scaling"]["original_max_position_embeddings"]) == (5e5, 512)
    linear = spec_from_hf(base | {"rope_scaling": {"type": "linear", "factor": 4, "beta_fast": 3}})
    assert linear["rope_scaling"] == {"type": "linear", "factor": 4}
    dynamic = spec_from_hf(base | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert (dynamic["max_position_embeddings"], dynamic["rope_scaling"]["original_max_position_embeddings"]) == (
        8192,
        4096,
    )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "bert"}, "model_type"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, "max_window_layers"),
        (
            {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "embd_pdrop": 0},
            "embd_pdrop",
        ),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_a_config_json_that_cannot_be_followed(changes, key):
    config = transformers.LlamaConfig().to_dict() | changes
    config = {name: value for name, value in config.items() if value is not ...}
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    with pytest.raises(ConfigError) as caught:
        spec_from_hf(config)
    assert (caught.value.field, caught.value.where) == (key, "config.json")


def test_a_window_in_the_last_layers_that_are_none():
    config = transformers.Qwen2Config(num_hidden_layers=4, use_sliding_window=True, max_window_layers=4).to_dict()
    assert spec_from_hf(config)["sliding_window"] is None
    assert spec_from_hf({k: v for k, v in config.items() if k != "layer_types"})["sliding_window"] is None
