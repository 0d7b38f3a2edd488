"""What one forward and backward pass holds on a CPU: kept activations, temporaries of the backward, the head.

Pure arithmetic that follows what the operators in `ops` save; imports no torch. Numbers are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.config.schema import Config
from samestep.dtypes import BYTES, NARROW, wide
from samestep.families import ModelSpec, parameter_shapes
from samestep.recompute import WHOLE, recomputed_modules

_CHUNK_BYTES = 2**27
"""Of logits, as in `ops.cross_entropy` on a CPU."""


@dataclass(frozen=True)
class Head:
    """The head and the loss.

    Attributes:
        most: held while the loss and its gradients are formed.
        weight_gradient: of that, what is left when the backward of the layers begins.
        embedding_gradient: of the embedding, which comes last in a pass and is as large.
    """

    most: int
    weight_gradient: int
    embedding_gradient: int


@dataclass(frozen=True)
class Activations:
    """Of the layers.

    Attributes:
        kept: by each layer for its backward, and by the last norm.
        again: of each layer, most that its backward has besides: what is computed again, and temporaries.
        handed_on: of each layer, gradients of weights that its backward hands on at once, besides all this.
    """

    kept: tuple[int, ...]
    again: tuple[int, ...]
    handed_on: tuple[int, ...]

    @property
    def forward(self) -> int:
        """When all layers have run."""
        return sum(self.kept)

    def backward(self, gradients: int) -> int:
        """Most that is held in the backward of the layers, which frees a layer and leaves its gradients.

        Args:
            gradients: of a layer, that stay.
        """
        return self._most(gradients, self.handed_on)

    @property
    def most(self) -> int:
        """Without gradients of weights."""
        return self._most(0, [0] * len(self.kept))

    def _most(self, gradients: int, handed_on: Sequence[int]) -> int:
        held, most = self.forward, 0
        for kept, *besides in zip(reversed(self.kept), reversed(self.again), reversed(handed_on), strict=True):
            most = max(most, held + sum(besides))
            held += gradients - kept
        return most


def loss_head(config: Config, spec: ModelSpec, positions: int) -> Head:
    """One chunk of logits; gradients of the weight and of the hidden states; the hidden states; of one chunk a copy
    of them and the product that becomes their gradient. The weight is copied where the product has another dtype."""
    model, tables = config.model, config.model.embedding_storage
    stored, compute = tables if spec.tied else model.params_dtype, BYTES[model.working_dtype]
    summed = wide(model.loss_dtype, model.working_dtype)
    size = BYTES[summed]
    chunk = min(positions, max(1, _CHUNK_BYTES // (spec.vocab_size * size)))
    weight = spec.vocab_size * spec.hidden_size
    copies = weight * size if {stored, model.working_dtype} != {summed} else 0
    hidden = spec.hidden_size * (positions * (size + compute) + 2 * chunk * size)
    return Head(
        most=chunk * spec.vocab_size * size + weight * size + copies + hidden,
        weight_gradient=weight * BYTES[stored],
        embedding_gradient=weight * max(4, BYTES[tables]),
    )


def activations(config: Config, spec: ModelSpec, positions: int) -> Activations:
    """Of one micro-batch, with what is computed again."""
    layer = _Layer(config, spec)
    chosen = recomputed_modules(config.recompute, spec.num_layers)
    weights = _weight_copies(config, spec)
    # Those of a layer that is computed again are made again as well.
    kept = [positions * layer.kept(names) + weights * (WHOLE not in names) for names in chosen]
    again = [positions * layer.again(names) + weights * (WHOLE in names) for names in chosen]
    kept[-1] += positions * layer.residual  # input of the last norm
    return Activations(tuple(kept), tuple(again), tuple(layer.handed_on(names) for names in chosen))


class _Layer:
    """Bytes a position of one layer.

    A norm keeps its input; the projections after it keep its output, attention its queries, keys, values and output,
    which the output projection shares; SwiGLU its two inputs, and the projection after it the product. A half of the
    layer that runs as one operator (`ops.block`) keeps neither the output of the norm nor that product.

    Attributes:
        residual: of hidden states between two layers.
        parts: what goes where a module is computed again.
    """

    _ATTENTION = frozenset({"input_layernorm", "self_attn", "self_attn.attention_core"})
    _FEED_FORWARD = frozenset({"post_attention_layernorm", "mlp"})

    def __init__(self, config: Config, spec: ModelSpec):
        self._config, self._spec = config, spec
        self._compute = BYTES[config.model.working_dtype]
        self._wide = BYTES[wide(config.model.working_dtype)]
        self.residual = spec.hidden_size * self._compute
        self._inner = spec.intermediate_size * self._compute
        model = config.model
        # Kernels in C are taken to be there, as they are on a CPU that has a compiler.
        self._has_kernels = model.working_dtype == "float32"
        is_plain = model.params_dtype == model.layernorm_compute_dtype == "float32" and not config.compile
        is_plain = is_plain and spec.normalization == "RMSNorm" and spec.fused_norm and not spec.hidden_dropout
        self._fuses = self._has_kernels and is_plain
        self._fuses_attention = (
            self._fuses
            and model.softmax_compute_dtype == model.rotary_dtype == "float32"
            and not (spec.learned_positions or spec.attention_dropout or spec.head_dim % 8)
        )
        self._norm_kept = self._norm(1, spec.hidden_size)
        attention, core = self._attention()
        self.parts = {
            "input_layernorm": self._norm_kept,
            "self_attn": attention,
            "self_attn.attention_core": core,
            "post_attention_layernorm": self._norm_kept,
            "mlp": self._feed_forward(),
        }

    def _norm(self, rows: int, size: int) -> int:
        """What a norm keeps besides its input, for each of its rows: numbers, and the twin copies."""
        spec, model = self._spec, self._config.model
        math, is_layer_norm = wide(model.layernorm_compute_dtype), spec.normalization == "LayerNorm"
        number = BYTES[math]
        copies = 0
        if not spec.fused_norm:  # of the input, and what divides and multiplies
            copies = number * (1 + is_layer_norm + (model.working_dtype != math))
        return rows * (size * copies + number * (1 + 2 * is_layer_norm))

    def _attention(self) -> tuple[int, int]:
        """Of the whole, and of the core alone; without the input of the projections."""
        spec, heads = self._spec, self._spec.num_heads
        rotated = spec.num_heads + spec.num_kv_heads
        out = heads * spec.head_dim * self._compute
        if self._has_kernels and spec.head_dim % 8 == 0:
            core = heads * 2 * self._wide  # the largest score of a query and its sum of exponentials
        else:
            # Documents and blocks of a window are run in groups: each keeps its output, and so does what joins them.
            is_windowed = (spec.sliding_window or math.inf) < spec.seq_length
            is_grouped = is_windowed or self._config.micro_batch == "packed"
            core = heads * self._wide + is_grouped * out
        raw = rotated * spec.head_dim * self._compute + self._norm(rotated, spec.head_dim) if spec.qk_layernorm else 0
        return core + 2 * rotated * spec.head_dim * self._compute + raw, core

    def _feed_forward(self) -> int:
        if not self._spec.gated:
            return 2 * self._inner
        return (3 if self._fuses_gate else 4) * self._inner

    @property
    def _fuses_gate(self) -> bool:
        return self._spec.gated and self._spec.hidden_act in ("silu", "fusedswiglu")

    def kept(self, recomputed: Sequence[str]) -> int:
        if WHOLE in recomputed:
            return self.residual
        return self._attention_kept(recomputed) + self._feed_forward_kept(recomputed)

    def _attends_as_one(self, recomputed: Sequence[str]) -> bool:
        return self._fuses_attention and not self._ATTENTION & set(recomputed)

    def _feeds_as_one(self, recomputed: Sequence[str]) -> bool:
        return self._fuses and self._fuses_gate and not self._FEED_FORWARD & set(recomputed)

    def _attention_kept(self, recomputed: Sequence[str]) -> int:
        again = sum(self.parts[name] for name in recomputed if name in self._ATTENTION)
        hidden = self.residual * (1 if self._attends_as_one(recomputed) else 2)
        return hidden + self._norm_kept + self.parts["self_attn"] - again

    def _feed_forward_kept(self, recomputed: Sequence[str]) -> int:
        again = sum(self.parts[name] for name in recomputed if name in self._FEED_FORWARD)
        hidden, product = (self.residual, self._inner) if self._feeds_as_one(recomputed) else (2 * self.residual, 0)
        return hidden - product + self._norm_kept + self.parts["mlp"] - again

    def again(self, recomputed: Sequence[str]) -> int:
        """Most that the backward holds besides: in the feed-forward, or in the attention when that is done."""
        if WHOLE in recomputed:
            return self.kept(()) - self.residual + self._feed_forward_temporaries(())
        back = {name: self.parts[name] for name in recomputed}
        attention = back.get("self_attn", 0) + back.get("self_attn.attention_core", 0)
        attention += self._attention_temporaries(recomputed) - self._feed_forward_kept(recomputed)
        return max(back.get("mlp", 0) + self._feed_forward_temporaries(recomputed), attention)

    def handed_on(self, recomputed: Sequence[str]) -> int:
        """Bytes of a half that runs as one operator, which hands on the gradients of all its weights at its end."""
        spec, heads = self._spec, (self._spec.num_heads + self._spec.num_kv_heads) * self._spec.head_dim
        recomputed = () if WHOLE in recomputed else recomputed
        attention = 2 * heads * self._attends_as_one(recomputed)
        feed_forward = 3 * spec.intermediate_size * self._feeds_as_one(recomputed)
        return max(attention, feed_forward) * self.residual

    def _feed_forward_temporaries(self, recomputed: Sequence[str]) -> int:
        """The gradient of the residual, and in the backward of the activation the gradients of its output and inputs;
        its output is gone. As one operator: the output becomes its gradient and that of the gate; then the output of
        the norm, which becomes its gradient, and a product that is added to it. A narrow dtype is widened: in `swiglu`
        both gate and gradient, with two float32 tensors more; in the down projection, which has its turn first,
        gradient, result and input."""
        number, compute, inner = self._wide, self._compute, self._spec.intermediate_size
        if number == compute:
            hidden = self.residual * (3 if self._feeds_as_one(recomputed) else 1)
            return hidden + (1 + self._spec.gated) * self._inner
        projection = self._spec.hidden_size * (compute + number) + inner * (compute + number)
        if not self._spec.gated:
            return projection
        return max(projection, 2 * self.residual + 4 * number * inner)

    def _attention_temporaries(self, recomputed: Sequence[str]) -> int:
        """Gradients of output, queries, keys and values, and of the residual. As one operator: when that of the output
        is gone, as many of hidden states as in the feed-forward."""
        spec = self._spec
        heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim * self._compute
        if not self._attends_as_one(recomputed):
            return self.residual + heads
        return self.residual + max(heads, heads - spec.num_heads * spec.head_dim * self._compute + 2 * self.residual)


def _weight_copies(config: Config, spec: ModelSpec) -> int:
    """Of a layer: `linear` in float32 and float64 keeps the weights that it had to convert."""
    model = config.model
    if model.working_dtype in NARROW or model.working_dtype == model.params_dtype:
        return 0
    shapes = parameter_shapes(spec)
    numbers = sum(math.prod(s) for name, s in shapes.items() if name.startswith("layers.0.") and len(s) > 1)
    return numbers * BYTES[model.working_dtype]
