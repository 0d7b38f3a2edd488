"""Every mistake ends in one message that says what, where, why and what to write instead; exit code 2; nothing lost."""

import json
import random
import re
import shutil

import pytest

from samestep.run import storage

YAML = """\
output_dir: {folder}/run
tokenizer:
  type: char
training:
  steps: 2
  global_batch_size: 4
  local_batch_size: 2
optimizer:
  betas: [0.9, 0.95]
lr_scheduler:
  learning_rate: 1e-3
train_dataset:
  path: text.txt
  split: tail
model:
  seq_length: 8
  hidden_size: 16
  num_hidden_layers: 1
  num_attention_heads: 2
  compute_dtype: float32
monitor:
  tensorboard: {{enable: false}}
  report: false
checkpoint:
  save_interleaved_steps: 1
"""
TEXT = "To be, or not to be, that is the question:\n" * 20


@pytest.fixture
def file(tmp_path):
    """A small valid YAML file with its text."""
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "run.yaml"
    path.write_text(YAML.format(folder=tmp_path))
    return path


def refused(result, *parts: str):
    """Exit code 2, nothing but one message on standard error, which has all the parts."""
    code, _, err = result
    assert code == 2, result
    assert err.startswith("error: "), err
    assert "Traceback" not in err
    for part in parts:
        assert part in err, (part, err)


MISTAKES = {
    "misspelt section": ("training:", "trainig:", ["run.yaml:4", "trainig", "did you mean `training`"]),
    "misspelt field": (
        "  global_batch_size:",
        "  global_batchsize:",
        ["run.yaml:6", "did you mean `global_batch_size`"],
    ),
    "misspelt deep field": ("{enable: false}", "{enabel: false}", ["run.yaml:22", "did you mean `enable`"]),
    "field of another section": (
        "  betas:",
        "  learning_rate: 1\n  betas:",
        ["run.yaml:9", "belongs in `lr_scheduler`"],
    ),
    "wrong type": ("steps: 2", "steps: two", ["run.yaml:5", "training.steps", "whole number", '"two"']),
    "no steps": ("steps: 2", "steps: 0", ["run.yaml:5", "training.steps", "> 0"]),
    "negative steps": ("steps: 2", "steps: -2", ["run.yaml:5", "training.steps", "> 0"]),
    "no batch": ("local_batch_size: 2", "local_batch_size: 0", ["run.yaml:7", "> 0"]),
    "no width": ("hidden_size: 16", "hidden_size: 0", ["run.yaml:17", "> 0"]),
    "no layers": ("num_hidden_layers: 1", "num_hidden_layers: -1", ["run.yaml:18", "> 0"]),
    "no rate": ("learning_rate: 1e-3", "learning_rate: 0", ["run.yaml:11", "learning_rate"]),
    "negative rate": ("learning_rate: 1e-3", "learning_rate: -1e-3", ["run.yaml:11", "learning_rate"]),
    "rate that is no number": ("learning_rate: 1e-3", "learning_rate: .nan", ["run.yaml:11", "learning_rate"]),
    "one beta": ("[0.9, 0.95]", "[0.9]", ["run.yaml:9", "optimizer.betas"]),
    "beta of 1": ("[0.9, 0.95]", "[0.9, 1.0]", ["run.yaml:9", "optimizer.betas"]),
    "negative beta": ("[0.9, 0.95]", "[-0.9, 0.95]", ["run.yaml:9", "optimizer.betas"]),
    "max_norm 0": ("steps: 2", "steps: 2\n  max_norm: 0", ["run.yaml:6", "zero", "null"]),
    "max_norm negative": ("steps: 2", "steps: 2\n  max_norm: -1", ["run.yaml:6", "reverse", "null"]),
    "micro-batch over global batch": (
        "local_batch_size: 2",
        "local_batch_size: 5",
        [
            "run.yaml:6",
            "1 x 5 = 5 is more than global_batch_size 4",
            "raise global_batch_size",
            "lower local_batch_size",
        ],
    ),
    "heads": ("attention_heads: 2", "attention_heads: 3", ["run.yaml:19", "3 heads do not divide hidden_size 16"]),
    "kv heads": (
        "attention_heads: 2",
        "attention_heads: 4\n  num_key_value_heads: 3",
        ["run.yaml:20", "3 key-value heads do not divide 4", "1, 2, 4"],
    ),
    "vocabulary": ("seq_length: 8", "seq_length: 8\n  vocab_size: 5", ["run.yaml:17", "model.vocab_size", "5"]),
    "missing file": ("text.txt", "texts.txt", ["train_dataset.path", "texts.txt", "relative to the YAML file"]),
    "tensor parallel": (
        "optimizer:",
        "parallelism: {tensor_parallel: 2}\noptimizer:",
        ["run.yaml:8", "does not divide the 1 rank", "start 2 ranks"],
    ),
    "shard 0": (
        "optimizer:",
        "parallelism: {data_parallel_shard: 0}\noptimizer:",
        ["run.yaml:8", "data_parallel_shard"],
    ),
    "unknown family": ("  seq_length", "  model_type: lama\n  seq_length", ["run.yaml:16", "lama", "llama"]),
    "unknown norm": (
        "  seq_length",
        "  normalization: BatchNorm\n  seq_length",
        ["run.yaml:16", "LayerNorm", "RMSNorm"],
    ),
    "unknown activation": ("  seq_length", "  hidden_act: tanh\n  seq_length", ["run.yaml:16", "silu", "fusedswiglu"]),
    "unknown dtype": ("float32", "float12", ["run.yaml:20", "bfloat16"]),
    "long warm-up": ("1e-3", "1e-3\n  warmup_steps: 3", ["run.yaml:12", "longer than the run", "2"]),
    "experts": ("optimizer:", "parallelism: {expert_parallel: 2}\noptimizer:", ["run.yaml:8", "experts"]),
    "two sources of validation data": (
        "optimizer:",
        "eval_dataset: {path: text.txt}\noptimizer:",
        ["train_dataset.split", "eval_dataset.path"],
    ),
    "idle long_documents": (
        "  split: tail",
        "  long_documents: error",
        ["run.yaml:14", "has no effect with `rows: cut`"],
    ),
    "idle vocab_size": ("type: char", "type: char\n  vocab_size: 99", ["run.yaml:4", "vocabulary of its text"]),
    "too large for this machine": ("hidden_size: 16", "hidden_size: 16000000", ["memory", "hidden_size"]),
    "bad yaml": ("training:", "training: [", ["not valid YAML"]),
    "tab": ("  steps: 2", "\tsteps: 2", ["run.yaml:5", "not valid YAML"]),
    "twice": ("  steps: 2", "  steps: 2\n  steps: 3", ["run.yaml:6", "steps"]),
}


