"""From a Hugging Face model, or a loss of the user's own, to sums and counts over the global batch.

Where the kind of the head is known, its sums are formed here (`HeadObjective`). Where the user computes the loss, or
the head is not known and its own loss is taken, the sum is regained from the loss and what it was divided by
(`LossObjective`). The first step of a run checks what is assumed, in a few passes without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.rows import IGNORE
from samestep.errors import ConfigError, DataError
from samestep.hf.batch import ModelBatch
from samestep.hf.heads import CausalHead, Head, head_of, predicts_first_token, unwrapped
from samestep.hf.linear_head import cross_entropy_by, gives_its_outputs, plain_head
from samestep.hf.losses import Loss, LossObjective, LossOfOutputs, OverriddenLoss, OwnLoss
from samestep.hf.passes import Normalization, Passes, nothing
from samestep.hf.routing import TERM as BALANCE
from samestep.hf.routing import BalanceLoss, balance_of
from samestep.ops import random_key
from samestep.ops.precision import is_narrow
from samestep.parallel.data import free
from samestep.parallel.mesh import Mesh

_WINDOW = 256
"""Positions of the check of a causal language model: enough to see a loss, and no memory to speak of."""


def objective_for(
    model: nn.Module,
    *,
    compute_loss: Callable[..., Any] | None = None,
    compute_loss_func: Callable[..., Any] | None = None,
    loss_is_scaled_for_ga: bool | None = None,
    label_smoothing_factor: float = 0.0,
    label_names: Sequence[str] | None = None,
    loss_normalization: Normalization = "global_targets",
    logits_free: bool = True,
) -> HeadObjective | LossObjective:
    """The objective of a model, for `step.TrainStep` (its `micro_batch_mean` must say the same as
    `loss_normalization`).

    Args:
        compute_loss: the user's override `(model, inputs, return_outputs=False, num_items_in_batch=None)`, bound to its
            trainer; None where the trainer's own is not overridden.
        compute_loss_func: the user's `(outputs, labels, num_items_in_batch=None)`. Without an override of
            `compute_loss` it is the loss.
        loss_is_scaled_for_ga: of a user's loss. True: it was divided by `num_items_in_batch`, the count of the global
            batch over all ranks. False: it is the mean over the targets of its micro-batch. None: the first step finds
            out whether it is divided, and ends the run if it is not.
        label_smoothing_factor: of heads whose targets are classes.
        label_names: inputs that hold targets, where they are not those of the known heads.
        loss_normalization: `micro_batch_mean` averages the means of the micro-batches.
        logits_free: whether a causal language model may be trained without its logits in memory, where the first step
            shows that nothing is done to them. Not for compiled models, which do not see a head replaced.

    Raises:
        ConfigError: arguments that do not fit the model or each other.
    """
    bare = unwrapped(model)
    passes = Passes(bare)
    head = head_of(bare, label_smoothing_factor)
    is_renamed = head is not None and not set(label_names or ()) <= set(head.names)
    if is_renamed or (isinstance(head, CausalHead) and predicts_first_token(model)):
        head = None
    if label_smoothing_factor:
        _check_smoothing(bare, head, label_smoothing_factor, compute_loss is not None or compute_loss_func is not None)
    name = (label_names or ("labels",))[0]
    if compute_loss is not None:
        loss: Loss = OverriddenLoss(compute_loss)
    elif compute_loss_func is not None:
        loss = LossOfOutputs(compute_loss_func, head, passes)
    elif head is not None:
        own = LossObjective(OwnLoss(passes), head, name, passes, None, loss_normalization)
        compiled = hasattr(model, "_orig_mod") or not logits_free
        return HeadObjective(head, balance_of(bare), passes, own, loss_normalization, logits_free=not compiled)
    else:
        loss = OwnLoss(passes)
    return LossObjective(loss, head, name, passes, loss_is_scaled_for_ga, loss_normalization)


def dropout_seed(seed: int, step: int, place: int) -> int:
    """Key of the random numbers of a micro-batch.

    Args:
        seed: of the run.
        place: of its first sample in the endless order of the run.
    """
    return random_key("micro-batch", seed, step, place)


def _check_smoothing(model: nn.Module, head: Head | None, smoothing: float, own: bool) -> None:
    if not 0 <= smoothing <= 1:
        reason, fix = f"{smoothing} is not between 0 and 1", "label_smoothing_factor=0.1"
    elif own:
        reason, fix = "a loss of your own has no labels smoothed", "smooth them in your loss, and leave it at 0"
    elif head is None or not hasattr(head, "smoothing"):
        reason, fix = f"{type(model).__name__} has no targets that are classes", "label_smoothing_factor=0"
    else:
        return
    raise ConfigError(reason, field="label_smoothing_factor", fix=fix)


class HeadObjective:
    """Sums and counts of a head whose kind is known.

    In the first step a few rows go through the model with their targets: what its own head makes of them must be what
    is summed here. A head that does something else is trained by its own loss instead (`LossObjective`), if that loss
    passes its checks. With a balance loss, each step begins with a pass over all its micro-batches without gradient,
    which counts how often each expert is chosen in the global batch; only models that ask for that loss pay for it.

    Attributes:
        weights: term -> weight.
    """

    def __init__(
        self,
        head: Head,
        balance: BalanceLoss | None,
        passes: Passes,
        own: LossObjective,
        normalization: Normalization,
        *,
        logits_free: bool,
    ):
        self.head, self._balance, self._passes, self._own = head, balance, passes, own
        self._is_mean_of_means = normalization == "micro_batch_mean"
        self.weights = {**head.weights, BALANCE: balance.coefficient} if balance else dict(head.weights)
        self._plain: nn.Linear | None = None
        self._may_replace = logits_free
        self._is_checked = self._uses_own_loss = False
        self._routed: Tensor | None = None
        self._targets: Tensor | None = None

    @property
    def has_logits(self) -> bool:
        """Whether the passes of training make logits."""
        return self._plain is None

    def counts(self, batch: ModelBatch) -> dict[str, int]:
        if "counts" not in batch.notes:
            found = self.head.counts(batch.inputs) if batch.samples else dict.fromkeys(self.head.weights, 0)
            batch.notes["counts"] = {term: found.get(term, found[next(iter(found))]) for term in self.weights}
        return batch.notes["counts"]

    def prepare(self, model: nn.Module, batches: Sequence[ModelBatch], counts: Tensor, mesh: Mesh) -> None:
        """Check the head, once; find out what the balance loss needs of the whole step. A collective.

        Raises:
            ConfigError: the head is another than it seemed, and its own loss cannot be divided up.
        """
        if not self._is_checked:
            self._check(model, batches, mesh)
        if self._uses_own_loss:
            self._own.prepare(model, batches, counts, mesh)
        elif self._balance is not None:
            self._routed, self._targets = self._routing(model, batches, mesh), counts[0]

    def sums(self, model: nn.Module, batch: ModelBatch) -> dict[str, Tensor]:
        """Of a micro-batch: of the step that was prepared last while the model trains. Else a balance loss is that of
        the routing in this micro-batch."""
        if self._uses_own_loss:
            return self._own.sums(model, batch)
        return self._sums(model, batch, self._plain, self._routed if model.training else None)[0]

    def sums_and_outputs(self, model: nn.Module, batch: ModelBatch) -> tuple[dict[str, Tensor], Any]:
        """Sums of a micro-batch and the outputs of the model, logits included. A balance loss is that of the routing in
        this micro-batch."""
        if self._uses_own_loss:
            return self._own.sums_and_outputs(model, batch)
        return self._sums(model, batch, None, None)

    def _sums(
        self, model: nn.Module, batch: ModelBatch, plain: nn.Linear | None, routed: Tensor | None
    ) -> tuple[dict[str, Tensor], Any]:
        inputs = batch.inputs
        with self._passes.around(batch):
            own = self._passes.inputs(self.head, batch)
            if not batch.samples:
                outputs = model(**own)
                return dict.fromkeys(self.weights, nothing(outputs)), outputs
            if plain is not None:
                assert isinstance(self.head, CausalHead)
                total, outputs = cross_entropy_by(
                    lambda: model(**own), plain, self.head.targets(inputs), self.head.smoothing
                )
                sums = {"loss": total}
            else:
                outputs = model(**own)
                sums = self.head.sums(outputs, inputs)
        if self._balance is not None:
            sums[BALANCE] = self._balance_sum(self._balance, outputs, batch, routed)
        return sums, outputs

    def _balance_sum(self, balance: BalanceLoss, outputs: Any, batch: ModelBatch, routed: Tensor | None) -> Tensor:
        """A sum that is divided by the count of the targets, as every term is."""
        targets: Any = self.counts(batch)["loss"]
        if routed is None:
            routed = balance.routed(outputs, batch.inputs)
        elif self._is_mean_of_means:  # over this micro-batch, of experts as the whole step chose them
            routed = routed * (balance.routed(outputs, batch.inputs)[-1] / routed[-1].clamp(min=1))
        else:
            assert self._targets is not None
            targets = self._targets
        share = balance.share(outputs, batch.inputs, routed)
        return share * torch.as_tensor(targets, dtype=share.dtype, device=share.device)

    @torch.no_grad()
    def _routing(self, model: nn.Module, batches: Sequence[ModelBatch], mesh: Mesh) -> Tensor:
        """How often each expert is chosen in the global batch, and its tokens times layers. A collective."""
        assert self._balance is not None
        found = []
        for batch in batches:
            moved = batch.to(mesh.device)
            with self._passes.around(moved):
                outputs = self._without_logits(model, moved)
            found.append(self._balance.routed(outputs, moved.inputs) * (batch.samples > 0))
        free(model)
        return mesh.sum_(torch.stack(found).sum(0))

    def _without_logits(self, model: nn.Module, batch: ModelBatch) -> Any:
        own = self._passes.inputs(self.head, batch)
        if self._plain is None:
            return model(**own)
        assert isinstance(self.head, CausalHead)
        nothing_counts = torch.full_like(self.head.targets(batch.inputs), IGNORE)
        return cross_entropy_by(lambda: model(**own), self._plain, nothing_counts, 0.0)[1]

    @torch.no_grad()
    def _check(self, model: nn.Module, batches: Sequence[ModelBatch], mesh: Mesh) -> None:
        batch = self._excerpt(max(batches, key=lambda batch: self.counts(batch)[next(iter(self.weights))]))
        batch = replace(batch.to(mesh.device), seed=batch.seed or 0)
        has_targets = batch.samples > 0 and all(self.head.counts(batch.inputs).values())
        is_known = self._is_as_expected(model, batch)
        plain = plain_head(self._passes.model) if self._may_replace and isinstance(self.head, CausalHead) else None
        is_plain = plain is not None and self._is_plain(model, batch, plain)
        counts_from_zero = self._counts_from_zero(model, batch)
        free(model)
        doubts = torch.tensor([not is_known, not is_plain, not counts_from_zero], dtype=torch.float64) * has_targets
        found = mesh.max_(torch.cat([doubts, torch.tensor([float(has_targets)])]).to(mesh.device)).tolist()
        is_other, may_have_logits, numbers_itself, self._is_checked = map(bool, found)
        if self._is_checked and is_other:
            self._use_own_loss()
        elif self._is_checked:
            self._plain = None if may_have_logits else plain
            self._passes.gives_positions = not numbers_itself

    def _excerpt(self, batch: ModelBatch) -> ModelBatch:
        """A few rows with targets; of a causal language model, a few positions."""
        if batch.has_rows and batch.samples:
            rows = range(batch.rows)
            first = next((r for r in rows if all(self.head.counts(batch.part([r]).inputs).values())), 0)
            batch = batch.part(range(first, min(first + 2, batch.rows)))
        labels = batch.inputs.get("labels")
        if not isinstance(self.head, CausalHead) or not isinstance(labels, Tensor):
            return batch
        tensors = [value for value in batch.inputs.values() if isinstance(value, Tensor)]
        if any(value.shape != labels.shape for value in tensors) or len(tensors) != len(batch.inputs):
            return batch
        start = int((self.head.targets(batch.inputs) != IGNORE).any(0).int().argmax())
        window = {name: value[:, start : start + _WINDOW] for name, value in batch.inputs.items()}
        return batch.with_inputs(**window)

    def _is_as_expected(self, model: nn.Module, batch: ModelBatch) -> bool:
        """Whether the model's own head makes of its outputs what is made of them here."""
        inputs = self.head.own_inputs(batch.inputs)
        with self._passes.around(batch):
            outputs = model(**self._passes.completed(inputs, batch))
        found = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if found is None:
            return False
        try:
            expected = self.head.own_loss(outputs, inputs)
        except (DataError, RuntimeError):  # shapes that are not those of this kind
            return False
        if self._balance is not None:
            routed = self._balance.routed(outputs, inputs)
            expected = expected + self._balance.coefficient * self._balance.share(outputs, inputs, routed)
        bound = 2e-2 if is_narrow(found.dtype) else 1e-5
        return bool((found - expected).abs() <= bound * expected.abs() + 1e-12)

    def _is_plain(self, model: nn.Module, batch: ModelBatch, head: nn.Linear) -> bool:
        assert isinstance(self.head, CausalHead)
        with self._passes.around(batch):
            own = self._passes.inputs(self.head, batch)
            return gives_its_outputs(lambda: model(**own), head, self.head.targets(batch.inputs).shape)

    def _counts_from_zero(self, model: nn.Module, batch: ModelBatch) -> bool:
        """Whether a causal language model numbers the positions of a row 0, 1, 2, ... if it is not told them. Some
        begin elsewhere, or pass over the padding by themselves."""
        mask = batch.inputs.get("attention_mask")
        is_told = not self._passes.takes_positions or "position_ids" in batch.inputs
        if is_told or not isinstance(self.head, CausalHead) or not isinstance(mask, Tensor) or mask.ndim != 2:
            return False
        own = self._passes.inputs(self.head, batch)
        places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        with self._passes.around(batch):
            untold = model(**own)
        with self._passes.around(batch):
            told = model(**own, position_ids=places)
        return torch.equal(untold["logits"], told["logits"])

    def _use_own_loss(self) -> None:
        name = type(self._passes.model).__name__
        if len(self.weights) > 1 or getattr(self.head, "smoothing", None):
            raise ConfigError(
                f"the loss of {name} is not what its name says, and it has several terms or smoothed labels, so that "
                "its sum over the global batch is not known",
                fix="give compute_loss_func, which divides a sum over the targets by num_items_in_batch"
                + (", or set model.config.output_router_logits = False" if self._balance else ""),
            )
        self._uses_own_loss = True
