"""The decoder: embedding, pre-norm layers, final norm; the head and the loss live together in `loss_head`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from samestep.data.batch import Batch
from samestep.families import ModelSpec
from samestep.model import blocks
from samestep.model.attention import Attention, Context, KeyValueCache
from samestep.model.feed_forward import FeedForward
from samestep.model.norm import make_norm
from samestep.ops import (
    Precision,
    dropout,
    dynamic_rope_tables,
    embedding,
    linear_cross_entropy,
    logits,
    prepare_rope,
    random_key,
    rope_tables,
    token_keys,
    wide,
)
from samestep.torch_private import has_hooks


@dataclass(frozen=True)
class Outputs:
    """What a forward pass gives: hidden states [B, S, hidden] after the final norm, and auxiliary tensors by name."""

    hidden: torch.Tensor
    auxiliary: dict[str, torch.Tensor] = field(default_factory=dict)


class LossHead(nn.Module):
    """Output projection and cross-entropy in one, so that logits need never exist at full size."""

    def __init__(self, spec: ModelSpec, precision: Precision):
        super().__init__()
        self.precision = precision
        storage = precision.embedding if spec.tied else precision.params
        self.weight: nn.Parameter = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=storage))

    def forward(
        self, hidden_BSC: torch.Tensor, labels_BS: torch.Tensor, z_loss_weight: float, label_smoothing: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums over targets: (cross-entropy + z_loss_weight x z-loss, cross-entropy, z-loss); only the first trains."""
        return linear_cross_entropy(
            hidden_BSC.flatten(0, 1),
            self.weight,
            labels_BS.flatten(),
            z_loss_weight=z_loss_weight,
            label_smoothing=label_smoothing,
            compute_dtype=self.precision.compute,
            loss_dtype=self.precision.loss,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden, self.weight, self.precision.compute)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, precision: Precision, layer: int):
        super().__init__()
        self.layer, self.hidden_dropout = layer, spec.hidden_dropout
        self.input_layernorm = make_norm(spec, precision)
        self.self_attn = Attention(spec, precision, layer)
        self.post_attention_layernorm = make_norm(spec, precision)
        self.mlp = FeedForward(spec, precision)

    def forward(self, x_BSC: torch.Tensor, context: Context) -> torch.Tensor:
        key = random_key(context.dropout_base, self.layer) if context.token_keys is not None else 0
        return self._feed(self._attend(x_BSC, context, key), context, key)

    def _attend(self, x_BSC: torch.Tensor, context: Context, key: int) -> torch.Tensor:
        norm, attention = self.input_layernorm, self.self_attn
        if not self._drops(context) and (y_BSC := blocks.attend(norm, attention, x_BSC, context)) is not None:
            return y_BSC
        return x_BSC + self._drop(attention(norm(x_BSC), context, key), context, key, "attention")

    def _feed(self, x_BSC: torch.Tensor, context: Context, key: int) -> torch.Tensor:
        norm, mlp = self.post_attention_layernorm, self.mlp
        if not self._drops(context) and (y_BSC := blocks.feed(norm, mlp, x_BSC, context)) is not None:
            return y_BSC
        return x_BSC + self._drop(mlp(norm(x_BSC)), context, key, "mlp")

    def _drops(self, context: Context) -> bool:
        return context.token_keys is not None and self.hidden_dropout > 0

    def _drop(self, x_BSC: torch.Tensor, context: Context, key: int, site: str) -> torch.Tensor:
        if not self._drops(context):
            return x_BSC
        assert context.token_keys is not None
        return dropout(x_BSC, self.hidden_dropout, random_key(key, site), context.token_keys)


