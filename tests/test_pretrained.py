"""Training from pretrained weights: what a folder decides, what contradicts it, and the step that follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import CORPUS
from test_families import CASES, make_hf
from test_run import rows

from samestep.config import pretrained as settings
from samestep.config.load import dump, from_dict, load
from samestep.config.schema import ModelConfig
from samestep.data.dataset import load_data
from samestep.data.tokenize import END_OF_TEXT
from samestep.errors import CheckpointError, ConfigError, ConfigErrors
from samestep.families import FAMILIES, resolve_model
from samestep.launch import run_ranks
from samestep.model.attention import KeyValueCache
from samestep.model.pretrained import read_pretrained
from samestep.model.weights import from_hf
from samestep.parallel.data import whole
from samestep.parallel.mesh import Mesh, join
from samestep.plan import make_plan, resolve_layout
from samestep.run.setup import build_model, open_run
from samestep.run.trainer import Trainer
from samestep.verify import parity
from samestep.verify.layouts import parse_layouts

pytestmark = pytest.mark.usefixtures("workers")

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def save_tokenizer(folder: Path, vocab_size: int = 97) -> None:
    """Bytes would need 256 tokens; here each character of the text is one."""
    characters = sorted(set(CORPUS.read_text(encoding="utf-8")[:4000]))
    vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, "<unk>", *characters])}
    assert len(vocabulary) <= vocab_size
    hub = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    hub.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(?m:.)"), "isolated")
    hub.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=hub,
        eos_token=END_OF_TEXT,
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved("qwen3")` -> folder of a model of `transformers` with a tokenizer."""

    def make(case: str, **options) -> Path:
        folder = tmp_path_factory.mktemp(case.replace(" ", "_"))
        make_hf(case).save_pretrained(folder, **options)
        save_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def llama(saved):
    return saved("llama")


@pytest.fixture
def from_folder(tmp_path):
    """`from_folder(folder, "a.b=c")` -> the configuration of a short run that begins from it."""

    def make(folder: Path | str, *overrides: str):
        text = tmp_path / "text.txt"
        text.write_text(CORPUS.read_text(encoding="utf-8")[:4000], encoding="utf-8")
        data = {
            "output_dir": str(tmp_path / "run"),
            "training": {"steps": 3, "global_batch_size": 4, "local_batch_size": 2},
            "lr_scheduler": {"type": "constant", "learning_rate": 1e-3},
            "train_dataset": {"path": str(text), "split": "tail"},
            "model": {"pretrained": str(folder), "seq_length": 10, "compute_dtype": "float32"},
            "monitor": {"report": False, "tensorboard": {"enable": False}},
        }
        return from_dict(data, overrides).config

    return make


# ---------------------------------------------------------------------------------------------- what the folder decides


@pytest.mark.parametrize("case", CASES)
def test_the_folder_decides_the_architecture(case, saved, from_folder):
    """Every number that `transformers` counts parameters and makes logits from; nothing but the folder is named."""
    folder = saved(case)
    config = from_folder(folder, "model.hidden_dropout=0", "model.attention_dropout=0")
    model = build_model(config, 97, Mesh.alone()).eval()
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert sum(p.numel() for p in model.parameters()) == hf.num_parameters()
    data = load_data(config)
    assert data.tokenizer.end_token == END_OF_TEXT
    ids = torch.tensor(data.tokenizer.encode("to be, or not")[None])
    text = transformers.PreTrainedTokenizerFast.from_pretrained(folder)("to be, or not")["input_ids"]
    assert ids[0].tolist() == text
    with torch.no_grad():
        got, truth = model.decode(ids, KeyValueCache()), hf(ids, use_cache=False).logits[:, -1]
    assert (got - truth).abs().max() <= 1e-5 * truth.abs().max()


