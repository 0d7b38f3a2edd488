"""Several ranks: the same run as one process, uneven data, other numbers of ranks on resume, and failing together."""

import ctypes
import json
import math
import os
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep import launch
from samestep.config.load import from_dict
from samestep.data.batch import Batch
from samestep.data.dataset import load_data, make_order
from samestep.data.rows import IGNORE
from samestep.errors import ConfigError, DataError, SamestepError, TrainingError
from samestep.launch import run_ranks
from samestep.parallel.data import local
from samestep.parallel.mesh import Mesh, World, join, launched
from samestep.plan import Layout, resolve_layout
from samestep.run import checkpoint
from samestep.run.setup import build_model, build_step, micro_batches
from samestep.run.trainer import Events, Trainer

pytestmark = pytest.mark.usefixtures("workers")

DOUBLE = [f"model.{name}=float64" for name in ("params_dtype", "compute_dtype", "gradient_dtype", "reduce_dtype")]
DOUBLE += [f"model.{name}=float64" for name in ("layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype")]
DOUBLE += ["model.loss_dtype=float64"]


def rows_of(config, key="loss"):
    with open(os.path.join(config.output_dir, "metrics.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [row[key] for row in rows if key in row and (key.startswith("eval") or "loss" in row)]


def train(config, resume="none", listeners=()):
    """In a worker: a whole run; returns what its rank knows of it."""
    join(timeout=30)
    trainer = Trainer(config, resume=resume, listeners=[listener() for listener in listeners])
    state = trainer.train()
    return state.step, state.updates, trainer.is_stopped


def run(config, ranks, *arguments):
    if ranks == 1:
        return [train(config, *arguments)]
    return run_ranks(train, ranks, config, *arguments, timeout=120)


def relative(found, wanted):
    return float(np.max(np.abs(np.array(found) - wanted) / np.maximum(np.abs(wanted), 1e-300)))


# ---- workers


def add_ranks(number):
    world = join(timeout=20)
    return float(
        Mesh(Layout(world.size, world.size, world.size, 1, 1, 1, 1), world, torch.device("cpu")).sum_(
            torch.tensor(float(number + world.rank))
        )
    )


def fail_alone(kind):
    world = join(timeout=60)
    mesh = Mesh(Layout(world.size, world.size, world.size, 1, 1, 1, 1), world, torch.device("cpu"))
    if world.rank == 1:
        if kind == "die":
            os._exit(7)
        if kind == "crash":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file of its memory
            ctypes.string_at(0)
        raise DataError("row 5 is odd") if kind == "mistake" else RuntimeError("a bug")
    mesh.sum_(torch.ones(1))


def sleep():
    time.sleep(60)


def test_workers_meet_and_give_results():
    assert run_ranks(add_ranks, 2, 3) == [7.0, 7.0]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("mistake", DataError, "row 5 is odd"),
        ("bug", TrainingError, "rank 1: RuntimeError('a bug')"),
        ("die", TrainingError, "rank 1 died with exit code 7"),
        ("crash", TrainingError, "rank 1 died of signal 11 (Segmentation fault)\nFatal Python error"),
    ],
)
def test_a_rank_that_fails_ends_the_others(kind, error, text):
    """The others wait for it in a collective, which fails as well."""
    with pytest.raises(SamestepError) as caught:
        run_ranks(fail_alone, 3, kind)
    assert isinstance(caught.value, error)
    assert str(caught.value).startswith(text)
    assert kind != "crash" or "in fail_alone" in str(caught.value)


def test_of_several_failures_a_mistake_is_told_first_and_a_death_with_what_nobody_expected():
    died, mistake = (launch._DIED, TrainingError("rank 1 died")), (launch._TOLD, DataError("row 5 is odd"))
    lost = (launch._UNEXPECTED, TrainingError("rank 0: gone"))
    assert launch._cause([lost, died, mistake]) is mistake[1]
    assert launch._cause([lost, lost]) is lost[1]
    assert str(launch._cause([lost, died])) == "rank 1 died\nrank 0: gone"


