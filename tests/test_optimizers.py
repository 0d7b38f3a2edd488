"""Optimizers against their papers' recurrences in float64, exact resume, and a skip that changes no bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from samestep.config.optimization import OPTIMIZER_FIELDS, OptimizerConfig
from samestep.errors import CheckpointError
from samestep.step.optimizers import orthogonalize
from samestep.step.update import Updater
from samestep.verify import parity
from samestep.verify.layouts import parse_layouts

RATES = [0.02 * (1 + math.cos(0.3 * t)) for t in range(40)]
SHAPES = {
    "embed.weight": (7, 4),
    "wide.weight": (4, 6),
    "tall.weight": (6, 3),
    "experts": (2, 3, 4),
    "norm.weight": (5,),
}
MATRICES = ("wide.weight", "tall.weight", "experts")
DECAY = 0.1
SETTINGS: list[dict[str, Any]] = [
    {"type": "AdamW"},
    {"type": "AdamW", "betas": [0.8, 0.99], "eps": 1e-6},
    {"type": "SGD"},
    {"type": "SGD", "momentum": 0.9},
    {"type": "SGD", "momentum": 0.9, "nesterov": True},
    {"type": "Adafactor"},
    {"type": "Adafactor", "decay_rate": 0.5, "clip_threshold": 2.0},
    {"type": "Lion"},
    {"type": "Lion", "betas": [0.95, 0.98]},
    {"type": "Muon"},
    {"type": "Muon", "nesterov": False, "momentum": 0.8, "ns_steps": 3, "matched_adamw_rms": 0.3},
]
every_optimizer = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
ONE = torch.tensor(1.0, dtype=torch.float64)
NO, YES = torch.tensor(False), torch.tensor(True)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Of float32 precision, so that every dtype is given the same numbers; a row of the embedding has none."""
    generator = torch.Generator().manual_seed(100 + step)
    found = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}
    found["embed.weight"][2] = 0
    return found


