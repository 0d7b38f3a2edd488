"""Losses that are computed elsewhere, by a user or by a head that is not known, as sums over the global batch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.hf.batch import ModelBatch
from samestep.hf.heads import CausalHead, Head, Seq2SeqHead, TokenHead, labels_of
from samestep.hf.passes import Normalization, Passes, device_of, nothing
from samestep.hf.probes import Findings, parted, probe, used_rows, without_dropout
from samestep.ops.precision import wide
from samestep.parallel.data import free
from samestep.parallel.mesh import Mesh


class Loss(Protocol):
    """How a loss is asked for.

    Attributes:
        is_users: whether a user wrote it.
    """

    is_users: bool

    def __call__(self, model: nn.Module, batch: ModelBatch, count: Any, with_outputs: bool) -> tuple[Tensor, Any]:
        """The loss, given `count` as `num_items_in_batch`, and the outputs, which may be None if not wanted."""
        ...


class OwnLoss:
    """What the model's own head says."""

    is_users = False

    def __init__(self, passes: Passes):
        self._passes = passes

    def __call__(self, model: nn.Module, batch: ModelBatch, count: Any, with_outputs: bool) -> tuple[Tensor, Any]:
        own = self._passes.completed(batch.inputs, batch)
        if self._passes.takes_count:
            own["num_items_in_batch"] = count
        outputs = model(**own)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ConfigError(
                f"{type(self._passes.model).__name__} returned no loss from the inputs {', '.join(batch.inputs)}",
                fix="let the data collator make the targets that the model's forward takes, or give compute_loss_func",
            )
        return loss, outputs


class OverriddenLoss:
    """`Trainer.compute_loss` of a subclass."""

    is_users = True

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._takes_count = any(
            p.name == "num_items_in_batch" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters
        )

    def __call__(self, model: nn.Module, batch: ModelBatch, count: Any, with_outputs: bool) -> tuple[Tensor, Any]:
        options = {"num_items_in_batch": count} if self._takes_count else {}
        if with_outputs:
            return self._function(model, dict(batch.inputs), return_outputs=True, **options)
        return self._function(model, dict(batch.inputs), **options), None


class LossOfOutputs:
    """A `compute_loss_func`: of the outputs of the model, which gets no labels, and the labels."""

    is_users = True

    def __init__(self, function: Callable[..., Any], head: Head | None, passes: Passes):
        self._function, self._head, self._passes = function, head, passes

    def __call__(self, model: nn.Module, batch: ModelBatch, count: Any, with_outputs: bool) -> tuple[Tensor, Any]:
        own = {name: value for name, value in batch.inputs.items() if name != "labels"}
        if isinstance(self._head, Seq2SeqHead):
            own = self._head.model_inputs(self._passes.model, batch.inputs)
        outputs = model(**self._passes.completed(own, batch))
        return self._function(outputs, batch.inputs.get("labels"), num_items_in_batch=count), outputs


