"""What a step costs a rank: bytes held and bytes sent, for both times at which sharded gradients can be reduced.

Pure arithmetic; imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from samestep.config.schema import Config
from samestep.families import ModelSpec, parameter_count, parameter_shapes
from samestep.recompute import WHOLE, recomputed_modules

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MASTERED = {"bfloat16", "float16"}
_FREED = {"default": (True, False), "always": (True, True), "never": (False, False)}
"""`reshard_after_forward_policy` -> whether gathered weights of the layers, and of the rest, are freed after use."""
_LOGITS_BYTES = 2**26
_FIXED, _EXACT = 8, 4
"""Bytes of a fixed-point sum, and of the float32 gradient made of it (`training.exact`)."""

Reduce = Literal["once_per_step", "every_micro_batch"]
POLICIES: tuple[Reduce, Reduce] = ("once_per_step", "every_micro_batch")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. Activations and logits are estimates of one micro-batch; weights and what belongs to them are
    an even share of the ranks that shard or split them.

    Attributes:
        buffers: rotary tables.
        gradients: what is kept from one micro-batch to the next.
        gathered: weights of sharded units that are whole at once.
        transfers: what collectives read and write besides.
        total: most that is held at once; the kinds do not all have their most at the same moment.
        host: of the total, what `parallelism.cpu_offload` keeps in CPU memory.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    masters: int
    gathered: int
    transfers: int
    activations: int
    logits: int
    total: int
    host: int

    @property
    def on_device(self) -> int:
        return self.total - self.host


@dataclass(frozen=True)
class Cost:
    """Of one step on one rank, by when sharded gradients are reduced.

    Attributes:
        sent: bytes that it sends for weights and gradients: of a ring of n ranks, (n - 1) / n of the whole tensor for a
            gather or a reduce-scatter, twice that for an all-reduce (Patarasuk and Yuan 2009).
    """

    reduce: Reduce
    memory: Memory
    sent: int


@dataclass(frozen=True)
class Split:
    """How the ranks share the step.

    Attributes:
        replicate, shard: degrees of data parallelism.
        inner: ranks that split the weights in another way.
        accumulation: micro-batches of the rank that has most.
        positions: of the largest micro-batch, padding included.
    """

    replicate: int
    shard: int
    inner: int
    accumulation: int
    positions: int

    @property
    def reduces_apart(self) -> bool:
        """Whether it matters when gradients are reduced: some are sharded, and some accumulate."""
        return self.shard > 1 and self.accumulation > 1


@dataclass(frozen=True)
class _Units:
    """Numbers in what FSDP gathers and reduces at once: each layer, and the rest (embedding, last norm, head).

    Every parameter is padded so that its first dimension divides by the ranks.
    """

    layer: int
    rest: int
    layers: int
    head: int

    @property
    def all(self) -> int:
        return self.layers * self.layer + self.rest


def _units(spec: ModelSpec, split: Split) -> _Units:
    layers = rest = 0
    for name, shape in parameter_shapes(spec).items():
        size = math.ceil(shape[0] / split.shard) * split.shard * math.prod(shape[1:])
        if name.startswith("layers."):
            layers += size
        else:
            rest += size
    head = spec.vocab_size * spec.hidden_size
    return _Units(layers // spec.num_layers // split.inner, rest // split.inner, spec.num_layers, head // split.inner)


def step_costs(config: Config, spec: ModelSpec, split: Split) -> tuple[Cost, Cost]:
    """The costs of `once_per_step` and of `every_micro_batch`; the same where nothing is sharded or accumulated."""
    units = _units(spec, split)
    sent = _sent_replicated if split.shard == 1 else _sent_sharded
    first, second = (
        Cost(reduce, _memory(config, spec, split, units, reduce), sent(config, split, units, reduce))
        for reduce in POLICIES
    )
    return first, second


def _sent_replicated(config: Config, split: Split, units: _Units, reduce: Reduce) -> int:
    """One all-reduce of all gradients, whatever the policy."""
    width = _FIXED if config.training.exact else BYTES[config.model.reduce_dtype]
    return _all_reduce(units.all * width, split.replicate)


def _sent_sharded(config: Config, split: Split, units: _Units, reduce: Reduce) -> int:
    """Weights are gathered for the forward pass, and once more for the backward where they were freed in between;
    gradients are reduced and scattered, then summed over the groups that are replicas of each other."""
    again_layers, again_rest = _FREED[config.parallelism.reshard_after_forward_policy]
    weights = (1 + again_layers) * units.layers * units.layer + (1 + again_rest) * units.rest
    gradients = units.all * BYTES[config.model.reduce_dtype]
    gathers = split.accumulation * _ring(weights * BYTES[config.model.params_dtype], split.shard)
    times = split.accumulation if reduce == "every_micro_batch" else 1
    return gathers + times * (_ring(gradients, split.shard) + _all_reduce(gradients // split.shard, split.replicate))


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def _all_reduce(size: int, ranks: int) -> int:
    return 2 * _ring(size, ranks)


def _memory(config: Config, spec: ModelSpec, split: Split, units: _Units, reduce: Reduce) -> Memory:
    model, exact = config.model, config.training.exact
    shares = split.shard * split.inner
    count = math.ceil(parameter_count(spec) / shares)
    weight = BYTES[model.params_dtype]
    # Shards of weights that are stored in 16 bits are the float32 masters themselves.
    in_shards = model.params_dtype in MASTERED and split.shard > 1
    parameters = count * (4 if in_shards else weight)
    optimizer = math.ceil(_state_numbers(config, spec) / shares) * max(4, weight)
    masters = count * 4 if model.params_dtype in MASTERED and not in_shards else 0
    buffers = 0 if spec.learned_positions else spec.max_positions * spec.head_dim * BYTES[model.rotary_dtype]
    activations, logits = _activations(config, spec, split.positions), _logits(config, spec, split.positions)
    gradients = count * (_FIXED + _EXACT if exact else BYTES[model.gradient_dtype])
    if split.shard == 1:
        gathered, transfers = 0, count * BYTES[model.reduce_dtype] if split.replicate > 1 and not exact else 0
        # Flat copies of the gradients are summed over the ranks when activations and logits are gone.
        moving = gradients + max(activations + logits, transfers)
    else:
        moments = _sharded_moments(config, split, units, reduce, gradients, activations, logits)
        gathered, transfers = max(m.gathered for m in moments), max(m.transfers for m in moments)
        gradients = max(m.gradients for m in moments)
        moving = max(m.total for m in moments)
    # This rank's part of the gradients is there as well, but a whole sum is kept where it is made.
    host = parameters + optimizer + masters
    host += count * BYTES[model.gradient_dtype] if reduce == "every_micro_batch" and split.accumulation > 1 else 0
    return Memory(
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        optimizer=optimizer,
        masters=masters,
        gathered=gathered,
        transfers=transfers,
        activations=activations,
        logits=logits,
        total=parameters + optimizer + masters + buffers + moving,
        host=host if config.parallelism.cpu_offload and split.shard > 1 else 0,
    )


@dataclass(frozen=True)
class _Moment:
    """Bytes that a sharded rank holds at one moment of a micro-batch, besides its part of weights and optimizer."""

    gradients: int
    gathered: int = 0
    transfers: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.transfers + self.others


def _sharded_moments(
    config: Config, split: Split, units: _Units, reduce: Reduce, part: int, activations: int, logits: int
) -> list[_Moment]:
    """The moments of a micro-batch at which most may be held, in their order, for FSDP2 (`fully_shard`).

    A gather writes one flat buffer, which is then copied out into the weights of the unit. A reduction frees the
    weights, copies the unit's gradient into a flat buffer, and writes this rank's part of the sum; the flat buffer is
    freed by the next reduction. Gloo, the backend of CPUs, works on a copy of either flat buffer.

    Args:
        part: bytes of this rank's part of the summed gradients.
    """
    weight, wide = BYTES[config.model.params_dtype], BYTES[config.model.reduce_dtype]
    layer, rest = units.layer * weight, units.rest * weight
    flat_layer, flat_rest = units.layer * wide, units.rest * wide
    frees_layers, _ = _FREED[config.parallelism.reshard_after_forward_policy]
    forward_layers = 0 if frees_layers else units.layers * layer
    backward_layers = layer if frees_layers else forward_layers
    later_layers = 0 if frees_layers else forward_layers - layer
    ahead = layer if frees_layers else 0
    # Between two micro-batches: the whole sum so far, or this rank's part of it.
    whole = units.all * wide if split.accumulation > 1 and reduce == "once_per_step" else 0
    summed = part if split.accumulation > 1 and reduce == "every_micro_batch" else 0
    head = 0 if whole else units.head * weight  # its gradient, the first to be made, waits for the rest of its unit
    part_layer, part_layers = part * units.layer // units.all, part * units.layer * units.layers // units.all
    begun = whole - flat_layer + part_layer if whole else summed or part_layer  # the last layer is reduced
    ended = summed or part_layers  # all layers are
    inner = activations * (units.layers - 1) // units.layers
    held = whole + summed
    return [
        # The first layer is gathered.
        _Moment(held, gathered=rest, transfers=rest + 2 * layer),
        # The loss, which makes the gradient of the head at once.
        _Moment(held, rest + forward_layers, layer, activations + logits),
        # The backward of the last layer gathers the weights of the one before ahead.
        _Moment(held + head, rest + backward_layers, min(units.layers, 2) * ahead, activations),
        # The last layer is reduced.
        _Moment(begun + head, rest + later_layers, ahead + 2 * flat_layer + flat_layer // split.shard, inner),
        # The backward of the layer before it gathers ahead once more.
        _Moment(begun + head, rest + max(later_layers, ahead), flat_layer + min(units.layers - 1, 2) * ahead, inner),
        # The rest is reduced, at the end. The gradient of the head, the last of its unit, is not freed before.
        _Moment(ended + units.head * (wide if whole else weight), 0, 2 * flat_rest + flat_rest // split.shard),
    ]


def _activations(config: Config, spec: ModelSpec, positions: int) -> int:
    """Kept for the backward of the layers, with what is computed again for one module at a time."""
    whole, parts = _layer_activations(config, spec)
    compute = BYTES[config.model.compute_dtype]
    again = parts | {WHOLE: whole - spec.hidden_size * compute}
    chosen = recomputed_modules(config.recompute, spec.num_layers)
    freed = [again.get(name, 0) for names in chosen for name in names]
    kept = spec.num_layers * whole - sum(freed) + max(freed, default=0)
    return positions * (kept + 2 * spec.hidden_size * compute)


def _layer_activations(config: Config, spec: ModelSpec) -> tuple[int, dict[str, int]]:
    """Bytes a position that a layer keeps, and those of them that go when one of its modules is computed again.

    Both norms' inputs and outputs; q, k, v and the attention's output; the MLP's gate, up and product. Norms keep a
    copy in their own dtype as well. Where queries and keys are normalized, they are kept before and after it.
    """
    model = config.model
    compute, norm = BYTES[model.compute_dtype], BYTES[model.layernorm_compute_dtype]
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim if spec.qk_layernorm else 0
    parts = {
        "input_layernorm": spec.hidden_size * norm,
        "self_attn": (attention + heads) * compute + heads * norm,
        "post_attention_layernorm": spec.hidden_size * norm,
        "mlp": (3 if spec.gated else 2) * spec.intermediate_size * compute,
    }
    return 4 * spec.hidden_size * compute + sum(parts.values()), parts


def _logits(config: Config, spec: ModelSpec, positions: int) -> int:
    """Kept for the head: one chunk of logits with its gradient, and the gradient of the head's weight."""
    loss = BYTES[config.model.loss_dtype]
    chunk = min(positions, max(1, _LOGITS_BYTES // (spec.vocab_size * loss)))
    return (2 * chunk + spec.hidden_size) * spec.vocab_size * loss


def _state_numbers(config: Config, spec: ModelSpec) -> int:
    """How many numbers the optimizer keeps; Muon's other half is taken to be all but the layers' matrices."""

    def of(name: str, shape: tuple[int, ...]) -> int:
        size = math.prod(shape)
        if optimizer.type == "Adafactor":
            return size if len(shape) == 1 else sum(shape)
        if optimizer.type == "SGD":
            return size if optimizer.setting("momentum") else 0
        one = optimizer.type == "Lion" or (optimizer.type == "Muon" and len(shape) > 1 and name.startswith("layers."))
        return size if one else 2 * size

    optimizer = config.optimizer
    return sum(of(name, shape) for name, shape in parameter_shapes(spec).items())
