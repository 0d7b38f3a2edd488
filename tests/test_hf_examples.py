"""The examples of the Trainer: each differs from the plain one by its import, and runs."""

import runpy
import sys
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

FOLDER = Path(__file__).parent.parent / "examples" / "hf"
NAMES = ["fine_tune", "classify", "own_loss"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small chat model with its tokenizer, as `examples/smollm2.sh` writes a larger one."""
    folder = tmp_path_factory.mktemp("model")
    trained = ByteLevelBPETokenizer()
    data = FOLDER.parent / "data" / "chitchat_120.jsonl"
    trained.train([str(data)], vocab_size=500, special_tokens=["<end>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    set_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def history(name, monkeypatch, *words):
    """What a script logs, one dict a row."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")["trainer"].state.log_history


@pytest.mark.parametrize("name", NAMES)
def test_one_import_differs(name):
    ours, theirs = ((FOLDER / f"{name}{ending}.py").read_text().splitlines() for ending in ("", "_transformers"))
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    imported = "import Trainer, TrainingArguments"
    assert differing == [(f"from samestep.hf {imported}", f"from transformers {imported}")]


def test_a_causal_model_trains_as_with_transformers(model, tmp_path, monkeypatch):
    ours, theirs = (
        history(name, monkeypatch, model, tmp_path / name, "--steps", 5)
        for name in ("fine_tune", "fine_tune_transformers")
    )
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    # transformers takes the mean of batches of unequal numbers of targets.
    assert ours[1]["eval_loss"] == pytest.approx(theirs[1]["eval_loss"], rel=0.01)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-4)
    assert (tmp_path / "fine_tune" / "model.safetensors").is_file()


def test_a_classifier_is_not_trained_with_twice_its_gradient(tmp_path, monkeypatch):
    ours, theirs = (
        history(name, monkeypatch, tmp_path / name, "--steps", 20) for name in ("classify", "classify_transformers")
    )
    assert 0.6 < ours[0]["loss"] < 0.72  # log 2 at first
    assert theirs[0]["loss"] > 1.9 * ours[0]["loss"]  # two micro-batches a step; if this fails, it is mended there
    assert ours[1].keys() == theirs[1].keys()


def test_a_loss_of_ones_own_trains_as_with_transformers(tmp_path, monkeypatch):
    ours, theirs = (
        history(name, monkeypatch, tmp_path / name, "--steps", 10) for name in ("own_loss", "own_loss_transformers")
    )
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-3)
