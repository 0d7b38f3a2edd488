"""Grouped-query self-attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from samestep.families import ModelSpec
from samestep.model.linear import Linear
from samestep.model.norm import make_norm
from samestep.ops import Precision, apply_rope, attention


@dataclass
class Context:
    """What every layer needs to know of the micro-batch. Tensors are int64 [rows, positions].

    Attributes:
        rope: cosines and sines, tables or rows of them for each token; None without rotary positions.
        rope_ids: row of the tables for each token; None where `rope` holds rows.
        spans: (row, start, stop) of every document, or None where each row is one document.
        token_keys: names of the positions for dropout; None where nothing is dropped.
        dropout_base: what the key of every dropout is made from, with its layer and site.
        cache: keys and values of earlier positions, for generation.
        runs_as_one: whether the halves of a layer may run as one operator; None: where nobody watches their parts.
    """

    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    rope_ids: torch.Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] | None = None
    token_keys: torch.Tensor | None = None
    dropout_base: int = 0
    cache: KeyValueCache | None = None
    runs_as_one: bool | None = None


@dataclass
class KeyValueCache:
    """Keys and values of the positions generated so far: layer -> ([rows, positions, heads, head_dim], same)."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return next(iter(self.layers.values()))[0].shape[1] if self.layers else 0

    def append(self, layer: int, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            k_BSKD, v_BSKD = torch.cat([old_k, k_BSKD], dim=1), torch.cat([old_v, v_BSKD], dim=1)
        self.layers[layer] = (k_BSKD, v_BSKD)
        return k_BSKD, v_BSKD


class AttentionCore(nn.Module):
    """The part between the projections; layouts that split the sequence replace this member."""

    def __init__(self, spec: ModelSpec, precision: Precision):
        super().__init__()
        self.dropout, self.softmax_dtype = spec.attention_dropout, precision.softmax
        self.window = spec.sliding_window

    def forward(
        self, q_BSHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, context: Context, dropout_key: int
    ) -> torch.Tensor:
        return attention(
            q_BSHD,
            k_BTKD,
            v_BTKD,
            spans=context.spans,
            window=self.window,
            softmax_dtype=self.softmax_dtype,
            dropout_p=0.0 if context.token_keys is None else self.dropout,
            dropout_key=dropout_key,
            token_keys_BS=context.token_keys,
        )


class Attention(nn.Module):
    """x [B, S, hidden] -> [B, S, hidden]."""

    def __init__(self, spec: ModelSpec, precision: Precision, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, spec.head_dim
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, queries, precision, spec.attention_bias)
        self.k_proj = Linear(spec.hidden_size, keys, precision, spec.attention_bias)
        self.v_proj = Linear(spec.hidden_size, keys, precision, spec.attention_bias)
        self.o_proj = Linear(queries, spec.hidden_size, precision, spec.output_bias)
        self.q_norm = make_norm(spec, precision, spec.head_dim) if spec.qk_layernorm else None
        self.k_norm = make_norm(spec, precision, spec.head_dim) if spec.qk_layernorm else None
        self.attention_core = AttentionCore(spec, precision)

    def forward(self, x_BSC: torch.Tensor, context: Context, dropout_key: int) -> torch.Tensor:
        q_BSHD, k_BSKD, v_BSKD = self.project(x_BSC, context.rope, context.rope_ids)
        if context.cache is not None:
            k_BSKD, v_BSKD = context.cache.append(self.layer, k_BSKD, v_BSKD)
        out_BSHD = self.attention_core(q_BSHD, k_BSKD, v_BSKD, context, dropout_key)
        return self.o_proj(out_BSHD.flatten(-2))

    def project(
        self, x_BSC: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None, rope_ids_BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values; queries and keys normalized head by head where the model does so, and turned by
        their positions. A function of tensors alone, which `model.activations` may compile."""
        q_BSHD = self.q_proj(x_BSC).unflatten(-1, (-1, self.head_dim))
        k_BSKD = self.k_proj(x_BSC).unflatten(-1, (-1, self.head_dim))
        v_BSKD = self.v_proj(x_BSC).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSKD = self.q_norm(q_BSHD), self.k_norm(k_BSKD)
        if rope is not None:
            q_BSHD, k_BSKD = apply_rope(q_BSHD, *rope, rope_ids_BS), apply_rope(k_BSKD, *rope, rope_ids_BS)
        return q_BSHD, k_BSKD, v_BSKD
