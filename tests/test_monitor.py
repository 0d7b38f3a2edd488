"""Steering and watching a run: its length, the best checkpoint, listeners, extra numbers, traces, loggers."""

import gzip
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from samestep.config.load import dump, from_dict, load
from samestep.config.schema import Config, TrainingConfig
from samestep.data.dataset import data_facts, load_data
from samestep.errors import ConfigError
from samestep.length import DataFacts, run_length
from samestep.model.init import initialize
from samestep.parallel.mesh import Mesh
from samestep.plan import make_plan
from samestep.run import checkpoint
from samestep.run.generate import generate
from samestep.run.monitor import chosen
from samestep.run.setup import build_model
from samestep.run.trainer import Events, Trainer


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict]:
    return [row for row in rows(folder) if "loss" in row]


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


# ---- length of the run

DOCUMENTS = (
    "train_dataset.rows=documents",
    'train_dataset.document_separator="\\n\\n"',
    "train_dataset.split=null",
    "lr_scheduler.warmup_steps=0",
    "training.steps=null",
)


@pytest.mark.parametrize("remainder", ["use", "drop"])
@pytest.mark.parametrize("last_batch", ["use", "drop"])
@pytest.mark.parametrize(("epochs", "tokens"), [(1, None), (2.5, None), (0.1, None), (None, 5000), (None, 1)])
def test_a_run_is_as_long_as_asked(remainder, last_batch, epochs, tokens, tiny):
    config = tiny(*DOCUMENTS, f"training.remainder={remainder}", f"training.last_batch={last_batch}",
                  "training.global_batch_size=20", "training.local_batch_size=3", "model.num_hidden_layers=1",
                  f"training.epochs={epochs or 'null'}",
                  f"training.tokens={tokens or 'null'}", "checkpoint.enable_save=false")  # fmt: skip
    trainer = Trainer(config)
    count = len(trainer.data.train)
    trainer.train()
    taken = steps(Path(config.output_dir))
    assert len(taken) == trainer.plan.steps
    if tokens:
        reached = np.cumsum([row["tokens"] for row in taken])
        assert reached[-1] >= tokens
        assert len(taken) == 1 or reached[-2] < tokens
    else:
        full, short = divmod(count, 20)
        short = short if last_batch == "use" else 0
        a_step = short >= 3 if remainder == "drop" else short > 0
        assert len(taken) == math.ceil(epochs * (full + a_step) - 1e-9)
    assert taken[-1]["lr"] > 0  # the schedule ends with the run, not before


def test_exact_fractions_of_epochs():
    facts = DataFacts(30, 300, 300, (10,), (10,), 5)
    for epochs, wanted in ((0.1, 3), (0.7, 21), (1.1, 33), (1e-9, 1)):
        assert run_length(TrainingConfig(epochs=epochs), 1, facts) == wanted


def test_tokens_need_known_data(tiny):
    with pytest.raises(ConfigError, match="can be counted only in known data"):
        make_plan(tiny("training.steps=null", "training.tokens=9", "model.vocab_size=60"), 1, None)


def test_only_one_length(tiny):
    with pytest.raises(ConfigError, match="given 2 times: steps, epochs") as caught:
        tiny("training.epochs=2")
    assert caught.value.field == "training.epochs"
    assert tiny("training.steps=null").training.steps == 1000
    assert TrainingConfig(tokens=7).steps is None


def test_a_resolved_file_with_epochs_loads_again(tiny, tmp_path):
    config = tiny("training.steps=null", "training.epochs=0.5")
    (tmp_path / "resolved.yaml").write_text(dump(config))
    assert load(tmp_path / "resolved.yaml").config == config
    plan = make_plan(config, 1, data_facts(config, load_data(config)))
    assert plan.epochs == pytest.approx(0.5, abs=0.5 / plan.steps_per_epoch)