@pytest.mark.parametrize("verb", ["train", "plan"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_file(name, verb, file, tmp_path, cli):
    old, new, parts = MISTAKES[name]
    text = file.read_text()
    assert text.count(old) >= 1
    file.write_text(text.replace(old, new, 1))
    if (verb, name) == ("plan", "too large for this machine"):
        assert cli(verb, file)[0] == 0  # it may be planned here and trained elsewhere
    else:
        refused(cli(verb, file), *parts)
    assert not (tmp_path / "run").exists()


DATA = {
    "empty": (b"", ["no document"]),
    "shorter than a row": (b"To be.", ["7 tokens", "model.seq_length 8", "lower model.seq_length"]),
    "not UTF-8": (b"good\xff", ["byte 4", "0xff", "UTF-8"]),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_text(name, file, tmp_path, cli):
    content, parts = DATA[name]
    (tmp_path / "text.txt").write_bytes(content)
    refused(cli("train", file), "train_dataset.path" if name == "shorter than a row" else "text.txt", *parts)
    assert not (tmp_path / "run").exists()


ROWS = {
    "truncated": (b'{"text": "one"}\n{"text": "tw', ["row 2", "byte 16", "truncated"]),
    "undecodable": (b'{"text": "one"}\n{"text": "\xc3("}\n', ["row 2", "byte 26", "UTF-8"]),
    "no text": (b'{"txt": "one"}\n', ["row 1", "txt", "text_column"]),
    "a list": (b"[1, 2]\n", ["row 1", "list"]),
    "lone surrogate": (b'{"text": "fine"}\n{"text": "\\ud83d"}\n', ["row 2", "surrogate"]),
    "message without content": (b'{"messages": [{"role": "user"}]}\n', ["row 1", "message 1"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_rows(name, file, tmp_path, cli):
    content, parts = ROWS[name]
    (tmp_path / "rows.jsonl").write_bytes(content)
    refused(cli("train", file, f"train_dataset.path={tmp_path}/rows.jsonl"), "rows.jsonl", *parts)
    assert not (tmp_path / "run").exists()


# ---- runs and checkpoints


def test_a_monitored_name_that_is_none(file, cli):
    refused(
        cli("train", file, "monitor.train_state.local_norm=nothing"), "local_norm", "nothing", "embed_tokens.weight"
    )


def test_folder_of_another_run(file, tmp_path, cli):
    assert cli("train", file)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused(cli("train", file), "already holds a run", "--resume auto", "run.yaml:1")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_resume_of_nothing(file, tmp_path, cli):
    refused(cli("train", file, "--resume", tmp_path / "nowhere"), "nowhere", "no such checkpoint")
    assert not (tmp_path / "run").exists()


def test_checkpoint_of_another_shape(file, cli):
    assert cli("train", file)[0] == 0
    refused(cli("train", file, "model.hidden_size=32", "--resume", "auto"), "has shape", "32]")


def test_half_written_and_corrupted_checkpoints_are_passed_over(file, tmp_path, cli):
    assert cli("train", file)[0] == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    shard = "shard-00001-model-00001-of-00001.safetensors"
    (newest / "model" / shard).write_bytes(b"\0" * 10)
    code, out, _ = cli("train", file, "--resume", "auto")
    assert code == 0
    assert "passed over" in out
    assert f"model/{shard} has 10 bytes" in out.replace("\n", "")
    assert "step-00000001 at step 1" in out
    assert storage.defect(newest) is None


def test_all_checkpoints_damaged(file, tmp_path, cli):
    """Starting over would throw the run away: that is for the user to say."""
    assert cli("train", file)[0] == 0
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        (folder / "complete.json").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    refused(cli("train", file, "--resume", "auto"), "no usable checkpoint", "step-00000002", "output_dir")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_no_space_on_disk_is_found_before_training(file, tmp_path, cli, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(cli("train", file), "disk", "checkpoint")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["/proc/here", "{tmp}/text.txt/run"])
def test_output_folder_that_cannot_be_made(place, file, tmp_path, cli):
    refused(cli("train", file, f"output_dir={place.format(tmp=tmp_path)}"), "output_dir", "cannot")


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_run_that_is_none(verb, tmp_path, cli):
    words = ["--prompt", "x"] if verb == "generate" else []
    refused(cli(verb, tmp_path, *words), "no complete checkpoint", str(tmp_path))


# ---- fuzz

VALUES = [
    *("", "null", "-1", "0", "1", "3", "1e9", "1e-30", ".inf", ".nan", "x", "[]", "[1, 2]", "{}", "true", "1.5", "'1'"),
    *("[a, b]", "{a: 1}", "99999999999999999999", "auto", "-0.5", "2024-01-01", "!tag x", "&a *a"),
]


def edited(text: str, choose: random.Random) -> str:
    """The file with one random edit: a value, a name, a line, a character."""
    lines = text.splitlines()
    at = choose.randrange(len(lines))
    kind = choose.randrange(7)
    if kind <= 2 and ":" in lines[at]:
        lines[at] = lines[at].partition(":")[0] + ": " + choose.choice(VALUES)
    elif kind == 3:
        name = re.match(r" *", lines[at]).end()
        spot = choose.randrange(name, max(name + 1, lines[at].find(":")))
        lines[at] = lines[at][:spot] + choose.choice("abz_ .") + lines[at][spot + choose.randrange(2) :]
    elif kind == 4:
        del lines[at]
    elif kind == 5:
        lines.insert(choose.randrange(len(lines)), lines[at])
    else:
        spot = choose.randrange(len(text))
        return text[:spot] + choose.choice(":-#{}[]'\"&*!|>%@`\t\n\0é") + text[spot + 1 :]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("seed", range(10))
def test_fuzz_never_ends_in_a_traceback(seed, file, tmp_path, cli):
    """Fifty files with one edit each: planned, and trained where the plan allows and the run is short."""
    choose = random.Random(seed)
    valid = file.read_text()
    for case in range(50):
        file.write_text(edited(valid, choose), encoding="utf-8")
        code, out, err = cli("plan", file, "--json")
        context = (seed, case, file.read_text(), err)
        assert code in (0, 2), context
        if code == 2:
            refused((code, out, err))
            continue
        if json.loads(out)["steps"] <= 3 and case % 3 == 0:
            folder = f"output_dir={tmp_path}/run-{case}"
            code, _, err = cli("train", file, folder, "checkpoint.enable_save=false")
            assert code in (0, 2), (*context, err)
            assert code == 0 or err.startswith("error: "), (*context, err)