def updater(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Updater:
    config = OptimizerConfig(weight_decay=DECAY, **settings)
    return Updater(parameters(dtype).items(), config, RATES.__getitem__)


def take(updater: Updater, steps: int, coefficient: torch.Tensor = ONE, dtype: torch.dtype = torch.float32) -> None:
    for _ in range(steps):
        updater.apply({n: g.to(dtype) for n, g in gradients(updater.updates).items()}, coefficient, NO)
        updater.updates += 1


# ---- the recurrences, in numpy


class Recurrence:
    """One parameter in float64, from the papers."""

    def __init__(self, settings: dict[str, Any], name: str, weight: np.ndarray):
        self.s = {**OPTIMIZER_FIELDS[settings["type"]], **settings}
        self.kind, self.w, self.t = settings["type"], weight, 0
        self.decay = DECAY if weight.ndim > 1 else 0.0
        if self.kind == "Muon" and name not in MATRICES:
            self.kind = "AdamW"
        self.m = self.v = self.row = self.column = np.zeros_like(weight)

    def step(self, g: np.ndarray, lr: float) -> None:
        self.t += 1
        getattr(self, self.kind.lower())(g, lr)

    def adamw(self, g, lr):
        b1, b2 = self.s["betas"]
        self.w = self.w * (1 - lr * self.decay)
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        self.w = self.w - lr * m / (np.sqrt(v) + self.s["eps"])

    def sgd(self, g, lr):
        g = g + self.decay * self.w
        self.m = self.s["momentum"] * self.m + g
        self.w = self.w - lr * (g + self.s["momentum"] * self.m if self.s["nesterov"] else self.m)

    def lion(self, g, lr):
        b1, b2 = self.s["betas"]
        direction = np.sign(b1 * self.m + (1 - b1) * g)
        self.w = self.w * (1 - lr * self.decay) - lr * direction
        self.m = b2 * self.m + (1 - b2) * g

    def adafactor(self, g, lr):
        b2 = 1 - self.t ** -self.s["decay_rate"]
        size = max(1e-3, np.sqrt((self.w**2).mean()))
        self.w = self.w * (1 - lr * self.decay)
        if g.ndim > 1:
            self.row = b2 * self.row + (1 - b2) * (g * g).mean(-1, keepdims=True)
            self.column = b2 * self.column + (1 - b2) * (g * g).mean(-2, keepdims=True)
            v = self.row * self.column / self.row.mean(-2, keepdims=True)
        else:
            self.v = b2 * self.v + (1 - b2) * g * g
            v = self.v
        update = g / np.sqrt(np.maximum(v, 1e-30))
        update = update / max(1.0, np.sqrt((update**2).mean()) / self.s["clip_threshold"])
        self.w = self.w - size * min(lr, self.t**-0.5) * update

    def muon(self, g, lr):
        self.m = self.s["momentum"] * self.m + g
        update = g + self.s["momentum"] * self.m if self.s["nesterov"] else self.m
        a, b, c = self.s["ns_coefficients"]
        if update.ndim == 3:
            update = np.stack([newton_schulz(u, a, b, c, self.s["ns_steps"]) for u in update])
        else:
            update = newton_schulz(update, a, b, c, self.s["ns_steps"])
        scale = self.s["matched_adamw_rms"] * math.sqrt(max(g.shape[-2:]))
        self.w = self.w * (1 - lr * self.decay) - lr * scale * update


def newton_schulz(matrix: np.ndarray, a: float, b: float, c: float, steps: int) -> np.ndarray:
    """The polynomial acts on the singular values alone."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ np.diag(s) @ v


@every_optimizer
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_twenty_steps_against_the_recurrence(settings: dict[str, Any], dtype: torch.dtype, bound: float):
    ours = updater(settings, dtype)
    truth = {n: Recurrence(settings, n, p.detach().double().numpy().copy()) for n, p in ours.parameters.items()}
    for step in range(20):
        take(ours, 1, dtype=dtype)
        for name, gradient in gradients(step).items():
            truth[name].step(gradient.double().numpy(), RATES[step])
    for name, parameter in ours.parameters.items():
        found = parameter.detach().double().numpy()
        error = np.linalg.norm(found - truth[name].w) / np.linalg.norm(truth[name].w)
        assert error <= bound, (name, error)


@pytest.mark.parametrize(("settings", "reference"), [
    ({"type": "SGD", "momentum": 0.9, "nesterov": True},
     lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True, weight_decay=DECAY)),
    ({"type": "AdamW"}, lambda p: torch.optim.AdamW(p, lr=1.0, betas=(0.9, 0.95), weight_decay=DECAY)),
    ({"type": "Adafactor"}, lambda p: torch.optim.Adafactor(p, lr=1.0, eps=(1e-15, 1e-3), weight_decay=DECAY)),
])  # fmt: skip
def test_against_torch(settings: dict[str, Any], reference: Any):
    ours = updater(settings, torch.float64)
    theirs = {n: p for n, p in parameters(torch.float64).items() if p.ndim > 1}
    optimizer = reference(list(theirs.values()))
    for step in range(20):
        take(ours, 1, dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = RATES[step]
        for name, parameter in theirs.items():
            parameter.grad = gradients(step)[name].double()
        optimizer.step()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours.parameters[name], parameter, rtol=1e-12, atol=1e-12)


def test_muon_is_near_to_that_of_torch():
    """PyTorch's iterates in bfloat16, hence only near."""
    ours = updater({"type": "Muon"})
    theirs = {n: p for n, p in parameters(torch.float32).items() if n in MATRICES and p.ndim == 2}
    optimizer = torch.optim.Muon(theirs.values(), weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        take(ours, 1)
        optimizer.param_groups[0]["lr"] = RATES[step]
        for name, parameter in theirs.items():
            parameter.grad = gradients(step)[name]
        optimizer.step()
    for name, parameter in theirs.items():
        assert (ours.parameters[name] - parameter).norm() / parameter.norm() < 1e-3


def test_muon_moves_matrices_as_far_as_adamw():
    """The root mean square of the update is matched_adamw_rms times that of U V^T, whose singular values are all 1."""
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix, (3.4445, -4.7750, 2.0315), 5))
    assert 0.6 < values.min() <= values.max() < 1.3
    ours = Updater(
        [("w", nn.Parameter(matrix.clone()))], OptimizerConfig(type="Muon", weight_decay=0.0), lambda updates: 0.5
    )
    ours.apply({"w": matrix.clone()}, ONE, NO)
    moved = (ours.parameters["w"].detach() - matrix).square().mean().sqrt()
    assert moved == pytest.approx(0.5 * 0.2, rel=0.3)


