"""A whole run: what it writes, kill -9 at any moment, signals, damaged checkpoints, evaluation."""

import ctypes
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from samestep.errors import CheckpointError, ConfigError, TrainingError
from samestep.parallel.mesh import Mesh, World
from samestep.run import checkpoint, storage
from samestep.run.allocator import MMAP_THRESHOLD
from samestep.run.evaluate import evaluate
from samestep.run.setup import open_run
from samestep.run.trainer import Events, Trainer

TIMES = {"step_seconds", "tokens_per_second", "targets_per_second", "eval_seconds", "peak_memory_bytes", "mfu"}
METRICS = {
    "step", "loss", "grad_norm", "clip_coefficient", "lr", "targets", "tokens", "samples", "consumed_samples",
    "accumulation_steps", "step_seconds", "tokens_per_second", "targets_per_second", "mfu", "peak_memory_bytes",
    "skipped",
}  # fmt: skip
SHARD = "shard-00001-model-00001-of-00001.safetensors"
OFTEN = ("checkpoint.save_interleaved_steps=2", "evaluation.interval_steps=3", "model.hidden_dropout=0.1")


def rows(folder: Path) -> list[dict]:
    """All rows of metrics.jsonl without what depends on time."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.complete_folders(folder / "checkpoints")[-1]
    return load_file(newest / "model" / SHARD) | load_file(newest / "optimizer" / SHARD)


def assert_same_run(found: Path, wanted: Path):
    assert rows(found) == rows(wanted)
    a, b = final_tensors(found), final_tensors(wanted)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, request):
    """Folder of a run of 8 steps that nothing disturbed; made once."""
    return {}


def reference_run(cache, tiny, tmp_path) -> Path:
    if "folder" not in cache:
        Trainer(tiny(*OFTEN)).train()
        keep = tmp_path.parent / "undisturbed"
        shutil.copytree(tmp_path / "run", keep)
        shutil.rmtree(tmp_path / "run")
        cache["folder"] = keep
    return cache["folder"]


# ---- what a run writes


def test_run_folder(tiny, tmp_path):
    state = Trainer(tiny("evaluation.interval_steps=4", "monitor.tensorboard.enable=true")).train()
    folder = tmp_path / "run"
    assert (state.step, state.updates, state.consumed_samples) == (8, 8, 48)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in lines if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert all(row.keys() == METRICS for row in steps)
    assert [row["step"] for row in lines if "eval_loss" in row] == [4, 8]
    assert steps[0]["lr"] == 0.0
    assert steps[2]["lr"] == 1e-2
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {path.name for path in folder.iterdir()} == {
        "config.resolved.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "tokenizer.json", "tensorboard",
        "checkpoints", "run.json",
    }  # fmt: skip
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000008"]
    assert len(events(folder, "checkpoint")) == 1


def test_resolved_file_runs_again_to_the_same_numbers(tiny, tmp_path):
    from samestep.config.load import load

    Trainer(tiny()).train()
    again = load(tmp_path / "run" / "config.resolved.yaml", [f"output_dir={tmp_path / 'again'}"]).config
    Trainer(again).train()
    assert_same_run(tmp_path / "again", tmp_path / "run")


def test_tensorboard_has_the_curves(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Trainer(tiny("monitor.tensorboard.enable=true")).train()
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    points = [point.value for point in board.Scalars("train/loss")]
    assert points == pytest.approx([row["loss"] for row in rows(tmp_path / "run") if "loss" in row], rel=1e-6)
    assert len(board.Scalars("eval/loss")) == 1


def test_tensorboard_hides_what_a_resumed_run_wrote_before(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny("monitor.tensorboard.enable=true", "checkpoint.save_interleaved_steps=4")
    Trainer(config).train()
    Trainer(config, resume=str(tmp_path / "run" / "checkpoints" / "step-00000004")).train()
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [*range(1, 9)]


def test_save_max_keeps_the_newest(tiny, tmp_path):
    Trainer(tiny("checkpoint.save_interleaved_steps=1", "checkpoint.save_max=2")).train()
    names = [path.name for path in checkpoint.complete_folders(tmp_path / "run" / "checkpoints")]
    assert names == ["step-00000007", "step-00000008"]


def test_skips_are_recorded_and_three_in_a_row_end_the_run(tiny, tmp_path):
    trainer = Trainer(tiny("training.max_consecutive_skipped_steps=3"))

    def poison(gradient):
        return gradient * math.nan if trainer.state.step in (2, 4, 5, 6, 7) else gradient

    trainer.model.layers["1"].mlp.down_proj.weight.register_hook(poison)
    with pytest.raises(TrainingError, match=r"3 steps in a row were skipped .*max_consecutive_skipped_steps 3"):
        trainer.train()
    folder = tmp_path / "run"
    assert [row["step"] for row in rows(folder) if row["skipped"]] == [2, 4, 5, 6]
    assert [(row["step"], row["reason"], row["consecutive"]) for row in events(folder, "skipped_step")] == [
        (2, "non-finite gradient norm", 1),
        (4, "non-finite gradient norm", 1),
        (5, "non-finite gradient norm", 2),
        (6, "non-finite gradient norm", 3),
    ]
    assert "NaN" not in (folder / "metrics.jsonl").read_text()
    assert [row["lr"] for row in rows(folder)][2:4] == [5e-3, 1e-2]  # the skipped step did not move the schedule
    saved = checkpoint.open_checkpoint(checkpoint.newest(folder / "checkpoints")[0])
    assert saved.state["run"] == {
        "step": 6, "updates": 2, "consumed_samples": 36, "tokens": 576, "skipped": 4, "consecutive_skips": 3,
    }  # fmt: skip
    assert {float(t) for name, t in final_tensors(folder).items() if name.startswith("step.")} == {2.0}


def test_listeners_see_events_and_their_flags_work(tiny, tmp_path):
    class Watch(Events):
        def __init__(self):
            self.seen = []

        def on_micro_batch(self, trainer, index, sums):
            self.seen.append((trainer.state.step, index))

        def on_step_end(self, trainer, report):
            self.should_save = trainer.state.step == 2
            self.should_evaluate = trainer.state.step == 1
            self.should_stop = trainer.state.step == 3

    watch = Watch()
    Trainer(tiny(), listeners=[watch]).train()
    assert watch.seen == [(step, index) for step in (1, 2, 3) for index in range(3)]
    assert [row["step"] for row in rows(tmp_path / "run") if "eval_loss" in row] == [1]
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [2, 3]


# ---- kill -9

KILL_POINTS = {
    "in_a_forward": ("samestep.model.decoder", "Layer.forward", 55),
    "after_a_step_is_written": ("samestep.run.metrics", "Metrics.step", 5),
    "while_the_optimizer_file_is_written": ("samestep.run.storage", "_save_tensors", 4),
    "before_the_marker": ("samestep.run.storage", "_inventory", 2),
    "before_the_rename": ("samestep.run.storage", "sync_folder", 8),
    "after_the_rename": ("samestep.run.storage", "sync_folder", 9),
    "before_the_configuration": ("samestep.run.trainer", "write_record", 1),
    "before_any_checkpoint": ("samestep.run.metrics", "Metrics.step", 1),
}


def train_and_die(config, place: str):
    """Run in another process: kill -9 itself right after the n-th call of a function."""
    import importlib

    module, name, calls = KILL_POINTS[place]
    owner = importlib.import_module(module)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, last)
    left = [calls]

    def counted(*args, **kwargs):
        result = original(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, counted)
    torch.set_num_threads(1)
    Trainer(config, resume="auto").train()


@pytest.mark.parametrize("place", KILL_POINTS)
def test_kill_nine_and_resume_to_the_same_bits(place, tiny, tmp_path, workers, undisturbed):
    wanted = reference_run(undisturbed, tiny, tmp_path)
    config = tiny(*OFTEN)
    process = workers.Process(target=train_and_die, args=(config, place))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    Trainer(config, resume="auto").train()
    assert_same_run(tmp_path / "run", wanted)
    assert not list((tmp_path / "run" / "checkpoints").glob(".writing-*"))


def test_rows_beyond_the_checkpoint_are_kept_elsewhere(tiny, tmp_path, workers):
    config = tiny(*OFTEN)
    process = workers.Process(target=train_and_die, args=(config, "after_a_step_is_written"))
    process.start()
    process.join(60)
    Trainer(config, resume="auto")
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4]
    lost = [json.loads(line) for line in (tmp_path / "run" / "metrics.lost.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lost] == [5]
    assert events(tmp_path / "run", "resume")[0]["rows_moved_to_lost"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_resumes_to_the_same_bits(number, tiny, tmp_path, undisturbed):
    wanted = reference_run(undisturbed, tiny, tmp_path)

    class Interrupt(Events):
        def on_micro_batch(self, trainer, index, sums):
            if (trainer.state.step, index) == (5, 1):
                signal.raise_signal(number)

    trainer = Trainer(tiny(*OFTEN), listeners=[Interrupt()])
    state = trainer.train()
    assert (state.step, trainer.stop_signal) == (5, number)
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].name == "step-00000005"
    Trainer(tiny(*OFTEN), resume="auto").train()
    assert_same_run(tmp_path / "run", wanted)


def test_resume_of_a_finished_run_changes_nothing(tiny, tmp_path):
    Trainer(tiny()).train()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert Trainer(tiny(), resume="auto").train().step == 8
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_more_steps_go_on_from_the_end(tiny, tmp_path):
    Trainer(tiny("lr_scheduler.type=constant")).train()
    assert Trainer(tiny("training.steps=10", "lr_scheduler.type=constant"), resume="auto").train().step == 10


def test_random_states_return(tiny):
    import random

    import numpy as np

    states = json.loads(json.dumps([checkpoint.random_states()]))
    wanted = (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist())
    checkpoint.set_random_states([{}, {}], World())  # of a run with two ranks
    checkpoint.set_random_states(states, World())
    assert (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()) == wanted


# ---- mistakes and damage


def test_a_folder_with_a_run_is_refused(tiny):
    Trainer(tiny()).train()
    with pytest.raises(ConfigError, match="already holds a run") as caught:
        Trainer(tiny())
    assert "--resume auto" in str(caught.value)


def damage(file: Path, kind: str):
    content = file.read_bytes()
    if kind == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif kind == "short":
        file.write_bytes(content[:-1])
    else:
        file.unlink()


@pytest.mark.parametrize("name", [f"model/{SHARD}", f"optimizer/{SHARD}", "state.json", "complete.json"])
@pytest.mark.parametrize("kind", ["flipped", "short", "missing"])
def test_a_damaged_checkpoint_is_passed_over_and_named(name, kind, tiny, tmp_path, undisturbed):
    if name == "complete.json" and kind == "flipped":
        kind = "short"
    wanted = reference_run(undisturbed, tiny, tmp_path)
    shutil.copytree(wanted, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000008"
    damage(newest / name, kind)
    trainer = Trainer(tiny(*OFTEN), resume="auto")
    assert trainer.state.step == 6
    (warning,) = events(tmp_path / "run", "warning")
    assert str(newest) in warning["message"]
    trainer.train()
    assert_same_run(tmp_path / "run", wanted)


def test_a_checkpoint_of_another_shape_is_refused(tiny, tmp_path):
    Trainer(tiny()).train()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight has shape \[48, 32\], .* \[64, 32\]"):
        Trainer(tiny("model.intermediate_size=64"), resume="auto")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_other_data_is_refused(tiny, tmp_path):
    Trainer(tiny()).train()
    text = tmp_path / "text.txt"
    text.write_text("e" * 100 + text.read_text()[100:])
    with pytest.raises(CheckpointError, match="training data differs"):
        Trainer(tiny(), resume="auto")


def test_resume_of_nothing(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        Trainer(tiny(), resume=str(tmp_path / "nowhere"))
    assert Trainer(tiny(), resume="auto").state.step == 0


def test_weights_only_checkpoints_evaluate_but_do_not_resume(tiny, tmp_path):
    Trainer(tiny("checkpoint.no_save_optim=true")).train()
    assert open_run(tmp_path / "run").step == 8
    with pytest.raises(CheckpointError, match="no optimizer state"):
        Trainer(tiny(), resume="auto")


def test_a_full_disk_leaves_older_checkpoints(tiny, tmp_path, monkeypatch):
    Trainer(tiny()).train()
    root = tmp_path / "run" / "checkpoints"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_write_text", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.save(
            root, 9, model={"a": torch.zeros(1)}, optimizer=None, state={}, texts={}, keep=1, mesh=Mesh.alone()
        )
    assert [path.name for path in root.iterdir()] == ["step-00000008"]


def test_no_pickle_is_ever_read(tiny, tmp_path, monkeypatch):
    import pickle

    Trainer(tiny()).train()

    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert Trainer(tiny("training.steps=9"), resume="auto").train().step == 9


# ---- evaluation


class Toy(nn.Module):
    """Mean of batch means would give (2/1 + 90/9) / 2 = 6.0; the truth is 92 / 10."""


class ToyObjective:
    weights = {"x": 1.0}  # noqa: RUF012

    def counts(self, batch):
        return {"x": batch.targets}

    def sums(self, model, batch):
        return {"x": torch.tensor({1: 2.0, 9: 90.0, 10: 92.0}[batch.targets])}


def test_validation_loss_is_sum_over_count():
    import numpy as np

    from samestep.data.rows import Sample

    samples = [Sample(*(np.zeros(n, dtype=np.int64) for _ in range(4))) for n in (1, 9)]
    for size in (1, 2):
        assert evaluate(Toy(), ToyObjective(), samples, size, Mesh.alone()) == (9.2, 10)


def test_validation_loss_does_not_depend_on_the_batch_size(tiny, tmp_path):
    trainer = Trainer(tiny("train_dataset.rows=documents", "train_dataset.document_separator=\"\\n\\n\"",
                           "train_dataset.split=documents"))  # fmt: skip
    trainer.train()
    model, data = trainer.model, trainer.data.evaluation
    losses = [evaluate(model, trainer.step.objective, data, n, trainer.mesh) for n in (1, 3, 8, 64)]
    with torch.no_grad():
        from samestep.data.batch import collate

        total = count = 0
        for i in range(len(data)):
            batch = collate([data[i]], [i], "padded")
            logits = (model(batch).hidden @ model.loss_head.weight.T)[0].double()
            total += float(F.cross_entropy(logits, batch.labels[0], reduction="sum"))
            count += batch.targets
    for loss, targets in losses:
        assert targets == count
        assert loss == pytest.approx(total / count, rel=1e-6)


def test_memory_does_not_grow_with_accumulation(tiny, workers):
    """Peak memory of 16 micro-batches is that of 2; a run of 16 times the micro-batch shows the measure can tell."""
    size = (
        "model.hidden_size=256",
        "model.intermediate_size=1024",
        "model.seq_length=64",
        "model.num_hidden_layers=3",
    )
    size += (
        "lr_scheduler.warmup_steps=0",
        "train_dataset.split=null",
        "checkpoint.enable_save=false",
        "cpu.keep_freed_memory=false",
    )

    def peak(name, local, whole):
        # The same samples for all.
        batch = (f"training.local_batch_size={local}", f"training.global_batch_size={whole}")
        batch += (f"training.steps={64 // whole}",)
        config = tiny(*size, *batch)
        config = config.model_copy(update={"output_dir": f"{config.output_dir}-{name}"})
        process = workers.Process(target=train_and_give_memory_back, args=(config,))
        process.start()
        process.join(200)
        assert process.exitcode == 0
        return max(json.loads(line)["peak_memory_bytes"] for line in open(f"{config.output_dir}/metrics.jsonl"))

    two, sixteen, wide = peak("two", 4, 8), peak("sixteen", 4, 64), peak("wide", 64, 64)
    assert sixteen <= 1.05 * two
    assert wide > 1.5 * two


def train_and_give_memory_back(config):
    """At once, so that what is measured is what was held."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 65536)
    train_quietly(config)


def train_quietly(config):
    torch.set_num_threads(1)
    Trainer(config).train()


def test_a_second_signal_stops_at_once(tiny):
    class Stubborn(Events):
        def on_micro_batch(self, trainer, index, sums):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Trainer(tiny(), listeners=[Stubborn()]).train()
    assert signal.getsignal(signal.SIGINT) is before
