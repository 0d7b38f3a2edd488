"""What the heads of Hugging Face models are trained on: which targets count, and what is summed over them.

The sums are formed from the outputs of a model that was not given its targets, in float32 or wider. Each kind follows
the loss that the library's own heads have for one sample (transformers `loss/loss_utils.py`), with the difference that
padding never matters, so that a sample's loss does not depend on the rows beside it.

Shape letters: B rows, S positions, V vocabulary or classes, L labels of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.data.rows import IGNORE
from samestep.errors import ConfigError, DataError
from samestep.ops.precision import wide

Inputs = Mapping[str, Any]


class Head(Protocol):
    """Loss terms of one kind of head.

    Attributes:
        weights: term -> weight.
        names: the inputs that hold targets; the model is run without them.
    """

    weights: Mapping[str, float]
    names: tuple[str, ...]

    def counts(self, inputs: Inputs) -> dict[str, int]:
        """Term -> number of targets."""
        ...

    def items(self, inputs: Inputs) -> int:
        """What `num_items_in_batch` counts."""
        ...

    def sums(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        """Term -> sum over the targets."""
        ...

    def own_loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        """The mean that the library's head makes of a single batch, padding in it included."""
        ...

    def own_inputs(self, inputs: Inputs) -> Inputs:
        """Inputs with the same targets, such that the library's head counts no others."""
        ...

    def used(self, inputs: Inputs) -> Tensor:
        """Which rows of the logits the targets are compared with, bool, of the logits' shape without the last axis."""
        ...

    def model_inputs(self, model: Any, inputs: Inputs) -> dict[str, Any]:
        """What the model is run with."""
        ...


def labels_of(inputs: Inputs, name: str) -> Tensor:
    """The targets of that name.

    Raises:
        DataError: there are none, or they are no tensor, so that nobody can tell how many they are.
    """
    if name not in inputs:
        raise DataError(
            f"a micro-batch has no {name!r} (it has {', '.join(inputs) or 'nothing'})\n  fix: use a data_collator that "
            f"makes {name!r}, or name your targets with label_names and give compute_loss_func"
        )
    labels = inputs[name]
    if not isinstance(labels, Tensor):
        raise DataError(
            f"{name!r} is a {type(labels).__name__}, not a tensor, so its targets cannot be counted\n  fix: use a "
            "data_collator that makes one tensor of it, with -100 where nothing counts"
        )
    return labels