class LossObjective:
    """Regains the sum over the global batch from a loss that is computed elsewhere.

    A loss that was divided by the count of the global batch is multiplied by it. A mean over the targets of its
    micro-batch is multiplied by their number. Which of the two it is, the user says, or the first step finds out by
    asking for the loss of one micro-batch with two counts. That costs five passes without gradient, once a run, and
    calls the user's code as often. A micro-batch without targets runs the model alone.

    Args:
        head: what the targets are, where the kind is known.
        name: the input that holds the targets, where it is not. Without that input, each row counts as one.
        is_scaled: the user's `loss_is_scaled_for_ga`.
    """

    weights: Mapping[str, float] = {"loss": 1.0}

    def __init__(
        self,
        loss: Loss,
        head: Head | None,
        name: str,
        passes: Passes,
        is_scaled: bool | None,
        normalization: Normalization,
    ):
        self._loss, self._head, self._name, self._passes = loss, head, name, passes
        self._is_users = loss.is_users
        self._is_mean_of_means = normalization == "micro_batch_mean"
        self._is_scaled, self._is_checked = is_scaled, False
        self._total: Tensor | None = None

    def items(self, inputs: Mapping[str, Any]) -> int:
        """Targets of a micro-batch: what `num_items_in_batch` counts, over all micro-batches and ranks.

        Raises:
            DataError: targets that are no tensor.
        """
        if self._head is not None and any(name in inputs for name in self._head.names):
            return self._head.items(inputs)
        if self._name not in inputs:
            return ModelBatch(inputs, samples=1).rows
        labels = labels_of(inputs, self._name)
        if labels.is_floating_point():
            return labels.numel()
        ignored = getattr(getattr(self._passes.model, "config", None), "semantic_loss_ignore_index", -100)
        return int((labels != ignored).sum())

    def counts(self, batch: ModelBatch) -> dict[str, int]:
        if "items" not in batch.notes:
            batch.notes["items"] = self.items(batch.inputs) if batch.samples else 0
        return {"loss": batch.notes["items"]}

    def prepare(self, model: nn.Module, batches: Sequence[ModelBatch], counts: Tensor, mesh: Mesh) -> None:
        """Note the count of the global batch; check the loss, once. A collective.

        Raises:
            ConfigError: the loss does not do what it is said to do, or nobody can say what it does.
        """
        self._total = counts[0].long().clamp(min=1)
        if not self._is_checked:
            self._check(model, batches, mesh)

    def sums(self, model: nn.Module, batch: ModelBatch) -> dict[str, Tensor]:
        return self._sums(model, batch, with_outputs=False)[0]

    def sums_and_outputs(self, model: nn.Module, batch: ModelBatch) -> tuple[dict[str, Tensor], Any]:
        """Sums of a micro-batch and the outputs of the model."""
        return self._sums(model, batch, with_outputs=True)

    def _sums(self, model: nn.Module, batch: ModelBatch, with_outputs: bool) -> tuple[dict[str, Tensor], Any]:
        items = self.counts(batch)["loss"]
        count = self._count(items, batch) if self._total is None else self._total
        with self._passes.around(batch):
            if not items:
                own = self._passes.inputs(self._head, batch)
                if self._head is None and self._passes.takes_count:
                    own["num_items_in_batch"] = count
                outputs = model(**own)
                return {"loss": nothing(outputs)}, outputs
            loss, outputs = self._loss(model, batch, count, with_outputs)
        loss = loss.to(wide(loss.dtype))
        return {"loss": loss * (items if self._is_scaled is False else count.to(loss.dtype))}, outputs

    def _count(self, items: int, batch: ModelBatch) -> Tensor:
        return torch.tensor(max(items, 1), device=device_of(batch))

    def _check(self, model: nn.Module, batches: Sequence[ModelBatch], mesh: Mesh) -> None:
        assert self._total is not None
        batch = max(batches, key=lambda batch: self.counts(batch)["loss"]).to(mesh.device)
        items, total = self.counts(batch)["loss"], float(self._total)

        def ask(part: ModelBatch, count: float) -> Tensor:
            with self._passes.around(part):
                return self._loss(model, part, torch.tensor(int(count), device=mesh.device), False)[0]

        name = "shift_labels" if isinstance(self._head, CausalHead) and "shift_labels" in batch.inputs else self._name
        can_mask = not self._is_users or isinstance(self._head, TokenHead)
        parts = parted(batch, name, self.items, can_mask) if items else None
        with without_dropout(model):  # parts of a batch would draw other masks than the whole
            found = probe(ask, batch, items, total, parts)
            used = used_rows(ask, model, batch, total)
        if items and used is not None:
            counted = None if self._head is None else self._head.used(batch.inputs).to(used.device)
            if counted is not None and counted.shape == used.shape and not torch.equal(used, counted):
                found.uses_others, found.used, found.counted = 1, int(used.sum()), int(counted.sum())
        free(model)
        found = found.of_all_ranks(mesh)
        if found.asked:
            self._is_scaled = self._judged(found, mesh)
            self._is_checked = True

    def _judged(self, found: Findings, mesh: Mesh) -> bool:
        """Whether the loss is divided by the count of the global batch."""
        if self._is_users and found.uses_others and mesh.is_first:
            warnings.warn(_uses_others(found), stacklevel=2)
        if self._is_scaled is False:
            if found.follows_count:
                raise ConfigError(
                    "it is False, but the loss is divided by num_items_in_batch",
                    field="loss_is_scaled_for_ga",
                    fix="loss_is_scaled_for_ga = True",
                )
            if found.is_no_mean and not self._is_mean_of_means and mesh.is_first:
                warnings.warn(_NO_MEAN, stacklevel=2)
            return False
        if self._is_scaled:
            if found.ignores_count and found.is_no_sum:
                raise ConfigError(
                    "it is True, but the loss is neither divided by num_items_in_batch nor a sum over its targets",
                    field="loss_is_scaled_for_ga",
                    fix="divide the sum by num_items_in_batch, or loss_is_scaled_for_ga = False for a mean",
                )
            if found.is_mixed and mesh.is_first:
                warnings.warn(_MIXED, stacklevel=2)
            return True
        if found.follows_count and not found.ignores_count and not found.is_mixed:
            return True
        is_mean = self._is_mean_of_means or not found.is_no_mean
        if not self._is_users and found.ignores_count and not found.is_mixed and is_mean:
            return False
        raise self._unknown(found)

    def _unknown(self, found: Findings) -> ConfigError:
        what = "only a part of it is" if found.is_mixed else "it is not"
        if self._is_users:
            return ConfigError(
                f"your loss should be divided by num_items_in_batch, but {what}: its sum over the global batch is not "
                "known, and would depend on how the batch is split",
                field="loss_is_scaled_for_ga",
                fix="return sum / num_items_in_batch (reduction='sum'), or set loss_is_scaled_for_ga = False for a "
                "plain mean over the targets of the micro-batch, without class weights",
            )
        name = type(self._passes.model).__name__
        return ConfigError(
            f"{name} is no head that is known, and its loss is neither divided by num_items_in_batch ({what}) nor the "
            f"mean over the targets in {self._name!r}: its sum over the global batch is not known",
            fix="give compute_loss_func, which divides a sum over the targets by num_items_in_batch, or write "
            "loss_normalization='micro_batch_mean', with which the step depends on how the batch is split",
        )


_NO_MEAN = (
    "loss_is_scaled_for_ga is False, so the loss should be the mean over the targets of its micro-batch, but it is "
    "not (a mean with class weights is none): weighing it by their number does not give the loss of the whole batch, "
    "and the step depends on the split. Return the sum (reduction='sum') / num_items_in_batch instead"
)
_MIXED = (
    "loss_is_scaled_for_ga is True, but a part of the loss is not divided by num_items_in_batch: it is added once for "
    "each micro-batch of each rank, so the step depends on the split"
)


def _uses_others(found: Findings) -> str:
    return (
        f"the loss compares {found.used:.0f} rows of the logits with labels, where num_items_in_batch counts "
        f"{found.counted:.0f}, or other ones. A causal language model is compared with labels[:, 1:], its logits being "
        "logits[:, :-1]"
    )
