"""The update of the weights: decay groups, optimizer, float32 masters, and the skip that changes nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from samestep.config.schema import OptimizerConfig
from samestep.errors import CheckpointError
from samestep.ops.dropout import random_key
from samestep.ops.precision import is_narrow, wide
from samestep.ops.rounding import round_stochastically
from samestep.parallel.data import first_element, local
from samestep.step.optimizers import AnyOptimizer, FusedAdamW, Lion, Muon, make_adamw_8bit
from samestep.step.schedule import Schedule
from samestep.step.trained import TrainedParameters

_ADAFACTOR_EPS = (1e-15, 1e-3)
"""Floors of a root mean squared gradient and of a parameter's size (Shazeer and Stern 2018: 1e-30 of the square)."""


def matches(name: str, rules: Sequence[str] | None) -> bool:
    """Whether a parameter's name is one of the rules, contains one, or fits one as a shell pattern."""
    return any(rule == name or rule in name or fnmatch.fnmatchcase(name, rule) for rule in rules or ())


def decays(name: str, parameter: torch.Tensor, config: OptimizerConfig) -> bool:
    """Whether weight decay applies to a parameter.

    First match decides: `weight_decay_include` yes, `weight_decay_exclude` no, vectors (norms, biases) no, else yes.
    """
    if matches(name, config.weight_decay_include):
        return True
    return not matches(name, config.weight_decay_exclude) and parameter.ndim > 1


def orthogonalizes(name: str, parameter: torch.Tensor, config: OptimizerConfig) -> bool:
    """Whether a parameter is in Muon's half: matrices and stacks of matrices that `adamw_include` does not name."""
    is_muon = config.type == "Muon"
    return is_muon and parameter.ndim in (2, 3) and not matches(name, config.setting("adamw_include"))