def cross_entropy_sum(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum over the targets that count of (1 - smoothing) * nll + smoothing * mean over the classes of -log p.

    Args:
        logits: [..., V], any floating dtype.
        targets: int64 [...]; -100 does not count.

    Returns:
        A scalar of float32 or wider. Only rows whose target counts are copied to that dtype.
    """
    rows, targets = logits.flatten(0, -2), targets.flatten().to(logits.device)
    kept = (targets != IGNORE).nonzero().squeeze(1)
    chosen = rows[kept].to(wide(logits.dtype))
    return F.cross_entropy(chosen, targets[kept], reduction="sum", label_smoothing=smoothing)


def _logits(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]


class _Base:
    """What most heads have in common."""

    names: tuple[str, ...] = ("labels",)

    def own_inputs(self, inputs: Inputs) -> Inputs:
        return inputs

    def model_inputs(self, model: Any, inputs: Inputs) -> dict[str, Any]:
        return {name: value for name, value in inputs.items() if name not in self.names}


class _OneTerm(_Base, ABC):
    """What heads with a single term have in common."""

    weights: Mapping[str, float] = {"loss": 1.0}

    def counts(self, inputs: Inputs) -> dict[str, int]:
        return {"loss": self.items(inputs)}

    @abstractmethod
    def items(self, inputs: Inputs) -> int: ...


class TokenHead(_OneTerm):
    """A class for each position: masked language models, token classification."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def targets(self, inputs: Inputs) -> Tensor:
        """The target of each position, int64 [B, S]; -100 where there is none."""
        return labels_of(inputs, "labels")

    def items(self, inputs: Inputs) -> int:
        return int((self.targets(inputs) != IGNORE).sum())

    def used(self, inputs: Inputs) -> Tensor:
        return self.targets(inputs) != IGNORE

    def sums(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        logits, targets = _logits(outputs), self.targets(inputs)
        if logits.shape[:-1] != targets.shape:
            raise DataError(f"logits {tuple(logits.shape)} have no row for each of the labels {tuple(targets.shape)}")
        return {"loss": cross_entropy_sum(logits, targets, self.smoothing)}

    def own_loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        return cross_entropy_sum(_logits(outputs), self.targets(inputs)) / self.items(inputs)


class CausalHead(TokenHead):
    """The next token at each position.

    `shift_labels` hold the target of each position and are taken as they are. Of `labels`, that of position i + 1 is
    the target of position i, unless i is padding to the left of the row, or i + 1 begins a new document
    (`position_ids` start again): neither is predicted from anything that belongs to it.
    """

    names: tuple[str, ...] = ("labels", "shift_labels")

    def targets(self, inputs: Inputs) -> Tensor:
        if inputs.get("shift_labels") is not None:
            return labels_of(inputs, "shift_labels")
        labels = labels_of(inputs, "labels")
        targets = F.pad(labels[..., 1:], (0, 1), value=IGNORE)
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            targets = targets.masked_fill((mask != 0).cumsum(-1) == 0, IGNORE)
        if isinstance(positions, Tensor) and positions.shape in (labels.shape, (1, labels.shape[-1])):
            begins = F.pad(positions.diff() <= 0, (0, 1))  # one row of positions may stand for all
            targets = targets.masked_fill(begins.expand_as(labels), IGNORE)
        return targets

    def own_inputs(self, inputs: Inputs) -> Inputs:
        labels = F.pad(self.targets(inputs)[..., :-1], (1, 0), value=IGNORE)
        return {name: value for name, value in inputs.items() if name != "shift_labels"} | {"labels": labels}


class Seq2SeqHead(TokenHead):
    """The next token of the decoder, whose inputs the model makes of the labels."""

    def model_inputs(self, model: Any, inputs: Inputs) -> dict[str, Any]:
        own = super().model_inputs(model, inputs)
        if own.get("decoder_input_ids") is None and own.get("decoder_inputs_embeds") is None:
            own["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels_of(inputs, "labels"))
        return own


class ClassHead(_OneTerm):
    """Classes or numbers of a whole row.

    One label of several (cross-entropy, -100 does not count), several at once (binary cross-entropy), or numbers
    (square error). The last two are averaged over rows and labels, as the library's heads do.
    """

    def __init__(self, config: Any, smoothing: float = 0.0):
        self._config, self.smoothing = config, smoothing

    def kind(self, labels: Tensor) -> str:
        """The configuration's `problem_type`, or what the library's heads make of the labels."""
        if self._config.problem_type is not None:
            return self._config.problem_type
        if self._config.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def items(self, inputs: Inputs) -> int:
        labels = labels_of(inputs, "labels")
        if self.kind(labels) == "single_label_classification":
            return int((labels != IGNORE).sum())
        return labels.numel()

    def used(self, inputs: Inputs) -> Tensor:
        labels = labels_of(inputs, "labels")
        if self.kind(labels) == "single_label_classification":
            return labels.flatten() != IGNORE
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)

    def sums(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        return {"loss": self._sum(outputs, inputs, self.smoothing)}

    def own_loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        return self._sum(outputs, inputs, 0.0) / self.items(inputs)

    def _sum(self, outputs: Any, inputs: Inputs, smoothing: float) -> Tensor:
        logits, labels = _logits(outputs), labels_of(inputs, "labels")
        kind = self.kind(labels)
        if kind == "single_label_classification":
            return cross_entropy_sum(logits, labels.flatten(), smoothing)
        if smoothing:
            raise ConfigError(
                f"labels cannot be smoothed: {kind.replace('_', ' ')} has no classes to spread them over",
                field="label_smoothing_factor",
                fix="label_smoothing_factor=0",
            )
        scores = logits.to(wide(logits.dtype))
        wanted = labels.to(scores).reshape(scores.shape)
        if kind == "regression":
            return F.mse_loss(scores, wanted, reduction="sum")
        return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")


class AnswerHead(_Base):
    """Start and end of the answer to a question, each a position of the row; padding is no candidate.

    A position beyond the row is left out, as in the library's heads. There, rows end where the longest row of the batch
    does; here, each where its own tokens do.
    """

    weights: Mapping[str, float] = {"start_loss": 0.5, "end_loss": 0.5}
    names: tuple[str, ...] = ("start_positions", "end_positions")

    def counts(self, inputs: Inputs) -> dict[str, int]:
        return {term: int((targets != IGNORE).sum()) for term, targets in self._targets(inputs).items()}

    def items(self, inputs: Inputs) -> int:
        return len(labels_of(inputs, "start_positions"))

    def sums(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        candidates = _not_padding(inputs)
        sums = {}
        for term, targets in self._targets(inputs).items():
            logits = _answer_logits(outputs, term)
            sums[term] = cross_entropy_sum(logits.masked_fill(~candidates, -torch.inf), targets)
        return sums

    def own_loss(self, outputs: Any, inputs: Inputs) -> Tensor:
        parts = []
        for term, places in self._places(inputs).items():
            logits = _answer_logits(outputs, term)
            targets = places.masked_fill(places >= logits.shape[1], IGNORE)
            parts.append(cross_entropy_sum(logits, targets) / (targets != IGNORE).sum())
        return (parts[0] + parts[1]) / 2

    def used(self, inputs: Inputs) -> Tensor:
        return torch.ones(self.items(inputs), dtype=torch.bool)

    def _places(self, inputs: Inputs) -> dict[str, Tensor]:
        """Term -> positions int64 [B], as the library's heads read them."""
        found = {term: labels_of(inputs, name) for term, name in zip(self.weights, self.names, strict=True)}
        return {term: places.reshape(len(places)).clamp(min=0) for term, places in found.items()}

    def _targets(self, inputs: Inputs) -> dict[str, Tensor]:
        """Term -> positions int64 [B]; -100 where they are outside of their row."""
        candidates = _not_padding(inputs)
        width = candidates.shape[1]
        targets = {}
        for term, places in self._places(inputs).items():
            inside = candidates.gather(1, places.clamp(max=width - 1)[:, None]).squeeze(1) & (places < width)
            targets[term] = places.masked_fill(~inside, IGNORE)
        return targets


def _answer_logits(outputs: Any, term: str) -> Tensor:
    if isinstance(outputs, Mapping):
        return outputs["start_logits" if term == "start_loss" else "end_logits"]
    return outputs[0 if term == "start_loss" else 1]


def _not_padding(inputs: Inputs) -> Tensor:
    """Bool [B, S]."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask != 0
    main = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"][..., 0]
    return torch.ones_like(main, dtype=torch.bool)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what `torch.compile` and peft have put around it."""
    inner: Any = getattr(model, "_orig_mod", model)
    return inner.get_base_model() if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model") else inner


def predicts_first_token(model: nn.Module) -> bool:
    """Whether peft lays a learned prompt before each row, whose last position predicts the first token."""
    inner: Any = getattr(model, "_orig_mod", model)
    config = getattr(inner, "active_peft_config", None) if hasattr(inner, "peft_config") else None
    return config is not None and config.is_prompt_learning and "PREFIX" not in str(config.peft_type)


_ROW_LOSSES = ("SequenceClassification", "ImageClassification", "VideoClassification", "AudioClassification")


def head_of(model: nn.Module, smoothing: float = 0.0) -> Head | None:
    """The kind of a model's head, by the name of its loss or of its class, or of the class that it derives from; None
    where none of them is known.

    Args:
        model: as `unwrapped`.
    """
    config = getattr(model, "config", None)
    if config is None:
        return None
    names = [getattr(model, "loss_type", None) or "", *(kind.__name__ for kind in type(model).__mro__)]
    found = (_named(name, model, config, smoothing) for name in names)
    return next((head for head in found if head is not None), None)


def _named(name: str, model: nn.Module, config: Any, smoothing: float) -> Head | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ2SEQ

    if name.endswith(_ROW_LOSSES):
        return ClassHead(config, smoothing)
    if name.endswith(("MaskedLM", "TokenClassification")):
        return TokenHead(smoothing)
    if name.endswith("QuestionAnswering"):
        return AnswerHead()
    if getattr(config, "is_encoder_decoder", False):
        makes_inputs = hasattr(model, "prepare_decoder_input_ids_from_labels")
        is_seq2seq = name in SEQ2SEQ.values() or name.endswith("ConditionalGeneration")
        return Seq2SeqHead(smoothing) if makes_inputs and is_seq2seq else None
    is_causal = name in CAUSAL.values() or name.endswith(("CausalLM", "ConditionalGeneration"))
    return CausalHead(smoothing) if is_causal else None
