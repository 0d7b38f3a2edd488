"""The decoder: token embedding, pre-norm layers, final norm; the head and the loss live together in `loss_head`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from samestep.data.batch import Batch
from samestep.families import ModelSpec
from samestep.model.attention import Attention, Context, KeyValueCache
from samestep.model.feed_forward import FeedForward
from samestep.ops import (
    Precision,
    dropout,
    get_norm_cls,
    linear_cross_entropy,
    logits,
    random_key,
    rope_tables,
    token_keys,
    wide,
)


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
        self.weight: nn.Parameter = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=precision.params))

    def forward(
        self, hidden_BSC: torch.Tensor, labels_BS: torch.Tensor, z_loss_weight: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums over targets: (cross-entropy + z_loss_weight x z-loss, cross-entropy, z-loss); only the first trains."""
        return linear_cross_entropy(
            hidden_BSC.flatten(0, 1),
            self.weight,
            labels_BS.flatten(),
            z_loss_weight=z_loss_weight,
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
        x_BSC = x_BSC + self._drop(self.self_attn(self.input_layernorm(x_BSC), context, key), context, key, "attention")
        return x_BSC + self._drop(self.mlp(self.post_attention_layernorm(x_BSC)), context, key, "mlp")

    def _drop(self, x_BSC: torch.Tensor, context: Context, key: int, site: str) -> torch.Tensor:
        if context.token_keys is None or not self.hidden_dropout:
            return x_BSC
        return dropout(x_BSC, self.hidden_dropout, random_key(key, site), context.token_keys)


def make_norm(spec: ModelSpec, precision: Precision) -> nn.Module:
    norm = get_norm_cls(spec.normalization, spec.fused_norm)
    return norm(spec.hidden_size, eps=spec.norm_eps, compute_dtype=precision.layernorm, params_dtype=precision.params)


class Decoder(nn.Module):
    """A causal language model.

    Parameters are made empty, on the current default device; `model.init.initialize` gives their first values.
    """

    embed_tokens: nn.Embedding
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, spec: ModelSpec, precision: Precision):
        super().__init__()
        self.spec, self.precision = spec, precision
        self.embed_tokens = nn.Embedding(
            spec.vocab_size,
            spec.hidden_size,
            _weight=torch.empty(spec.vocab_size, spec.hidden_size, dtype=precision.params),
        )
        # Keyed by the layer's own number: a pipeline stage that holds some of the layers keeps their names.
        self.layers = nn.ModuleDict({str(i): Layer(spec, precision, i) for i in range(spec.num_layers)})
        self.norm = make_norm(spec, precision)
        self.loss_head = LossHead(spec, precision)
        if spec.tied:
            self.loss_head.weight = cast(nn.Parameter, self.embed_tokens.weight)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the rotary tables, on the model's device. `to_empty` does not know them: call it again after that."""
        spec = self.spec
        # Made on the CPU, so that every device turns by the same angles.
        cos, sin = rope_tables(spec.max_positions, spec.head_dim, spec.rope_theta, self.precision.rotary, "cpu")
        self.register_buffer("rope_cos", cos.to(self.device), persistent=False)
        self.register_buffer("rope_sin", sin.to(self.device), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(self, batch: Batch) -> Outputs:
        context = Context(position_ids=batch.position_ids, rope=(self.rope_cos, self.rope_sin), spans=batch.spans)
        if self.training and (self.spec.hidden_dropout or self.spec.attention_dropout):
            context.token_keys = token_keys(batch.sample_ids, batch.document_ids, batch.position_ids)
            context.dropout_base = batch.dropout_key
        return Outputs(self._hidden(batch.input_ids, context))

    def decode(self, input_ids_BS: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """Next-token logits [B, vocab] after further tokens; `cache` holds all earlier positions and is extended."""
        start = cache.length
        positions = torch.arange(start, start + input_ids_BS.shape[1], device=input_ids_BS.device)
        context = Context(
            position_ids=positions.expand_as(input_ids_BS), rope=(self.rope_cos, self.rope_sin), cache=cache
        )
        return self.loss_head.logits(self._hidden(input_ids_BS, context)[:, -1])

    def _hidden(self, input_ids_BS: torch.Tensor, context: Context) -> torch.Tensor:
        # Widened before the look-up: its backward adds up all occurrences of a token in the dtype of the table.
        table_VC = self.embed_tokens.weight.to(wide(self.precision.params))
        x_BSC = F.embedding(input_ids_BS, table_VC).to(self.precision.compute)
        if context.token_keys is not None and self.spec.hidden_dropout:
            x_BSC = dropout(
                x_BSC, self.spec.hidden_dropout, random_key(context.dropout_base, "embedding"), context.token_keys
            )
        for layer in self.layers.values():
            x_BSC = layer(x_BSC, context)
        return self.norm(x_BSC)
