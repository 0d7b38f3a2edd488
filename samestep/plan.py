"""The plan: what a configuration means on a number of ranks, as numbers. Pure arithmetic; imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from samestep.config.schema import Config, LrSchedulerConfig, ParallelismConfig
from samestep.cost import Cost, Memory, Reduce, Split, step_costs
from samestep.dtypes import NARROW, KindDtypes, check_sizes, expected_dtypes
from samestep.errors import ConfigError
from samestep.families import ModelSpec, attended, flops_per_token, parameter_count, resolve_model
from samestep.length import (
    DataFacts,
    Progress,
    check_rest_of_epoch,
    epochs_of,
    run_length,
    steps_of_epoch,
    usable_samples,
)
from samestep.split import positions, split_by_budget

AUTO_POSITIONS = 8192
"""Of a micro-batch with `local_batch_size: auto` where no limit of memory is known."""
_MOST_POSITIONS = 32_768
"""Of a micro-batch with `local_batch_size: auto`: a larger one is no faster, only harder to balance."""
_USABLE_MEMORY = 0.8
"""Share of the limit that `local_batch_size: auto` plans with; the rest is for what the model of memory leaves out."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; `data_parallel` = replicate x shard."""

    world_size: int
    data_parallel: int
    replicate: int
    shard: int
    tensor: int
    context: int
    pipeline: int


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward of one rank, on the samples at `places` of the global batch."""

    rank: int
    index: int
    places: tuple[int, ...]
    samples: int
    tokens: int | None
    padding: int | None
    targets: int | None


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of a run. Samples, tokens, targets, FLOPs and micro-batches are of the first global batch
    unless named otherwise; it is smaller than `global_batch_size` where the data is. FLOPs take each row for one
    document.

    Attributes:
        local_batch_size, local_batch_tokens: what limits a micro-batch, in samples or in positions; the other is None.
        memory, sent_bytes, reduce: of one rank; those of `reductions` that were chosen.
        casts_once: whether weights are cast to the compute dtype once a step.
        dtypes: of each kind of module, wherever the run will be; a device may run products in a wider one.
    """

    layout: Layout
    global_batch_size: int
    local_batch_size: int | None
    local_batch_tokens: int | None
    accumulation_steps: int
    samples_trained: int
    samples_dropped: int
    divides: bool
    nearest_dividing: tuple[int, ...]
    micro_batches: tuple[MicroBatch, ...]
    steps: int
    steps_per_epoch: int | None
    epochs: float | None
    last_batch_samples: int | None
    tokens: int | None
    targets: int | None
    padding: int | None
    parameters: int
    flops_per_step: float | None
    memory: Memory
    sent_bytes: int
    reduce: Reduce
    reductions: tuple[Cost, Cost]
    casts_once: bool
    dtypes: tuple[KindDtypes, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """All numbers as JSON values."""
        return asdict(self)


def resolve_layout(parallelism: ParallelismConfig, world_size: int) -> Layout:
    """Degrees of parallelism on `world_size` ranks.

    Raises:
        ConfigError: degrees that do not divide the ranks; the message names the nearest that do.
    """
    tensor, context, pipeline = (
        parallelism.tensor_parallel,
        parallelism.context_parallel,
        parallelism.pipeline_parallel,
    )
    inner = tensor * context * pipeline
    if parallelism.expert_parallel > 1:
        raise ConfigError(
            "no model family of this version has experts to split",
            field="parallelism.expert_parallel",
            fix="remove it, or write 1",
        )
    if world_size % inner:
        _, name = max((tensor, "tensor_parallel"), (context, "context_parallel"), (pipeline, "pipeline_parallel"))
        raise ConfigError(
            f"tensor x context x pipeline parallel = {tensor} x {context} x {pipeline} = {inner} does not divide "
            f"the {world_size} rank{'s' if world_size > 1 else ''} of this run",
            field=f"parallelism.{name}",
            fix=f"write degrees whose product is one of {_divisors(world_size)}, or start {inner} ranks",
        )
    data_parallel = world_size // inner
    shard = parallelism.data_parallel_shard
    if shard < 0:
        shard = data_parallel
    if data_parallel % shard:
        raise ConfigError(
            f"{shard} does not divide the data-parallel degree {data_parallel}",
            field="parallelism.data_parallel_shard",
            fix=f"write -1 (all of it) or one of {_divisors(data_parallel)}",
        )
    return Layout(world_size, data_parallel, data_parallel // shard, shard, tensor, context, pipeline)


def check_sharding(config: Config, layout: Layout) -> None:
    """What the configuration asks for can be had with weights that are sharded as the layout says.

    Raises:
        ConfigError: it needs whole weights.
    """
    if layout.shard == 1:
        return
    fix = "write parallelism.data_parallel_shard: 1, or "
    if config.training.exact:
        raise ConfigError(
            "sharded weights are updated in pieces whose bounds follow from the number of ranks, and the last bit "
            "of an update may depend on its place in a piece",
            field="training.exact",
            fix=f"{fix}exact: false",
        )
    if config.optimizer.state_dtype == "int8":
        raise ConfigError(
            "int8 state shares a scale in blocks of 256 numbers, which would be other blocks on each number of ranks, "
            f"but the weights are sharded over {layout.shard} ranks",
            field="optimizer.state_dtype",
            fix=f"{fix}bfloat16",
        )
    if config.optimizer.type == "Adafactor":
        raise ConfigError(
            "Adafactor goes by the rows and columns of whole matrices, but the weights are sharded over "
            f"{layout.shard} ranks",
            field="optimizer.type",
            fix=f"{fix}another optimizer",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def split_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive (start, stop) ranges whose sizes differ by at most one, larger ones first; some may be empty."""
    size, larger = divmod(count, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + size + (part < larger)
        ranges.append((start, stop))
        start = stop
    return ranges


def split_step(samples: int, data_parallel: int, local_batch_size: int) -> list[list[tuple[int, int]]]:
    """The micro-batches of every data-parallel rank, as (start, stop) ranges into the global batch.

    Ranks take consecutive blocks, as even as possible; each block is cut into micro-batches of `local_batch_size`.
    """
    table = []
    for start, stop in split_evenly(samples, data_parallel):
        table.append([(at, min(at + local_batch_size, stop)) for at in range(start, stop, local_batch_size)])
    return table


def split_samples(
    config: Config, lengths: Sequence[int], data_parallel: int, budget: int | None = None
) -> list[list[Sequence[int]]]:
    """The micro-batches of every data-parallel rank, as places in the global batch, however the configuration makes
    them. In exact mode each sample is one.

    Args:
        lengths: of the samples of the global batch that are trained.
        budget: positions of a micro-batch where they limit it (`Plan.local_batch_tokens`); without one the configured,
            or a fixed one.
    """
    training = config.training
    if training.exact or not training.has_budget:
        size = 1 if training.exact else training.least_samples
        return [[range(*pair) for pair in rank] for rank in split_step(len(lengths), data_parallel, size)]
    budget = budget or training.local_batch_tokens or AUTO_POSITIONS
    table = split_by_budget(lengths, data_parallel, budget, packed=config.micro_batch == "packed")
    return [list(rank) for rank in table]


def evaluation_rows(config: Config, budget: int | None = None) -> int:
    """Rows of one pass of an evaluation on one rank: those configured, or as many of the longest as a budget holds.

    Args:
        budget: as in `split_samples`.
    """
    size = config.evaluation.local_batch_size or config.training.local_batch_size
    if isinstance(size, int):
        return size
    budget = budget or config.training.local_batch_tokens or AUTO_POSITIONS
    return max(1, budget // config.model.seq_length)


def make_plan(
    config: Config,
    world_size: int = 1,
    facts: DataFacts | None = None,
    progress: Progress | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """Resolve a configuration into numbers.

    Args:
        world_size: number of ranks.
        facts: of the data; without them tokens, targets and epochs are None where they cannot be known.
        progress: of a resumed run, from which the rest of the run is counted.
        memory_limit: bytes of the device for one rank; `parallelism.reduce: auto` stays below it if it can, and
            `training.local_batch_size: auto` follows from it.

    Raises:
        ConfigError: numbers that do not fit together, or no vocabulary size; each message names the ways out.
    """
    layout = resolve_layout(config.parallelism, world_size)
    check_sharding(config, layout)
    training = config.training
    spec = resolve_model(config.model, facts.vocab_size if facts else None)
    check_sizes(config, spec)
    _check_batch(config, layout, facts)
    unit = layout.data_parallel * training.least_samples
    lengths = facts.step_lengths if facts else (spec.seq_length,) * training.global_batch_size
    samples = len(lengths)
    trained = usable_samples(samples, unit, training.remainder)
    budget = _budget(config, spec, layout, memory_limit)
    ranks = split_samples(config, lengths[:trained], layout.data_parallel, budget)
    micro_batches = _micro_batches(config, ranks, spec, facts)
    tokens = _total([m.tokens for m in micro_batches])
    divides = training.global_batch_size % unit == 0
    progress = progress or Progress()
    steps = run_length(training, unit, facts, progress)
    if facts:
        check_rest_of_epoch(training, unit, facts, progress, steps)
    _check_schedule(config.lr_scheduler, steps)
    steps_per_epoch, last = steps_of_epoch(training, unit, facts) if facts else (None, None)
    accumulation = max(len(rank) for rank in ranks)
    inner = layout.tensor * layout.pipeline
    split = Split(layout.replicate, layout.shard, inner, accumulation, _widest(spec, micro_batches))
    split = replace(split, casts_once=_casts_once(config, spec, split, memory_limit))
    costs = step_costs(config, spec, split)
    chosen = _choose(config.parallelism, split, costs, memory_limit)
    context = _mean_context(lengths, spec.sliding_window)
    notes = _notes(config, split, layout, divides, unit, facts, last)
    return Plan(
        layout=layout,
        global_batch_size=training.global_batch_size,
        local_batch_size=None if budget is not None else training.least_samples,
        local_batch_tokens=budget,
        accumulation_steps=accumulation,
        samples_trained=trained,
        samples_dropped=samples - trained,
        divides=divides,
        nearest_dividing=() if divides else _nearest(training.global_batch_size, unit),
        micro_batches=tuple(micro_batches),
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs_of(steps, steps_per_epoch, facts, progress),
        last_batch_samples=last,
        tokens=tokens,
        targets=_total([m.targets for m in micro_batches]),
        padding=_total([m.padding for m in micro_batches]),
        parameters=parameter_count(spec),
        flops_per_step=None if tokens is None else flops_per_token(spec, context) * tokens,
        memory=chosen.memory,
        sent_bytes=chosen.sent,
        reduce=chosen.reduce,
        reductions=costs,
        casts_once=split.casts_once,
        dtypes=expected_dtypes(config, spec, layout.data_parallel),
        notes=(*_budget_notes(config, lengths, budget, memory_limit), *notes),
    )


def _widest(spec: ModelSpec, micro_batches: Sequence[MicroBatch]) -> int:
    """Positions of the largest micro-batch, padding included; of the longest samples where theirs are not known."""
    return max(
        m.samples * spec.seq_length if m.tokens is None or m.padding is None else m.tokens + m.padding
        for m in micro_batches
    )


def _budget(config: Config, spec: ModelSpec, layout: Layout, memory_limit: int | None) -> int | None:
    """Positions of a micro-batch at most, where they limit it. `auto`: as many as leave a part of the memory free."""
    training = config.training
    if training.local_batch_size != "auto":
        return training.local_batch_tokens
    if memory_limit is None:
        return max(AUTO_POSITIONS, spec.seq_length)
    usable = int(_USABLE_MEMORY * memory_limit)

    def is_too_much(size: int) -> bool:
        split = Split(layout.replicate, layout.shard, layout.tensor * layout.pipeline, 2, size)
        return _choose(config.parallelism, split, step_costs(config, spec, split), usable).memory.on_device > usable

    return max(bisect_left(range(_MOST_POSITIONS + 1), True, key=is_too_much) - 1, spec.seq_length)


def _budget_notes(config: Config, lengths: Sequence[int], budget: int | None, memory_limit: int | None) -> list[str]:
    if budget is None:
        return []
    notes = []
    if config.training.local_batch_size == "auto":
        why = (
            f"{_USABLE_MEMORY:.0%} of a memory of {memory_limit / 2**30:.3g} GiB, and no more than {_MOST_POSITIONS}"
            if memory_limit is not None
            else "a fixed number, since no limit of memory is known here; a run takes it from its device"
        )
        notes.append(f"local_batch_size auto: micro-batches of up to {budget} positions, padding included ({why}).")
    longer = sum(length > budget for length in lengths)
    if longer:
        notes.append(
            f"{longer} of {len(lengths)} samples are longer than local_batch_tokens {budget}: each is a micro-batch of "
            "its own."
        )
    if config.training.exact:
        notes.append("training.exact: each sample is a micro-batch of its own, whatever the budget.")
    return notes


def _choose(parallelism: ParallelismConfig, split: Split, costs: tuple[Cost, Cost], memory_limit: int | None) -> Cost:
    """Once a step, unless told otherwise, or unless that is too large and the other takes less."""
    once, every = costs
    if not split.reduces_apart or parallelism.reduce == "once_per_step":
        return once
    if parallelism.reduce == "every_micro_batch":
        return every
    fits = memory_limit is None or once.memory.on_device <= memory_limit
    return once if fits or once.memory.on_device <= every.memory.on_device else every


def _casts_once(config: Config, spec: ModelSpec, split: Split, memory_limit: int | None) -> bool:
    """Whether weights are cast to the compute dtype once a step."""
    if not (config.model.casts_weights and wants_one_cast(config, split.shard, split.accumulation)):
        return False
    if memory_limit is None or config.training.cast_weights == "once_per_step":
        return True
    return step_costs(config, spec, replace(split, casts_once=True))[0].memory.on_device <= memory_limit


def wants_one_cast(config: Config, shard: int, accumulation: int) -> bool:
    """Whether weights that are cast to the compute dtype shall be cast once a step, if there is memory for it."""
    wanted = config.training.cast_weights
    can = shard == 1 and not config.compile
    return can and (wanted == "once_per_step" or (wanted == "auto" and accumulation > 1))


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _mean_context(lengths: Sequence[int], sliding_window: int | None) -> float:
    tokens = sum(lengths)
    return sum(attended(length, sliding_window) for length in lengths) / tokens if tokens else 0.0


def _nearest(size: int, unit: int) -> tuple[int, ...]:
    lower = size // unit * unit
    return tuple(value for value in (lower, lower + unit) if value)


def _check_batch(config: Config, layout: Layout, facts: DataFacts | None) -> None:
    training = config.training
    unit = layout.data_parallel * training.least_samples
    size = training.global_batch_size
    if training.has_budget and unit > size:
        raise ConfigError(
            f"{unit} data-parallel ranks are more than the {size} samples of a global batch",
            field="training.global_batch_size",
            fix=f"raise global_batch_size to {unit} or more, or lower the data-parallel ranks to {size} or less",
        )
    if unit > size:
        raise ConfigError(
            f"data_parallel x local_batch_size = {layout.data_parallel} x {training.least_samples} = {unit} is more "
            f"than global_batch_size {size}",
            field="training.global_batch_size",
            fix=f"raise global_batch_size to {unit} or more, or "
            + (
                f"lower local_batch_size to {size // layout.data_parallel} or less"
                if size >= layout.data_parallel
                else f"lower local_batch_size to 1 and the data-parallel ranks to {size} or less"
            ),
        )
    if training.remainder == "error" and size % unit:
        raise ConfigError(
            f"{size} is not a multiple of data_parallel x local_batch_size = {unit}, and training.remainder is error",
            field="training.global_batch_size",
            fix=f"write {' or '.join(map(str, _nearest(size, unit)))}, or remainder: use",
        )
    if facts is None:
        return
    if not usable_samples(min(size, facts.samples), unit, training.remainder):
        raise ConfigError(
            f"the data has {facts.samples} samples, fewer than data_parallel x local_batch_size = {unit}: dropping the "
            "remainder leaves nothing to train on",
            field="training.remainder",
            fix=f"write remainder: use, or local_batch_size {max(1, facts.samples // layout.data_parallel)} or less",
        )
    last = facts.samples % size
    if training.remainder == "error" and training.last_batch == "use" and last % unit:
        raise ConfigError(
            f"the last batch of an epoch has {last} samples, no multiple of data_parallel x local_batch_size = {unit}",
            field="training.remainder",
            fix="write remainder: use, or last_batch: drop",
        )
    if training.last_batch == "drop" and facts.samples < size:
        raise ConfigError(
            f"the data has {facts.samples} samples, fewer than global_batch_size {size}: dropping the short batch "
            "leaves nothing to train on",
            field="training.last_batch",
            fix=f"write last_batch: use, or a global_batch_size of {facts.samples} or less",
        )


def _check_schedule(schedule: LrSchedulerConfig, steps: int) -> None:
    if schedule.warmup_ratio is None and schedule.warmup_steps > steps:
        raise ConfigError(
            f"a warm-up of {schedule.warmup_steps} steps is longer than the run of {steps} steps",
            field="lr_scheduler.warmup_steps",
            fix=f"write {steps} or less, or warmup_ratio",
        )
    for name in ("warmup_lr_init", "lr_end", "lr_end2"):
        value = getattr(schedule, name)
        if value is not None and value > schedule.learning_rate:
            raise ConfigError(
                f"{value} is above the learning_rate {schedule.learning_rate}",
                field=f"lr_scheduler.{name}",
                fix=f"write {schedule.learning_rate} or less",
            )
    _check_decay(schedule, steps)


def _check_decay(schedule: LrSchedulerConfig, steps: int) -> None:
    """A decay whose place is written must lie after the warm-up and have a length."""
    names = ("decay_start_ratio", "decay_start_steps", "decay_ratio", "decay_steps", "final_steps", "keep_steps")
    written = next((name for name in names if getattr(schedule, name) is not None), None)
    if written is None:
        return
    warmup = schedule.warmup_updates(steps)
    begin, end = schedule.decay_span(steps)
    if begin < warmup or end <= begin:
        raise ConfigError(
            f"the decay would go from update {begin} to {end}, but the warm-up takes {warmup} of {steps} updates",
            field=f"lr_scheduler.{written}",
            fix="write numbers with which the decay begins after the warm-up and takes one update or more",
        )


def _micro_batches(
    config: Config, ranks: list[list[Sequence[int]]], spec: ModelSpec, facts: DataFacts | None
) -> list[MicroBatch]:
    packed = config.micro_batch == "packed"
    fixed = config.train_dataset.rows == "cut"
    table = []
    for rank, groups in enumerate(ranks):
        for index, places in enumerate(groups):
            tokens = targets = padding = None
            if facts:
                lengths = [facts.step_lengths[place] for place in places]
                tokens, targets = sum(lengths), sum(facts.step_targets[place] for place in places)
                padding = positions(lengths, packed) - tokens
            elif fixed:
                tokens = targets = len(places) * spec.seq_length
                padding = 0
            table.append(MicroBatch(rank, index, tuple(places), len(places), tokens, padding, targets))
    return table


def _notes(
    config: Config,
    split: Split,
    layout: Layout,
    divides: bool,
    unit: int,
    facts: DataFacts | None,
    last: int | None,
) -> list[str]:
    training = config.training
    notes = []
    size = training.global_batch_size
    if not divides:
        nearest = " or ".join(map(str, _nearest(size, unit)))
        outcome = (
            f"{size % unit} samples of every global batch are discarded (remainder: drop)"
            if training.remainder == "drop"
            else "the last micro-batch is smaller; every sample is trained once"
        )
        notes.append(
            f"global_batch_size {size} is not a multiple of {unit}: {outcome}. {nearest} would divide exactly."
        )
    if size > unit and not training.has_budget:
        notes.append(
            "Accumulation saves memory; it is no faster than a true large batch. "
            "If memory allows, raise local_batch_size: the step stays the same."
        )
    if training.loss_normalization == "micro_batch_mean":
        notes.append("loss_normalization micro_batch_mean: the step depends on how the batch is split.")
    if config.parallelism.reduce == "every_micro_batch" and not split.reduces_apart:
        why = "there is one micro-batch" if layout.shard > 1 else "no weights are sharded"
        notes.append(f"parallelism.reduce every_micro_batch has no effect: {why}, so once_per_step is the same.")
    if config.parallelism.data_parallel_shard < -1:
        notes.append("parallelism.data_parallel_shard: a negative value means all of data parallel; write -1.")
    if config.model.compute_dtype in NARROW:
        notes.append(
            f"A CPU without units for {config.model.compute_dtype} runs products of operands rounded to it in float32."
        )
    if config.training.cast_weights == "once_per_step" and layout.shard > 1:
        notes.append(
            f"training.cast_weights once_per_step has no effect on weights that are sharded over {layout.shard} ranks: "
            "they are gathered, cast and freed in every pass."
        )
    if config.compile:
        notes.append("compile: compute dtypes are not checked in the first step, since compiled modules are not seen.")
    if config.model.attention_dropout > 0:
        notes.append("attention_dropout > 0 runs the reference attention: slower, with a score matrix in memory.")
    if config.swap.enable:
        notes.append(
            "swap.enable keeps the activations of the layers in CPU memory, which the figures here do not take into "
            "account; on a CPU device it has no effect."
        )
    if facts and last and training.last_batch == "use":
        dropped = last - usable_samples(last, unit, training.remainder)
        discarded = f", of which {dropped} are discarded (remainder: drop)" if dropped else ""
        notes.append(f"The last batch of every epoch has {last} samples (last_batch: use){discarded}.")
    if facts and last and training.last_batch == "drop":
        notes.append(f"The last {last} samples of every epoch are not trained (last_batch: drop).")
    return notes
