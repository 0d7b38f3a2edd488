"""What a step costs a rank: bytes held and bytes sent, for both times at which sharded gradients can be reduced.

Pure arithmetic; imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from samestep.config.schema import Config
from samestep.dtypes import BYTES, NARROW
from samestep.families import ModelSpec, parameter_count, parameter_shapes
from samestep.pass_memory import Activations, Head, activations, loss_head

_FREED = {"default": (True, False), "always": (True, True), "never": (False, False)}
"""`reshard_after_forward_policy` -> whether gathered weights of the layers, and of the rest, are freed after use."""
_FIXED, _EXACT = 8, 4
"""Bytes of a fixed-point sum, and of the float32 gradient made of it (`training.exact`)."""
_WORKSPACE = 2**22
"""In which the CPU's library of matrix products lays out their operands; it is not freed."""
_STATE = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}
"""`optimizer.state_dtype` -> bytes of a number; blocks of 256 share a float32 scale."""
_UPDATE_TEMPORARIES = {"AdamW": 0, "Lion": 1, "SGD": 1, "Adafactor": 1, "Muon": 2}
"""Tensors of a parameter's size that its update makes; parameters are updated one after the other."""

Reduce = Literal["once_per_step", "every_micro_batch"]
POLICIES: tuple[Reduce, Reduce] = ("once_per_step", "every_micro_batch")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. Activations and logits are estimates of one micro-batch; weights and what belongs to them are
    an even share of the ranks that shard or split them. Operators are taken to hold what they hold on a CPU, wherever
    the run will be: a GPU has chunks of logits four times as large, and fewer temporaries in narrow dtypes. Scores of
    `attention_dropout` and moving activations to CPU memory are not counted.

    Attributes:
        buffers: rotary tables.
        casts: weights in the compute dtype, where they are cast once a step.
        gradients: what is kept from one micro-batch to the next.
        gathered: weights of sharded units that are whole at once.
        transfers: what collectives read and write besides.
        activations: what the layers keep for the backward pass, with most that this has besides.
        logits: what the head and the loss hold, with the gradient of the head's weight.
        total: most that is held at once, with the workspace of matrix products; the kinds do not all have their most at
            the same moment.
        host: of the total, what `parallelism.cpu_offload` keeps in CPU memory.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    masters: int
    casts: int
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
        casts_once: whether weights are cast to the compute dtype once a step, and kept in it.
    """

    replicate: int
    shard: int
    inner: int
    accumulation: int
    positions: int
    casts_once: bool = False

    @property
    def reduces_apart(self) -> bool:
        """Whether it matters when gradients are reduced: some are sharded, and some accumulate."""
        return self.shard > 1 and self.accumulation > 1


@dataclass(frozen=True)
class _Units:
    """Numbers in what FSDP gathers and reduces at once: each layer, and the rest (embedding, last norm, head), which is
    two or three units where the embedding is stored in another dtype.

    Every parameter is padded so that its first dimension divides by the ranks.
    """

    layer: int
    rest: int
    layers: int
    head: int
    tables: int

    def rest_bytes(self, config: Config) -> int:
        """Of the rest as it is stored."""
        others = (self.rest - self.tables) * BYTES[config.model.params_dtype]
        return self.tables * BYTES[config.model.embedding_storage] + others

    @property
    def all(self) -> int:
        return self.layers * self.layer + self.rest


def _units(spec: ModelSpec, split: Split) -> _Units:
    layers = rest = tables = 0
    for name, shape in parameter_shapes(spec).items():
        size = math.ceil(shape[0] / split.shard) * split.shard * math.prod(shape[1:])
        if name.startswith("layers."):
            layers += size
        else:
            rest += size
            tables += size if name.startswith("embed_") else 0
    head, inner = spec.vocab_size * spec.hidden_size, split.inner
    layer = layers // spec.num_layers // inner
    return _Units(layer, rest // inner, spec.num_layers, head // inner, tables // inner)


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
    layers = (1 + again_layers) * units.layers * units.layer * BYTES[config.model.params_dtype]
    weights = layers + (1 + again_rest) * units.rest_bytes(config)
    gradients = units.all * BYTES[config.model.reduce_dtype]
    gathers = split.accumulation * _ring(weights, split.shard)
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
    tables = math.ceil(_table_numbers(spec) / shares)
    stored = ((config.model.embedding_storage, tables), (model.params_dtype, count - tables))
    # Shards of weights that are stored in 16 bits are the float32 masters themselves.
    parameters = sum(n * (4 if dtype in NARROW and split.shard > 1 else BYTES[dtype]) for dtype, n in stored)
    has_masters = config.optimizer.master_weights == "float32" and split.shard == 1
    masters = sum(n * 4 for dtype, n in stored if dtype in NARROW and has_masters)
    state = _STATE[config.optimizer.state_dtype] if weight <= 4 else weight
    optimizer = math.ceil(_state_numbers(config, spec) / shares * state)
    casts = math.ceil(_linear_numbers(spec) / shares) * BYTES[model.working_dtype] if split.casts_once else 0
    buffers = 0 if spec.learned_positions else spec.max_positions * spec.head_dim * BYTES[model.rotary_dtype]
    layers, loss = activations(config, spec, split.positions), loss_head(config, spec, split.positions)
    gradients = count * (_FIXED + _EXACT if exact else BYTES[model.gradient_dtype])
    if split.shard == 1:
        gathered, transfers = 0, count * BYTES[model.reduce_dtype] if split.replicate > 1 and not exact else 0
        # Flat copies of the gradients are summed over the ranks when activations and logits are gone.
        after = gradients + max(transfers, _update_temporaries(config, spec, count, weight))
        moving = max(casts + _passes(config, spec, split, units, layers, loss), after)
    else:
        moments = _sharded_moments(config, split, units, reduce, gradients, layers, loss.most)
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
        casts=casts,
        gathered=gathered,
        transfers=transfers,
        activations=layers.most,
        logits=loss.most,
        total=parameters + optimizer + masters + buffers + moving + _WORKSPACE,
        host=host if config.parallelism.cpu_offload and split.shard > 1 else 0,
    )


def _passes(config: Config, spec: ModelSpec, split: Split, units: _Units, layers: Activations, loss: Head) -> int:
    """Most that a rank with whole weights holds of gradients, activations and logits: at the loss, in the backward of
    a layer, or at its end, where the gradient of the embedding is made.

    One micro-batch leaves gradients as it goes; several add to sums that are there from the first to the last. A tied
    head's gradient waits for that of the embedding.
    """
    width = _FIXED if config.training.exact else BYTES[config.model.gradient_dtype]
    accumulates = split.accumulation > 1 or config.training.exact
    sums = units.all * width
    held, layer = (sums, 0) if accumulates else (0, units.layer * width)
    waiting = loss.weight_gradient if spec.tied or not accumulates else 0
    ended = sums + loss.embedding_gradient * (accumulates or spec.tied) + waiting * (accumulates and spec.tied)
    return max(held + layers.forward + loss.most, held + waiting + layers.backward(layer), ended)


def _update_temporaries(config: Config, spec: ModelSpec, count: int, weight: int) -> int:
    """Of the update: gradients in the dtype of what is updated, if it is another, and what the rule makes or widens."""
    trained = max(4, weight)
    given = _EXACT if config.training.exact else BYTES[config.model.gradient_dtype]
    largest = max(math.prod(shape) for shape in parameter_shapes(spec).values())
    optimizer = config.optimizer
    widened = (optimizer.master_weights != "float32") + 2 * (optimizer.state_dtype != "float32")
    return count * trained * (given != trained) + (_UPDATE_TEMPORARIES[optimizer.type] + widened) * largest * trained


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
    config: Config, split: Split, units: _Units, reduce: Reduce, part: int, layers: Activations, logits: int
) -> list[_Moment]:
    """The moments of a micro-batch at which most may be held, in their order, for FSDP2 (`fully_shard`).

    A gather writes one flat buffer, which is then copied out into the weights of the unit. A reduction frees the
    weights, copies the unit's gradient into a flat buffer, and writes this rank's part of the sum; the flat buffer is
    freed by the next reduction. Gloo, the backend of CPUs, works on a copy of either flat buffer.

    Args:
        part: bytes of this rank's part of the summed gradients.
    """
    weight, wide = BYTES[config.model.params_dtype], BYTES[config.model.reduce_dtype]
    layer, rest = units.layer * weight, units.rest_bytes(config)
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
    most = layers.most
    inner = most - layers.kept[-1]
    held = whole + summed
    return [
        # The first layer is gathered.
        _Moment(held, gathered=rest, transfers=rest + 2 * layer),
        # The loss, which makes the gradient of the head at once.
        _Moment(held, rest + forward_layers, layer, layers.forward + logits),
        # The backward of the last layer gathers the weights of the one before ahead.
        _Moment(held + head, rest + backward_layers, min(units.layers, 2) * ahead, most),
        # Its end, when that is gathered.
        _Moment(held + head, rest + backward_layers, min(units.layers - 1, 1) * ahead, layers.backward(0)),
        # The last layer is reduced.
        _Moment(begun + head, rest + later_layers, ahead + 2 * flat_layer + flat_layer // split.shard, inner),
        # The backward of the layer before it gathers ahead once more.
        _Moment(begun + head, rest + max(later_layers, ahead), flat_layer + min(units.layers - 1, 2) * ahead, inner),
        # The rest is reduced, at the end. The gradient of the head, the last of its unit, is not freed before.
        _Moment(ended + units.head * (wide if whole else weight), 0, 2 * flat_rest + flat_rest // split.shard),
    ]


def _table_numbers(spec: ModelSpec) -> int:
    return sum(math.prod(shape) for name, shape in parameter_shapes(spec).items() if name.startswith("embed_"))


def _linear_numbers(spec: ModelSpec) -> int:
    """Weights of the layers' matrix products."""
    shapes = parameter_shapes(spec)
    return sum(math.prod(s) for name, s in shapes.items() if name.startswith("layers.") and len(s) > 1)


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
