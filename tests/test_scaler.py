"""The loss scale of float16: PyTorch's rules, gradients that neither vanish nor keep the scale, and overflow."""

import json
import math
from pathlib import Path

import pytest
import torch
from test_parallel import DOUBLE, rows_of, stored_tensors
from test_step import Setting, masked, plain_gradients, poison
from torch import nn

from samestep.config.schema import LossScaleConfig
from samestep.errors import ConfigError, TrainingError
from samestep.run.report import read_run
from samestep.run.trainer import Events, Trainer
from samestep.step.scaler import LossScaler
from samestep.step.step import NO_TARGETS, NON_FINITE, OVERFLOW

HALF = "model.compute_dtype=float16"


def copied_to(seen):
    return lambda gradients: seen.update({name: gradient.clone() for name, gradient in gradients.items()})


def test_the_rules_are_those_of_grad_scaler():
    config = LossScaleConfig(init=64.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2, min_scale=2.0**-9)
    ours = LossScaler(config)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for number, finite in enumerate([1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1]):
        theirs.scale(weight * (1.0 if finite else math.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.update(bool(finite)) is not bool(finite)
        assert (ours.scale, ours.good_steps) == (theirs.get_scale(), theirs.state_dict()["_growth_tracker"]), number
        again = LossScaler(config)
        again.load_state(json.loads(json.dumps(ours.state())))
        ours = again


def test_bounds_of_the_scale():
    scaler = LossScaler(LossScaleConfig(init=4.0, growth_interval=1))
    assert [(scaler.update(False), scaler.scale) for _ in range(3)] == [(True, 2.0), (True, 1.0), (False, 1.0)]
    scaler = LossScaler(LossScaleConfig(init=2.0**127, growth_interval=1))
    assert (scaler.update(True), scaler.scale) == (False, 2.0**127)  # no more in float32
    scaler = LossScaler(LossScaleConfig.model_validate(64))
    scaler.load_state({"scale": 5.0, "good_steps": 7})
    assert (scaler.update(False), scaler.update(True), scaler.state()) == (False, False, {"scale": 64, "good_steps": 0})


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Muon"])
def test_a_power_of_two_changes_no_bit_of_a_float32_step(tiny, kind):
    """Norm, clipping and update are without the scale, whether somebody looks at the gradients or not."""
    found = []
    for scale, looks in ((None, False), (2.0**12, False), (2.0**12, True)):
        setting = Setting(tiny(f"optimizer.type={kind}", "training.max_norm=0.5", "lr_scheduler.warmup_steps=0"))
        setting.step.scaler = scale and LossScaler(LossScaleConfig(fixed=scale))
        seen = {}
        look = copied_to(seen) if looks else None
        reports = [setting.step(setting.batches(number), on_gradients=look) for number in (1, 2)]
        assert all(report.clip_coefficient < 1 and report.loss_scale == scale for report in reports)
        if looks:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in seen.values()))
            assert reports[-1].grad_norm == pytest.approx(norm, rel=1e-6)
        found.append(([(r.loss, r.grad_norm, r.clip_coefficient) for r in reports], setting.bits()))
    for reports, bits in found[1:]:
        assert reports == found[0][0]
        assert all(torch.equal(bits[name], tensor) for name, tensor in found[0][1].items())


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_scaled_gradients_do_not_vanish(tiny, storage):
    """Against float64. A scale far too small stands for a loss over very many targets."""
    truth = Setting(tiny(*DOUBLE))
    batches = truth.batches()
    wanted = plain_gradients(truth.model, batches, sum(batch.targets for batch in batches))
    for scale, least, most in ((2.0**-14, 0.2, 2.0), (65536.0, 0.0, 0.01)):
        setting = Setting(tiny(HALF, f"model.params_dtype={storage}", f"training.loss_scale={scale}"))
        seen = {}
        assert setting.step(batches, on_gradients=copied_to(seen)).loss_scale == scale
        errors = [float((seen[name] - g).norm() / g.norm()) for name, g in wanted.items()]
        assert least < max(errors) < most, (scale, errors)


@pytest.mark.parametrize("settings", [(), ("model.params_dtype=float16", "optimizer.type=Lion")])
def test_an_overflow_changes_no_bit_and_lowers_the_scale(tiny, settings):
    scale = f"training.loss_scale={{init: {2**40}, backoff_factor: {2.0**-26}}}"
    setting = Setting(tiny(HALF, *settings, scale))
    before = setting.bits()
    report = setting.step(setting.batches(1))
    assert (report.skipped, report.loss_scale, setting.step.loss_scale) == (OVERFLOW, 2.0**40, 2.0**14)
    assert math.isfinite(report.loss) and not math.isfinite(report.grad_norm)
    assert all(torch.equal(before[name], tensor) for name, tensor in setting.bits().items())
    assert setting.step.updater.updates == 0
    empty = setting.step([masked(batch, 0) for batch in setting.batches(2)])
    assert (empty.skipped, setting.step.scaler.state()) == (NO_TARGETS, {"scale": 2.0**14, "good_steps": 0})
    assert setting.step(setting.batches(3)).skipped is None
    assert (setting.step.updater.updates, setting.step.scaler.good_steps) == (1, 1)


