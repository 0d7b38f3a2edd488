"""A causal language model of transformers, run by samestep's decoder: the same weights, other operators.

The model stays what its owner made: its parameters are those that the decoder computes with, so that optimizers,
saving, `generate` and callbacks see nothing new. Only the passes of training and evaluation are others: rows are packed
instead of padded, logits of training never exist, and dropout is named by sample and position, so that its masks do not
depend on how the global batch is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from pydantic import ValidationError
from torch import Tensor, nn

from samestep.config.huggingface import spec_from_hf
from samestep.config.schema import ModelConfig, ParallelismConfig
from samestep.data.batch import Batch, collate
from samestep.data.rows import IGNORE, Sample
from samestep.errors import CheckpointError, ConfigError, DataError
from samestep.families import FAMILIES, ModelSpec, resolve_model
from samestep.hf.heads import CausalHead, Inputs, cross_entropy_sum
from samestep.hf.probes import without_dropout
from samestep.model.activations import compile_layers, recompute
from samestep.model.decoder import Decoder
from samestep.model.weights import from_hf, hf_place
from samestep.ops import Precision
from samestep.ops.precision import is_narrow
from samestep.parallel.data import shard
from samestep.parallel.mesh import Mesh
from samestep.recompute import WHOLE
from samestep.run.setup import around_passes

_FIELD = "native"
_TAKEN = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What padding-free collators add, which says no more than `position_ids` do."""
_HEAD = "lm_head"
_PROBED, _COMPARED = 512, 16
"""Positions of the first check, and how many of the last ones have their logits compared."""


@dataclass(frozen=True)
class NativeBatch(Batch):
    """A micro-batch of the decoder, made of what a data collator made.

    Attributes:
        taken: bool [rows, positions] of the collator's layout: which positions are here, in that order.
    """

    taken: Tensor

    def as_collated(self, values: Tensor) -> Tensor:
        """Numbers of each position [..., V] in the collator's layout [rows, positions, V]; 0 in padding."""
        taken = self.taken.to(values.device)
        whole = values.new_zeros(*taken.shape, values.shape[-1])
        whole[taken] = values.flatten(0, -2)
        return whole


def native_batch(
    inputs: Inputs, max_positions: int, *, samples: int = 1, first: int = 0, dropout_key: int = 0
) -> NativeBatch:
    """Lay the documents of a collated batch end to end; where they have one length, a row each.

    A row is a sample and, but for its padding, a document. In rows without `attention_mask` a document begins wherever
    `position_ids` do not go on, as transformers has it.

    Args:
        inputs: on the CPU; without labels nothing is a target.
        max_positions: of the model.
        samples: that the data collator was given. If it laid them into one row, each document of that row is one; where
            there are more, its dropout is named by the row, so that it depends on the split.
        first: number of the first sample in the global batch, which names it for dropout.
        dropout_key: of the step.

    Raises:
        DataError: inputs that the decoder does not take, a position beyond its last, or a target in padding.
    """
    _check_inputs(inputs)
    ids = inputs["input_ids"].cpu()
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    taken = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu() != 0
    targets = _targets(inputs, ids).cpu()
    if bool(((targets != IGNORE) & ~taken).any()):
        raise DataError(
            "a target follows a position that attention_mask hides, so that nothing can predict it\n"
            "  fix: write -100 into labels wherever attention_mask is 0"
        )
    taken[:, 0] |= ~taken.any(1)  # a row of padding alone: one position without a target
    if positions is None:
        numbers = (taken.cumsum(1) - 1).clamp(min=0)
    else:
        numbers = positions.cpu().expand_as(ids).clamp(min=0)
    largest = int(numbers[taken].max())
    if largest >= max_positions:
        raise DataError(
            f"a row has position {largest}, but the model has positions 0 to {max_positions - 1}\n"
            "  fix: cut the rows shorter (max_length of the tokenizer)"
        )
    begins = numbers.diff(prepend=numbers[:, :1] - 1) != 1
    if mask is not None or positions is None:
        begins = torch.zeros_like(taken)
    rows = []
    for row in range(len(ids)):
        here = taken[row]
        arrays = (ids[row][here], targets[row][here], begins[row][here].cumsum(0), numbers[row][here])
        rows.append(Sample(*(array.numpy() for array in arrays)))
    if len(rows) == 1 < samples:
        documents = _documents(rows[0])
        rows = documents if len(documents) <= samples else rows
    layout = "padded" if len({len(row) for row in rows}) == 1 else "packed"
    places = range(first, first + len(rows))
    return NativeBatch(**vars(collate(rows, places, layout, dropout_key)), taken=taken)