def test_a_run_of_epochs_resumes_to_the_same_rows(tiny, tmp_path):
    class Stop(Events):
        def on_step_end(self, trainer, report):
            self.should_stop = trainer.state.step == 5

    length = ("training.steps=null", "training.epochs=0.3", "checkpoint.save_interleaved_steps=2")
    Trainer(tiny(*length)).train()
    wanted = [(row["step"], row["loss"], row["lr"]) for row in steps(tmp_path / "run")]
    other = from_dict(tiny(*length).model_dump(), [f"output_dir={tmp_path / 'stopped'}"]).config
    Trainer(other, listeners=[Stop()]).train()
    Trainer(other, resume="auto").train()
    assert [(row["step"], row["loss"], row["lr"]) for row in steps(tmp_path / "stopped")] == wanted


# ---- the best checkpoint


@pytest.fixture
def losses(monkeypatch):
    """`losses({2: 3.0})`: what the evaluations of a run find, by step."""

    def make(found: dict[int, float]) -> None:
        import samestep.run.trainer as module

        place = {}

        def measured(model, *_, **__):
            return found[place["trainer"].state.step], 10

        monkeypatch.setattr(module, "evaluate", measured)
        original = Trainer.train
        monkeypatch.setattr(Trainer, "train", lambda self: (place.update(trainer=self), original(self))[1])

    return make


BEST = ("checkpoint.keep_best=true", "evaluation.interval_steps=2", "checkpoint.save_max=1",
        "checkpoint.save_interleaved_steps=3")  # fmt: skip


def test_the_best_checkpoint_stays(tiny, tmp_path, losses):
    losses({2: 3.0, 4: 1.0, 6: math.nan, 8: 1.0})
    Trainer(tiny(*BEST)).train()
    root = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoint.complete_folders(root)] == ["step-00000004", "step-00000008"]
    best = json.loads((root / "best.json").read_text())
    assert best == {"step": 4, "eval_loss": 1.0, "checkpoint": "step-00000004"}
    assert [(row["step"], row["best"]) for row in events(tmp_path / "run", "checkpoint")] == [
        (2, True), (3, False), (4, True), (6, False), (8, False)
    ]  # fmt: skip


def test_a_resumed_run_remembers_the_best(tiny, tmp_path, losses):
    class Stop(Events):
        def on_step_end(self, trainer, report):
            self.should_stop = trainer.state.step == 5

    losses({2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5})
    Trainer(tiny(*BEST), listeners=[Stop()]).train()
    (tmp_path / "run" / "checkpoints" / "best.json").unlink()
    trainer = Trainer(tiny(*BEST), resume="auto")
    assert trainer.best == checkpoint.Best(4, 1.0)
    trainer.train()
    root = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoint.complete_folders(root)] == ["step-00000004", "step-00000008"]
    assert json.loads((root / "best.json").read_text())["step"] == 4


def test_going_back_forgets_what_was_better_later(tiny, tmp_path, losses):
    losses({2: 3.0, 4: 1.0, 6: 0.5, 8: 2.0})
    Trainer(tiny(*BEST, "checkpoint.save_max=9")).train()
    root = tmp_path / "run" / "checkpoints"
    assert json.loads((root / "best.json").read_text())["step"] == 6
    assert Trainer(tiny(*BEST), resume=str(root / "step-00000003")).best == checkpoint.Best(2, 3.0)
    assert json.loads((root / "best.json").read_text())["step"] == 2


def test_no_best_without_validation_or_checkpoints(tiny):
    with pytest.raises(ConfigError, match="no validation data"):
        Trainer(tiny("checkpoint.keep_best=true", "train_dataset.split=null"))
    with pytest.raises(ConfigError, match="without checkpoints"):
        tiny("checkpoint.keep_best=true", "checkpoint.enable_save=false")


# ---- listeners


