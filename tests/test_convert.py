"""Hugging Face folders written from runs, from GGUF files and from other folders, opened by `transformers`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_families import CASES, SCALINGS, make_hf, scaling_of, spec_of
from test_pretrained import from_folder, llama, saved  # noqa: F401 - fixtures

from samestep.config.huggingface import spec_from_hf
from samestep.config.load import from_dict
from samestep.config.schema import ModelConfig
from samestep.data.tokenize import END_OF_TEXT
from samestep.errors import CheckpointError, ConfigError
from samestep.families import RopeScaling, resolve_model
from samestep.model.attention import KeyValueCache
from samestep.model.pretrained import read_pretrained
from samestep.model.weights import from_hf, hf_config
from samestep.run import convert as conversion
from samestep.run.convert import convert
from samestep.run.setup import open_run
from samestep.run.trainer import Trainer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def trained(from_folder):  # noqa: F811
    """`trained(folder, "a.b=c")` -> folder of a run of one step that began from a Hugging Face folder."""

    def make(folder: Path, *overrides: str) -> Path:
        config = from_folder(folder, "training.steps=1", *overrides)
        Trainer(config).train()
        return Path(config.output_dir)

    return make


def opened(folder: Path, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)
    # For qwen2 AutoTokenizer puts the rule of Qwen's own tokenizer in place of the one in the file.
    kind = transformers.PreTrainedTokenizerFast if model.config.model_type == "qwen2" else transformers.AutoTokenizer
    return model.eval(), kind.from_pretrained(folder)


# ---------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize("case", CASES)
def test_transformers_opens_a_run_with_equal_logits(case, saved, trained, tmp_path):  # noqa: F811
    run, out = trained(saved(case)), tmp_path / "out"
    written = convert(run, out)
    own = open_run(run)
    hf, tokenizer = opened(out)
    text = "to be, or not to be"[:10]
    ids = tokenizer(text)["input_ids"]
    assert ids == own.tokenizer.encode(text).tolist()
    assert hf.dtype == torch.float32
    with torch.no_grad():
        truth = hf(torch.tensor([ids]), use_cache=False).logits[:, -1]
        got = own.model.eval().decode(torch.tensor([ids]), KeyValueCache())
    assert (got - truth).abs().max() <= 1e-6 * truth.abs().max()
    before = transformers.AutoModelForCausalLM.from_pretrained(own.config.model.pretrained, dtype=torch.float32)
    moved = [not torch.equal(a, b) for a, b in zip(before.parameters(), hf.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2  # the step has changed what was written
    assert written.parameters == hf.num_parameters() and written.files == 1
    assert tokenizer.eos_token == END_OF_TEXT and hf.generation_config.eos_token_id == own.tokenizer.end_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hm"}], tokenize=False) == "hm"


def test_a_run_with_a_tokenizer_of_its_own(tiny, tmp_path):
    """Random weights, characters; and the folder is a place to begin again."""
    config = tiny("training.steps=2", "model.tie_word_embeddings=true", "model.params_dtype=bfloat16")
    Trainer(config).train()
    out = tmp_path / "out"
    assert convert(Path(config.output_dir), out).dtype == "bfloat16"
    hf, tokenizer = opened(out)
    own = open_run(Path(config.output_dir))
    assert hf.dtype == torch.bfloat16
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert tokenizer("What ho!\n")["input_ids"] == own.tokenizer.encode("What ho!\n").tolist()
    assert tokenizer.decode(own.tokenizer.encode("What ho!\n")) == "What ho!\n"
    assert hf.config.bos_token_id is None and hf.config.eos_token_id == own.tokenizer.end_id
    data = {
        "model": {"pretrained": str(out), "seq_length": 16},
        "train_dataset": {"path": config.train_dataset.path},
    }
    again = from_dict(data).config
    spec = resolve_model(again.model)
    assert replace(spec, hidden_act="silu") == replace(own.model.spec, hidden_act="silu")
    weights = read_pretrained(str(out), spec)
    assert all(torch.equal(weights[name].float(), p.detach().float()) for name, p in own.model.named_parameters())


def test_a_qwen2_with_another_tokenizer_is_told_of(tiny, tmp_path):
    """`AutoTokenizer` does not follow the file there; the class that does is named."""
    config = tiny("training.steps=2", "model.model_type=qwen2")
    Trainer(config).train()
    (note,) = convert(Path(config.output_dir), tmp_path / "out").notes
    assert "PreTrainedTokenizerFast" in note
    text = "What ho!\n"
    own = open_run(Path(config.output_dir)).tokenizer.encode(text).tolist()
    assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")(text)["input_ids"] == own
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] != own


def test_a_qwen2_with_qwen_s_tokenizer(tiny, tmp_path):
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "ho", END_OF_TEXT])}
    made = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[("h", "o")])
    made.save_pretrained(tmp_path / "tokenizer")
    config = tiny("training.steps=2", "model.model_type=qwen2", f"tokenizer={{path: {tmp_path / 'tokenizer'}}}")
    Trainer(config).train()
    assert convert(Path(config.output_dir), tmp_path / "out").notes == ()
    text = "What   ho!\n\n\nWho's there? 1234"
    own = open_run(Path(config.output_dir)).tokenizer.encode(text).tolist()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == own
    assert made(text)["input_ids"] == own


def test_files_in_parts(saved, trained, tmp_path):  # noqa: F811
    run, out = trained(saved("gpt2")), tmp_path / "out"
    written = convert(run, out, shard_bytes=30_000)
    sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
    assert len(sizes) == written.files > 3 and max(sizes) < 40_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.size == 4 * written.parameters
    own = open_run(run).model
    truth = from_hf({n: p.detach() for n, p in opened(out)[0].named_parameters()}, own.spec)
    assert all(torch.equal(truth[name], p.detach()) for name, p in own.named_parameters())
    assert convert(run, tmp_path / "one").files == 1


def test_other_dtypes(llama, trained, tmp_path):  # noqa: F811
    run = trained(llama, "model.embedding_params_dtype=bfloat16")
    own = open_run(run).model
    convert(run, tmp_path / "kept")
    kept = load_file(tmp_path / "kept" / "model.safetensors")
    assert kept["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert kept["lm_head.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["torch_dtype"] == "float32"
    convert(run, tmp_path / "half", "float16")
    half, _ = opened(tmp_path / "half")
    assert half.dtype == torch.float16
    truth = from_hf({n: p.detach() for n, p in half.named_parameters()}, own.spec)
    assert all(torch.equal(truth[name], p.detach().half()) for name, p in own.named_parameters())
    with pytest.raises(ConfigError, match="float64"):
        convert(run, tmp_path / "wide", "float64")


def test_values_that_float16_does_not_hold(llama, tmp_path):  # noqa: F811
    folder = tmp_path / "large"
    hf = make_hf("llama")
    with torch.no_grad():
        hf.model.norm.weight[3] = 70_000.0
    hf.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values up to 7e\+04"):
        convert(folder, tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()
    convert(folder, tmp_path / "out", "bfloat16")


# ---------------------------------------------------------------------------------------------- other sources


def test_a_folder_in_another_dtype(saved, tmp_path):  # noqa: F811
    folder, out = saved("mistral"), tmp_path / "out"
    convert(folder, out, "bfloat16")
    hf, tokenizer = opened(out)
    truth = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert hf.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(hf.parameters(), truth.parameters(), strict=True))
    assert tokenizer("to be")["input_ids"] == transformers.AutoTokenizer.from_pretrained(folder)("to be")["input_ids"]
    assert (out / "chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()


def write_gguf(file: Path, hf) -> list[str]:
    """A GGUF file as llama.cpp lays it out: other names, and rotary pairs side by side."""
    gguf = pytest.importorskip("gguf")
    config = hf.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [END_OF_TEXT, *(chr(i) for i in range(33, 33 + config.vocab_size - 2)), "to"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["t o"])
    writer.add_eos_token_id(0)
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{a}_proj": f"attn_{b}" for a, b in zip("qkvo", ("q", "k", "v", "output"), strict=True)}
    names |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
    for name, tensor in hf.state_dict().items():
        module = name.removeprefix("model.").removesuffix(".weight")
        prefix = ""
        if module.startswith("layers."):
            _, layer, module = module.split(".", 2)
            prefix = f"blk.{layer}."
        values = tensor.numpy()
        for projection, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if module == f"self_attn.{projection}_proj":
                halves = values.reshape(heads, 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{prefix}{names[module]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def test_a_gguf_file(tmp_path):
    """It becomes a folder, and a run can begin from it as it is."""
    pytest.importorskip("gguf")
    fields = {key: value for key, value in CASES["llama"][1].items() if not key.endswith("bias")}
    torch.manual_seed(5)
    truth = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    file, out = tmp_path / "tiny.gguf", tmp_path / "out"
    tokens = write_gguf(file, truth)
    assert convert(file, out).dtype == "float32"
    hf, tokenizer = opened(out)
    ids = tokenizer("to!")["input_ids"]
    assert [tokens[i] for i in ids] == ["to", "!"]
    assert tokenizer.eos_token == END_OF_TEXT
    for (name, got), wanted in zip(hf.named_parameters(), truth.parameters(), strict=True):
        assert torch.equal(got, wanted), name
    text = tmp_path / "text.txt"
    text.write_text("tototo!" * 50)
    data = {
        "output_dir": str(tmp_path / "run"),
        "training": {"steps": 1, "global_batch_size": 2},
        "lr_scheduler": {"learning_rate": 1e-3},
        "train_dataset": {"path": str(text)},
        "model": {"pretrained": str(file), "seq_length": 10, "compute_dtype": "float32"},
        "monitor": {"report": False, "tensorboard": {"enable": False}},
    }
    config = from_dict(data).config
    weights = read_pretrained(str(file), resolve_model(config.model))
    assert all(torch.equal(t, weights[n]) for n, t in from_hf(truth.state_dict(), resolve_model(config.model)).items())
    trainer = Trainer(config)
    assert trainer.data.tokenizer.end_token == END_OF_TEXT
    trainer.train()
    convert(tmp_path / "run", tmp_path / "again")
    assert opened(tmp_path / "again")[1]("to!")["input_ids"] == ids


# ---------------------------------------------------------------------------------------------- all or nothing


def test_a_folder_is_complete_or_not_there(llama, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "deep" / "out"
    (tmp_path / "deep" / ".writing-out").mkdir(parents=True)  # left behind by a process that was killed
    (tmp_path / "deep" / ".writing-out" / "old").write_text("x")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "save_file", full)
    with pytest.raises(ConfigError, match="No space left"):
        convert(llama, out)
    assert not list((tmp_path / "deep").iterdir())
    monkeypatch.undo()
    out.mkdir()
    convert(llama, out)
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out"]
    assert not (out / "old").exists()
    before = {file: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(ConfigError, match="not empty"):
        convert(llama, out)
    assert {file: file.read_bytes() for file in out.iterdir()} == before


def test_the_command(llama, trained, tmp_path, cli):  # noqa: F811
    run = trained(llama)
    code, out, _ = cli("convert", run, "--to", "hf", tmp_path / "out", "--dtype", "bfloat16")
    assert code == 0 and "parameters in bfloat16, 1 file" in out
    assert opened(tmp_path / "out")[0].dtype == torch.bfloat16
    step = next((run / "checkpoints").iterdir())
    assert cli("convert", step, tmp_path / "of_checkpoint")[0] == 0
    (tmp_path / "empty").mkdir()
    for words, part in (
        (["convert", run, "--to", "onnx", tmp_path / "x"], "write hf"),
        (["convert", tmp_path / "nowhere", tmp_path / "x"], "no such folder"),
        (["convert", tmp_path / "empty", tmp_path / "x"], "neither a run"),
        (["convert", run, tmp_path / "out"], "not empty"),
        (["train", _yaml(tmp_path, run)], "samestep convert"),
    ):
        code, _, err = cli(*words)
        assert code == 2 and part in err, err
    shutil.rmtree(run / "checkpoints")
    code, _, err = cli("convert", run, tmp_path / "x")
    assert code == 2 and "no complete checkpoint" in err


def _yaml(folder: Path, run: Path) -> Path:
    """A run in place of a Hugging Face folder."""
    file = folder / "wrong.yaml"
    file.write_text(f"model: {{pretrained: {run}, seq_length: 8}}\ntrain_dataset: {{path: text.txt}}\n")
    return file


# ---------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_spec_goes_to_config_json_and_back(case, tied):
    spec = replace(spec_of(make_hf(case)), tied=tied, attention_dropout=0.25, initializer_range=0.03, norm_eps=3e-5)
    if case == "gpt2":
        spec = replace(spec, hidden_dropout=0.2)
    again = resolve_model(ModelConfig(seq_length=spec.seq_length, **spec_from_hf(hf_config(spec))))
    assert again == spec
    theirs = transformers.AutoConfig.for_model(**hf_config(spec))
    assert resolve_model(ModelConfig(seq_length=spec.seq_length, **spec_from_hf(theirs.to_dict()))) == spec


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_rotary_scalings_go_to_config_json_and_back(case, name):
    scaling = scaling_of(name.partition(",")[0], SCALINGS[name])
    spec = replace(spec_of(make_hf(case)), rope_scaling=scaling, rope_theta=5e5, max_positions=1024)
    assert resolve_model(ModelConfig(seq_length=spec.seq_length, **spec_from_hf(hf_config(spec)))) == spec


@pytest.mark.parametrize(
    ("case", "changes", "field"),
    [
        ("gpt2", {"gated": True, "hidden_act": "silu"}, "hidden_act"),
        ("gpt2", {"num_kv_heads": 3}, "num_key_value_heads"),
        ("gpt2", {"attention_bias": False, "output_bias": False}, "attention_bias"),
        ("gpt2", {"normalization": "RMSNorm"}, "normalization"),
        ("llama", {"sliding_window": 7}, "sliding_window"),
        ("llama", {"qk_layernorm": True}, "qk_layernorm"),
        ("llama", {"normalization": "LayerNorm"}, "normalization"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"attention_bias": False}, "attention_bias"),
        ("qwen3", {"qk_layernorm": False}, "qk_layernorm"),
        ("mistral", {"attention_bias": True, "output_bias": True}, "attention_bias"),
    ],
)
def test_what_transformers_does_not_have_is_refused_by_name(case, changes, field):
    spec = replace(spec_of(make_hf(case)), **changes)
    with pytest.raises(ConfigError, match=f"a Hugging Face {case} has") as caught:
        hf_config(spec)
    assert caught.value.field == f"model.{field}"


def test_what_is_the_same_under_another_name():
    spec = spec_of(make_hf("llama"))
    assert hf_config(replace(spec, hidden_act="fusedswiglu", fused_norm=False)) == hf_config(spec)
    dynamic = replace(spec, rope_scaling=RopeScaling("dynamic", 2.0, 16), max_positions=50)
    assert hf_config(dynamic)["max_position_embeddings"] == 16