def test_a_resolved_file_runs_again_and_needs_no_folder_to_be_read(llama, from_folder, tmp_path):
    config = from_folder(llama, "model.attention_dropout=0.1")
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(config), encoding="utf-8")
    assert load(file).config == config
    assert config.model.pretrained == str(llama)
    assert config.tokenizer.path == str(llama)
    gone = tmp_path / "moved"
    moved = dump(config).replace(str(llama), str(gone))
    file.write_text(moved, encoding="utf-8")
    assert load(file).config.model.hidden_size == 72
    with pytest.raises(ConfigError, match="no such folder"):
        read_pretrained(str(gone), resolve_model(config.model))
    file.write_text("\n".join(line for line in moved.splitlines() if "head_dim" not in line), encoding="utf-8")
    with pytest.raises(ConfigError, match="no such folder"):
        load(file)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.hidden_size=64", ["64", "72", "config.json"]),
        ("model.num_key_value_heads=9", ["9", "3"]),
        ("model.rms_norm_eps=1e-3", ["0.001", "1e-06"]),
        ("model.model_type=qwen2", ["qwen2", "llama"]),
        ("model.tie_word_embeddings=true", ["true", "false"]),
        ("model.rope_theta=5e5", ["500000.0", "10000.0"]),
        ("model.rope_scaling={type: linear, factor: 2}", ["linear", "default"]),
        ("model.sliding_window=4", ["4", "none"]),
        ("model.qk_layernorm=true", ["true", "false"]),
        ("model.normalization=LayerNorm", ["LayerNorm", "RMSNorm"]),
        ("model.hidden_act=gelu", ["gelu", "silu"]),
        ("model.vocab_size=128", ["128", "97"]),
    ],
)
def test_a_field_that_contradicts_the_folder(override, parts, llama, from_folder):
    with pytest.raises(ConfigError) as caught:
        from_folder(llama, override)
    assert caught.value.where == "command line"
    for part in parts:
        assert part in str(caught.value)
    assert "remove it" in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "model.hidden_size=72",
        "model.head_dim=8",
        "model.layer_norm_epsilon=1e-6",
        "model.hidden_act=fusedswiglu",
        "model.rope_scaling={rope_type: default}",
        "model.position_embedding_type=rope",
        "model.params_dtype=bfloat16",
        "model.hidden_dropout=0.2",
        "model.num_attention_heads=null",
    ],
)
def test_fields_that_agree_or_are_free(override, llama, from_folder):
    assert resolve_model(from_folder(llama, override).model).hidden_size == 72


def test_two_contradictions_are_two_messages(llama, from_folder):
    with pytest.raises(ConfigErrors) as caught:
        from_folder(llama, "model.hidden_size=64", "model.num_hidden_layers=3", "training.steps=-1")
    assert {error.field for error in caught.value.errors} == {
        "model.hidden_size",
        "model.num_hidden_layers",
        "training.steps",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_what_no_config_json_has_is_the_family_s(family):
    own = {"normalization", "position_embedding_type", "qk_layernorm", "attention_bias", "mlp_bias"}
    for field, value in settings._IMPLIED[family].items():
        assert field in own and field in ModelConfig.model_fields
        assert getattr(FAMILIES[family], field) == value


def test_rows_longer_than_the_positions(llama, from_folder):
    with pytest.raises(ConfigError, match=r"model\.seq_length: 40 or less"):
        resolve_model(from_folder(llama, "model.seq_length=41").model)


# ---------------------------------------------------------------------------------------------- tokenizers


def test_a_tokenizer_that_is_trained_here(llama, from_folder):
    with pytest.raises(ConfigError, match="mean nothing to pretrained weights") as caught:
        from_folder(llama, "tokenizer.type=char")
    assert caught.value.field == "tokenizer.type"


def test_a_folder_without_a_tokenizer(llama, from_folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama / name, bare / name)
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        from_folder(bare)
    config = from_folder(bare, f"tokenizer.path={llama / 'tokenizer.json'}")
    assert config.tokenizer.path == str(llama / "tokenizer.json")


def test_a_tokenizer_too_large_is_refused_before_the_text_is_tokenized(llama, from_folder, tmp_path, monkeypatch):
    hub = tokenizers.Tokenizer.from_file(str(llama / "tokenizer.json"))
    hub.add_tokens([f"<extra {i}>" for i in range(60)])
    hub.save(str(tmp_path / "large.json"))
    monkeypatch.setattr("samestep.data.dataset.tokenize", None)  # calling it would be an error of another kind
    config = from_folder(llama, f"tokenizer.path={tmp_path / 'large.json'}")
    with pytest.raises(ConfigError, match="no embedding") as caught:
        load_data(config)
    assert "tokenizer of the pretrained weights" in caught.value.fix


# ---------------------------------------------------------------------------------------------- reading the weights


@pytest.mark.parametrize("case", ["mistral", "gpt2"])
def test_files_in_parts_and_of_16_bits(case, saved, from_folder):
    hf = make_hf(case).to(torch.bfloat16)
    parts = saved(case)
    (parts / "model.safetensors").unlink()
    hf.save_pretrained(parts, max_shard_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    model = build_model(from_folder(parts), 97, Mesh.alone())
    again = transformers.AutoModelForCausalLM.from_pretrained(parts, dtype=torch.float32).state_dict()
    truth = from_hf({n: t for n, t in again.items() if n != "lm_head.weight"}, model.spec)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter.detach(), truth[name]), name
    missing = sorted(parts.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"{missing.name} is missing"):
        read_pretrained(str(parts), model.spec)


def test_what_cannot_be_read(llama, from_folder, tmp_path, monkeypatch):
    spec = resolve_model(from_folder(llama).model)
    folder = tmp_path / "other"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pretrained(str(folder), spec)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickle.*only safetensors") as caught:
        read_pretrained(str(folder), spec)
    assert "save_pretrained" in caught.value.fix
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        read_pretrained(str(folder), spec)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter"):
        read_pretrained(str(folder), spec)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        read_pretrained(str(folder), spec)
    with pytest.raises(ConfigError, match="no such folder"):
        read_pretrained(str(tmp_path / "nowhere"), spec)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match="'bert' is not known"):
        from_folder(folder)


