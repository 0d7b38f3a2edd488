"""Evaluation and prediction: one loss over all targets of a data set, however it is cut into batches and over ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size, nested_concat
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length

from samestep.parallel.mesh import Mesh

_IGNORED = -100


class LossTotals:
    """Sums and counts of the loss terms of a data set, so far and on this rank.

    Args:
        weights: of the terms, as an objective has them.
    """

    def __init__(self, weights: Mapping[str, float], mesh: Mesh):
        self._weights, self._mesh = weights, mesh
        self._sums = torch.zeros(len(weights), dtype=torch.float64, device=mesh.device)
        self._counts = torch.zeros(len(weights), dtype=torch.float64, device=mesh.device)

    def add(self, sums: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """Of one batch."""
        self._sums += torch.stack([sums[term].detach().double() for term in self._weights])
        self._counts += torch.tensor([counts[term] for term in self._weights], dtype=torch.float64).to(self._counts)

    def add_mean(self, loss: torch.Tensor, counts: Mapping[str, int]) -> None:
        """Of one batch whose weighed mean is all that is known."""
        first = next(iter(self._weights))
        if counts[first]:
            self.add({term: loss * (counts[first] if term == first else 0) for term in self._weights}, counts)

    def loss(self) -> float:
        """Sum / count of the weighed terms over all ranks; NaN without a target. A collective."""
        sums, counts = self._mesh.sum_(torch.stack([self._sums, self._counts])).tolist()
        weights = list(self._weights.values())
        if not any(count for count, weight in zip(counts, weights, strict=True) if weight):
            return math.nan
        return sum(weight * total / max(count, 1) for weight, total, count in zip(weights, sums, counts, strict=True))


class Collected:
    """What is kept of every batch for `compute_metrics` and `predict`.

    Args:
        concat: into one array, or one a batch.
    """

    def __init__(self, concat: bool, mesh: Mesh):
        self._concat, self._mesh = concat, mesh
        self._kept = {name: EvalLoopContainer(concat, padding_index=_IGNORED) for name in _KEPT}

    def add(self, **tensors: Any) -> None:
        """Of one batch; None is nothing."""
        for name, value in tensors.items():
            if value is not None:
                self._kept[name].add(value)

    def to_cpu(self) -> None:
        """Out of the memory of the device."""
        for container in self._kept.values():
            container.to_cpu_and_numpy()

    def arrays(self) -> dict[str, Any]:
        """Of all ranks, one after the other, by name. A collective."""
        own = {name: container.get_arrays() for name, container in self._kept.items()}
        found = self._mesh.gather(own)
        return {name: self._joined([part[name] for part in found if part[name] is not None]) for name in own}

    def _joined(self, parts: Sequence[Any]) -> Any:
        if not parts:
            return None
        if not self._concat:
            return [array for part in parts for array in part]
        whole = parts[0]
        for part in parts[1:]:
            whole = nested_concat(whole, part, padding_index=_IGNORED)
        return whole


_KEPT = ("predictions", "labels", "inputs", "losses")


def batches_together(loader: Any, mesh: Mesh) -> Iterator[tuple[Any, bool]]:
    """Batches of a loader and whether each is this rank's own, for as long as any rank has one. Ranks whose own are
    used up get their last again, or the first of the first rank: with sharded weights they take part in every pass."""
    found = iter(loader)
    if mesh.world.size == 1:
        yield from ((batch, True) for batch in found)
        return
    latest = next(found, None)
    is_own = latest is not None
    first = mesh.from_first(lambda: latest)
    while mesh.any(is_own):
        yield (first if latest is None else latest), is_own
        batch = next(found, None) if is_own else None
        is_own = batch is not None
        latest = batch if is_own else latest


class Evaluation:
    """One pass over a data set: what `Trainer.evaluation_loop` does. All ranks run it together.

    Args:
        trainer: a `samestep.hf.Trainer`.
        description, loss_only, ignore_keys, prefix: as `evaluation_loop` has them.
    """

    def __init__(
        self, trainer: Any, description: str, loss_only: bool | None, ignore_keys: list[str] | None, prefix: str
    ):
        args = trainer.args
        self._trainer, self._args, self._mesh, self._prefix = trainer, args, trainer.mesh, prefix
        self._loss_only = args.prediction_loss_only if loss_only is None else loss_only
        self._ignore_keys = ignore_keys
        self._totals = LossTotals(trainer.eval_objective.weights, trainer.mesh)
        self._collected = Collected(args.eval_do_concat_batches, trainer.mesh)
        self._in_batches = args.batch_eval_metrics and trainer.compute_metrics is not None and not self._loss_only
        self._collects = not self._in_batches or description == "Prediction"
        self._metrics: dict[str, Any] = {}
        self._seen, self._steps, self._has_loss = 0, 0, False

    def run(self, loader: Any) -> EvalLoopOutput:
        self._set_modes()
        self._trainer.callback_handler.eval_dataloader = loader
        ahead = batches_together(loader, self._mesh)
        current = next(ahead, None)
        while current is not None:
            (inputs, is_own), current = current, next(ahead, None)
            found = self._trainer.predict_batch(self._trainer.model, inputs, self._loss_only, self._ignore_keys)
            if is_own:
                self._take(inputs, *found, is_last=current is None)
        return self._output(loader)

    def _set_modes(self) -> None:
        trainer, args = self._trainer, self._args
        start = time.perf_counter()
        if not trainer.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16
            trainer.model.to(dtype=dtype, device=self._mesh.device)
        trainer.model.eval()
        if trainer.updater is None and not hasattr(trainer, "model_preparation_time"):
            # transformers tells it from an evaluation before the training on.
            trainer.model_preparation_time = round(time.perf_counter() - start, 4)
        if callable(getattr(trainer.optimizer, "eval", None)):
            trainer.optimizer.eval()

    def _take(self, inputs: Any, sums: Any, loss: Any, logits: Any, labels: Any, *, is_last: bool) -> None:
        """What was found of one batch of this rank."""
        trainer, args = self._trainer, self._args
        size = find_batch_size(inputs) or 0
        self._seen += size
        self._steps += 1
        if loss is not None:
            self._has_loss = True
            counts = trainer.eval_objective.counts(trainer.model_batch(inputs))
            self._totals.add_mean(loss, counts) if sums is None else self._totals.add(sums, counts)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        wants = args.include_for_metrics
        main = inputs.get(getattr(trainer.model, "main_input_name", "input_ids")) if "inputs" in wants else None
        losses = loss.repeat(size) if loss is not None and "loss" in wants else None
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
        if self._in_batches and logits is not None and labels is not None:
            batch = EvalPrediction(predictions=logits, label_ids=labels, losses=losses, inputs=main)
            self._metrics = trainer.compute_metrics(batch, compute_result=is_last) or {}
        if self._collects:
            self._collected.add(predictions=logits, labels=labels, inputs=main, losses=losses)
        if args.eval_accumulation_steps is not None and self._steps % args.eval_accumulation_steps == 0:
            self._collected.to_cpu()

    def _output(self, loader: Any) -> EvalLoopOutput:
        trainer, prefix = self._trainer, self._prefix
        arrays = self._collected.arrays()
        predictions, labels = arrays["predictions"], arrays["labels"]
        has_both = predictions is not None and labels is not None
        if trainer.compute_metrics is not None and not self._in_batches and has_both:
            whole = EvalPrediction(
                predictions=predictions, label_ids=labels, losses=arrays["losses"], inputs=arrays["inputs"]
            )
            self._metrics = trainer.compute_metrics(whole)
        loss = {f"{prefix}_loss": self._totals.loss()} if self._mesh.any(self._has_loss) else {}
        own = denumpify_detensorize(self._metrics)
        own = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in own.items()}
        metrics = loss | own | loss  # the first place, and the last word
        if hasattr(trainer, "model_preparation_time"):
            metrics[f"{prefix}_model_preparation_time"] = trainer.model_preparation_time
        return EvalLoopOutput(predictions, labels, metrics, _samples(loader, self._seen, self._mesh))


def _samples(loader: Any, seen: int, mesh: Mesh) -> int:
    dataset: Dataset[Any] | None = getattr(loader, "dataset", None)
    if dataset is not None and has_length(dataset):
        return len(dataset)
    return sum(mesh.gather(seen))
