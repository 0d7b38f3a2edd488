"""What `verify` demands of a layout's step.

Bounds (all relative):
- float64: gradient, loss and norm of the first step 1e-12, weights and moments after it 1e-9, later steps 1e-9.
- float32: gradient, loss and norm of the first step 1e-6, loss 1e-5 and norm 1e-4 later; the update is judged against
  a float64 update from that layout's own gradient, 1e-6 of max(|w|, lr sqrt(n)): AdamW turns the noise of a gradient
  that is truly zero into a step of +-lr, so weights of two layouts may not be compared in float32. For AdamW the
  float64 update is written out here; for the others it is their own rule in float64, so it shows rounding and what is
  taken from the wrong place, not a wrong rule.
- bfloat16, float16: distance of the gradient to the float64 truth at most 1.1 times that of one padded micro-batch for
  more of them, and 1.2 times for packed ones. In float16 the loss scale stays what it is at first.
- `training.exact`, whatever the dtypes: no bit of a gradient, weight, moment, loss or norm differs, at any step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from samestep.config.schema import Config, OptimizerConfig
from samestep.ops import Precision
from samestep.step.step import NO_TARGETS
from samestep.step.update import Updater, decays
from samestep.verify.layouts import VerifyLayout

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """One layout in one case against the reference. Errors are relative; None where the mode does not judge them.

    Attributes:
        clipped: whether clipping was active in every step of the reference that was taken.
        gradient: of the parameter `worst`, or in low precision the ratio to the reference's own error.
        weights, moments: after the first step.
        failures: what is out of bounds, in words; empty means it passed.
    """

    case: str
    layout: str
    clipped: bool
    gradient: float | None
    worst: str
    loss: float
    norm: float
    weights: float | None
    moments: float | None
    failures: tuple[str, ...]


@dataclass
class Trace:
    """What a layout did: before-clip gradients, weights and moments of the first step, and the curves of all.

    Attributes:
        before: weights before the first step.
        touched: what changed in steps that had no target.
        ran_out: whether a micro-batch ran out of memory.
        digest: SHA-256 of weights and optimizer state after the last step.
    """

    before: Tensors
    learning_rate: float
    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    moments: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    skipped: list[str | None] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    ran_out: bool = False
    digest: str = ""


def _update_bound(optimizer: OptimizerConfig) -> float:
    """Relative error of a float32 update: 1e-6, but Muon's iterations x -> a x + b x^3 + c x^5 multiply the rounding of
    small singular values by `a` each time."""
    if optimizer.type != "Muon":
        return 1e-6
    growth = optimizer.setting("ns_coefficients")[0] ** optimizer.setting("ns_steps")
    return max(1e-6, torch.finfo(torch.float32).eps / 2 * growth)


def _lost_bound(config: Config) -> float:
    """Relative error of a weight that has no master: one step of the dtype that it is stored in."""
    if config.optimizer.master_weights == "float32":
        return 0.0
    precision = Precision.from_config(config.model)
    return max(torch.finfo(dtype).eps for dtype in (precision.params, precision.embedding))


class Judge:
    """Compares one trace with the reference and says what is out of bounds."""

    def __init__(self, config: Config, case: str, layout: VerifyLayout, reference: Trace, found: Trace):
        self.config, self.case, self.layout, self.reference, self.found = config, case, layout, reference, found
        self.failures: list[str] = []
        if reference.skipped != found.skipped:
            self.failures.append("other steps were skipped")
        if case == "all_empty" and not all(found.skipped):
            self.failures.append("a step without targets was not skipped")
        if layout.out_of_memory and case != "all_empty" and not found.ran_out:
            self.failures.append("no micro-batch ran out of memory")
        if found.touched:
            self.failures.append(f"a step without targets changed {len(found.touched)} tensors: {found.touched[0]}")
        for kind in ("weights", "moments"):
            odd = [name for name, tensor in getattr(found, kind).items() if not tensor.isfinite().all()]
            if odd:
                self.failures.append(f"{kind} are not finite: {odd[0]}")

    def double(self) -> Comparison:
        gradient, worst = gradient_error(self.reference.gradients, self.found.gradients)
        self._bound("gradient", gradient, 1e-12, worst)
        weights = moments = None
        if not self.found.skipped[0]:
            noise = noise_alone(self.reference.gradients, self.found.gradients)
            weights = _largest_difference(self.reference.weights, self.found.weights, noise)
            moments = _largest_difference(self.reference.moments, self.found.moments, noise)
            self._bound("weights", weights, 1e-9)
            self._bound("moments", moments, 1e-9)
        return self._result(gradient, worst, self._curves(1e-12, 1e-9, 1e-9), weights, moments)

    def single(self) -> Comparison:
        gradient, worst = gradient_error(self.reference.gradients, self.found.gradients)
        self._bound("gradient", gradient, 1e-6, worst)
        weights = None
        if not self.found.skipped[0]:
            weights, name = self._update_error()
            self._bound("update", weights, _update_bound(self.config.optimizer), name)
        return self._result(gradient, worst, self._curves(1e-6, 1e-5, 1e-4), weights, None)

    def exact(self) -> Comparison:
        gradient, worst = gradient_error(self.reference.gradients, self.found.gradients)
        self._bound("gradient", gradient, 0.0, worst)
        weights = _largest_difference(self.reference.weights, self.found.weights, ())
        moments = _largest_difference(self.reference.moments, self.found.moments, ())
        self._bound("weights", weights, 0.0)
        self._bound("moments", moments, 0.0)
        if self.reference.digest != self.found.digest:
            self.failures.append("the bits of weights and optimizer state after the last step differ")
        return self._result(gradient, worst, self._curves(0.0, 0.0, 0.0), weights, moments)

    def low(self, truth: Trace) -> Comparison:
        if self.found.skipped[0] == NO_TARGETS:
            return self._result(None, "", (0.0, 0.0), None, None)
        own = _distance(truth.gradients, self.found.gradients)
        one = _distance(truth.gradients, self.reference.gradients)
        ratio = own / one if one else (0.0 if own == 0 else math.inf)
        self._bound(
            "gradient error over that of one micro-batch", ratio, 1.1 if self.layout.micro_batch == "padded" else 1.2
        )
        weights, name = self._update_error()
        self._bound("update", weights, max(_update_bound(self.config.optimizer), _lost_bound(self.config)), name)
        return self._result(ratio, "", self._curves(math.inf, math.inf, math.inf), weights, None)

    def _update_error(self) -> tuple[float, str]:
        """Largest distance to a float64 update from this layout's own gradient, over max(|w|, size of an update)."""
        rate = self.found.learning_rate
        wanted = _first_update(self.config, self.found.before, self.found.gradients, rate)
        worst, name = 0.0, ""
        for key, weight in self.found.weights.items():
            scale = max(float(wanted[key].norm()), rate * math.sqrt(weight.numel()))
            error = float((weight - wanted[key]).norm()) / scale
            if error >= worst or math.isnan(error):
                worst, name = error, key
        return worst, name

    def _curves(self, first: float, loss_bound: float, norm_bound: float) -> tuple[float, float]:
        """Largest relative difference of loss and norm over all steps that were taken."""
        result = []
        for name, bound in (("losses", loss_bound), ("norms", norm_bound)):
            worst = 0.0
            pairs = zip(getattr(self.reference, name), getattr(self.found, name), self.found.skipped, strict=True)
            for number, (wanted, value, skipped) in enumerate(pairs, 1):
                if skipped:
                    continue
                error = abs(value - wanted) / abs(wanted)
                self._bound(f"{name} of step {number}", error, first if number == 1 else bound)
                worst = _larger(worst, error)
            result.append(worst)
        return result[0], result[1]

    def _bound(self, what: str, error: float, bound: float, where: str = "") -> None:
        if not math.isfinite(error):
            self.failures.append(f"{what} is not finite" + (f" at {where}" if where else ""))
        elif error > bound:
            self.failures.append(f"{what} {error:.2e} > {bound:.0e}" + (f" at {where}" if where else ""))

    def _result(
        self,
        gradient: float | None,
        worst: str,
        curves: tuple[float, float],
        weights: float | None,
        moments: float | None,
    ) -> Comparison:
        taken = zip(self.reference.coefficients, self.reference.skipped, strict=True)
        clipped = [coefficient < 1 for coefficient, skipped in taken if not skipped]
        return Comparison(
            self.case,
            self.layout.name,
            bool(clipped) and all(clipped),
            gradient,
            worst,
            *curves,
            weights,
            moments,
            tuple(self.failures),
        )


