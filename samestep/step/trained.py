"""What an optimizer updates: parameters, their parts or float32 masters, and the state that it keeps of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.errors import CheckpointError
from samestep.parallel.data import is_distributed, like
from samestep.step.optimizers import AnyOptimizer, packed_state, unpacked_state
from samestep.torch_private import scale_

_MASTER, _NUMBER = "master", "number"


class TrainedParameters(ABC):
    """Base of updaters: an optimizer over named parameters, to which the clip coefficient and the skip are given.

    Args:
        parameters: (name, parameter) pairs; frozen ones are passed over.

    Attributes:
        masters: name -> float32 copy that the optimizer updates in place of the parameter.
        updates: really made; skipped steps are none.
    """

    optimizer: AnyOptimizer
    _held: dict[str, nn.Parameter]
    """Name -> what is updated of a parameter without master: itself, or the part that this rank holds."""
    _reads_first: bool
    """Whether the decision to skip must be read from the device before the optimizer may be called."""
    _dtype_fix: str
    """What a user may do who resumes in another dtype."""
    _optimizer_fix: str
    """What a user may do who resumes with another optimizer."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]):
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters: dict[str, nn.Parameter] = {}
        self.updates = 0

    def trained(self, name: str) -> nn.Parameter:
        """What the optimizer updates for a parameter: its master where it has one, of the part that this rank holds."""
        return self.masters[name] if name in self.masters else self._held[name]

    @abstractmethod
    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the optimizer sees of a tensor that is laid out as a parameter."""

    @abstractmethod
    def _keeps_state(self) -> bool:
        """Whether the optimizer has state of every parameter once it has updated it."""

    def _check_state(
        self, states: Mapping[str, Mapping[str, Any]], masters: Mapping[str, torch.Tensor], updates: int
    ) -> None:
        """Raise CheckpointError unless a state is what this optimizer has after so many updates."""
        if masters.keys() != self.masters.keys():
            odd = min(masters.keys() ^ self.masters.keys())
            raise CheckpointError(
                f"the checkpoint {'has a' if odd in masters else 'lacks the'} float32 master copy of {odd!r}\n"
                f"  fix: {self._dtype_fix}"
            )
        if updates and not any(states.values()) and self._keeps_state():
            raise CheckpointError(
                f"the checkpoint holds no optimizer state, but {updates} updates were made\n"
                f"  fix: {self._optimizer_fix}"
            )

    def _decide(
        self, device: torch.device, coefficient: torch.Tensor, skip: torch.Tensor
    ) -> Callable[[Mapping[str, torch.Tensor]], None] | None:
        """How to update parameters by their gradients times the coefficient; None where the step is skipped.

        Args:
            device: of the gradients. Offloaded ones are elsewhere than the decision, and PyTorch would copy that
                without waiting for it.
        """
        if not self._reads_first:
            scale, flag = coefficient.reciprocal().float().to(device), skip.float().to(device)
            return partial(self._take_on_device, coefficient=coefficient, scale=scale, skip=flag)
        # Other optimizers have no hooks for it (fused SGD has, but leaves its momentum uninitialised when its first
        # step is skipped).
        factor, skipped = torch.stack([coefficient, skip.to(coefficient.dtype)]).tolist()
        return None if skipped else partial(self._take, factor=factor)

    def _take(self, gradients: Mapping[str, torch.Tensor], *, factor: float) -> None:
        """One update of these parameters by `factor * gradient`."""
        given = self._give(gradients)
        if factor != 1:
            scale_(given, factor)
        self._step(gradients)

    def _take_on_device(
        self,
        gradients: Mapping[str, torch.Tensor],
        *,
        coefficient: torch.Tensor,
        scale: torch.Tensor | None,
        skip: torch.Tensor,
    ) -> None:
        """The same, with a decision that stays on the device.

        PyTorch's fused Adam and AdamW divide by `grad_scale`, and leave weights, moments and step count bit-unchanged
        where `found_inf` is 1: hooks made for its GradScaler. They take float32, too coarse for float64 gradients.
        """
        given = self._give(gradients)
        if not given:
            return
        if any(gradient.dtype == torch.float64 for gradient in given):
            scale_(given, coefficient)
            scale = None
        vars(self.optimizer).update(grad_scale=scale, found_inf=skip)
        self._step(gradients)

    def _give(self, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Hand gradients to the optimizer, in the dtype of what it updates: the sum may be wider or narrower."""
        given = []
        for name, gradient in gradients.items():
            parameter = self.trained(name)
            parameter.grad = gradient.to(parameter.dtype)
            given.append(parameter.grad)
        return given

    def _step(self, names: Iterable[str]) -> None:
        self.optimizer.step()
        for name in names:
            self.trained(name).grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and optimizer state: `master.NAME`, `KEY.NAME` for tensors, `number.KEY.NAME` for Python numbers.

        What belongs to a sharded parameter is laid out as it is. A parameter that was never updated has no state, but
        for AdamW's, which is zero.
        """
        tensors = {f"{_MASTER}.{name}": self._whole(name, master.detach()) for name, master in self.masters.items()}
        for name in self.parameters:
            for key, value in unpacked_state(self.optimizer.state.get(self.trained(name), {})).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}.{name}"] = self._whole(name, value)
                elif value is not None:
                    tensors[f"{_NUMBER}.{key}.{name}"] = torch.tensor(
                        value, dtype=torch.int64 if isinstance(value, int) else torch.float64
                    )
        return tensors

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of which this rank holds the part `tensor`; single numbers are not split."""
        return like(tensor, self.parameters[name]) if tensor.ndim and not is_distributed(tensor) else tensor

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        """Take over what `state` gave.

        Raises:
            CheckpointError: names do not fit the parameters, or the state is of another optimizer.
        """
        states: dict[str, dict[str, Any]] = {name: {} for name in self.parameters}
        masters: dict[str, torch.Tensor] = {}
        for full, tensor in tensors.items():
            key, _, name = full.partition(".")
            is_number = key == _NUMBER
            if is_number:
                key, _, name = name.partition(".")
            if name not in self.parameters:
                raise CheckpointError(f"the optimizer state has {full!r}, but no trained parameter is called {name!r}")
            if key == _MASTER:
                masters[name] = tensor
            else:
                states[name][key] = tensor.item() if is_number else self._placed(tensor, name)
        states = {name: packed_state(state) for name, state in states.items()}
        self._check_state(states, masters, updates)
        for name, master in self.masters.items():
            master.copy_(self._part(masters[name]))
        self.optimizer.state.clear()
        self.optimizer.state.update({self.trained(name): state for name, state in states.items() if state})
        self.updates = updates

    def _placed(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A copy on the parameter's device; a step count stays on the CPU unless the optimizer is fused."""
        is_count = tensor.ndim == 0 and not self.optimizer.defaults.get("fused")
        return self._part(tensor).to("cpu" if is_count else self.trained(name).device, copy=True)