def make_optimizer(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> AnyOptimizer:
    """The optimizer of a configuration over named parameters, in groups by weight decay (and by Muon's two halves).

    AdamW: Loshchilov and Hutter 2019. SGD: `torch.optim.SGD` without dampening. Adafactor: Shazeer and Stern 2018.
    """
    groups = []
    for decayed, orthogonal in ((True, True), (True, False), (False, True), (False, False)):
        chosen = [
            p
            for name, p in parameters.items()
            if (decays(name, p, config), orthogonalizes(name, p, config)) == (decayed, orthogonal)
        ]
        group: dict[str, Any] = {"params": chosen, "weight_decay": config.weight_decay if decayed else 0.0}
        if config.type == "Muon":
            group["orthogonalize"] = orthogonal
        if chosen:
            groups.append(group)
    return _MAKERS[config.type](config, groups)


def _adamw(config: OptimizerConfig, groups: list[dict[str, Any]]) -> AnyOptimizer:
    b1, b2 = config.setting("betas")
    is_double = any(p.dtype == torch.float64 for group in groups for p in group["params"])
    if config.state_dtype == "int8" and not is_double:
        return make_adamw_8bit(groups, betas=(b1, b2), eps=config.eps)
    return FusedAdamW(groups, betas=(b1, b2), eps=config.eps)


def _sgd(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, momentum=config.setting("momentum"), nesterov=config.setting("nesterov"))


def _adafactor(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    decay, clip = -config.setting("decay_rate"), config.setting("clip_threshold")
    return torch.optim.Adafactor(groups, lr=0.0, beta2_decay=decay, d=clip, eps=_ADAFACTOR_EPS)


def _lion(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    b1, b2 = config.setting("betas")
    return Lion(groups, lr=0.0, betas=(b1, b2))


def _muon(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    b1, b2 = config.setting("betas")
    return Muon(
        groups,
        lr=0.0,
        betas=(b1, b2),
        eps=config.eps,
        momentum=config.setting("momentum"),
        nesterov=config.setting("nesterov"),
        coefficients=config.setting("ns_coefficients"),
        iterations=config.setting("ns_steps"),
        matched_adamw_rms=config.setting("matched_adamw_rms"),
    )


_MAKERS = {"AdamW": _adamw, "SGD": _sgd, "Adafactor": _adafactor, "Lion": _lion, "Muon": _muon}


class Updater(TrainedParameters):
    """An optimizer over named parameters, with the clip coefficient folded in.

    Of a sharded parameter it updates the part that this rank holds, in place; Muon, whose update of an
    element depends on the whole matrix, works on the distributed tensor itself.

    A parameter stored in bfloat16 or float16 has a float32 master copy: the optimizer updates the master, which is then
    written back. With another `master_weights` it has none: the update is made in float32 and rounded as it is written
    back, to the nearest or stochastically; so is state that is kept in bfloat16. Only one parameter at a time is
    widened for that. `updates` counts the updates really made and drives schedule and bias correction.

    Args:
        parameters: (name, parameter) pairs; frozen ones are passed over.
        stored: name -> dtype that the weights are stored in; where the parameters are wider, as shards are, they hold
            the masters themselves, or what was rounded. None: each in its own dtype.
        seed: keys the stochastic rounding, with the number of the update and the name.
    """

    _dtype_fix = "restore model.params_dtype to what the run began with"
    _optimizer_fix = "restore the optimizer settings that the run began with"

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        schedule: Schedule,
        stored: Callable[[str], torch.dtype] | None = None,
        seed: int = 0,
    ):
        super().__init__(parameters)
        self.config, self.schedule, self._seed = config, schedule, seed
        held = {name: self._part(p.detach()) for name, p in self.parameters.items()}
        dtypes = {name: stored(name) if stored else p.dtype for name, p in held.items()}
        narrow = {name: dtype for name, dtype in dtypes.items() if is_narrow(dtype)}
        has_masters = config.master_weights == "float32"
        self.masters = {name: nn.Parameter(held[name].float()) for name in narrow if has_masters}
        self._rounded_to = {} if has_masters else narrow
        self._held = {name: nn.Parameter(p) for name, p in held.items() if name not in self.masters}
        self.optimizer = make_optimizer(config, {name: self.trained(name) for name in self.parameters})
        self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        self._reads_first = not isinstance(self.optimizer, FusedAdamW)
        if not self._reads_first:
            self._begin_state()

    def _begin_state(self) -> None:
        """AdamW's state as it is before any update. PyTorch makes it in the first step, also in one that is skipped;
        made here, a skip leaves even the set of tensors as it was, and lack of memory shows at once."""
        for name in self.parameters:
            parameter = self.trained(name)
            dtype = wide(parameter.dtype)
            if dtype is torch.float32 and self.config.state_dtype == "bfloat16":
                dtype = torch.bfloat16
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
            }

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.config.type == "Muon" else local(tensor)

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.schedule(self.updates)

    @torch.no_grad()
    def apply(self, gradients: Mapping[str, torch.Tensor], coefficient: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with `coefficient * gradient`, or, where `skip` is true, change nothing at all.

        The caller counts the update once it has read the flag.

        Args:
            gradients: name -> gradient; a parameter without one is left alone.
            coefficient: scalar float64.
            skip: scalar bool.
        """
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.learning_rate)
            else:
                group["lr"] = self.learning_rate
        if not gradients:
            return
        device = self._part(next(iter(gradients.values()))).device
        take = self._decide(device, coefficient, skip)
        if take is None:
            return
        ready = {name: self._part(gradient) for name, gradient in gradients.items()}
        apart = {name: gradient for name, gradient in ready.items() if self._is_widened(name)}
        take({name: gradient for name, gradient in ready.items() if name not in apart})
        for name, gradient in apart.items():
            with self._widened(name):
                take({name: gradient})
        for name in ready:
            self._write_back(name)

    def _narrow_state(self, name: str) -> dict[str, torch.Tensor]:
        state = self.optimizer.state.get(self.trained(name), {})
        return {key: t for key, t in state.items() if isinstance(t, torch.Tensor) and is_narrow(t.dtype)}

    def _is_widened(self, name: str) -> bool:
        return is_narrow(self.trained(name).dtype) or bool(self._narrow_state(name))

    @contextmanager
    def _widened(self, name: str) -> Iterator[None]:
        """A parameter and its state in float32, the only one that the optimizer knows of; rounded at the end."""
        parameter, groups = self.trained(name), self.optimizer.param_groups
        weight, narrow = parameter.data, self._narrow_state(name)
        parameter.data = weight.float()
        state = self.optimizer.state[parameter]
        state.update({key: tensor.float() for key, tensor in narrow.items()})
        self.optimizer.param_groups = [{**self._groups[id(parameter)], "params": [parameter]}]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups
            updated, parameter.data = parameter.data, weight
            for key, tensor in narrow.items():
                # Rounded to the nearest, a second moment with a decay of 0.999 would stand still: its changes are
                # under half of a step of bfloat16.
                self._round_stochastically(state[key], tensor, name, key)
                state[key] = tensor
            if is_narrow(weight.dtype):
                self._round(updated, weight, name)

    def _round(self, wide: torch.Tensor, target: torch.Tensor, name: str) -> None:
        """Fill `target`, of the storage dtype or wider, with an updated weight that has no master."""
        if self.config.master_weights == "stochastic_rounding":
            self._round_stochastically(wide, target, name, "weight")
        else:
            target.copy_(wide.to(self._rounded_to[name]))

    def _round_stochastically(self, wide: torch.Tensor, target: torch.Tensor, name: str, what: str) -> None:
        key = random_key("rounding", self._seed, self.updates, name, what)
        round_stochastically(local(wide), local(target), key, first_element(self.parameters[name]))

    def _write_back(self, name: str) -> None:
        parameter = self.parameters[name]
        if name in self.masters:
            if parameter.dtype != self.masters[name].dtype:
                self._part(parameter.detach()).copy_(self.masters[name])
        elif name in self._rounded_to and not is_narrow(parameter.dtype):
            shard = self._part(parameter.detach())
            self._round(shard, shard, name)

    def _check_state(
        self, states: Mapping[str, Mapping[str, Any]], masters: Mapping[str, torch.Tensor], updates: int
    ) -> None:
        super()._check_state(states, masters, updates)
        for name, state in states.items():
            if (state or not self._reads_first) and state.keys() != self._state_keys(name):
                raise CheckpointError(
                    f"the optimizer state of {name!r} is {', '.join(sorted(state))}, but {self.config.type} keeps "
                    f"{', '.join(sorted(self._state_keys(name))) or 'nothing'} for it\n"
                    f"  fix: {self._optimizer_fix}"
                )

    def _keeps_state(self) -> bool:
        return all(self._state_keys(name) for name in self.parameters)

    def _state_keys(self, name: str) -> set[str]:
        if self.config.type == "SGD":
            return {"momentum_buffer"} if self.config.setting("momentum") else set()
        if self.config.type == "Adafactor":
            return {"step", "row_var", "col_var"} if self.trained(name).ndim > 1 else {"step", "variance"}
        if self.config.type == "Lion":
            return {"exp_avg"}
        if orthogonalizes(name, self.trained(name), self.config):
            return {"momentum_buffer"}
        return {"step", "exp_avg", "exp_avg_sq"}