def _check_inputs(inputs: Inputs) -> None:
    there = {name for name, value in inputs.items() if value is not None}
    others = sorted(there.difference(_TAKEN, _FLATTENED if "position_ids" in there else ()))
    if others or "input_ids" not in there:
        raise DataError(
            f"native=True takes {', '.join(_TAKEN)}, but the data collator made {', '.join(sorted(there))}\n"
            "  fix: leave the others out, or write native=False"
        )
    for name in ("input_ids", "attention_mask", "position_ids"):
        if name in there and inputs[name].ndim != 2:
            raise DataError(
                f"native=True takes {name} as [rows, positions], but it has the shape {tuple(inputs[name].shape)}\n"
                "  fix: use a collator that makes two axes, or write native=False"
            )


def _targets(inputs: Inputs, ids: Tensor) -> Tensor:
    if any(inputs.get(name) is not None for name in CausalHead.names):
        return CausalHead().targets(inputs)
    return torch.full_like(ids, IGNORE)


def _documents(row: Sample) -> list[Sample]:
    """Those of one row, each as a sample of its own."""
    edges = np.flatnonzero(np.diff(row.documents)) + 1
    parts = zip(*(np.split(array, edges) for array in (row.input_ids, row.labels, row.positions)), strict=True)
    return [Sample(ids, labels, np.zeros_like(ids), positions) for ids, labels, positions in parts]


class NativeModel:
    """A decoder with the parameters of a model of transformers.

    Args:
        model: a `...ForCausalLM` of a family that samestep knows.
        precision: what products are computed in: `no` for the dtype of the weights.
        device: of the weights, once they are in use.

    Attributes:
        decoder: runs the passes, after `refresh`.
        precision: of the decoder.

    Raises:
        ConfigError: the decoder does not know the model, or gives other logits than the model does.
    """

    def __init__(self, model: nn.Module, precision: str, device: torch.device):
        self._model: Any = model
        self.spec = _spec_of(model)
        self.precision = _precision(model, precision)
        self._lent: list[nn.Parameter] = []
        self._check_logits(_precision(model, "no"))
        self.decoder = self._made(self.precision, device)
        self._is_sharded = False

    @property
    def _keeps_joined(self) -> bool:
        return self.spec.family == "gpt2"

    def _made(self, precision: Precision, device: torch.device) -> Decoder:
        with torch.device("meta"):
            decoder = Decoder(self.spec, precision)
        self._lend(decoder)
        decoder.reset_buffers(device)
        decoder.embed_tokens.padding_idx = self._model.get_input_embeddings().padding_idx
        return decoder

    def refresh(self) -> None:
        """Before a pass: the decoder is in the mode of the model, and has the parameters that it has by now. Those that
        the model keeps joined or transposed (gpt2) are views, made anew."""
        if self.decoder.training != self._model.training:
            self.decoder.train(self._model.training)
        if not self._is_sharded and (self._keeps_joined or not self._is_up_to_date()):
            self._lend(self.decoder)

    def _is_up_to_date(self) -> bool:
        now = list(self._model.parameters())
        return len(now) == len(self._lent) and all(a is b for a, b in zip(now, self._lent, strict=True))

    def _lend(self, decoder: Decoder) -> None:
        weights = from_hf(dict(self._model.named_parameters()), self.spec)
        self._lent = list(self._model.parameters())
        for name, weight in weights.items():
            _put(decoder, name, weight)
        if self.spec.tied:
            decoder.loss_head.weight = weights["embed_tokens.weight"]  # type: ignore[assignment]

    def shard(self, mesh: Mesh, frees: bool) -> None:
        """Split the weights over the ranks, those of the model too: it then holds this rank's parts.

        Args:
            frees: gathered weights of layers after the forward pass.

        Raises:
            ConfigError: the model keeps weights joined that are units of their own in the decoder.
        """
        if self._keeps_joined:
            raise ConfigError(
                "gpt2 keeps weights joined that the decoder splits over ranks one by one",
                field="fsdp",
                fix="write native=False, or leave fsdp out",
            )
        policy = ParallelismConfig(reshard_after_forward_policy="default" if frees else "never")
        shard(self.decoder, mesh, policy, self.precision)
        self._is_sharded = True
        self.decoder.reset_buffers(mesh.device)
        for name, weight in self.decoder.named_parameters():
            _put(self._model, hf_place(name, self.spec).name, weight)
        if self.spec.tied:
            _put(self._model, f"{_HEAD}.weight", self.decoder.loss_head.weight)

    @contextmanager
    def around_passes(self) -> Iterator[None]:
        """Around the passes of a training step: weights that are rounded for each product are rounded once."""
        self._model.train()
        self.refresh()
        with around_passes(self.decoder, not self._is_sharded, not self._is_sharded):
            yield

    def recompute(self, every: int) -> None:
        """Keep only the inputs of every `every`-th layer, and run it again in the backward pass."""
        recompute(self.decoder, [(WHOLE,) if i % every == 0 else () for i in range(self.spec.num_layers)])

    def compile(self) -> None:
        """Compile the parts of the layers that are functions of tensors alone."""
        compile_layers(self.decoder)

    @torch.no_grad()
    def _check_logits(self, precision: Precision) -> None:
        """Whoever changed the model - an adapter, a hook, another forward - is not passed over."""
        spec, model = self.spec, self._model
        rates = {rate for module in model.modules() if (rate := _dropout_rate(module)) is not None}
        off = sorted(rates - {spec.hidden_dropout, spec.attention_dropout})
        if off:
            raise ConfigError(
                f"a module of the model has the dropout rate {off[0]}, which its config.json does not tell",
                field=_FIELD,
                fix="set it in the configuration that the model is made from",
            )
        device = next(model.parameters()).device
        ids = (torch.arange(min(_PROBED, spec.max_positions)) * 7 % spec.vocab_size)[None]
        decoder = self._made(precision, device).eval()
        with without_dropout(model):
            wanted = model(input_ids=ids.to(device), use_cache=False, logits_to_keep=_COMPARED).logits
        hidden = decoder(native_batch({"input_ids": ids}, spec.max_positions).to(device)).hidden
        found = decoder.loss_head.logits(hidden[:, -_COMPARED:]).to(wanted.dtype)
        bound = 3e-2 if is_narrow(precision.params) else 1e-4
        share = (found - wanted).abs().max().item() / max(wanted.abs().max().item(), 1e-6)
        if not share <= bound:
            raise ConfigError(
                f"the decoder gives other logits than this {type(model).__name__} ({share:.1e} of the largest): "
                "something was changed in it that its config.json does not tell",
                field=_FIELD,
                fix="write native=False",
            )