def test_what_is_not_finite_at_the_lowest_scale_is_no_overflow(tiny):
    for scale in ("4", "{init: 4, min_scale: 2}"):
        setting = Setting(tiny(HALF, f"training.loss_scale={scale}"))
        poison(setting, math.nan)
        assert setting.step(setting.batches(1)).skipped == (NON_FINITE if scale == "4" else OVERFLOW)
        assert setting.step(setting.batches(2)).skipped == NON_FINITE


# ---- runs


def events_of(config, kind):
    rows = map(json.loads, (Path(config.output_dir) / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == kind]


class Spoils(Events):
    """Makes some steps of a run be skipped."""

    def __init__(self, steps):
        self.steps = steps

    def on_gradients(self, trainer, gradients):
        if trainer.state.step in self.steps:
            gradients["norm.weight"].fill_(math.nan)


def test_a_run_finds_its_scale_and_ends_where_float32_does(tiny, tmp_path):
    base = ("training.steps=40", "lr_scheduler.learning_rate=3e-3", "training.max_consecutive_skipped_steps=2")
    scale = "training.loss_scale={init: 1073741824, growth_interval: 6}"
    half = tiny(*base, HALF, scale, f"output_dir={tmp_path / 'half'}")
    Trainer(half).train()
    skips = events_of(half, "skipped_step")
    assert len(skips) > 8 and {row["reason"] for row in skips} == {OVERFLOW}
    assert {row["consecutive"] for row in skips} == {0}
    assert all(row["next_loss_scale"] == row["loss_scale"] / 2 for row in skips)
    growths = events_of(half, "loss_scale")
    assert growths and all(row["after"] == 2 * row["before"] for row in growths)
    scales = rows_of(half, "loss_scale")
    assert scales[:2] == [2.0**30, 2.0**29] and len(scales) == 40
    assert read_run(tmp_path / "half", "half").columns["loss_scale"].tolist() == scales
    single = tiny("training.steps=40", "lr_scheduler.learning_rate=3e-3", f"output_dir={tmp_path / 'single'}")
    Trainer(single, listeners=[Spoils({row["step"] for row in skips})]).train()
    assert rows_of(half, "eval_loss")[-1] == pytest.approx(rows_of(single, "eval_loss")[-1], rel=0.005)
    assert "loss_scale" not in (tmp_path / "single" / "metrics.jsonl").read_text()


def test_a_run_that_is_lost_ends(tiny):
    class Breaks(Events):
        def on_step_begin(self, trainer):
            with torch.no_grad():
                trainer.model.norm.weight.fill_(math.nan)

    config = tiny(
        HALF, "training.steps=30", "training.max_consecutive_skipped_steps=2", "training.loss_scale={init: 8}"
    )
    with pytest.raises(TrainingError, match="2 steps in a row were skipped"):
        Trainer(config, listeners=[Breaks()]).train()
    assert [row["reason"] for row in events_of(config, "skipped_step")] == [OVERFLOW] * 3 + [NON_FINITE] * 2


def test_a_resumed_run_has_the_same_scale_and_the_same_bits(tiny, tmp_path):
    scale = "training.loss_scale={init: 134217728, growth_interval: 3}"
    base = (
        HALF,
        "model.params_dtype=float16",
        scale,
        "lr_scheduler.type=constant",
        "monitor.train_state.local_norm=norm",
    )
    whole = tiny(*base, "training.steps=14", f"output_dir={tmp_path / 'whole'}")
    Trainer(whole).train()
    for steps in (5, 11, 14):
        part = tiny(*base, f"training.steps={steps}", f"output_dir={tmp_path / 'part'}")
        Trainer(part, resume="auto").train()
    for name in ("loss", "grad_norm", "loss_scale", "skipped", "local_norm"):
        assert rows_of(part, name) == rows_of(whole, name), name
    assert len(set(rows_of(whole, "loss_scale"))) > 3
    found, wanted = stored_tensors(part), stored_tensors(whole)
    assert found.keys() == wanted.keys() and any(name.startswith("optimizer.master.") for name in found)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


# ---- configuration


@pytest.mark.parametrize(
    ("settings", "field", "text"),
    [
        (["training.loss_scale=64"], "training.loss_scale", "no dtype of the model is float16"),
        ([HALF, "training.loss_scale=1000"], "training.loss_scale.fixed", "write 1024"),
        ([HALF, "training.exact=true"], "training.exact", "write false, or bfloat16"),
        ([HALF, "training.loss_scale={fixed: 8, init: 4}"], "training.loss_scale.init", "no effect on a fixed scale"),
        ([HALF, "training.loss_scale.init=0.5"], "training.loss_scale.init", "below min_scale"),
        ([HALF, "training.loss_scale=-1"], "training.loss_scale", "-1 is no scale"),
        ([HALF, "training.loss_scale.growth_factor=1"], "training.loss_scale.growth_factor", "> 1"),
    ],
)
def test_scales_that_make_no_sense(tiny, settings, field, text):
    with pytest.raises(ConfigError) as caught:
        tiny(*settings)
    assert field in str(caught.value) and text in str(caught.value)
