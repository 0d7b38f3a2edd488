"""Going on from a checkpoint: which run it belongs to, what must stay as it was, and how much is left to train."""

import hashlib
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as HubTokenizer

from samestep.config.load import load
from samestep.errors import CheckpointError, ConfigError, SamestepError
from samestep.parallel.mesh import Mesh
from samestep.run import checkpoint
from samestep.run.metrics import JsonLines
from samestep.run.record import RUN_FILE
from samestep.run.setup import open_run
from samestep.run.trainer import Events, Trainer

SHARD = "shard-00001-model-00001-of-00001.safetensors"
OFTEN = ("checkpoint.save_interleaved_steps=2", "checkpoint.save_max=9", "lr_scheduler.type=constant")


class Stop(Events):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer, report):
        self.should_stop = trainer.state.step == self.step


class Places(Events):
    """The places in the data, step by step."""

    def __init__(self):
        self.steps: list[list[int]] = []

    def on_train_begin(self, trainer):
        follow = trainer.order.next

        def noted(consumed):
            samples = follow(consumed)
            self.steps.append(samples.places.tolist())
            return samples

        trainer.order.next = noted


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in read_lines(folder / "metrics.jsonl") if "loss" in row]


def events(folder: Path, kind: str) -> list[dict]:
    return [row for row in read_lines(folder / "events.jsonl") if row["event"] == kind]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def content(folder: Path) -> dict[str, str]:
    """Every path below a folder, with the hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def refused(config, folder: Path, match: str, resume: str = "auto", error: type = SamestepError) -> str:
    """The message of a resume that is refused and leaves every byte as it was."""
    before = content(folder)
    with pytest.raises(error, match=match) as caught:
        Trainer(config, resume=resume)
    assert content(folder) == before
    assert "fix:" in str(caught.value)
    return str(caught.value)


# ---- an older checkpoint


def test_later_checkpoints_are_set_aside(tiny, tmp_path):
    Trainer(tiny(*OFTEN)).train()
    run, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    bytes_of_8 = (root / "step-00000008" / "model" / SHARD).read_bytes()
    anew = tiny(*OFTEN, "training.steps=6", "lr_scheduler.learning_rate=1e-3", "checkpoint.save_max=1")
    Trainer(anew, resume=str(root / "step-00000004")).train()
    assert names(root) == ["step-00000006", "step-00000006.abandoned", "step-00000008.abandoned"]
    assert (root / "step-00000008.abandoned" / "model" / SHARD).read_bytes() == bytes_of_8
    (event,) = events(run, "abandoned_checkpoints")
    assert event["step"] == 4
    assert [Path(path).name for path in event["paths"]] == ["step-00000008.abandoned", "step-00000006.abandoned"]
    again = Trainer(anew, resume="auto")
    assert again.last_checkpoint == root / "step-00000006"
    assert [row["lr"] for row in read_lines(run / "metrics.jsonl") if row["step"] == 6 and "lr" in row] == [1e-3]
    assert open_run(run).checkpoint == root / "step-00000006"


def test_abandoning_twice_keeps_both(tiny, tmp_path):
    Trainer(tiny(*OFTEN, "training.steps=4")).train()
    root = tmp_path / "run" / "checkpoints"
    for _ in range(2):
        Trainer(tiny(*OFTEN, "training.steps=4"), resume=str(root / "step-00000002")).train()
    assert names(root) == [
        "step-00000002", "step-00000004", "step-00000004.abandoned", "step-00000004.abandoned-2",
    ]  # fmt: skip


def test_what_was_just_written_is_never_pruned(tmp_path):
    def save(step):
        return checkpoint.save(tmp_path, step, model={}, optimizer=None, state={}, texts={}, keep=1, mesh=Mesh.alone())

    save(8)
    assert save(4).is_dir()


def test_an_abandoned_checkpoint_goes_on_elsewhere_only(tiny, tmp_path):
    Trainer(tiny(*OFTEN, "training.steps=4")).train()
    run, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    Trainer(tiny(*OFTEN, "training.steps=4"), resume=str(root / "step-00000002"))
    abandoned = str(root / "step-00000004.abandoned")
    refused(tiny(*OFTEN), run, "rows are missing", abandoned, CheckpointError)
    elsewhere = tiny(*OFTEN, "training.steps=5", f"output_dir={tmp_path / 'other'}")
    assert Trainer(elsewhere, resume=abandoned).train().step == 5


# ---- whose checkpoint


def test_every_run_has_an_id_that_its_checkpoints_carry(tiny, tmp_path):
    for name in ("a", "b"):
        Trainer(tiny(f"output_dir={tmp_path / name}")).train()
    ids = [json.loads((tmp_path / name / RUN_FILE).read_text())["id"] for name in "ab"]
    assert ids[0] != ids[1]
    assert [checkpoint.run_id(tmp_path / name / "checkpoints" / "step-00000008") for name in "ab"] == ids
    Trainer(tiny("training.steps=9", f"output_dir={tmp_path / 'a'}"), resume="auto").train()
    assert checkpoint.run_id(tmp_path / "a" / "checkpoints" / "step-00000009") == ids[0]


def test_a_checkpoint_of_another_run_is_refused(tiny, tmp_path):
    for name in ("a", "b"):
        Trainer(tiny(*OFTEN, f"output_dir={tmp_path / name}")).train()
    config = tiny(*OFTEN, f"output_dir={tmp_path / 'b'}")
    message = refused(config, tmp_path, "holds another run", str(tmp_path / "a" / "checkpoints" / "step-00000004"))
    assert "another output_dir" in message
    (tmp_path / "b" / RUN_FILE).unlink()
    refused(config, tmp_path, "holds another run")
    (tmp_path / "b" / RUN_FILE).write_text("{")
    refused(config, tmp_path, "damaged", error=CheckpointError)


def test_a_run_begins_from_the_checkpoint_of_another(tiny, tmp_path):
    Trainer(tiny(*OFTEN, f"output_dir={tmp_path / 'a'}")).train()
    before = content(tmp_path / "a")
    start = str(tmp_path / "a" / "checkpoints" / "step-00000004")
    config = tiny(*OFTEN, "training.steps=7", f"output_dir={tmp_path / 'b'}")
    Trainer(config, resume=start)  # ends before its first step, as by a kill
    assert Trainer(config, resume="auto").state.step == 4
    assert Trainer(config, resume=start, listeners=[Stop(6)]).train().step == 6
    assert Trainer(config, resume="auto").train().step == 7
    assert steps_of(tmp_path / "b") == [5, 6, 7]
    assert content(tmp_path / "a") == before
    refused(config, tmp_path, "holds another run", str(tmp_path / "a" / "checkpoints" / "step-00000006"))


def test_only_the_checkpoints_of_a_run_were_copied(tiny, tmp_path):
    Trainer(tiny(*OFTEN)).train()
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "copy" / "checkpoints")
    config = tiny(*OFTEN, "training.steps=10", f"output_dir={tmp_path / 'copy'}")
    Trainer(config, resume="auto").train()
    assert steps_of(tmp_path / "copy") == [9, 10]
    Trainer(config, resume=str(tmp_path / "copy" / "checkpoints" / "step-00000006")).train()
    assert steps_of(tmp_path / "copy") == [7, 8, 9, 10]


@pytest.mark.parametrize("resume", ["none", "auto", "PATH"])
def test_a_folder_with_another_runs_checkpoints_is_refused(resume, tiny, tmp_path):
    shared = f"checkpoint.save_path={tmp_path / 'saved'}"
    Trainer(tiny(*OFTEN, shared, f"output_dir={tmp_path / 'a'}")).train()
    resume = str(tmp_path / "saved" / "step-00000004") if resume == "PATH" else resume
    config = tiny(*OFTEN, shared, f"output_dir={tmp_path / 'b'}")
    with pytest.raises(ConfigError, match="checkpoints of another run") as caught:
        Trainer(config, resume=resume)
    assert caught.value.field == "checkpoint.save_path"
    assert not (tmp_path / "b").exists()


def test_a_run_folder_stands_for_its_newest_checkpoint(tiny, tmp_path):
    Trainer(tiny("training.steps=3", f"checkpoint.save_path={tmp_path / 'saved'}")).train()
    other = tiny("training.steps=4", f"output_dir={tmp_path / 'other'}")
    assert Trainer(other, resume=str(tmp_path / "run")).state.step == 3


# ---- metrics.jsonl


def test_rows_that_are_missing_or_edited_are_refused(tiny, tmp_path):
    Trainer(tiny(*OFTEN)).train()
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]))
    refused(tiny(*OFTEN), tmp_path / "run", "rows are missing", error=CheckpointError)
    file.write_bytes(b" " + b"".join(lines) + b"{}\n")
    refused(tiny(*OFTEN), tmp_path / "run", "no row of step 8 ends at byte", error=CheckpointError)
    file.unlink()
    refused(tiny(*OFTEN), tmp_path / "run", "rows are missing", error=CheckpointError)


def test_a_half_written_line_is_not_joined(tmp_path):
    (tmp_path / "e.jsonl").write_bytes(b'{"event": "a"}\n{"ev')
    lines = JsonLines(tmp_path / "e.jsonl")
    lines.write(event="b")
    lines.close()
    assert (tmp_path / "e.jsonl").read_bytes() == b'{"event": "a"}\n{"ev\n{"event": "b"}\n'


# ---- what must stay as it was


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (["training.seed=7"], r"training.seed: 7, but .* has 42"),
        (["train_dataset.shuffle=false"], r"train_dataset.shuffle: false, but .* has true"),
        (["optimizer.type=SGD"], r"optimizer.type: SGD, but .* has AdamW"),
        (["model.params_dtype=bfloat16"], r"model.params_dtype: bfloat16, but .* has float32"),
        (["model.params_dtype=float64", "model.gradient_dtype=float64"], r"(?s)params_dtype: .*gradient_dtype: "),
        (["model.intermediate_size=64"], "has shape"),
        (["train_dataset.eval_fraction=0.2"], "training data differs"),
        (["tokenizer.end_token=<unk>"], r"tokenizer.end_token: <unk>, but .* has <\|endoftext\|>"),
    ],
)
def test_a_refused_resume_leaves_every_byte(changed, match, tiny, tmp_path):
    Trainer(tiny(*OFTEN)).train()
    later = ("training.steps=400", *OFTEN)
    before = content(tmp_path / "run")
    with pytest.raises(SamestepError, match=match):
        Trainer(tiny(*later, *changed), resume="auto")
    assert content(tmp_path / "run") == before


def test_a_dtype_that_null_stands_for_may_be_written(tiny, tmp_path):
    Trainer(tiny(*OFTEN), listeners=[Stop(2)]).train()
    Trainer(tiny(*OFTEN, "model.embedding_params_dtype=float32"), resume="auto").train()
    other = tiny(*OFTEN, "model.embedding_params_dtype=bfloat16")
    refused(other, tmp_path / "run", "embedding_params_dtype: bfloat16, but .* has float32", error=ConfigError)


def test_another_optimizer_is_refused_without_any_state(tiny, tmp_path):
    Trainer(tiny(*OFTEN, "optimizer.type=SGD")).train()
    message = refused(tiny(*OFTEN), tmp_path / "run", "optimizer.type: AdamW, but", error=ConfigError)
    assert "write SGD" in message


def test_random_states_that_do_not_fit_are_refused(tiny, tmp_path, monkeypatch):
    Trainer(tiny()).train()
    open_whole = checkpoint.open_checkpoint

    def changed(*args):
        loaded = open_whole(*args)
        loaded.state["random"][0]["python"][1] = [1, 2]
        return loaded

    monkeypatch.setattr(checkpoint, "open_checkpoint", changed)
    refused(tiny(), tmp_path / "run", "random generators do not fit", error=CheckpointError)


def test_several_differing_fields_are_all_named_with_their_lines(tiny, tmp_path, cli):
    from samestep.config.load import dump

    file = tmp_path / "run.yaml"
    file.write_text(dump(tiny()))
    assert cli("train", file)[0] == 0
    text = file.read_text().replace("seed: 42", "seed: 43").replace("type: AdamW", "type: Lion")
    file.write_text(text)
    line = 1 + [part.strip() for part in text.splitlines()].index("seed: 43")
    code, _, err = cli("train", file, "--resume", "auto")
    assert (code, f"run.yaml:{line}: training.seed" in err, "optimizer.type: Lion" in err) == (2, True, True)


def test_a_best_checkpoint_that_is_gone_is_forgotten(tiny, tmp_path, monkeypatch):
    import samestep.run.trainer as module

    losses = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: (next(losses), 10))
    often = ("checkpoint.keep_best=true", "evaluation.interval_steps=2", *OFTEN)
    Trainer(tiny(*often)).train()
    root = tmp_path / "run" / "checkpoints"
    assert Trainer(tiny(*often), resume="auto").best == checkpoint.Best(2, 1.0)
    shutil.rmtree(root / "step-00000002")
    trainer = Trainer(tiny(*often, "training.steps=10"), resume="auto")
    assert trainer.best is None
    assert not (root / "best.json").exists()
    trainer.train()
    assert json.loads((root / "best.json").read_text()) == {
        "step": 10, "eval_loss": 5.0, "checkpoint": "step-00000010",
    }  # fmt: skip


# ---- another global batch size


@pytest.mark.parametrize("size", [2, 5, 12])
@pytest.mark.parametrize("length", ["training.epochs=1", "training.epochs=2", "training.tokens=3600"])
def test_every_sample_is_trained_once_whatever_the_batch_size(size, length, tiny, tmp_path):
    fields = ("training.steps=null", length, "checkpoint.no_save_optim=false", "lr_scheduler.type=constant")
    watch = Places()
    first = Trainer(tiny(*fields), listeners=[Stop(10), watch])
    count = len(first.data.train)
    assert count * 16 == 3600  # one epoch of tokens
    assert first.train().consumed_samples == 60
    config = tiny(*fields, f"training.global_batch_size={size}")
    second = Trainer(config, resume="auto", listeners=[Stop(13), watch])
    planned = second.plan.steps
    second.train()
    third = Trainer(config, resume="auto", listeners=[watch])
    assert third.plan.steps == planned == third.train().step
    epochs = 2 if length == "training.epochs=2" else 1
    assert planned == 10 + math.ceil((count - 60) / size) + (epochs - 1) * math.ceil(count / size)
    assert Counter(place for places in watch.steps for place in places) == Counter(range(epochs * count))
    (event,) = events(tmp_path / "run", "global_batch_size")
    assert (event["step"], event["before"], event["after"], event["steps"]) == (10, 6, size, planned)


def test_fixed_steps_go_on_with_the_next_sample(tiny, tmp_path, capsys):
    watch = Places()
    Trainer(tiny("lr_scheduler.type=constant"), listeners=[Stop(4), watch]).train()
    Trainer(
        tiny("lr_scheduler.type=constant", "training.global_batch_size=10"), resume="auto", listeners=[watch]
    ).train()
    assert [place for places in watch.steps for place in places] == list(range(24 + 40))
    assert len(watch.steps) == 8
    assert "global_batch_size 6 -> 10: goes on with sample 24" in capsys.readouterr().out.replace("\n", " ")


def test_a_short_batch_that_a_resume_made_is_refused_where_it_is_met(tiny, tmp_path):
    """225 samples end with 25, but from sample 45 on with 30, which is no multiple of 25."""
    fields = ("training.remainder=error", "lr_scheduler.type=constant")
    Trainer(tiny(*fields, "training.global_batch_size=15", "training.local_batch_size=5"), listeners=[Stop(3)]).train()
    larger = (*fields, "training.global_batch_size=50", "training.local_batch_size=25")
    message = refused(
        tiny(*larger, "training.steps=7"), tmp_path / "run", "the last batch of that epoch has 30 samples"
    )
    assert "training.global_batch_size: going on from sample 45" in message
    assert Trainer(tiny(*larger, "training.steps=6"), resume="auto").train().consumed_samples == 45 + 150


# ---- the end token of a folder's tokenizer


@pytest.fixture
def chat_tokenizer(tmp_path) -> Path:
    """A tokenizer's folder with two usual end tokens; its settings name the second."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = ["<|endoftext|>", "<|turn_end|>", "<unk>", *characters]
    hub = HubTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    hub.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    hub.add_special_tokens(words[:2])
    hub.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|turn_end|>"}))
    return folder


