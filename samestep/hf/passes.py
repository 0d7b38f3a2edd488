"""How the passes of a Hugging Face model are run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from samestep.hf.batch import ModelBatch
from samestep.hf.heads import Head
from samestep.ops.precision import wide

Normalization = Literal["global_targets", "micro_batch_mean"]


class Passes:
    """How the passes of a model are run: with which random numbers, and with which inputs of no effect on the result.

    Args:
        model: without wrappers.

    Attributes:
        takes_positions: whether the model can be told the position of each token.
        gives_positions: whether rows padded to their left are given the positions they have without padding.
        takes_count: whether the model takes `num_items_in_batch`.
    """

    def __init__(self, model: Any):
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._takes_cache = "use_cache" in parameters
        self.takes_positions = "position_ids" in parameters
        self.gives_positions = False
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.takes_count = getattr(model, "accepts_loss_kwargs", takes_any or "num_items_in_batch" in parameters)

    @contextmanager
    def around(self, batch: ModelBatch) -> Iterator[None]:
        """Random numbers of the passes of a micro-batch: its own, if it has a seed."""
        if batch.seed is None:
            yield
            return
        device = device_of(batch)
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_generators(device)):
            torch.manual_seed(batch.seed)
            yield

    def inputs(self, head: Head | None, batch: ModelBatch) -> dict[str, Any]:
        """What the model is run with: no targets, if the head is known, and no cache, which only generation reads."""
        own = dict(batch.inputs) if head is None else head.model_inputs(self.model, batch.inputs)
        return self.completed(own, batch)

    def completed(self, inputs: Mapping[str, Any], batch: ModelBatch) -> dict[str, Any]:
        """Inputs of the model, the targets included if they are there."""
        own = dict(inputs)
        if self._takes_cache:
            own.setdefault("use_cache", False)
        if self.gives_positions and batch.is_left_padded and own.get("position_ids") is None:
            own["position_ids"] = (batch.inputs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
        return own


def _generators(device: torch.device) -> str:
    """The kind of accelerator whose random numbers are kept; with none of them it means nothing."""
    return "cuda" if device.type == "cpu" else device.type


def device_of(batch: ModelBatch) -> torch.device:
    return next((x.device for x in batch.inputs.values() if isinstance(x, Tensor)), torch.device("cpu"))


def nothing(outputs: Any) -> Tensor:
    """0, with gradients of 0 for whatever took part in the outputs, even if they are not finite."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    found = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack([value.flatten()[:0].to(wide(value.dtype)).sum() for value in found]).sum()