def gradient_error(reference: Tensors, found: Tensors) -> tuple[float, str]:
    """Largest over parameters of |g - g_ref| / max(|g_ref|, 1e-3 |G_ref| / sqrt(P)), and the parameter's name.

    G is all gradients and P the number of parameters: the floor is for those whose true gradient is zero, such as a key
    bias, where there is only noise to compare.
    """
    if reference.keys() != found.keys():
        return math.inf, sorted(reference.keys() ^ found.keys())[0]
    floor = _gradient_floor(reference)
    worst, name = 0.0, ""
    for key, gradient in reference.items():
        difference = float((found[key] - gradient).norm())
        scale = max(float(gradient.norm()), floor)
        error = difference / scale if scale else (math.inf if difference else 0.0)
        if error >= worst or math.isnan(error):
            worst, name = error, key
    return worst, name


def _gradient_floor(gradients: Tensors) -> float:
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values()))
    return 1e-3 * total / math.sqrt(max(len(gradients), 1))


def noise_alone(reference: Tensors, found: Tensors) -> tuple[str, ...]:
    """Parameters whose true gradient is zero, such as a key bias without rotary positions.

    Their moments are rounding noise, which the update of AdamW magnifies: there is nothing of them to compare after it.
    """
    least = 1e-9 * _gradient_floor(reference)
    sizes = {n: float(g.norm()) + float(found[n].norm()) for n, g in reference.items() if n in found}
    return tuple(name for name, size in sizes.items() if 0 < size <= least)