def test_a_failing_listener_ends_the_run_with_its_name(tiny, tmp_path):
    class Careless(Events):
        def on_step_end(self, trainer, report):
            if trainer.state.step == 2:
                raise LookupError("nothing here")

    with pytest.raises(LookupError) as caught:
        Trainer(tiny(), listeners=[Careless()]).train()
    assert caught.value.__notes__ == ["raised by the listener Careless.on_step_end at step 2"]
    (event,) = events(tmp_path / "run", "listener_failed")
    assert (event["listener"], event["error"]) == ("Careless.on_step_end", "LookupError('nothing here')")
    assert len(steps(tmp_path / "run")) == 2


def test_flags_are_taken_once_even_where_the_step_was_due(tiny, tmp_path):
    class Save(Events):
        def on_step_end(self, trainer, report):
            if trainer.state.step == 2:
                self.should_save = self.should_evaluate = True

    Trainer(tiny("checkpoint.save_interleaved_steps=2", "evaluation.interval_steps=2"), listeners=[Save()]).train()
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [2, 4, 6, 8]
    assert [row["step"] for row in rows(tmp_path / "run") if "eval_loss" in row] == [2, 4, 6, 8]


def test_listeners_see_the_gradients_before_clipping(tiny, tmp_path):
    class Norm(Events):
        found: list[float] = []  # noqa: RUF012

        def on_gradients(self, trainer, gradients):
            self.found.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))

    Trainer(tiny("training.max_norm=0.01"), listeners=[Norm()]).train()
    assert Norm.found == pytest.approx([row["grad_norm"] for row in steps(tmp_path / "run")], rel=1e-6)


# ---- extra numbers


def truth(config: Config) -> tuple[list[float], list[dict[str, float]], dict[str, float], float]:
    """Of the first step: losses and norms of each micro-batch, norms and loss of the whole, by plain autograd."""
    trainer = Trainer(config)
    model = trainer.model
    batches = trainer._next_batches()
    targets = sum(batch.targets for batch in batches)
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    losses, shares, whole = [], [], 0.0
    for batch in batches:
        logits = model(batch).hidden @ model.loss_head.weight.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        gradients = torch.autograd.grad(loss / targets, list(parameters.values()))
        shares.append({name: float(g.double().norm()) for name, g in zip(parameters, gradients, strict=True)})
        for name, g in zip(parameters, gradients, strict=True):
            total[name] += g
        losses.append(loss.item() / batch.targets)
        whole += loss.item()
    return losses, shares, {name: float(g.double().norm()) for name, g in total.items()}, whole / targets


EXTRA = ("training.steps=1", "lr_scheduler.warmup_steps=0", "training.global_batch_size=5",
         "monitor.train_state.local_loss=true", "monitor.train_state.device_loss=true",
         "monitor.train_state.device_norm=true", "train_dataset.rows=documents",
         'train_dataset.document_separator="\\n\\n"', "train_dataset.split=null")  # fmt: skip


def test_monitor_numbers_equal_autograd(tiny, tmp_path):
    config = tiny(*EXTRA, "monitor.train_state.local_norm=true", f"output_dir={tmp_path / 'truth'}")
    losses, shares, total, whole = truth(config)
    Trainer(tiny(*EXTRA, "monitor.train_state.local_norm=true")).train()
    (row,) = steps(tmp_path / "run")
    assert len(losses) == 3
    assert row["local_loss"] == pytest.approx(losses, rel=1e-5)
    assert row["device_loss"] == pytest.approx(whole, rel=1e-5) == pytest.approx(row["loss"], rel=1e-6)
    assert row["device_norm"] == pytest.approx(total, rel=1e-4, abs=1e-7)
    assert row["local_norm"].keys() == total.keys()
    for name, norms in row["local_norm"].items():
        assert norms == pytest.approx([share[name] for share in shares], rel=1e-4, abs=1e-7)
    assert math.sqrt(sum(v**2 for v in row["device_norm"].values())) == pytest.approx(row["grad_norm"], rel=1e-6)