def _dropout_rate(module: nn.Module) -> float | None:
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", None)
    return rate if isinstance(rate, float) else None


def _put(module: nn.Module, name: str, weight: Tensor) -> None:
    """A parameter, or a view of one, in the place of the parameter `name`."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if not isinstance(weight, nn.Parameter) and leaf in owner._parameters:
        delattr(owner, leaf)
    setattr(owner, leaf, weight)


def _spec_of(model: nn.Module) -> ModelSpec:
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    known = {family.architecture for family in FAMILIES.values()}
    if name not in known or type(model) is not getattr(transformers, name):
        raise ConfigError(
            f"the decoder has no {name}; it has {', '.join(sorted(known))}", field=_FIELD, fix="write native=False"
        )
    weights = dict(model.named_parameters())
    try:
        found = spec_from_hf(config.to_dict())
        del found["initializer_range"]  # which may be anything, and means nothing here
        spec = resolve_model(ModelConfig(seq_length=1, **found))
        from_hf(weights, spec)
    except ConfigError as error:
        raise ConfigError(f"{error.field}: {error.reason}", field=_FIELD, fix="write native=False") from error
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{problem['loc'][0]}: {problem['msg']}", field=_FIELD, fix="write native=False") from error
    except CheckpointError as error:
        raise ConfigError(
            f"{error} (adapters and quantized weights are none of the decoder's)",
            field=_FIELD,
            fix="write native=False",
        ) from error
    if spec.tied and f"{_HEAD}.weight" in weights:
        raise ConfigError(
            "config.json ties the head to the embedding, but they are two weights",
            field=_FIELD,
            fix="call model.tie_weights(), or set model.config.tie_word_embeddings = False",
        )
    return spec


def _precision(model: nn.Module, wanted: str) -> Precision:
    weights = list(model.parameters())
    dtypes, places = {w.dtype for w in weights}, {w.device for w in weights}
    if len(dtypes) > 1 or len(places) > 1:
        found = ", ".join(sorted(map(str, dtypes if len(dtypes) > 1 else places)))
        raise ConfigError(f"the weights are of several kinds: {found}", field=_FIELD, fix="load them as one")
    stored = dtypes.pop()
    if stored == torch.float64:
        if wanted != "no":
            raise ConfigError("weights in float64 are computed with in float64", field=wanted, fix="leave it out")
        return Precision().raised(stored)
    return Precision(params=stored, compute={"no": stored, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted])


class NativeObjective:
    """Next-token cross-entropy of the decoder. The model that it is handed is the one that lends its weights.

    Attributes:
        weights: term -> weight.
    """

    weights: Mapping[str, float] = {"loss": 1.0}

    def __init__(self, native: NativeModel, label_smoothing: float):
        self._native, self._smoothing = native, label_smoothing

    def counts(self, batch: NativeBatch) -> dict[str, int]:
        return {"loss": batch.targets}

    def sums(self, model: nn.Module, batch: NativeBatch) -> dict[str, Tensor]:
        self._native.refresh()
        return {"loss": self._native.decoder.losses(batch, 0.0, self._smoothing)[0]}

    def outputs(self, batch: NativeBatch) -> dict[str, Tensor]:
        """Logits [rows, positions, V] in the layout of the data collator; 0 in padding."""
        self._native.refresh()
        return {"logits": batch.as_collated(self._native.decoder.logits(batch))}

    def sums_and_outputs(self, model: nn.Module, batch: NativeBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self._native.refresh()
        logits = self._native.decoder.logits(batch)
        sums = {"loss": cross_entropy_sum(logits, batch.labels, self._smoothing)}
        return sums, {"logits": batch.as_collated(logits)}
