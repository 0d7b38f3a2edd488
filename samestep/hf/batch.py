"""A micro-batch of a Hugging Face model: whatever its data collator made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from samestep.ops import random_key

_MAIN_INPUTS = ("input_ids", "inputs_embeds", "input_values", "input_features", "pixel_values")


@dataclass(frozen=True)
class ModelBatch:
    """One micro-batch.

    Attributes:
        inputs: name -> input of the model, targets included, as the data collator made them. Tensors are moved to the
            device, also inside of dictionaries, lists and tuples; anything else is passed through.
        samples: number of samples; 0 for one that counts for nothing (`empty`).
        seed: of the random numbers that the passes draw, such as dropout; None: from the stream of the process. Derived
            from the run's seed, the step and the place of the first sample, it lets a resumed run draw them again.
            Models that are not samestep's own know no samples, so their dropout masks depend on how the global batch is
            split.
        notes: what has been found out about the inputs so far; `to` keeps it, so that no device has to be asked.
    """

    inputs: Mapping[str, Any]
    samples: int
    seed: int | None = None
    notes: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def rows(self) -> int:
        """Size of the first dimension of the main input; 0 where no input is a tensor."""
        main = self._main
        return 0 if main is None or main.ndim == 0 else main.shape[0]

    @property
    def positions(self) -> int:
        """Padding included; rows where the main input is no sequence of token ids or of their embeddings."""
        main = self._main
        if main is None:
            return self.samples
        return main.shape[:2].numel() if "input_ids" in self.inputs or "inputs_embeds" in self.inputs else self.rows

    @property
    def tokens(self) -> int:
        """Positions that are not padding, as far as `attention_mask` [rows, positions] tells."""
        if not self.samples:
            return 0
        mask = self.inputs.get("attention_mask")
        return int((mask != 0).sum()) if isinstance(mask, torch.Tensor) and mask.ndim == 2 else self.positions

    @property
    def _main(self) -> torch.Tensor | None:
        named = [self.inputs[name] for name in _MAIN_INPUTS if name in self.inputs]
        return next((x for x in [*named, *self.inputs.values()] if isinstance(x, torch.Tensor)), None)

    @property
    def is_left_padded(self) -> bool:
        """Whether a row of `attention_mask` begins with padding."""
        if "is_left_padded" not in self.notes:
            mask = self.inputs.get("attention_mask")
            found = isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask[:, :1] == 0).any())
            self.notes["is_left_padded"] = found
        return self.notes["is_left_padded"]

    def to(self, device: torch.device) -> ModelBatch:
        return replace(self, inputs=_moved(self.inputs, device))

    def with_inputs(self, **inputs: Any) -> ModelBatch:
        """With some inputs replaced."""
        return replace(self, inputs={**self.inputs, **inputs}, notes={})

    @property
    def is_divisible(self) -> bool:
        """Whether there are rows for two. Documents laid end to end in one row are not taken apart."""
        return self.samples > 1 and self.has_rows and self.rows > 1

    @property
    def has_rows(self) -> bool:
        """Whether every input has one entry a row."""
        return self.rows > 0 and _has_rows(self.inputs, self.rows)

    def halves(self) -> tuple[ModelBatch, ModelBatch]:
        """Two micro-batches of the rows of one that `is_divisible`, as wide as it is."""
        assert self.is_divisible
        count = self.rows // 2
        samples = self.samples * count // self.rows
        seed = None if self.seed is None else random_key(self.seed, "half")  # they draw different masks
        first = replace(self.part(range(count)), samples=samples)
        return first, replace(self.part(range(count, self.rows)), samples=self.samples - samples, seed=seed)

    def part(self, rows: Sequence[int]) -> ModelBatch:
        """Some rows; each counts as a sample. All inputs must have one entry a row."""
        return replace(self, inputs=_chosen(self.inputs, list(rows)), samples=len(rows), notes={})

    def empty(self) -> ModelBatch:
        """A micro-batch with which a rank that has run out of samples joins in the passes of the others: inputs of this
        one, the first row alone where that can be had, that count for nothing."""
        return replace(self.part([0]) if self.has_rows else self, samples=0, notes={})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: _moved(entry, device) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        moved = [_moved(entry, device) for entry in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 or value.shape[0] == rows
    if isinstance(value, Mapping):
        # Positions of several axes lie axis by axis.
        return all(
            _has_rows(entry, rows) and not (name == "position_ids" and getattr(entry, "ndim", 0) == 3)
            for name, entry in value.items()
        )
    return not isinstance(value, list | tuple) or len(value) == rows


def _chosen(value: Any, rows: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value[rows] if value.ndim else value
    if isinstance(value, Mapping):
        return {name: _chosen(entry, rows) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        chosen = [value[row] for row in rows]
        return chosen if isinstance(value, list) else tuple(chosen)
    return value