def test_muon_leaves_the_rest_to_adamw():
    def halves(**settings: Any) -> set[str]:
        ours = updater({"type": "Muon", **settings})
        matrices = [g["params"] for g in ours.optimizer.param_groups if g["orthogonalize"]]
        return {n for n in ours.parameters if any(ours.trained(n) is q for group in matrices for q in group)}

    assert halves() == set(MATRICES)
    assert halves(adamw_include=["tall"]) == {"embed.weight", "wide.weight", "experts"}
    assert halves(adamw_include=[]) == set(MATRICES) | {"embed.weight"}


# ---- state


def bits(updater: Updater) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in {**updater.parameters, **updater.state()}.items()}


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resume_is_bit_exact(settings: dict[str, Any], dtype: torch.dtype, tmp_path):
    from safetensors.torch import load_file, save_file

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = updater(settings, dtype)
    take(whole, 5, dtype=wide)
    save_file({n: t.contiguous() for n, t in whole.state().items()}, tmp_path / "state")
    weights = {n: p.detach().clone() for n, p in whole.parameters.items()}
    take(whole, 5, dtype=wide)

    resumed = updater(settings, dtype)
    take(resumed, 2, dtype=wide)  # what it had before is forgotten
    with torch.no_grad():
        for name, parameter in resumed.parameters.items():
            parameter.copy_(weights[name])
    resumed.load_state(load_file(tmp_path / "state"), 5)
    assert resumed.updates == 5 and resumed.learning_rate == RATES[5]
    take(resumed, 5, dtype=wide)
    truth, found = bits(whole), bits(resumed)
    assert truth.keys() == found.keys()
    for name, tensor in truth.items():
        assert torch.equal(tensor, found[name]) and tensor.dtype == found[name].dtype, name


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 3])
def test_a_skipped_step_changes_no_bit(settings: dict[str, Any], dtype: torch.dtype, before: int):
    """Also as the very first step, when no state has been made yet."""
    tried, calm = updater(settings, dtype), updater(settings, dtype)
    for one in (tried, calm):
        take(one, before)
    weights = bits(tried)
    for poison in (math.nan, math.inf):
        poisoned = gradients(50)
        poisoned["wide.weight"][1, 1] = poison
        tried.apply(poisoned, torch.tensor(math.nan, dtype=torch.float64), YES)
        assert all(torch.equal(t, bits(tried)[n]) for n, t in weights.items())
    for one in (tried, calm):
        take(one, 3)
    for name, tensor in bits(calm).items():
        assert torch.equal(tensor, bits(tried)[name]), name


@every_optimizer
def test_the_clip_coefficient_scales_the_gradients(settings: dict[str, Any]):
    clipped, scaled = updater(settings, torch.float64), updater(settings, torch.float64)
    take(clipped, 3, torch.tensor(0.25, dtype=torch.float64), dtype=torch.float64)
    for step in range(3):
        scaled.apply({n: g.double() * 0.25 for n, g in gradients(step).items()}, ONE, NO)
        scaled.updates += 1
    for name, parameter in clipped.parameters.items():
        torch.testing.assert_close(parameter, scaled.parameters[name], rtol=1e-14, atol=0)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_have_masters(settings: dict[str, Any], dtype: torch.dtype):
    """The run is that of the float32 copies; what is stored is their rounding."""
    narrow = updater(settings, dtype)
    wide = Updater(
        [(n, nn.Parameter(p.detach().float())) for n, p in parameters(dtype).items()], narrow.config, narrow.schedule
    )
    for one in (narrow, wide):
        take(one, 10)
    assert narrow.masters.keys() == SHAPES.keys()
    for name, parameter in wide.parameters.items():
        assert narrow.masters[name].dtype == torch.float32
        assert torch.equal(narrow.masters[name], parameter)
        assert torch.equal(narrow.parameters[name], parameter.to(dtype))
        assert narrow.masters[name].grad is None
    states = [t for n, t in narrow.state().items() if not n.startswith("master.")]
    assert all(t.dtype == torch.float32 for t in states)