def test_workers_that_do_not_end_are_ended():
    with pytest.raises(TrainingError, match=r"ranks \[0, 1\] did not end within 1 s"):
        run_ranks(sleep, 2, timeout=1.0)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', which is no number"),
        ({"WORLD_SIZE": "2"}, "RANK does not say which"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "LOCAL_RANK does not say which"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK 2 and WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "MASTER_ADDR and MASTER_PORT do not say"),
    ],
)
def test_an_environment_that_makes_no_sense(monkeypatch, variables, text):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        join()


def test_one_process_is_a_world_of_its_own(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == World(0, 1, 0, 1)


# ---- samples over ranks


def batches_of_all_ranks(config, data, samples, step, ranks) -> list[list[Batch]]:
    layout = Layout(ranks, ranks, ranks, 1, 1, 1, 1)
    meshes = [Mesh(layout, World(rank, ranks), torch.device("cpu")) for rank in range(ranks)]
    return [micro_batches(config, data.train, samples, step, mesh) for mesh in meshes]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_every_sample_is_visited_once_an_epoch_on_any_number_of_ranks(tiny, ranks, kind):
    config = tiny("training.global_batch_size=13", "training.local_batch_size=2", f"training.micro_batch={kind}")
    data = load_data(config)
    order, consumed, visits = make_order(config, data), 0, Counter()
    step = 0
    while consumed < 2 * len(data.train):
        samples = order.next(consumed)
        consumed, step = samples.consumed, step + 1
        of_ranks = batches_of_all_ranks(config, data, samples, step, ranks)
        assert len({len(batches) for batches in of_ranks}) == 1, "every rank has as many micro-batches"
        for batch in (batch for batches in of_ranks for batch in batches):
            visits.update(set(batch.sample_ids[batch.sample_ids >= 0].tolist()))
    assert sorted(visits) == list(range(2 * len(data.train)))
    assert set(visits.values()) == {1}


def test_ranks_beyond_the_samples_get_empty_micro_batches(tiny):
    config = tiny("training.global_batch_size=4", "training.local_batch_size=1")
    data = load_data(config)
    samples = make_order(config, data).next(0)
    short = type(samples)(samples.rows[:1], samples.places[:1], 1)
    of_ranks = batches_of_all_ranks(config, data, short, 1, 4)
    assert [[batch.samples for batch in batches] for batches in of_ranks] == [[1], [0], [0], [0]]
    empty = of_ranks[3][0]
    assert (empty.tokens, empty.targets, (empty.labels == IGNORE).all().item()) == (0, 0, True)


def test_remainder_drop_goes_by_all_ranks(tiny):
    config = tiny("training.global_batch_size=13", "training.local_batch_size=2", "training.remainder=drop")
    data = load_data(config)
    of_ranks = batches_of_all_ranks(config, data, make_order(config, data).next(0), 1, 3)
    assert [[batch.samples for batch in batches] for batches in of_ranks] == [[2, 2]] * 3  # floor(13 / 6) x 6


# ---- runs


@pytest.mark.parametrize("shard", [1, -1])
def test_curves_are_those_of_one_process(tiny, shard):
    """24 steps with uneven ranks, over the end of an epoch whose last batch leaves ranks without a sample."""
    settings = ["training.steps=24", "training.global_batch_size=14", "checkpoint.enable_save=false"]
    settings += ["evaluation.interval_steps=12", "lr_scheduler.learning_rate=3e-3"]
    curves = {}
    counts = (1, 2) if shard == 1 else (1, 4)
    for ranks in counts:
        config = tiny(*settings, f"parallelism.data_parallel_shard={shard}", f"output_dir={tiny().output_dir}-{ranks}")
        assert run(config, ranks) == [(24, 24, False)] * ranks
        names = ("loss", "grad_norm", "lr", "eval_loss", "targets", "samples", "consumed_samples")
        curves[ranks] = {name: rows_of(config, name) for name in names}
    assert min(curves[1]["samples"]) < 4, "the last batch of an epoch leaves ranks without a sample"
    for ranks in counts[1:]:
        for name, bound in (("loss", 1e-5), ("grad_norm", 1e-4), ("eval_loss", 1e-5), ("lr", 0)):
            assert relative(curves[ranks][name], curves[1][name]) <= bound, (ranks, name)
        for name in ("targets", "samples", "consumed_samples"):
            assert curves[ranks][name] == curves[1][name]


def test_what_a_run_of_shards_tells(tiny):
    """Extremes over the ranks; the dtypes that were used, with those of gathered weights and of messages."""
    low = ("model.params_dtype=bfloat16", "model.compute_dtype=bfloat16", "lr_scheduler.learning_rate=1e-3")
    low += ("model.embedding_params_dtype=float32",)  # norm and head are then gathered apart from it
    config = tiny("training.steps=2", "monitor.watch_steps=2", "optimizer.type=SGD", "optimizer.momentum=0.9", *low)
    run(config, 2)
    for row in rows_of(config, "ranks"):
        assert row.keys() == {"step_seconds", "data_seconds", "peak_memory_bytes"}
        assert all(0 <= least <= most for least, most in row.values())
    events = [json.loads(line) for line in (Path(config.output_dir) / "events.jsonl").read_text().splitlines()]
    (audit,) = (event for event in events if event["event"] == "dtype_audit")
    kinds = {row["kind"]: row for row in audit["kinds"]}
    assert [kinds[kind]["weights"] for kind in ("embedding", "norm")] == ["float32", "bfloat16"]
    mlp = kinds["mlp"]
    assert (mlp["weights"], mlp["compute"]) == ("bfloat16", "bfloat16")
    assert mlp["reduction"] == mlp["masters"] == mlp["state"] == mlp["gradients"] == "float32"
    assert (audit["sent"], audit["compute_not_seen"]) == (["float32"], [])
    assert all(event["event"] != "still_weights" for event in events)


def test_a_run_goes_on_with_other_ranks_and_other_micro_batches(tiny):
    """Saved on 4 ranks with sharded weights, resumed on 3, then on 1: the curve of an undisturbed process."""
    base = [*DOUBLE, "training.global_batch_size=12", "lr_scheduler.type=constant", "lr_scheduler.warmup_steps=0"]
    whole = tiny(*base, "training.steps=30", f"output_dir={tiny().output_dir}-whole")
    run(whole, 1)
    for ranks, steps, size in ((4, 10, 1), (3, 20, 2), (1, 30, 5)):
        config = tiny(*base, f"training.steps={steps}", f"training.local_batch_size={size}")
        resume = "none" if ranks == 4 else "auto"
        assert run(config, ranks, resume)[0][0] == steps
    assert rows_of(config, "step") == list(range(1, 31))
    assert rows_of(config, "consumed_samples") == rows_of(whole, "consumed_samples")
    assert relative(rows_of(config), rows_of(whole)) <= 1e-9
    assert relative(rows_of(config, "grad_norm"), rows_of(whole, "grad_norm")) <= 1e-9


def stored_tensors(config) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint."""
    found = checkpoint.open_checkpoint(checkpoint.newest(Path(config.output_dir) / "checkpoints")[0])
    tensors = {}
    for part in ("model", "optimizer"):
        parts = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in getattr(found, part).items()}
        found.read(part, parts)
        tensors |= {f"{part}.{name}": tensor for name, tensor in parts.items()}
    return tensors


def test_in_exact_mode_other_ranks_change_no_bit(tiny):
    """4 ranks, then 3, then 1: all weights, moments, losses and norms are those of one undisturbed process."""
    base = ["training.exact=true", "training.global_batch_size=12", "parallelism.data_parallel_shard=1"]
    base += ["lr_scheduler.type=constant", "training.max_norm=0.5", "evaluation.interval_steps=5"]
    whole = tiny(*base, "training.steps=15", f"output_dir={tiny().output_dir}-whole")
    run(whole, 1)
    for ranks, steps, size in ((4, 5, 2), (3, 10, 1), (1, 15, 5)):
        config = tiny(*base, f"training.steps={steps}", f"training.local_batch_size={size}")
        run(config, ranks, "none" if ranks == 4 else "auto")
    for name in ("loss", "grad_norm", "clip_coefficient", "eval_loss"):
        assert rows_of(config, name) == rows_of(whole, name)
    assert max(rows_of(whole, "clip_coefficient")) < 1
    found, wanted = stored_tensors(config), stored_tensors(whole)
    assert found.keys() == wanted.keys()
    assert len(found) > 20
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_float16_goes_on_with_its_scale_on_other_ranks(tiny, tmp_path):
    """Weights stored in float16 with masters, sharded over 4 ranks, then 2, after overflows and growth."""
    base = ["model.params_dtype=float16", "model.compute_dtype=float16", "training.global_batch_size=8"]
    base += ["training.loss_scale={init: 8388608, growth_interval: 2}", "training.local_batch_size=1"]
    base += ["lr_scheduler.type=constant", "lr_scheduler.warmup_steps=0", "checkpoint.save_interleaved_steps=9"]
    four, two = (tiny(*base, "training.steps=10", f"output_dir={tmp_path / name}") for name in ("four", "two"))
    run(four, 4)
    run(two, 2, str(tmp_path / "four" / "checkpoints" / "step-00000009"))
    for name in ("loss", "grad_norm"):
        assert rows_of(two, name)[0] == pytest.approx(rows_of(four, name)[9], rel=1e-6)
    scales = rows_of(four, "loss_scale")
    assert rows_of(two, "loss_scale") == scales[9:] and len(set(scales)) > 3


def poisoned(config):
    """Two steps; in the second the loss of rank 1 is NaN. Returns what a skip must leave, before and after, and why."""
    world = join(timeout=30)
    data = load_data(config)
    mesh = Mesh(resolve_layout(config.parallelism, world.size), world, torch.device("cpu"))
    step = build_step(config, build_model(config, data.tokenizer.vocab_size, mesh), mesh, "once_per_step")
    order, sums = make_order(config, data), step.objective.sums
    for number in (1, 2):
        before = {name: local(t).clone() for name, t in step.updater.state().items()}
        before |= {name: local(p.detach()).clone() for name, p in step.model.named_parameters()}
        if number == 2 and world.rank == 1:
            step.objective.sums = lambda *a: {term: value * math.nan for term, value in sums(*a).items()}
        report = step(micro_batches(config, data.train, order.next(6 * number - 6), number, mesh))
    after = step.updater.state() | dict(step.model.named_parameters())
    return report.skipped, all(torch.equal(local(after[name].detach()), tensor) for name, tensor in before.items())


@pytest.mark.parametrize("shard", [1, -1])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(tiny, shard):
    config = tiny(f"parallelism.data_parallel_shard={shard}")
    assert run_ranks(poisoned, 2, config, timeout=60) == [("non-finite gradient norm", True)] * 2


def differing(config, field):
    world = join(timeout=30)
    if world.rank == 1:
        config = from_dict(json.loads(config.model_dump_json()), [field]).config
    Trainer(config)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("lr_scheduler.learning_rate=1e-3", "configuration"),
        ("evaluation.interval_steps=3", "configuration"),
        ("train_dataset.path=OTHER", "training data"),
    ],
)
def test_ranks_that_would_not_do_the_same_are_found(tiny, tmp_path, field, what):
    config = tiny("tokenizer.type=bpe", "tokenizer.vocab_size=100", "train_dataset.split=null")
    other = tmp_path / "other.txt"
    other.write_text("To be, or not to be. " * 200, encoding="utf-8")
    with pytest.raises(DataError, match=f"rank 1 has another {what} than rank 0"):
        run_ranks(differing, 2, config, field.replace("OTHER", str(other)))


# ---- failing and stopping together


class RaisesOnRankOne(Events):
    def on_step_end(self, trainer, report):
        if trainer.world.rank == 1 and trainer.state.step == 2:
            raise DataError("rank one has had enough")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shard", [1, -1])
def test_a_rank_that_raises_ends_the_run(tiny, shard):
    config = tiny(f"parallelism.data_parallel_shard={shard}")
    with pytest.raises(DataError, match="rank one has had enough"):
        run(config, 2, "none", [RaisesOnRankOne])


class SignalsRankOne(Events):
    def on_step_begin(self, trainer):
        if trainer.world.rank == 1 and trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_rank_stops_all_with_one_checkpoint(tiny):
    config = tiny()
    assert run(config, 2, "none", [SignalsRankOne]) == [(3, 3, True)] * 2
    assert os.listdir(os.path.join(config.output_dir, "checkpoints")) == ["step-00000003"]
    assert run(config, 2, "auto") == [(8, 8, False)] * 2
    assert rows_of(config, "step") == list(range(1, 9))


class StopsOnRankOne(Events):
    def on_step_end(self, trainer, report):
        self.should_stop = trainer.world.rank == 1 and trainer.state.step == 2


def test_a_listener_of_one_rank_stops_all(tiny):
    assert run(tiny(), 2, "none", [StopsOnRankOne]) == [(2, 2, False)] * 2


def mistake_of_the_first(config):
    join(timeout=30)
    Trainer(config)


def test_what_only_the_first_rank_looks_at_is_told_by_all(tiny):
    config = tiny("training.steps=2")
    train(config)
    with pytest.raises(ConfigError, match="already holds a run"):
        run_ranks(mistake_of_the_first, 2, config)


# ---- narrow dtypes on resume

NARROW = ["model.params_dtype=bfloat16", "model.compute_dtype=float16", "optimizer.state_dtype=bfloat16"]
NARROW += ["training.loss_scale={init: 1048576, growth_interval: 2}", "lr_scheduler.type=constant"]
NARROW += ["lr_scheduler.warmup_steps=0", "lr_scheduler.learning_rate=1e-3", "training.global_batch_size=8"]
NARROW += ["training.local_batch_size=1", "checkpoint.save_interleaved_steps=6"]
TIMES = {"step_seconds", "data_seconds", "eval_seconds", "tokens_per_second", "targets_per_second", "ranks"}
TIMES |= {"peak_memory_bytes"}


def untimed_rows(config) -> list[dict]:
    with open(os.path.join(config.output_dir, "metrics.jsonl"), encoding="utf-8") as file:
        return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in file]


def kept_scale(config) -> dict:
    return checkpoint.open_checkpoint(checkpoint.newest(Path(config.output_dir) / "checkpoints")[0]).state["loss_scale"]


@pytest.mark.parametrize("shard", [1, 2])
def test_narrow_dtypes_go_on_to_the_same_bits(tiny, tmp_path, shard):
    """Weights in bfloat16 with masters, products in float16 with a scale, moments in bfloat16: resumed on 2 ranks, they
    are those of a run of 2 ranks that was not interrupted."""
    base = [*NARROW, f"parallelism.data_parallel_shard={shard}", "training.steps=9"]
    whole, again = (tiny(*base, f"output_dir={tmp_path / name}") for name in ("whole", "again"))
    run(whole, 2)
    run(again, 2, str(tmp_path / "whole" / "checkpoints" / "step-00000006"))
    rows = untimed_rows(whole)
    scales = [row["loss_scale"] for row in rows if "loss_scale" in row]
    assert len(scales) == 9 and len(set(scales[:6])) > 1 and len(set(scales[5:])) > 1
    assert untimed_rows(again) == [row for row in rows if row["step"] > 6]
    assert kept_scale(again) == kept_scale(whole)
    found, wanted = stored_tensors(again), stored_tensors(whole)
    assert found.keys() == wanted.keys()
    assert {tensor.dtype for tensor in wanted.values()} >= {torch.float32, torch.bfloat16}
    assert [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])] == []


def test_narrow_dtypes_go_on_with_fewer_shards(tiny, tmp_path):
    """4 ranks, then 2: all is as on 4 ranks all along, but for the order of sums. The random bits of the moments go by
    the place in the whole tensor, so that only a sum at the very edge of a rounding comes out otherwise."""
    four, two = (tiny(*NARROW, "training.steps=10", f"output_dir={tmp_path / name}") for name in ("four", "two"))
    run(four, 4)
    run(two, 2, str(tmp_path / "four" / "checkpoints" / "step-00000006"))
    assert rows_of(two, "skipped").count(False) >= 2
    found, wanted = stored_tensors(two), stored_tensors(four)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor.dtype == torch.bfloat16:
            assert (found[name] == tensor).double().mean() > 0.999, name
        else:
            assert (found[name] - tensor).norm() <= 1e-6 * tensor.norm(), name
