"""The update by any torch optimizer, with the clip coefficient and the skip of samestep's step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from samestep.errors import CheckpointError, ConfigError
from samestep.ops.precision import is_narrow
from samestep.parallel.data import is_distributed, local
from samestep.step.optimizers import unpacked_state
from samestep.step.trained import TrainedParameters

_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers whose update of an element depends on that element alone: each rank updates its part of a weight."""


class TorchUpdater(TrainedParameters):
    """Updates the parameters of a torch optimizer, in place of whose `step` it is called.

    Parameters stored in bfloat16 or float16 get float32 masters, which take their place in the optimizer: else most
    updates would be lost to rounding. Of sharded parameters the optimizer gets the parts of this rank, unless its
    update of an element depends on others.

    Args:
        parameters: (name, parameter) pairs of the model; frozen ones, and those that the optimizer does not have, are
            left alone.
        optimizer: has made no step; its groups are changed as said above.
        stored: name -> dtype that a weight is stored in; a parameter that is wider, as shards are, is its own master.
    """

    _dtype_fix = "load the model in the dtype that the run began with"
    _optimizer_fix = "resume with the optimizer that the run began with"

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        stored: Mapping[str, torch.dtype],
    ):
        super().__init__(parameters)
        self.optimizer = optimizer
        fused = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))
        self._reads_first = not fused
        self._takes_parts = isinstance(optimizer, _ELEMENTWISE)
        self._held = {}
        if type(optimizer).__name__ == "Adafactor" and any(map(is_distributed, self.parameters.values())):
            raise ConfigError(
                "Adafactor cannot work on the parts of a weight, for it needs the means of rows and columns",
                field="optim",
                fix="write optim='adamw_torch_fused', or leave fsdp out",
            )
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) in known}
        replaced: dict[int, nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            part = self._part(parameter.detach())
            if is_narrow(stored[name]):
                self.masters[name] = replaced[id(parameter)] = nn.Parameter(part.float())
            elif self._takes_parts and is_distributed(parameter):
                self._held[name] = replaced[id(parameter)] = nn.Parameter(part)
            else:
                self._held[name] = parameter
        self._replace(replaced)
        if known and not self.parameters:
            raise ConfigError(
                "the optimizer has no trained parameter of the model, so nothing would be trained",
                field="optimizers",
                fix="make the optimizer from the parameters of this model, and a new one for each Trainer",
            )

    def _replace(self, replaced: Mapping[int, nn.Parameter]) -> None:
        """Give the optimizer other parameters, by the id of those that it has. Some make their state at once."""
        for group in self.optimizer.param_groups:
            for old in group["params"]:
                if id(old) in replaced and old in self.optimizer.state:
                    new = replaced[id(old)]
                    self.optimizer.state[new] = {
                        key: self._state_part(value) if isinstance(value, torch.Tensor) else value
                        for key, value in self.optimizer.state.pop(old).items()
                    }
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor) if self._takes_parts else tensor

    def _state_part(self, value: torch.Tensor) -> torch.Tensor:
        part = self._part(value)
        return part.float() if is_narrow(part.dtype) else part

    @property
    def learning_rate(self) -> float:
        """Of the next update, in the first group."""
        rate: Any = self.optimizer.param_groups[0]["lr"]
        return float(rate)

    @torch.no_grad()
    def apply(self, gradients: Mapping[str, torch.Tensor], coefficient: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with `coefficient * gradient`, or, where `skip` is true, change nothing at all.

        The caller counts the update, and moves the schedule, once it has read the flag.

        Args:
            gradients: name -> gradient; a parameter without one is left alone.
            coefficient: scalar float64.
            skip: scalar bool.
        """
        ready = {name: self._part(gradient) for name, gradient in gradients.items() if name in self.parameters}
        if not ready:
            return
        take = self._decide(next(iter(ready.values())).device, coefficient, skip)
        if take is None:
            return
        take(ready)
        for name in ready:
            if name in self.masters:
                self._part(self.parameters[name].detach()).copy_(self.masters[name])

    @torch.no_grad()
    def renew_masters(self) -> None:
        """Take the masters over from the parameters, which someone else has changed."""
        for name, master in self.masters.items():
            master.copy_(self._part(self.parameters[name].detach()))

    def state(self) -> dict[str, torch.Tensor]:
        """As the base does.

        Raises:
            CheckpointError: the optimizer keeps what is neither tensor nor number, which no safe file can hold.
        """
        for name in self.parameters:
            for key, value in unpacked_state(self.optimizer.state.get(self.trained(name), {})).items():
                if not isinstance(value, torch.Tensor | int | float | None):
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps a {type(value).__name__} ({key}) for {name}, which "
                        "cannot be stored without pickle\n  fix: write save_only_model=True, or use another optimizer"
                    )
        return super().state()

    def groups(self) -> list[dict[str, Any]]:
        """The settings of each parameter group (learning rate, weight decay, ...), as JSON values."""
        return [_plain(group, type(self.optimizer).__name__) for group in self.optimizer.param_groups]

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take over what `groups` gave.

        Raises:
            CheckpointError: there are more or fewer groups.
        """
        if len(groups) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"the checkpoint has {len(groups)} parameter groups, the optimizer {len(self.optimizer.param_groups)}"
                "\n  fix: resume with the optimizer settings that the run began with"
            )
        for group, stored in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in stored.items():
                old = group.get(key)
                if isinstance(old, torch.Tensor):
                    old.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(old, tuple) else value

    def _keeps_state(self) -> bool:
        if isinstance(self.optimizer, torch.optim.SGD):
            return any(group["momentum"] for group in self.optimizer.param_groups)
        return isinstance(self.optimizer, _ELEMENTWISE)


def _plain(group: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        if key != "params":
            found[key] = value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
    return _json(found, f"the settings of {optimizer}")


def schedule_state(scheduler: Any) -> dict[str, Any]:
    """The state of a learning-rate schedule, as JSON values.

    Raises:
        ConfigError: it holds something else.
    """
    return _json(dict(scheduler.state_dict()), f"the state of {type(scheduler).__name__}")


def load_schedule(scheduler: Any, stored: Mapping[str, Any]) -> None:
    """Take over what `schedule_state` gave."""
    scheduler.load_state_dict(_like(scheduler.state_dict(), stored))


def _like(fresh: Any, stored: Any) -> Any:
    """Stored JSON values with the keys and kinds that a fresh state has: JSON knows texts as keys, and lists."""
    if isinstance(fresh, Mapping) and isinstance(stored, Mapping):
        keys = {str(key): key for key in fresh}
        made = {keys.get(key, key): _like(fresh.get(keys.get(key, key)), value) for key, value in stored.items()}
        return Counter(made) if isinstance(fresh, Counter) else made
    if isinstance(fresh, list) and isinstance(stored, list) and len(fresh) == len(stored):
        return [_like(*pair) for pair in zip(fresh, stored, strict=True)]
    return tuple(stored) if isinstance(fresh, tuple) else stored


def _json(values: dict[str, Any], what: str) -> dict[str, Any]:
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} cannot be stored without pickle: {error}",
            fix='write save_only_model=True or save_strategy="no", or use one of plain numbers',
        ) from error
    return values