def test_tensors_of_another_model(llama, saved, from_folder):
    spec = resolve_model(from_folder(llama).model)
    with pytest.raises(CheckpointError, match=r"tensors do not match the model; missing: .*mlp.*bias"):
        read_pretrained(str(saved("qwen2")), spec)


def test_a_name_on_the_hub(llama, from_folder, monkeypatch):
    """Without a network there is a message; with one, the folder that the Hub's library gives is read."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="no folder someone/some-model, and the Hugging Face Hub does not give it"):
        from_folder("someone/some-model")
    asked = []

    def give(name, allow_patterns):
        asked.append((name, "model.safetensors" in allow_patterns))
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    config = from_folder("someone/some-model")
    assert config.model.pretrained == "someone/some-model"
    build_model(config, 97, Mesh.alone())
    assert asked == [("someone/some-model", False), ("someone/some-model", True)]
    assert from_dict(config.model_dump()).config == config  # a resolved file asks nobody
    assert len(asked) == 2


# ---------------------------------------------------------------------------------------------- runs


def test_the_first_loss_is_that_of_transformers_and_a_resume_reads_no_weights(saved, from_folder, tmp_path):
    folder = saved("llama")
    config = from_folder(folder, "training.steps=2", "training.global_batch_size=3")
    trainer = Trainer(config)
    trainer.train()
    first = rows(Path(config.output_dir))[0]
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = count = 0
    for index in trainer.order.next(0).rows:
        sample = trainer.data.train[int(index)]
        with torch.no_grad():
            logits = hf(torch.tensor(sample.input_ids[None])).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(sample.labels), reduction="sum"))
        count += len(sample.labels)
    assert first["targets"] == count
    assert first["loss"] == pytest.approx(total / count, rel=1e-5)
    shutil.rmtree(folder)
    resolved = load(Path(config.output_dir) / "config.resolved.yaml", ["training.steps=4"]).config
    again = Trainer(resolved, resume="auto")
    again.train()
    assert [row["step"] for row in rows(Path(config.output_dir)) if "loss" in row] == [1, 2, 3, 4]
    assert open_run(Path(config.output_dir)).step == 4


def test_a_run_stops_before_the_data_is_read(llama, from_folder, tmp_path, monkeypatch):
    folder = tmp_path / "other"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("samestep.run.trainer.load_data", None)
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors") as caught:
        Trainer(from_folder(folder))
    assert caught.value.field == "model.pretrained"


def test_verify_and_plan_begin_from_the_weights(llama, from_folder):
    config = from_folder(llama)
    report = parity.run(config, layouts=parse_layouts("ga=2 packed"), cases=["skewed"], dtype="float64")
    assert report.passed
    assert make_plan(config, 2).parameters == make_hf("llama").num_parameters()


def sharded_weights(config):
    """In a worker process."""
    world = join()
    mesh = Mesh(resolve_layout(config.parallelism, world.size), world, torch.device("cpu"))
    model = build_model(config, 97, mesh)
    return {name: whole(parameter.detach()).numpy() for name, parameter in model.named_parameters()}


def test_each_rank_gets_its_part(saved, from_folder):
    config = from_folder(saved("gpt2"))
    alone = build_model(config, 97, Mesh.alone())
    for found in run_ranks(sharded_weights, 2, config):
        for name, parameter in alone.named_parameters():
            assert torch.equal(torch.from_numpy(found[name]), parameter.detach()), name


def test_yaml_paths_are_relative_to_the_file(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "weights")
    file = tmp_path / "run.yaml"
    file.write_text("model: {pretrained: weights, seq_length: 8}\ntrain_dataset: {path: text.txt}\n", encoding="utf-8")
    assert load(file).config.model.pretrained == str(tmp_path / "weights")
    file.write_text(file.read_text().replace("weights", "weights/nowhere/at all"))
    with pytest.raises(ConfigError, match="no such folder") as caught:
        load(file)
    assert caught.value.where.startswith(f"{file}:")