class Decoder(nn.Module):
    """A causal language model.

    Parameters are made empty, on the current default device; `model.init.initialize` gives their first values.

    Attributes:
        sparse_tables: see the function of that name.
    """

    embed_tokens: nn.Embedding
    embed_positions: nn.Embedding | None
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, spec: ModelSpec, precision: Precision):
        super().__init__()
        self.spec, self.precision = spec, precision
        self.sparse_tables = False
        self.embed_tokens = _table(spec.vocab_size, spec, precision)
        self.embed_positions = _table(spec.max_positions, spec, precision) if spec.learned_positions else None
        # Keyed by the layer's own number: a pipeline stage that holds some of the layers keeps their names.
        self.layers = nn.ModuleDict({str(i): Layer(spec, precision, i) for i in range(spec.num_layers)})
        self.norm = make_norm(spec, precision)
        self.loss_head = LossHead(spec, precision)
        if spec.tied:
            self.loss_head.weight = cast(nn.Parameter, self.embed_tokens.weight)
        self.reset_buffers()

    def reset_buffers(self, device: torch.device | None = None) -> None:
        """Fill the rotary tables, on the device of the weights unless told. `to_empty` does not know them: call it
        again after that."""
        spec, device = self.spec, device or self.device
        if spec.learned_positions or self._dynamic:
            return
        # Made on the CPU, so that every device turns by the same angles.
        cos, sin = rope_tables(
            spec.max_positions, spec.head_dim, spec.rope_theta, self.precision.rotary, "cpu", spec.rope_scaling
        )
        self.register_buffer("rope_cos", cos.to(device), persistent=False)
        self.register_buffer("rope_sin", sin.to(device), persistent=False)

    @property
    def _dynamic(self) -> bool:
        return self.spec.rope_scaling is not None and self.spec.rope_scaling.type == "dynamic"

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def stored_dtype(self, name: str) -> torch.dtype:
        """What a parameter is stored in, whatever dtype its shards have."""
        return self.precision.embedding if name.startswith("embed_") else self.precision.params

    def losses(
        self, batch: Batch, z_loss_weight: float, label_smoothing: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `loss_head` gives for a micro-batch: forward pass and head in one call."""
        return self.loss_head(self._outputs(batch).hidden, batch.labels, z_loss_weight, label_smoothing)

    def logits(self, batch: Batch) -> torch.Tensor:
        """[rows, positions, vocab] of a micro-batch, in one call as well."""
        return self.loss_head.logits(self._outputs(batch).hidden)

    def forward(self, batch: Batch) -> Outputs:
        return self._outputs(batch)

    def _outputs(self, batch: Batch) -> Outputs:
        lengths = document_lengths(batch) if self._dynamic else None
        context = self._context(batch.position_ids, lengths)
        context.spans = batch.spans
        if self.training and (self.spec.hidden_dropout or self.spec.attention_dropout):
            context.token_keys = token_keys(batch.sample_ids, batch.document_ids, batch.position_ids)
            context.dropout_base = batch.dropout_key
        return Outputs(self._hidden(batch.input_ids, batch.position_ids, context))

    def decode(self, input_ids_BS: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """Next-token logits [B, vocab] after further tokens; `cache` holds all earlier positions and is extended.

        With `dynamic` rotary scaling the new tokens turn by the length so far; keys in the cache stay as they are.
        """
        start, stop = cache.length, cache.length + input_ids_BS.shape[1]
        position_ids_BS = torch.arange(start, stop, device=input_ids_BS.device).expand_as(input_ids_BS)
        context = self._context(position_ids_BS, torch.full_like(position_ids_BS, stop))
        context.cache = cache
        return self.loss_head.logits(self._hidden(input_ids_BS, position_ids_BS, context)[:, -1])

    def _context(self, position_ids_BS: torch.Tensor, lengths_BS: torch.Tensor | None) -> Context:
        spec = self.spec
        if spec.learned_positions:
            return Context()
        rope_ids_BS = position_ids_BS
        if not self._dynamic:
            tables = self.rope_cos, self.rope_sin
        else:
            assert spec.rope_scaling is not None and lengths_BS is not None
            tables = dynamic_rope_tables(
                position_ids_BS, lengths_BS, spec.head_dim, spec.rope_theta, self.precision.rotary, spec.rope_scaling
            )
            rope_ids_BS = torch.arange(position_ids_BS.numel(), device=position_ids_BS.device).view_as(position_ids_BS)
        return Context(*prepare_rope(*tables, rope_ids_BS, self.precision.compute))

    def _hidden(self, input_ids_BS: torch.Tensor, position_ids_BS: torch.Tensor, context: Context) -> torch.Tensor:
        x_BSC = self._rows(self.embed_tokens, input_ids_BS)
        if self.embed_positions is not None:
            x_BSC = x_BSC + self._rows(self.embed_positions, position_ids_BS)
        x_BSC = x_BSC.to(self.precision.compute)
        if context.token_keys is not None and self.spec.hidden_dropout:
            x_BSC = dropout(
                x_BSC, self.spec.hidden_dropout, random_key(context.dropout_base, "embedding"), context.token_keys
            )
        for layer in self.layers.values():
            x_BSC = layer(x_BSC, context)
        return self.norm(x_BSC)

    def _rows(self, table: nn.Embedding, ids_BS: torch.Tensor) -> torch.Tensor:
        # Widened before the look-up: its backward adds up all occurrences of a row in the dtype of the table.
        weight = table.weight.to(wide(self.precision.embedding))
        sparse = self.sparse_tables and weight is table.weight and weight.is_cpu and not has_hooks(weight)
        return embedding(weight, ids_BS, padding_idx=table.padding_idx, sparse=sparse)


@contextmanager
def sparse_tables(model: Decoder) -> Iterator[None]:
    """Inside, gradients of the tables are sparse tensors where they can be: for a `GradientSink` on whole weights."""
    model.sparse_tables = True
    try:
        yield
    finally:
        model.sparse_tables = False


def _table(rows: int, spec: ModelSpec, precision: Precision) -> nn.Embedding:
    weight = torch.empty(rows, spec.hidden_size, dtype=precision.embedding)
    return nn.Embedding(rows, spec.hidden_size, _weight=weight)


def document_lengths(batch: Batch) -> torch.Tensor:
    """int64 [rows, positions]: tokens of the document that each token is in."""
    if batch.spans is None:
        return (batch.position_ids.amax(1, keepdim=True) + 1).expand_as(batch.position_ids)
    lengths = torch.ones(batch.position_ids.shape, dtype=torch.int64)
    for row, start, stop in batch.spans:
        lengths[row, start:stop] = stop - start
    return lengths.to(batch.position_ids.device)