def test_local_norm_of_16_bit_weights_and_chosen_names(tiny, tmp_path):
    names = "monitor.train_state.local_norm=[layers.1.mlp, norm.weight]"
    Trainer(tiny("training.steps=2", names, "model.params_dtype=bfloat16")).train()
    found = [set(row["local_norm"]) for row in steps(tmp_path / "run")]
    assert found[0] == found[1]
    assert "layers.1.mlp.up_proj.weight" in found[0]
    assert "norm.weight" in found[0]
    assert not any("q_proj" in name or "layers.0.mlp" in name for name in found[0])
    assert all(len(norms) == 3 for norms in steps(tmp_path / "run")[0]["local_norm"].values())


def test_chosen():
    assert chosen(["a.b", "c"], True) == ["a.b", "c"]
    for nothing in (False, "", [], [""]):
        assert chosen(["a.b", "c"], nothing) == []
    assert chosen(["a.b", "c"], "b") == ["a.b"]
    assert chosen(["a.b", "c"], ["b", "c"]) == ["a.b", "c"]


def test_extra_numbers_change_no_step_and_stay_json(tiny, tmp_path):
    Trainer(tiny()).train()
    plain = steps(tmp_path / "run")
    config = tiny(*EXTRA[3:6], "monitor.train_state.local_norm=true", f"output_dir={tmp_path / 'watched'}")
    trainer = Trainer(config)
    trainer.model.layers["1"].mlp.down_proj.weight.register_hook(
        lambda g: g * math.nan if trainer.state.step == 8 else g
    )
    trainer.train()
    watched = steps(tmp_path / "watched")
    assert [row["loss"] for row in watched] == [row["loss"] for row in plain]
    assert "NaN" not in (tmp_path / "watched" / "metrics.jsonl").read_text()
    assert watched[7]["device_norm"]["layers.1.mlp.down_proj.weight"] is None


# ---- traces


def test_a_trace_parses_and_holds_the_steps(tiny, tmp_path):
    Trainer(
        tiny("profiler.enable_profiling=true", "profiler.start_step=2", "profiler.end_step=3", "training.steps=4",
             "profiler.profile_memory=true", "profiler.with_stack=false", "profiler.profiler_level=2")
    ).train()  # fmt: skip
    (file,) = (tmp_path / "run" / "profile").iterdir()
    assert file.name == "steps-2-3-rank-0.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in trace}
    assert {"step 2", "step 3", "[memory]"} <= names
    assert not {"step 1", "step 4"} & names
    assert any(name and name.startswith("aten::") for name in names)
    assert events(tmp_path / "run", "profile")[0]["path"] == str(file)


def test_a_run_that_ends_early_still_writes_its_trace(tiny, tmp_path):
    out = tmp_path / "traces"
    Trainer(tiny("profiler.enable_profiling=true", "profiler.start_step=7", "profiler.end_step=99",
                 "profiler.with_stack=false", f"profiler.output_path={out}")).train()  # fmt: skip
    assert [file.name for file in out.iterdir()] == ["steps-7-8-rank-0.json.gz"]


def test_nothing_is_recorded_when_off_or_on_another_rank(tiny, tmp_path):
    Trainer(tiny("profiler.enable_profiling=true", "profiler.profiler_rank=[1]", "training.steps=2")).train()
    assert not (tmp_path / "run" / "profile").exists()
    with pytest.raises(ConfigError, match="start_step 3 is after end_step 2"):
        tiny("profiler.start_step=3", "profiler.end_step=2")


# ---- loggers

