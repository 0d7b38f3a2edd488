"""The update of the weights: decay groups, optimizer, float32 masters, and the skip that changes nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from samestep.config.schema import OptimizerConfig
from samestep.step.schedule import Schedule

_NARROW = (torch.bfloat16, torch.float16)


def decays(name: str, parameter: torch.Tensor, config: OptimizerConfig) -> bool:
    """Whether weight decay applies to a parameter.

    First match decides: `weight_decay_include` yes, `weight_decay_exclude` no, vectors (norms, biases) no, else yes.
    A rule matches by full name, as a part of the name, or as a shell pattern.
    """

    def matches(rules: list[str] | None) -> bool:
        return any(rule == name or rule in name or fnmatch.fnmatchcase(name, rule) for rule in rules or ())

    if matches(config.weight_decay_include):
        return True
    return not matches(config.weight_decay_exclude) and parameter.ndim > 1


class Updater:
    """AdamW (Loshchilov and Hutter 2019) over named parameters, with the clip coefficient folded in.

    A parameter stored in bfloat16 or float16 has a float32 master copy: the optimizer updates the master, which is then
    written back. `updates` counts the updates really made and drives schedule and bias correction.

    Args:
        parameters: (name, parameter) pairs; frozen ones are passed over.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, schedule: Schedule):
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters = {
            name: nn.Parameter(p.detach().float()) for name, p in self.parameters.items() if p.dtype in _NARROW
        }
        self.schedule = schedule
        self.updates = 0
        self.decayed = {name: decays(name, p, config) for name, p in self.parameters.items()}
        groups = [
            {
                "params": [self.trained(name) for name, decayed in self.decayed.items() if decayed == wanted],
                "weight_decay": config.weight_decay if wanted else 0.0,
            }
            for wanted in (True, False)
        ]
        betas = (config.betas[0], config.betas[1])
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=config.eps, fused=True
        )

    def trained(self, name: str) -> nn.Parameter:
        """What the optimizer updates for a parameter: its master where it has one."""
        return self.masters.get(name, self.parameters[name])

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.schedule(self.updates)

    @torch.no_grad()
    def apply(self, gradients: Mapping[str, torch.Tensor], coefficient: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with `coefficient * gradient`, or, where `skip` is true, change nothing at all.

        The decision stays on the device. The caller counts the update once it has read the flag.

        Args:
            gradients: name -> gradient; a parameter without one is left alone.
            coefficient: scalar float64.
            skip: scalar bool.
        """
        for name in self.parameters:
            self.trained(name).grad = gradients.get(name)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        # PyTorch's fused optimizers divide by `grad_scale`, and leave weights, moments and step count bit-unchanged
        # where `found_inf` is 1: hooks made for its GradScaler. They take float32, too coarse for float64 gradients.
        if any(gradient.dtype == torch.float64 for gradient in gradients.values()):
            torch._foreach_mul_(list(gradients.values()), coefficient)
            scale = None
        else:
            scale = coefficient.reciprocal().float()
        vars(self.optimizer).update(grad_scale=scale, found_inf=skip.float())
        self.optimizer.step()
        for name, master in self.masters.items():
            self.parameters[name].copy_(master)
            master.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state and masters as `moment.name -> tensor`, after filling in what no update has made yet."""
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name in self.parameters:
            for key, value in self.optimizer.state.get(self.trained(name), {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        """Take over what `state` gave; names must fit exactly."""
        left = dict(tensors)
        for name in self.parameters:
            target = self.trained(name)
            if name in self.masters:
                self.masters[name].copy_(left.pop(f"master.{name}"))
            state = {
                key: left.pop(f"{key}.{name}").clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}.{name}" in left
            }
            if state:
                self.optimizer.state[target] = state
        if left:
            raise KeyError(f"optimizer state of unknown parameters: {', '.join(sorted(left)[:5])}")
        self.updates = updates
