"""Learning-rate schedules against their closed forms, and against transformers and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import transformers
from pydantic import ValidationError

from samestep.config.kinds import REFUSED_SCHEDULES, SCHEDULE_NAMES
from samestep.config.load import from_dict
from samestep.config.optimization import SCHEDULE_FIELDS, LrSchedulerConfig
from samestep.errors import ConfigError
from samestep.plan import make_plan
from samestep.step.schedule import make_schedule

PEAK, END, START, WARMUP, TOTAL = 3e-3, 1e-4, 1e-5, 10, 110
POINTS = (0, 1, 5, 9, 10, 11, 35, 60, 85, 109, 110, 120)
FROM_END = {"learning_rate": PEAK, "lr_end": END}


def fall(part: float) -> float:
    """END + (PEAK - END) * part."""
    return END + (PEAK - END) * part


def held(t: int, begin: int, end: int) -> float:
    return min(max((t - begin) / (end - begin), 0.0), 1.0)


def cos(turns: float) -> float:
    """(1 + cos(2 pi turns)) / 2."""
    return (1 + math.cos(2 * math.pi * turns)) / 2


def sgdr(t: int) -> float:
    """Cycles of 20, 40, 80 updates."""
    for begin, length in ((10, 20), (30, 40), (70, 80)):
        if begin <= t < begin + length:
            return cos((t - begin) / length / 2)
    raise AssertionError(t)


CLOSED: list[tuple[dict, Callable[[int], float]]] = [
    ({"type": "constant", "learning_rate": PEAK}, lambda t: PEAK),
    ({"type": "linear", **FROM_END}, lambda t: fall(1 - held(t, 10, 110))),
    ({"type": "cosine", **FROM_END}, lambda t: fall(cos(held(t, 10, 110) / 2))),
    ({"type": "cosine", **FROM_END, "num_cycles": 1.25}, lambda t: fall(cos(1.25 * held(t, 10, 110)))),
    ({"type": "cosine", **FROM_END, "decay_steps": 60}, lambda t: fall(cos(held(t, 10, 60) / 2))),
    ({"type": "cosine", **FROM_END, "decay_ratio": 0.5}, lambda t: fall(cos(held(t, 10, 55) / 2))),
    (
        {"type": "cosine_with_restarts", **FROM_END, "num_cycles": 4},
        lambda t: fall(cos(4 * held(t, 10, 110) % 1 / 2) if t < 110 else 0.0),
    ),
    (
        {"type": "cosine_with_restarts", **FROM_END, "num_cycles": 1.5, "decay_steps": 85},
        lambda t: fall(cos(1.5 * held(t, 10, 85) % 1 / 2)),
    ),
    ({"type": "polynomial", **FROM_END, "power": 2.5}, lambda t: fall((1 - held(t, 10, 110)) ** 2.5)),
    ({"type": "polynomial", **FROM_END, "decay_steps": 50}, lambda t: fall(1 - held(t, 10, 60))),
    ({"type": "wsd", **FROM_END}, lambda t: fall(1 - held(t, 99, 110))),
    ({"type": "wsd", **FROM_END, "decay_steps": 75}, lambda t: fall(1 - held(t, 35, 110))),
    ({"type": "wsd", **FROM_END, "decay_start_ratio": 0.5}, lambda t: fall(1 - held(t, 55, 110))),
    (
        {"type": "wsd", **FROM_END, "decay_start_steps": 30, "decay_type": "cosine"},
        lambda t: fall(cos(held(t, 30, 110) / 2)),
    ),
    (
        {"type": "wsd", **FROM_END, "decay_ratio": 0.5, "decay_type": "1-sqrt"},
        lambda t: fall(1 - math.sqrt(held(t, 55, 110))),
    ),
    ({"type": "inverse_sqrt", "learning_rate": PEAK}, lambda t: PEAK * math.sqrt(10 / t)),
    ({"type": "inverse_sqrt", "learning_rate": PEAK, "timescale": 50}, lambda t: PEAK * math.sqrt(50 / (t + 40))),
    ({"type": "cosine_annealing", "base_lr": PEAK, "eta_min": END, "t_max": 50}, lambda t: fall(cos((t - 10) / 100))),
    (
        {"type": "cosine_annealing_warm_restarts", "base_lr": PEAK, "eta_min": END, "t_0": 20, "t_mult": 2},
        lambda t: fall(sgdr(t)),
    ),
    (
        {"type": "cosine_annealing_warm_restarts", **FROM_END, "t_0": 20},
        lambda t: fall(cos((t - 10) % 20 / 40)),
    ),
    (
        {"type": "constant_with_cooldown", "learning_rate": PEAK, "lr_end1": END, "keep_steps": 25, "decay_steps": 25},
        lambda t: fall(cos(held(t, 35, 60) / 2)),
    ),
    (
        {
            "type": "constant_with_cooldown",
            **FROM_END,
            "keep_steps": 25,
            "decay_steps": 25,
            "final_steps": 25,
            "lr_end2": END / 4,
        },
        lambda t: fall(cos(held(t, 35, 60) / 2)) if t < 85 else END / 4,
    ),
    (
        {"type": "constant_with_cooldown", **FROM_END, "final_steps": 25, "num_cycles": 1.5},
        lambda t: fall(cos(1.5 * held(t, 10, 85))),
    ),
]


@pytest.mark.parametrize(
    ("fields", "after"), CLOSED, ids=lambda value: value["type"] if isinstance(value, dict) else ""
)
def test_closed_form(fields: dict, after: Callable[[int], float]):
    config = LrSchedulerConfig.model_validate({**fields, "warmup_lr_init": START, "warmup_steps": WARMUP})
    rate = make_schedule(config, TOTAL)
    for t in POINTS:
        truth = START + (PEAK - START) * t / WARMUP if t < WARMUP else after(t)
        assert rate(t) == pytest.approx(truth, rel=1e-12, abs=1e-18), t
    assert all(0 <= rate(t) <= PEAK for t in range(3 * TOTAL))


@pytest.mark.parametrize(
    ("fields", "after"), CLOSED, ids=lambda value: value["type"] if isinstance(value, dict) else ""
)
def test_without_warm_up_and_at_extreme_lengths(fields: dict, after: Callable[[int], float]):
    config = LrSchedulerConfig.model_validate(fields)
    for total in (1, 2, 3, 110):
        rate = make_schedule(config, total)
        assert all(math.isfinite(rate(t)) and 0 <= rate(t) <= PEAK * (1 + 1e-15) for t in range(400))
    assert rate(0) == pytest.approx(PEAK, rel=1e-12)
    whole = make_schedule(config.model_copy(update={"warmup_ratio": 1.0}), 10)
    assert [whole(0), whole(5)] == [0.0, PEAK / 2]
    assert math.isfinite(whole(9)) and 0 <= whole(10) <= PEAK


@pytest.mark.parametrize("kind", ["linear", "cosine", "cosine_with_restarts", "polynomial", "wsd"])
@pytest.mark.parametrize("extra", [{}, {"warmup_steps": 7}])
def test_no_jump_at_the_end(kind: str, extra: dict):
    """The last update is one step of the curve away from what comes after it, and that never changes again."""
    config = LrSchedulerConfig(type=kind, learning_rate=1.0, lr_end=0.1, **extra)
    rate = make_schedule(config, 1000)
    assert abs(rate(1000) - rate(999)) <= 0.01
    assert {rate(t) for t in range(1000, 1100)} == {rate(1000)}
    assert rate(1000) == pytest.approx(0.1)


def torch_rates(scheduler: torch.optim.lr_scheduler.LRScheduler, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("constant", {}, {}),
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr": END}, {"min_lr": END}),
        ("polynomial", {"power": 2.0}, {"power": 2.0}),
        ("inverse_sqrt", {}, {}),
        ("warmup_stable_decay", {"decay_steps": 30, "lr_end": 0}, {"num_decay_steps": 30, "decay_type": "linear"}),
        (
            "warmup_stable_decay",
            {"decay_steps": 30, "lr_end": 0, "decay_type": "1-sqrt"},
            {"num_decay_steps": 30, "decay_type": "1-sqrt"},
        ),
    ],
)
@pytest.mark.parametrize("warmup", [0, 10])
def test_against_transformers(name: str, ours: dict, theirs: dict, warmup: int):
    config = LrSchedulerConfig.model_validate({"type": name, "learning_rate": PEAK, "warmup_steps": warmup, **ours})
    rate = make_schedule(config, TOTAL)
    steps = 0 if name == "constant" else warmup
    reference = transformers.get_scheduler(name, optimizer(), steps, TOTAL, scheduler_specific_kwargs=theirs)
    found = [rate(t) if name != "constant" or t >= warmup else PEAK for t in range(TOTAL)]
    assert found == pytest.approx(torch_rates(reference, TOTAL), rel=1e-9, abs=1e-15)


def test_against_torch():
    config = LrSchedulerConfig(type="cosine_annealing_warm_restarts", t_0=7, t_mult=2, **FROM_END)
    reference = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer(), T_0=7, T_mult=2, eta_min=END)
    rate = make_schedule(config, TOTAL)
    assert [rate(t) for t in range(200)] == pytest.approx(torch_rates(reference, 200), rel=1e-9)
    config = LrSchedulerConfig(type="cosine_annealing", t_max=40, **FROM_END)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer(), T_max=40, eta_min=END)
    rate = make_schedule(config, TOTAL)
    assert [rate(t) for t in range(200)] == pytest.approx(torch_rates(reference, 200), rel=1e-6)


def test_every_name_leads_to_a_schedule():
    assert set(SCHEDULE_NAMES.values()) <= set(SCHEDULE_FIELDS)
    for name, kind in SCHEDULE_NAMES.items():
        needed = {"t_0": 5} if kind == "cosine_annealing_warm_restarts" else {}
        assert LrSchedulerConfig.model_validate({"type": name, **needed}).type == kind
    assert {config[0]["type"] for config in CLOSED} == set(SCHEDULE_FIELDS)


def test_small_peaks_keep_the_end_below():
    for kind in ("polynomial", "wsd"):
        rate = make_schedule(LrSchedulerConfig(type=kind, learning_rate=1e-8), 10)
        assert {rate(t) for t in range(20)} == {1e-8}


def refusal(steps: int = 100, **fields: object) -> ConfigError:
    data = {
        "train_dataset": {"path": "a.txt"},
        "training": {"steps": steps},
        "lr_scheduler": fields,
        "model": {
            "seq_length": 8,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 20,
        },
    }
    with pytest.raises(ConfigError) as caught:
        make_plan(from_dict(data).config)
    return caught.value


@pytest.mark.parametrize("kind", sorted(SCHEDULE_FIELDS))
def test_fields_without_effect_are_refused(kind: str):
    values = {"lr_end": 1e-6, "lr_end2": 1e-6, "power": 2.0, "num_cycles": 0.5, "decay_type": "cosine"}
    ratios = {"decay_ratio": 0.5, "decay_start_ratio": 0.5}
    everything = {name for fields in SCHEDULE_FIELDS.values() for name in fields}
    needed = {"t_0": 5} if kind == "cosine_annealing_warm_restarts" else {}
    for name in everything - set(SCHEDULE_FIELDS[kind]):
        error = refusal(type=kind, **needed, **{name: (values | ratios).get(name, 7)})
        assert error.field == f"lr_scheduler.{name}" and "no effect" in error.reason
        assert all(f"`{own}`" in (error.fix or "") for own in SCHEDULE_FIELDS[kind])
    for name in SCHEDULE_FIELDS[kind]:
        LrSchedulerConfig.model_validate({"type": kind, **needed, name: (values | ratios).get(name, 7)})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"type": "cosine", "lr_end": 1.0}, "lr_end"),
        ({"type": "cosine", "warmup_steps": 5, "warmup_lr_init": 1.0}, "warmup_lr_init"),
        ({"type": "constant_with_cooldown", "lr_end2": 1.0}, "lr_end2"),
        ({"type": "cosine", "warmup_steps": 50, "decay_steps": 50}, "decay_steps"),
        ({"type": "wsd", "warmup_steps": 50, "decay_start_steps": 49}, "decay_start_steps"),
        ({"type": "wsd", "decay_start_steps": 100}, "decay_start_steps"),
        ({"type": "wsd", "decay_ratio": 0.0}, "decay_ratio"),
        ({"type": "wsd", "decay_steps": 101}, "decay_steps"),
        ({"type": "constant_with_cooldown", "keep_steps": 100}, "keep_steps"),
        ({"type": "constant_with_cooldown", "num_cycles": 1.0}, "num_cycles"),
        ({"type": "wsd", "decay_steps": 5, "decay_start_ratio": 0.9}, "decay_start_steps"),
        ({"type": "cosine_annealing_warm_restarts"}, "t_0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields: dict, field: str):
    error = refusal(**fields)
    assert error.field == f"lr_scheduler.{field}" and error.fix


@pytest.mark.parametrize("name", sorted(REFUSED_SCHEDULES))
def test_refused_schedules_say_why(name: str):
    with pytest.raises(ValidationError, match=REFUSED_SCHEDULES[name].partition(",")[0]):
        LrSchedulerConfig.model_validate({"type": name})
    assert name in str(refusal(type=name))