WANDB = """
calls = []
class _Run:
    id = "run-7"
    def define_metric(self, *a, **k): pass
    def log(self, values):
        calls.append(values)
        if values["step"] == FAIL: raise OSError("no network")
    def finish(self): calls.append("finish")
FAIL = None
def init(**settings):
    calls.append(settings)
    return _Run()
"""
MLFLOW = """
calls = []
class _Found:
    experiment_id = "3"
    class info: run_id = "m-1"
class MlflowClient:
    def __init__(self, tracking_uri): calls.append(tracking_uri)
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): calls.append(name); return "3"
    def create_run(self, experiment, run_name): calls.append((experiment, run_name)); return _Found
    def log_dict(self, run, values, file): calls.append((run, file, values["training"]["steps"]))
    def log_batch(self, run, metrics): calls.append(metrics)
    def set_terminated(self, run): calls.append(("end", run))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`package("wandb", code)`: what `import wandb` finds; `package("wandb")`: nothing."""

    def make(name: str, code: str | None = None, **modules: str) -> None:
        for known in [key for key in sys.modules if key.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        if code is None:
            monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
            return
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(code)
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    return make


def test_wandb_gets_the_numbers_and_a_resumed_run_its_id(tiny, tmp_path, package):
    package("wandb", WANDB)
    on = ("monitor.wandb.enable=true", "monitor.wandb.mode=offline", "monitor.wandb.log_interval=4")
    Trainer(tiny(*on)).train()
    import wandb

    start, *points, end = wandb.calls
    assert (start["project"], start["name"], start["mode"], start["id"]) == ("samestep", "run", "offline", None)
    assert start["config"]["training"]["steps"] == 8
    wanted = [row["loss"] for row in steps(tmp_path / "run")]
    assert [(p["step"], p["train/loss"]) for p in points if "train/loss" in p] == [(4, wanted[3]), (8, wanted[7])]
    assert [p["step"] for p in points if "eval/loss" in p] == [8]
    assert end == "finish"
    wandb.calls.clear()
    Trainer(tiny(*on, "training.steps=9"), resume="auto").train()
    assert wandb.calls[0]["id"] == "run-7"


def test_a_service_that_fails_does_not_end_the_run(tiny, tmp_path, package):
    package("wandb", WANDB.replace("FAIL = None", "FAIL = 3"))
    assert Trainer(tiny("monitor.wandb.enable=true")).train().step == 8
    (warning,) = events(tmp_path / "run", "warning")
    assert warning["message"] == "WandbLogger gets no more numbers: OSError: no network"


def test_mlflow_gets_the_numbers(tiny, tmp_path, package):
    metric = "from collections import namedtuple\nMetric = namedtuple('Metric', 'key value timestamp step')"
    package("mlflow", MLFLOW, entities=metric)
    Trainer(tiny("monitor.mlflow.enable=true", "monitor.mlflow.tracking_uri=file:x", "monitor.mlflow.experiment=e",
                 "monitor.train_state.device_norm=true")).train()  # fmt: skip
    import mlflow

    assert mlflow.calls[:4] == ["file:x", "e", ("3", "run"), ("m-1", "config.json", 8)]
    points = [metric for batch in mlflow.calls[4:-1] for metric in batch]
    taken = steps(tmp_path / "run")
    assert [p.value for p in points if p.key == "train/loss"] == [row["loss"] for row in taken]
    norms = [p.value for p in points if p.key == "train/device_norm/norm.weight"]
    assert norms == [row["device_norm"]["norm.weight"] for row in taken]
    assert mlflow.calls[-1] == ("end", "m-1")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_slow(name, tiny, tmp_path, package):
    package(name)
    with pytest.raises(ConfigError, match=f"the package {name} is not installed") as caught:
        Trainer(tiny(f"monitor.{name}.enable=true"))
    assert f"samestep[{name}]" in str(caught.value)
    assert not (tmp_path / "run").exists()


# ---- generation


def test_rows_beyond_the_tokenizer_are_never_chosen(tiny):
    model = build_model(tiny("model.vocab_size=200"), 200, Mesh.alone())
    initialize(model, 1, 0.02)
    for temperature in (0.0, 50.0):
        free = list(generate(model, [1], max_new_tokens=60, temperature=temperature, seed=3))
        ids = list(generate(model, [1], max_new_tokens=60, temperature=temperature, seed=3, token_count=5))
        assert len(ids) == 60 and max(ids) < 5
        assert max(free) >= 5
