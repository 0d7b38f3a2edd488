"""Warnings of what goes wrong without an error, each with a fault that is made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.run.trainer import Trainer
from samestep.run.watch import WINDOW, LossSpikes, _fingerprint, _sample


def findings(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


FEW = ("training.steps=5", "monitor.watch_steps=4", "checkpoint.enable_save=false", "train_dataset.split=null",
       "model.num_hidden_layers=1", "lr_scheduler.type=constant", "lr_scheduler.warmup_steps=0")  # fmt: skip

# ---- weights that stand still


def test_weights_without_a_gradient_are_named(tiny, tmp_path):
    name = "layers.0.mlp.down_proj.weight"
    trainer = Trainer(tiny(*FEW, "optimizer.weight_decay=0"))
    trainer.model.get_parameter(name).register_hook(torch.zeros_like)
    # Of the embedding only the rows of tokens that occur get a gradient, which is enough.
    trainer.model.embed_tokens.weight.register_hook(lambda g: g * (torch.arange(len(g)) == 43)[:, None])
    trainer.train()
    (event,) = findings(tmp_path / "run", "still_weights")
    assert (event["step"], event["parameters"], event["count"], event["reason"]) == (4, [name], 1, "gradient")


@pytest.mark.parametrize("masters", ["float32", "none"])
def test_updates_below_the_resolution_are_found_where_nothing_keeps_them(masters, tiny, tmp_path):
    """AdamW moves each weight by about the learning rate: 1e-3 is under half of bfloat16's spacing at 1, 2^-8 downward,
    so a norm weight of 1 stands still, while weights of about 0.02 move."""
    low = ("model.params_dtype=bfloat16", f"optimizer.master_weights={masters}", "lr_scheduler.learning_rate=1e-3")
    trainer = Trainer(tiny(*FEW, *low))
    trainer.train()
    found = findings(tmp_path / "run", "still_weights")
    if masters == "float32":
        assert not found
    else:
        (event,) = found
        ones = [name for name, p in trainer.model.named_parameters() if p.ndim == 1]
        assert all(bool((trainer.model.get_parameter(name) == 1).all()) for name in ones)
        assert (event["parameters"], event["reason"]) == (ones, "resolution")
        assert "optimizer.master_weights: float32" in event["message"]


def test_a_learning_rate_of_0_is_called_so(tiny, tmp_path):
    trainer = Trainer(tiny(*FEW))
    trainer.step.updater.schedule = lambda updates: 0.0
    trainer.train()
    (event,) = findings(tmp_path / "run", "still_weights")
    assert event["reason"] == "learning rate"
    assert event["count"] == len(list(trainer.model.parameters())) > len(event["parameters"]) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_changes_with_any_bit(dtype):
    draw = torch.Generator().manual_seed(0)
    part = torch.randn(70, 50, generator=draw).to(dtype)
    kept = part.clone()
    before, sample = _fingerprint(part), _sample(part)
    assert torch.equal(part, kept)
    unsampled = 0
    for place in range(0, 3500, 7):
        other = part.clone()
        bits = other.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        bits[place] ^= 1 << (place % (8 * dtype.itemsize - 1))
        assert _fingerprint(other) != before
        unsampled += bool((_sample(other) == sample).all())
    assert unsampled > 100


# ---- numbers that are not finite


@pytest.mark.parametrize("name", ["layers.0.self_attn.k_proj", "layers.0.mlp", "embed_tokens", "loss_head", None])
def test_the_first_module_that_is_not_finite_is_named(name, tiny, tmp_path):
    trainer = Trainer(tiny(*FEW, "monitor.check_finite=true", "training.steps=2"))

    def spoil(module, inputs, result):
        """From the second step on."""
        if trainer.state.step < 2:
            return result
        first, *rest = result if isinstance(result, tuple) else (result,)
        return (first * math.nan, *rest) if rest else first * math.nan

    if name == "embed_tokens":
        rows = trainer.model._rows
        trainer.model._rows = lambda table, ids: spoil(None, (), rows(table, ids))
    elif name is None:
        trainer.model.norm.weight.register_hook(lambda g: g * math.inf)
    else:
        trainer.model.get_submodule(name).register_forward_hook(spoil)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()} if name is None else None
    trainer.train()
    event = findings(tmp_path / "run", "non_finite")[-1]
    assert event["module"] == name
    if name is None:
        assert "backward" in event["message"]
        assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    else:
        assert (event["step"], event["micro_batch"], event["rank"]) == (2, 0, 0)
    assert not any(m._forward_pre_hooks for m in trainer.model.modules())


def test_nothing_is_run_again_unless_asked(tiny, tmp_path):
    trainer = Trainer(tiny(*FEW))
    trainer.model.norm.weight.register_hook(lambda g: g * math.nan)
    trainer.train()
    assert len(findings(tmp_path / "run", "skipped_step")) == 5
    assert not findings(tmp_path / "run", "non_finite")


# ---- losses that jump


def series(seed: int) -> np.ndarray:
    """400 losses of a run that learns, with ordinary noise."""
    steps = np.arange(400)
    return 3 + 4 * np.exp(-steps / 60) + 0.1 * np.random.default_rng(seed).standard_normal(400)


def spikes(losses: np.ndarray, zscore: float = 6.0) -> dict[int, float]:
    watch = LossSpikes(zscore)
    found = {step: watch.add(step, float(loss)) for step, loss in enumerate(losses)}
    return {step: z for step, z in found.items() if z is not None}


def test_ordinary_noise_is_no_spike():
    for seed in range(20):
        assert not spikes(series(seed))


def test_one_spike_is_found_and_measured():
    losses = series(0)
    losses[[200, 210, 249]] += 2
    losses[[120, 205]] = np.nan
    window = losses[:200][~np.isnan(losses[:200])][-WINDOW:]
    spread = 1.4826 * np.median(abs(window - np.median(window)))
    assert spikes(losses) == {200: pytest.approx((losses[200] - np.median(window)) / spread)}
    losses[250] += 2
    assert list(spikes(losses)) == [200, 250], "not before 50 steps have passed"
    assert not spikes(losses, zscore=1e3)


def test_a_run_without_spread_has_no_spikes():
    assert not spikes(np.array([*[1.0] * 60, 1.05, 1.0]))
    assert list(spikes(np.array([*[1.0] * 60, 1.07, 1.0]))) == [60]


def test_a_spike_in_a_run_is_told_with_advice(tiny, tmp_path):
    config = tiny("training.steps=53", "checkpoint.enable_save=false", "model.num_hidden_layers=1",
                  "train_dataset.split=null", "model.layernorm_compute_dtype=bfloat16", "model.seq_length=8",
                  "training.global_batch_size=2")  # fmt: skip
    trainer = Trainer(config)
    assert len(trainer.data.train) > 106
    sums = trainer.step.objective.sums

    def raised(model, batch):
        return {term: value * (4 if trainer.state.step == 52 else 1) for term, value in sums(model, batch).items()}

    trainer.step.objective.sums = raised
    trainer.train()
    (event,) = findings(tmp_path / "run", "loss_spike")
    assert event["step"] == 52
    assert event["samples"] == [102, 103], "two samples a step"
    assert "write model.layernorm_compute_dtype: float32" in event["message"]
