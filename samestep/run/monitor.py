"""Extra numbers of each step (`monitor.train_state`), collected on the device and read once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.config.schema import TrainStateConfig
from samestep.data.batch import Batch
from samestep.errors import ConfigError
from samestep.parallel.data import owned
from samestep.parallel.mesh import Mesh
from samestep.step.clip import square, squares
from samestep.step.objective import Objective


def chosen(names: Iterable[str], wanted: bool | str | list[str]) -> list[str]:
    """Names that `local_norm` asks for: all for true, else those that contain one of its texts."""
    if isinstance(wanted, bool):
        return list(names) if wanted else []
    texts = [text for text in ([wanted] if isinstance(wanted, str) else wanted) if text]
    return [name for name in names if any(text in name for text in texts)]


class StepMonitor:
    """Collects what `settings` asks for while a step runs.

    Feed it `begin`, then `on_micro_batch` and `on_gradients` as hooks of the step, then `read` once.

    A micro-batch's gradient is its share of the step's: the shares of a step add up to the gradient of the step.
    """

    def __init__(self, settings: TrainStateConfig, model: nn.Module, objective: Objective, mesh: Mesh):
        self.settings, self.objective, self.mesh = settings, objective, mesh
        self.active = bool(settings.local_loss or settings.device_loss or settings.device_norm or settings.local_norm)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._watched = chosen(parameters, settings.local_norm)
        if settings.local_norm and not self._watched:
            raise ConfigError(
                f"no trained parameter's name contains {settings.local_norm!r}",
                field="monitor.train_state.local_norm",
                fix=f"write true, or a part of a name such as {next(iter(parameters))}",
            )
        if self._watched and mesh.weights is not None:
            raise ConfigError(
                "with sharded weights no rank has the whole gradient of its own micro-batch",
                field="monitor.train_state.local_norm",
                fix="write device_norm: true, local_norm: false, or parallelism.data_parallel_shard: 1",
            )
        for name in self._watched:
            parameters[name].register_hook(self._watcher(name))
        self.begin(())

    def _watcher(self, name: str):
        def watch(gradient: torch.Tensor) -> None:
            self._arriving[name] = square(gradient).sqrt() / self._loss_scale

        return watch

    def begin(self, batches: Sequence[Batch], loss_scale: float = 1.0) -> None:
        """Forget the last step; `batches` are the micro-batches of the next, and their gradients come times
        `loss_scale`."""
        self._loss_scale = loss_scale
        lossy = self.settings.local_loss or self.settings.device_loss
        self._counts = [self.objective.counts(batch) for batch in batches] if lossy else []
        self._sums: list[dict[str, torch.Tensor]] = []
        self._arriving: dict[str, torch.Tensor] = {}
        self._local_norms: list[dict[str, torch.Tensor]] = []
        self._device_norms: dict[str, torch.Tensor] = {}

    def on_micro_batch(self, index: int, sums: dict[str, torch.Tensor]) -> None:
        self._sums.append(sums)
        self._local_norms.append(self._arriving)
        self._arriving = {}

    def on_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if self.settings.device_norm:
            shares = squares(gradients.values(), partial(owned, mesh=self.mesh), self.mesh.device)
            self._device_norms = dict(zip(gradients, self.mesh.sum_(shares).sqrt(), strict=True))

    def read(self) -> dict[str, Any]:
        """The numbers of the step by the names of `metrics.jsonl`, floats; None where there were no targets or no
        gradient. One transfer from the device."""
        found: dict[str, Any] = {}
        if self.settings.local_loss:
            found["local_loss"] = [self._loss([s], [c]) for s, c in zip(self._sums, self._counts, strict=True)]
        if self.settings.device_loss:
            found["device_loss"] = self._loss(self._sums, self._counts)
        if self._watched:
            found["local_norm"] = {name: [norms.get(name) for norms in self._local_norms] for name in self._watched}
        if self.settings.device_norm:
            found["device_norm"] = self._device_norms
        return _on_host(found)

    def _loss(
        self, sums: Sequence[Mapping[str, torch.Tensor]], counts: Sequence[Mapping[str, int]]
    ) -> torch.Tensor | None:
        trained = {term: weight for term, weight in self.objective.weights.items() if weight}
        totals = {term: sum(count[term] for count in counts) for term in trained}
        if not any(totals.values()):
            return None
        parts = [
            weight * torch.stack([s[term].double() for s in sums]).sum() / max(totals[term], 1)
            for term, weight in trained.items()
        ]
        return torch.stack(parts).sum()


def _on_host(values: dict[str, Any]) -> dict[str, Any]:
    """The same structure with floats in place of scalar tensors."""
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: collect(part) for key, part in value.items()}
        if isinstance(value, list):
            return [collect(part) for part in value]
        if value is None:
            return None
        tensors.append(value.double().reshape(()))
        return len(tensors) - 1

    places = collect(values)
    numbers = torch.stack(tensors).tolist() if tensors else []

    def fill(place: Any) -> Any:
        if isinstance(place, dict):
            return {key: fill(part) for key, part in place.items()}
        if isinstance(place, list):
            return [fill(part) for part in place]
        return None if place is None else numbers[place]

    return fill(places)