@every_optimizer
def test_a_parameter_without_gradient_is_left_alone(settings: dict[str, Any]):
    ours = updater(settings)
    before = bits(ours)["tall.weight"]
    given = gradients(0)
    del given["tall.weight"]
    ours.apply(given, ONE, NO)
    assert torch.equal(ours.parameters["tall.weight"], before)
    assert not torch.equal(ours.parameters["wide.weight"], parameters(torch.float32)["wide.weight"])
    left = [state for name, state in ours.state().items() if name.endswith("tall.weight")]
    assert not any(state.any() for state in left)  # AdamW's is there from the start
    updater(settings).load_state(ours.state(), 1)


def test_python_numbers_in_a_state_survive():
    ours = updater({"type": "Lion"})
    take(ours, 1)
    for state in ours.optimizer.state.values():
        state.update(exp_avg=3, scale=0.1, nothing=None)
    saved = ours.state()
    assert saved["number.exp_avg.norm.weight"].dtype == torch.int64
    del saved["number.scale.norm.weight"]
    for name in SHAPES:
        saved.pop(f"number.scale.{name}", None)
    again = updater({"type": "Lion"})
    again.load_state(saved, 1)
    assert again.optimizer.state[again.trained("norm.weight")] == {"exp_avg": 3}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("AdamW", "Lion"),
        ("Lion", "AdamW"),
        ("AdamW", "SGD"),
        ("Adafactor", "AdamW"),
        ("Muon", "AdamW"),
        ("AdamW", "Muon"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved: str, loaded: str):
    ours = updater({"type": saved})
    take(ours, 1)
    with pytest.raises(CheckpointError, match=rf"but {loaded} keeps .*\n  fix:"):
        updater({"type": loaded}).load_state(ours.state(), 1)


def test_states_that_do_not_fit_the_parameters_are_refused():
    narrow, wide = updater({"type": "Lion"}, torch.bfloat16), updater({"type": "Lion"})
    with pytest.raises(CheckpointError, match=r"has a float32 master copy of 'embed.weight'"):
        wide.load_state(narrow.state(), 0)
    with pytest.raises(CheckpointError, match=r"lacks the float32 master copy of 'embed.weight'"):
        narrow.load_state(wide.state(), 0)
    with pytest.raises(CheckpointError, match="no trained parameter is called 'other'"):
        wide.load_state({"exp_avg.other": torch.zeros(1)}, 0)


# ---- configuration


@pytest.mark.parametrize("kind", sorted(OPTIMIZER_FIELDS))
def test_fields_without_effect_are_refused(kind: str):
    values = {
        "betas": [0.5, 0.6], "eps": 1e-3, "nesterov": True, "momentum": 0.5, "decay_rate": 0.5, "clip_threshold": 3.0,
        "ns_steps": 3, "ns_coefficients": [1.0, 2.0, 3.0], "matched_adamw_rms": 0.5, "adamw_include": ["x"],
    }  # fmt: skip
    assert values.keys() == {name for fields in OPTIMIZER_FIELDS.values() for name in fields}
    for name, value in values.items():
        if name in OPTIMIZER_FIELDS[kind]:
            extra = {"momentum": 0.5} if (kind, name) == ("SGD", "nesterov") else {}
            assert OptimizerConfig(type=kind, **{name: value}, **extra).setting(name) == value
        else:
            with pytest.raises(ValidationError, match=f"optimizer.{name}: it has no effect with type `{kind}`"):
                OptimizerConfig(type=kind, **{name: value})


def test_nesterov_needs_momentum_and_other_names_are_taken():
    with pytest.raises(ValidationError, match="Nesterov momentum needs a momentum"):
        OptimizerConfig(type="SGD", nesterov=True)
    config = OptimizerConfig.model_validate({"type": "Muon", "adamw_betas": [0.95, 0.95], "adamw_eps": 1e-7})
    assert (config.betas, config.eps) == ([0.95, 0.95], 1e-7)


# ---- a whole step


@pytest.mark.parametrize("kind", ["SGD", "Lion", "Adafactor", "Muon"])
def test_the_step_does_not_depend_on_the_split(tiny, kind: str):
    config = tiny(f"optimizer.type={kind}", "optimizer.weight_decay=0.1")
    report = parity.run(config, layouts=parse_layouts("ga=3 packed"), cases=["skewed"], dtype="float64")
    assert [c.failures for c in report.comparisons] == [[], []] or not any(c.failures for c in report.comparisons)