def _distance(truth: Tensors, found: Tensors) -> float:
    """|G - G_truth| / |G_truth| over all parameters together."""
    difference = sum(float((found[name] - gradient).norm()) ** 2 for name, gradient in truth.items())
    total = sum(float(gradient.norm()) ** 2 for gradient in truth.values())
    return math.sqrt(difference / total) if total else (math.inf if difference else 0.0)


def _largest_difference(reference: Tensors, found: Tensors, without: tuple[str, ...]) -> float:
    """Largest over tensors of |a - b| / |b|, but for the parameters `without`; a moment is called `KEY.PARAMETER`."""
    worst = 0.0
    for name, tensor in reference.items():
        if name in without or name.partition(".")[2] in without:
            continue
        size = float(tensor.norm())
        difference = float((found[name] - tensor).norm())
        worst = _larger(worst, difference / size if size else difference)
    return worst


def _larger(one: float, other: float) -> float:
    """NaN where one of them is, unlike `max`, so that no bound holds."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _first_update(config: Config, weights: Tensors, gradients: Tensors, rate: float) -> Tensors:
    """The weights after the first step in float64, clipping included."""
    max_norm = config.training.max_norm
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values()))
    coefficient = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    if config.optimizer.type == "AdamW":
        return _adamw(config.optimizer, weights, gradients, rate, coefficient)
    updater = Updater(
        [(name, torch.nn.Parameter(weight.clone())) for name, weight in weights.items()],
        config.optimizer,
        lambda _: rate,
    )
    wide = torch.tensor(coefficient, dtype=torch.float64, device=next(iter(weights.values())).device)
    updater.apply({name: gradient.clone() for name, gradient in gradients.items()}, wide, torch.zeros_like(wide).bool())
    return {name: parameter.detach() for name, parameter in updater.parameters.items()}


def _adamw(
    optimizer: OptimizerConfig, weights: Tensors, gradients: Tensors, rate: float, coefficient: float
) -> Tensors:
    """From its recurrence (Loshchilov and Hutter 2019, algorithm 2)."""
    updated = {}
    for name, weight in weights.items():
        decay = optimizer.weight_decay if decays(name, weight, optimizer) else 0.0
        new = weight * (1 - rate * decay)
        if name in gradients:
            # At the first step both bias corrections undo the moments' factors: m / (1 - b1) = g, v / (1 - b2) = g^2.
            gradient = gradients[name] * coefficient
            new = new - rate * gradient / (gradient.abs() + optimizer.eps)
        updated[name] = new
    return updated
