"""Update rules that `torch.optim` does not have in the form needed here."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from samestep.errors import ConfigError

NORM_EPS = 1e-7
_CODES, _SCALE = "_codes", "_scale"


class FusedAdamW:
    """AdamW (Loshchilov and Hutter 2019) in one pass over memory, as `torch.optim.AdamW(fused=True)`, with the same
    attributes. No `torch.optim.Optimizer`: making one imports the compiler, which takes a second.

    Args:
        groups: dicts with `params` and `weight_decay`.

    Attributes:
        grad_scale: gradients are divided by it; a float32 scalar, or None.
        found_inf: a float32 scalar; 1 leaves everything as it is.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float):
        self.defaults: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": eps, "fused": True}
        self.param_groups = [self.defaults | group for group in groups]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; all have state."""
        hooks: dict[str, Any] = {"grad_scale": self.grad_scale, "found_inf": self.found_inf}
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            _adamw(group, given, [p.grad for p in given], [self.state[p] for p in given], fused=True, **hooks)


AnyOptimizer = Optimizer | FusedAdamW


class Lion(Optimizer):
    """Sign momentum with decoupled weight decay (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    c = b1 m + (1 - b1) g;  w = w (1 - lr * decay) - lr sign(c);  m = b2 m + (1 - b2) g.

    Args:
        params: tensors, or groups with `weight_decay`.
        betas: b1, b2.
    """

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; takes no closure."""
        assert closure is None
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for parameter, gradient, state in _with_gradient(self, group):
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                direction = average.mul(b1).add_(gradient, alpha=1 - b1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                average.mul_(b2).add_(gradient, alpha=1 - b2)


class Muon(Optimizer):
    """Orthogonalized momentum for matrices (Jordan et al. 2024, "Muon: An optimizer for hidden layers"), AdamW for the
    rest.

    m = momentum m + g;  u = g + momentum m (Nesterov) or m;
    w = w (1 - lr * decay) - lr * matched_adamw_rms * sqrt(max(rows, columns)) * orthogonalize(u).
    The scale gives the update the root mean square of an AdamW update (Liu et al. 2025, "Muon is Scalable for LLM
    Training"), so that one learning rate fits both halves. A tensor of three dimensions is a stack of matrices.

    `torch.optim.Muon` is not used: it iterates in bfloat16, whose rounding would make the update depend on how the
    batch is split, and it takes no stacks.

    Args:
        params: groups with `orthogonalize` (which half) and `weight_decay`.
        betas, eps: of AdamW.
        coefficients: a, b, c of the Newton-Schulz polynomial.
        iterations: of Newton-Schulz.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        coefficients: Sequence[float],
        iterations: int,
        matched_adamw_rms: float,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults | {"weight_decay": 0.0, "orthogonalize": False})
        self._coefficients, self._iterations = tuple(coefficients), iterations
        self._matched_adamw_rms = matched_adamw_rms

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; takes no closure."""
        assert closure is None
        for group in self.param_groups:
            if group["orthogonalize"]:
                self._step_matrices(group)
            else:
                self._step_adamw(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        for parameter, gradient, state in _with_gradient(self, group):
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            total = state["momentum_buffer"].mul_(momentum).add_(gradient)
            direction = gradient.add(total, alpha=momentum) if group["nesterov"] else total
            direction = orthogonalize(direction, self._coefficients, self._iterations)
            scale = self._matched_adamw_rms * math.sqrt(max(parameter.shape[-2:]))
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"] * scale)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        parameters, gradients, states = [], [], []
        for parameter, gradient, state in _with_gradient(self, group):
            if not state:
                state["step"] = torch.tensor(0.0)  # on the CPU, where adamw reads it without waiting for the device
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            parameters.append(parameter)
            gradients.append(gradient)
            states.append(state)
        _adamw(group, parameters, gradients, states)


def _adamw(
    group: Mapping[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    **how: Any,
) -> None:
    b1, b2 = group["betas"]
    adamw(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=b1,
        beta2=b2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        **how,
    )


def check_package(state_dtype: str) -> None:
    """Find out before a run begins that a package is missing.

    Raises:
        ConfigError: the state needs torchao, which is not installed.
    """
    if state_dtype == "int8" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "int8 state needs the package torchao, which is not installed",
            field="optimizer.state_dtype",
            fix='run `pip install "samestep[lowbit]"`, or write bfloat16',
        )


def make_adamw_8bit(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> Optimizer:
    """torchao's AdamW, whose moments are kept in 8 bits: a dynamic code and one float32 scale for each 256 numbers
    (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"); what `dtypes.takes_int8` does not take
    stays float32. Its `lr` is a tensor.

    Raises:
        ConfigError: torchao is not installed.
    """
    check_package("int8")
    from torchao.optim import AdamW8bit  # an extra

    class EagerOnCpu(AdamW8bit):
        """It compiles its rule for every shape, which a CPU does not need and may have no compiler for."""

        def step(self, closure: Callable[[], float] | None = None) -> None:
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                super().step(closure)

    return EagerOnCpu(groups, lr=0.0, betas=betas, eps=eps)


def unpacked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with 8-bit moments as plain tensors: `KEY_codes` and `KEY_scale`."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if hasattr(value, "codes"):
            found |= {f"{key}{_CODES}": value.codes, f"{key}{_SCALE}": value.scale}
        else:
            found[key] = value
    return found


def packed_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `unpacked_state`."""
    found = dict(state)
    for key in [key.removesuffix(_CODES) for key in state if key.endswith(_CODES)]:
        from torchao.optim.subclass_8bit import OptimState8bit

        codes, scale = found.pop(f"{key}{_CODES}"), found.pop(f"{key}{_SCALE}")
        block = codes.numel() // scale.numel()
        found[key] = OptimState8bit.zeros(codes.shape, key == "exp_avg", block, codes.device, dtype=scale.dtype)
        found[key].codes.copy_(codes)
        found[key].scale.copy_(scale)
    return found


def orthogonalize(matrix: torch.Tensor, coefficients: Sequence[float], iterations: int) -> torch.Tensor:
    """Nearly U V^T of the singular value decomposition U S V^T, by Newton-Schulz iterations (Jordan et al. 2024).

    X = matrix / |matrix|_F;  then `iterations` times X = a X + (b A + c A A) X with A = X X^T. In the dtype given.

    Args:
        matrix: [..., rows, columns]; leading dimensions are a stack of matrices.
        coefficients: a, b, c; the usual ones leave singular values between 0.7 and 1.2.
    """
    a, b, c = coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # the smaller Gram matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=NORM_EPS)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def _with_gradient(optimizer: Optimizer, group: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor, dict]]:
    """(parameter, gradient, state) of the parameters of a group that have a gradient."""
    return [(p, p.grad, optimizer.state[p]) for p in group["params"] if p.grad is not None]