def test_the_end_token_is_kept(chat_tokenizer, tiny, tmp_path, cli):
    data = tmp_path / "text.txt"
    fields = (
        "tokenizer.type=file", f"tokenizer.path={chat_tokenizer}", "training.steps=4", "train_dataset.split=documents",
        "train_dataset.rows=documents", 'train_dataset.document_separator="\\n\\n"', "lr_scheduler.type=constant",
    )  # fmt: skip
    tiny()
    data.write_text(data.read_text().encode("ascii", "replace").decode())
    first = Trainer(tiny(*fields))
    assert first.data.tokenizer.end_id == 1
    first.train()
    run = tmp_path / "run"
    shutil.rmtree(chat_tokenizer)  # the run keeps what it needs
    opened = open_run(run)
    assert (opened.tokenizer.end_id, opened.tokenizer.end_token) == (1, "<|turn_end|>")
    assert load(run / "config.resolved.yaml").config.tokenizer.end_token == "<|turn_end|>"
    (row,) = [row for row in read_lines(run / "metrics.jsonl") if "eval_loss" in row]
    code, out, err = cli("evaluate", run)
    assert code == 0, err
    assert f"validation loss {row['eval_loss']:.6f}" in out
    assert cli("generate", run, "--prompt", "the", "--max-new-tokens", "3")[0] == 0
    resumed = Trainer(tiny(*fields, "training.steps=5"), resume="auto")
    assert resumed.data.tokenizer.end_id == 1
    assert resumed.train().step == 5


# ---- the command line


def test_a_world_size_that_is_no_number(tiny, tmp_path, cli, monkeypatch):
    from samestep.config.load import dump

    (tmp_path / "run.yaml").write_text(dump(tiny()))
    monkeypatch.setenv("WORLD_SIZE", "abc")
    code, _, err = cli("train", tmp_path / "run.yaml")
    assert (code, "WORLD_SIZE is 'abc'" in err, "Traceback" in err) == (2, True, False)
