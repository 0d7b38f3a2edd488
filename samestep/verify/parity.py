"""The proof: the same global batches on several layouts, compared with one process and one micro-batch.

Bounds (all relative):
- float64: gradient, loss and norm of the first step 1e-12, weights and moments after it 1e-9, later steps 1e-9.
- float32: gradient, loss and norm of the first step 1e-6, loss 1e-5 and norm 1e-4 later; the update is judged against
  a float64 update from that layout's own gradient, 1e-6 of max(|w|, lr sqrt(n)): AdamW turns the noise of a gradient
  that is truly zero into a step of +-lr, so weights of two layouts may not be compared in float32. For AdamW the
  float64 update is written out here; for the others it is their own rule in float64, so it shows rounding and what is
  taken from the wrong place, not a wrong rule.
- bfloat16, float16: distance of the gradient to the float64 truth at most 1.1 times that of one padded micro-batch for
  more of them, and 1.2 times for packed ones. In float16 the loss scale stays what it is at first.
- `training.exact`, whatever the dtypes: no bit of a gradient, weight, moment, loss or norm differs, at any step.

The reference recomputes nothing, and in float64, where the logic is judged, it is not compiled: so the layouts, which
do as the config says, prove these too. In narrower dtypes a compiled run has a compiled reference, since fused kernels
round in other places.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from samestep.config.schema import (
    Config,
    LossScaleConfig,
    LrSchedulerConfig,
    OptimizerConfig,
    ParallelismConfig,
    RecomputeConfig,
)
from samestep.data.batch import Batch
from samestep.data.dataset import Data, data_facts, load_data, make_order
from samestep.data.order import StepSamples
from samestep.data.rows import IGNORE, Rows, Sample
from samestep.errors import ConfigError
from samestep.launch import run_ranks
from samestep.ops import Precision, random_key
from samestep.ops.precision import is_narrow
from samestep.parallel.data import local, whole
from samestep.parallel.mesh import Mesh, choose_device, join
from samestep.plan import (
    DataFacts,
    Layout,
    check_sharding,
    in_steps,
    make_plan,
    resolve_layout,
    split_evenly,
    split_samples,
)
from samestep.run.preflight import device_memory
from samestep.run.setup import build_model, build_step, collate_groups, fill_up
from samestep.split import split_by_budget
from samestep.step.step import NO_TARGETS, NON_FINITE
from samestep.step.update import Updater, decays

CASES = ("even", "skewed", "one_rank_empty", "all_empty")
DTYPES = ("config", "float32", "float64", "bfloat16", "float16")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class VerifyLayout:
    """One way to split a global batch: over ranks, and on each of them over micro-batches, by their number
    (`accumulation`), by a budget of positions (`tokens`), or as the config does (`by_config`).

    Attributes:
        out_of_memory: in the first step this micro-batch of the last rank, from 1 on, runs out of memory once, half-way
            through its backward pass; not in `all_empty`, whose second step may have other micro-batches.
        casts_once: whether weights are cast to the compute dtype once a step, as `training.cast_weights` says.
    """

    name: str
    accumulation: int = 1
    tokens: int | None = None
    micro_batch: str = "padded"
    by_config: bool = False
    out_of_memory: int | None = None
    replicate: int = 1
    shard: int = 1
    casts_once: bool = False

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def degrees(self) -> Layout:
        return resolve_layout(ParallelismConfig(data_parallel_shard=self.shard), self.ranks)


@dataclass(frozen=True)
class Comparison:
    """One layout in one case against the reference. Errors are relative; None where the mode does not judge them.

    Attributes:
        clipped: whether clipping was active in every step of the reference that was taken.
        gradient: of the parameter `worst`, or in low precision the ratio to the reference's own error.
        weights, moments: after the first step.
        failures: what is out of bounds, in words; empty means it passed.
    """

    case: str
    layout: str
    clipped: bool
    gradient: float | None
    worst: str
    loss: float
    norm: float
    weights: float | None
    moments: float | None
    failures: tuple[str, ...]


@dataclass(frozen=True)
class ParityReport:
    """All comparisons of one `verify`."""

    dtype: str
    comparisons: tuple[Comparison, ...]

    @property
    def clipped(self) -> bool:
        return any(comparison.clipped for comparison in self.comparisons)

    @property
    def passed(self) -> bool:
        return not any(comparison.failures for comparison in self.comparisons)


@dataclass
class Trace:
    """What a layout did: before-clip gradients, weights and moments of the first step, and the curves of all.

    Attributes:
        before: weights before the first step.
        touched: what changed in steps that had no target.
        ran_out: whether a micro-batch ran out of memory.
        digest: SHA-256 of weights and optimizer state after the last step.
    """

    before: Tensors
    learning_rate: float
    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    moments: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    skipped: list[str | None] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    ran_out: bool = False
    digest: str = ""


def parse_layouts(text: str) -> list[VerifyLayout]:
    """`"ga=2 packed packed+ga=3"` -> layouts.

    Raises:
        ConfigError: an axis that is not known or needs several processes.
    """
    layouts = []
    for name in text.split():
        layout = VerifyLayout(name)
        axes = [_axis(axis) for axis in name.split("+")]
        for axis in axes:
            layout = replace(layout, **axis)
        _check_axes(layout, {key for axis in axes for key in axis})
        layouts.append(layout)
    if not layouts:
        raise ConfigError("names no layout", field="--layouts", fix="write for example: ga=4 packed")
    return layouts


def _check_axes(layout: VerifyLayout, given: set[str]) -> None:
    reason = fix = ""
    if layout.by_config and given & {"accumulation", "tokens", "micro_batch"}:
        reason, fix = "`config` makes the micro-batches as the config says", "write config, or ga=K, tokens=N, packed"
    elif layout.tokens is not None and layout.accumulation > 1:
        reason, fix = "a budget of positions decides how many micro-batches there are", "write ga=K or tokens=N"
    elif layout.out_of_memory and layout.shard > 1:
        reason = "with sharded weights a micro-batch that runs out of memory ends the run, since others are in it too"
        fix = "write oom=K with dp=N or alone"
    if reason:
        raise ConfigError(f"{layout.name}: {reason}", field="--layouts", fix=fix)


def _axis(text: str) -> dict[str, Any]:
    """Fields of `VerifyLayout` that one axis sets."""
    if text in ("packed", "padded"):
        return {"micro_batch": text}
    if text == "config":
        return {"by_config": True}
    key, _, value = text.partition("=")
    numbers = [int(part) for part in value.split("x") if part.isdecimal() and int(part) > 0]
    fields: dict[str, tuple[str, ...]] = {"ga": ("accumulation",), "tokens": ("tokens",), "dp": ("replicate",)}
    fields |= {"fsdp": ("shard",), "hsdp": ("replicate", "shard"), "oom": ("out_of_memory",)}
    if key in fields and len(numbers) == len(value.split("x")) == len(fields[key]):
        return dict(zip(fields[key], numbers, strict=True))
    raise ConfigError(
        f"{text!r} is no axis of a layout",
        field="--layouts",
        fix="write layouts parted by spaces, each of ga=K, tokens=N, packed, config, oom=K, dp=N, fsdp=N and hsdp=RxS "
        "joined by +: config ga=4 packed+ga=2+oom=1 fsdp=2+ga=3",
    )


def parse_cases(text: str) -> list[str]:
    """`"even skewed"` -> names; ConfigError for one that is not known."""
    cases = text.split()
    for case in cases:
        if case not in CASES:
            raise ConfigError(f"{case!r} is no case", field="--cases", fix=f"write some of: {' '.join(CASES)}")
    if not cases:
        raise ConfigError("names no case", field="--cases", fix=f"write some of: {' '.join(CASES)}")
    return cases


def default_layouts(config: Config) -> list[VerifyLayout]:
    """A few splits that the global batch and this machine allow."""
    names = "config ga=2 ga=3 ga=4 packed packed+ga=2 oom=1 dp=2 fsdp=2 dp=2+ga=3 fsdp=2+ga=3"
    return _possible(parse_layouts(names), config)


def grid_layouts(config: Config) -> list[VerifyLayout]:
    """One process, replicas, shards and both, each with 1 to 3 micro-batches a rank, padded and packed, and with those
    of the config; without shards also with one that runs out of memory; as far as the global batch and this machine
    allow."""
    ranks = ("dp=1", "dp=2", "fsdp=2", "fsdp=4", "hsdp=2x2")
    names = [f"{axis}+ga={k}+{kind}" for axis in ranks for k in (1, 2, 3) for kind in ("padded", "packed")]
    names += [f"{axis}+config" for axis in ranks]
    names += [f"{axis}+ga=2+{kind}+oom=2" for axis in ("dp=1", "dp=2") for kind in ("padded", "packed")]
    return _possible(parse_layouts(" ".join(names)), config)


def _possible(layouts: Sequence[VerifyLayout], config: Config) -> list[VerifyLayout]:
    most_ranks = torch.cuda.device_count() or math.inf
    whole = config.training.exact or config.optimizer.type == "Adafactor"

    def fits(layout: VerifyLayout) -> bool:
        samples = 2 if layout.out_of_memory else config.training.least_samples if layout.by_config else 1
        return layout.ranks * layout.accumulation * samples <= config.training.global_batch_size

    return [
        layout
        for layout in layouts
        if fits(layout)
        and layout.ranks <= most_ranks
        and not (whole and layout.shard > 1)
        and not (config.training.exact and layout.out_of_memory)
    ]


def run(
    config: Config,
    *,
    layouts: Sequence[VerifyLayout] | None = None,
    cases: Sequence[str] = CASES,
    dtype: str = "config",
    steps: int = 1,
    data: Data | None = None,
) -> ParityReport:
    """Take the same steps on every layout and compare.

    Layouts of several ranks run in processes of this machine, started here. The learning rate is the configured peak
    from the first step on, since a warm-up from zero would prove nothing.

    Args:
        dtype: `config`; `float32` or `float64` in place of every one of the config; `bfloat16` or `float16` in place of
            its `compute_dtype`.
        steps: global batches; the curves of loss and norm are compared over all of them.
        data: already loaded.

    Raises:
        ConfigError: more micro-batches than samples; a micro-batch that cannot be halved shall run out of memory;
            float64 or float16 in exact mode; gradients that overflow at the loss scale.
    """
    if config.training.exact and dtype == "float16":
        raise ConfigError(
            "`training.exact: true` refuses float16, which needs a scaled loss",
            field="--dtype",
            fix="write another, or add training.exact=false",
        )
    if config.training.exact and dtype == "float64":
        raise ConfigError(
            "`training.exact: true` adds gradients as integers, cut from float32: float64 would prove nothing",
            field="--dtype",
            fix="leave it out: exact mode is judged by equal bits in the run's own dtypes; or add training.exact=false",
        )
    data = data or load_data(config)
    facts = data_facts(config, data)
    plan = make_plan(config, 1, facts)  # a configuration that cannot train proves nothing
    layouts = [_resolved(layout, config, facts) for layout in layouts or default_layouts(config)]
    for layout in layouts:
        _check_size(layout, config, facts.step_lengths)
        check_sharding(config, layout.degrees)
    peak = LrSchedulerConfig(type="constant", learning_rate=config.lr_scheduler.learning_rate)
    config = in_steps(config.model_copy(update={"lr_scheduler": peak}), plan.steps)
    scale = LossScaleConfig(fixed=config.training.loss_scale.first)
    config = config.model_copy(update={"training": config.training.model_copy(update={"loss_scale": scale})})
    precision = _precision(config, dtype)
    low = any(d in (torch.bfloat16, torch.float16) for d in vars(precision).values())
    double = _is_double(precision)
    jobs = [Job(layout, case, precision, steps) for case in cases for layout in (REFERENCE, *layouts)]
    if low and not config.training.exact:
        jobs += [Job(REFERENCE, case, precision.raised(torch.float64), 1) for case in cases]
    traces = _run_jobs(config, data, list(dict.fromkeys(jobs)))
    comparisons = []
    for case in cases:
        reference = traces[Job(REFERENCE, case, precision, steps)]
        for layout in layouts:
            judge = _Judge(config, case, layout, reference, traces[Job(layout, case, precision, steps)])
            if config.training.exact:
                comparisons.append(judge.exact())
            elif low:
                comparisons.append(judge.low(traces[Job(REFERENCE, case, precision.raised(torch.float64), 1)]))
            else:
                comparisons.append(judge.double() if double else judge.single())
    name = dtype if dtype != "config" else str(precision.compute).removeprefix("torch.")
    return ParityReport(name, tuple(comparisons))


def _precision(config: Config, dtype: str) -> Precision:
    precision = Precision.from_config(config.model)
    if dtype == "config":
        return precision
    chosen = getattr(torch, dtype)
    return replace(precision, compute=chosen) if is_narrow(chosen) else precision.raised(chosen)


def run_grid(config: Config, *, cases: Sequence[str] = CASES, dtype: str = "config", steps: int = 1) -> ParityReport:
    """`run` over `grid_layouts`, once with a threshold that always clips and once with one that never does."""
    data, layouts = load_data(config), grid_layouts(config)
    reports = []
    for max_norm in (_ALWAYS, _NEVER):
        training = config.training.model_copy(update={"max_norm": max_norm})
        changed = config.model_copy(update={"training": training})
        reports.append(run(changed, layouts=layouts, cases=cases, dtype=dtype, steps=steps, data=data))
    return ParityReport(reports[0].dtype, reports[0].comparisons + reports[1].comparisons)


_ALWAYS, _NEVER = 1e-3, 1e9
"""Thresholds of the norm: a gradient below the one trains nothing worth a proof, one above the other is not finite for
long."""


def _is_double(precision: Precision) -> bool:
    return all(dtype == torch.float64 for dtype in vars(precision).values())


def _resolved(layout: VerifyLayout, config: Config, facts: DataFacts) -> VerifyLayout:
    """With what a run on as many ranks would do here: casts, and by the config the kind and budget of micro-batches."""
    if not layout.by_config:
        return replace(layout, casts_once=_casts_once(layout, config, facts.step_lengths))
    parallelism = config.parallelism.model_copy(update={"data_parallel_shard": layout.shard})
    device = choose_device()
    memory = device_memory(device) // (layout.ranks if device.type == "cpu" else 1)
    plan = make_plan(config.model_copy(update={"parallelism": parallelism}), layout.ranks, facts, memory_limit=memory)
    return replace(layout, tokens=plan.local_batch_tokens, micro_batch=config.micro_batch, casts_once=plan.casts_once)


def _casts_once(layout: VerifyLayout, config: Config, lengths: Sequence[int]) -> bool:
    """As the plan decides it, for micro-batches that are not the config's; there is memory for such small proofs."""
    if config.compile or layout.shard > 1 or config.training.cast_weights == "every_micro_batch":
        return False
    passes = len(lengths) if config.training.exact else max(map(len, _groups(config, lengths, layout)))
    return passes > 1 or config.training.cast_weights == "once_per_step"


def _check_size(layout: VerifyLayout, config: Config, lengths: Sequence[int]) -> None:
    """The samples of the first step suffice."""
    of_rank = math.ceil(len(lengths) / layout.ranks)
    if layout.accumulation > of_rank:
        raise ConfigError(
            f"{layout.name}: a global batch of {len(lengths)} samples on {layout.ranks} rank{'s' * (layout.ranks > 1)} "
            f"cannot make {layout.accumulation} micro-batches",
            field="--layouts",
            fix=f"write ga={of_rank} or less",
        )
    if layout.out_of_memory is None:
        return
    if config.training.exact:
        raise ConfigError(
            f"{layout.name}: in exact mode a micro-batch is one sample and cannot be halved",
            field="--layouts",
            fix="leave oom=K out",
        )
    sizes = [len(group) for group in _groups(config, lengths, layout)[-1]]
    if layout.out_of_memory > len(sizes) or sizes[layout.out_of_memory - 1] < 2:
        raise ConfigError(
            f"{layout.name}: the last rank's micro-batches have {', '.join(map(str, sizes))} samples, and number "
            f"{layout.out_of_memory} shall be halved",
            field="--layouts",
            fix="name one with two samples or more",
        )


@dataclass(frozen=True)
class Job:
    """One trace to be made."""

    layout: VerifyLayout
    case: str
    precision: Precision
    steps: int


REFERENCE = VerifyLayout("reference")


def _run_jobs(config: Config, data: Data, jobs: Sequence[Job]) -> dict[Job, Trace]:
    """Those of one rank here, the others in worker processes, started once for each number of ranks."""
    found: dict[Job, Trace] = {}
    for ranks in sorted({job.layout.ranks for job in jobs}):
        chosen = [job for job in jobs if job.layout.ranks == ranks]
        if ranks == 1:
            traces = [trace(config, data, job, Mesh.alone()) for job in chosen]
        else:
            traces = run_ranks(trace_jobs, ranks, config, data, chosen)[0]
        found.update(zip(chosen, traces, strict=True))
    return found


def trace_jobs(config: Config, data: Data, jobs: Sequence[Job]) -> list[Trace] | None:
    """In a worker process: the traces, on the first rank."""
    world = join()
    traces = []
    for job in jobs:
        mesh = Mesh(job.layout.degrees, world, choose_device())
        traces.append(trace(config, data, job, mesh))
    return traces if world.is_first else None


def trace(config: Config, data: Data, job: Job, mesh: Mesh) -> Trace:
    """Take the steps of a job from the first values of the model; every rank makes it, the first keeps the tensors."""
    layout, case = job.layout, job.case
    if layout == REFERENCE:
        compiled = config.compile and not _is_double(job.precision)
        config = config.model_copy(update={"recompute": RecomputeConfig(), "compile": compiled})
    model = build_model(config, data.tokenizer.vocab_size, mesh, job.precision)
    every = config.parallelism.reduce == "every_micro_batch"
    step = build_step(
        config, model, mesh, "every_micro_batch" if every else "once_per_step", casts_once=layout.casts_once
    )
    order = make_order(config, data)
    consumed = 0
    if case == "all_empty":  # with moments that a step without targets could decay
        samples = order.next(consumed)
        consumed = samples.consumed
        step(_batches(config, data.train, samples, 0, replace(layout, accumulation=1), "even", mesh))
    record = Trace(_copies(model.named_parameters(), mesh), step.updater.learning_rate)
    shortage = None
    if layout.out_of_memory and case != "all_empty" and mesh.data_rank == layout.ranks - 1:
        shortage = _Shortage(model, layout.out_of_memory)

    def keep_gradients(gradients: Mapping[str, torch.Tensor]) -> None:
        record.gradients = _copies(gradients.items(), mesh)

    for number in range(1, job.steps + 1):
        samples = order.next(consumed)
        consumed = samples.consumed
        untouched = _all_state(step.updater) if case == "all_empty" else {}
        batches = _batches(config, data.train, samples, number, layout, case, mesh)
        report = step(
            batches,
            on_micro_batch=shortage.on_micro_batch if shortage else None,
            on_gradients=keep_gradients if number == 1 else None,
        )
        if layout == REFERENCE and report.loss_scale is not None and report.skipped == NON_FINITE:
            raise ConfigError(
                f"gradients are not finite at the scale {report.loss_scale:g}, so there is no step to compare",
                field="training.loss_scale",
                fix="write a smaller one, such as 1024"
                if config.model.has_float16
                else "leave --dtype out and add to the command line: "
                "model.compute_dtype=float16 training.loss_scale=1024",
            )
        if case == "all_empty":
            changed = _changed(untouched, _all_state(step.updater))
            record.touched += sorted({name for names in mesh.gather(changed) for name in names})
        record.losses.append(report.loss)
        record.norms.append(report.grad_norm)
        record.coefficients.append(report.clip_coefficient)
        record.skipped.append(report.skipped)
        if number == 1:
            state = step.updater.state()
            masters = {n.removeprefix("master."): t for n, t in state.items() if n.startswith("master.")}
            record.weights = _copies((dict(model.named_parameters()) | masters).items(), mesh)
            record.moments = _copies(((n, t) for n, t in state.items() if not n.startswith("master.")), mesh)
    record.digest = digest(step.updater)
    record.ran_out = mesh.any(shortage is not None and shortage.is_over)
    return record


class _Shortage:
    """No memory for the rest of a backward pass, once: it breaks off with half of the gradients added.

    Args:
        micro_batch: number of the pass among those from now on, from 1 on.
    """

    def __init__(self, model: torch.nn.Module, micro_batch: int):
        self._left, self.is_over = micro_batch, False
        parameters = list(model.parameters())
        parameters[len(parameters) // 2].register_hook(self._on_gradient)

    def on_micro_batch(self, index: int, sums: Mapping[str, torch.Tensor]) -> None:
        self._left -= 1

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if self._left == 1 and not self.is_over:
            self.is_over = True
            raise torch.OutOfMemoryError("out of memory, by the layout")


def _copies(tensors: Iterable[tuple[str, torch.Tensor]], mesh: Mesh) -> Tensors:
    """Whole tensors in float64 on the CPU, on the first rank."""
    found = ((name, whole(tensor.detach())) for name, tensor in tensors)
    return {name: tensor.to("cpu", torch.float64, copy=True) for name, tensor in found if mesh.is_first}


def _all_state(updater: Updater) -> Tensors:
    """Everything of this rank that a skipped step must leave as it is, to the bit."""
    tensors = {f"weight.{name}": local(p.detach()).clone() for name, p in updater.parameters.items()}
    tensors |= {name: local(tensor).clone() for name, tensor in updater.state().items()}
    return tensors | {"number of updates": torch.tensor(updater.updates)}


def digest(updater: Updater) -> str:
    """SHA-256 of this rank's weights, masters and optimizer state, names and all."""
    found = hashlib.sha256()
    for name, tensor in sorted(_all_state(updater).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _changed(before: Tensors, after: Tensors) -> list[str]:
    odd = sorted(before.keys() ^ after.keys())
    return odd + [name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])]


def _batches(
    config: Config, rows: Rows, samples: StepSamples, step: int, layout: VerifyLayout, case: str, mesh: Mesh
) -> list[Batch]:
    """The micro-batches of this rank; the case has taken targets away from some samples."""
    count = len(samples.rows)
    table = _groups(config, rows.lengths()[samples.rows].tolist(), layout)
    if config.training.exact:  # passes of one sample, whatever the layout asks for
        table = [[range(i, i + 1) for group in groups for i in group] for groups in table]
    key = random_key(config.training.seed, step)
    batches = collate_groups(
        table[mesh.data_rank],
        lambda i: _masked(rows[int(samples.rows[i])], i, count, case),
        samples.places,
        layout.micro_batch,
        key,
    )
    return fill_up(batches, max(map(len, table)), key)


def _groups(config: Config, lengths: Sequence[int], layout: VerifyLayout) -> list[list[Sequence[int]]]:
    """The micro-batches of every rank, as places in the global batch."""
    if layout.by_config:
        return split_samples(config, lengths, layout.ranks, layout.tokens)
    if layout.tokens is not None:
        packed = layout.micro_batch == "packed"
        return [list(rank) for rank in split_by_budget(lengths, layout.ranks, layout.tokens, packed=packed)]
    table: list[list[Sequence[int]]] = []
    for start, stop in split_evenly(len(lengths), layout.ranks):
        parts = split_evenly(stop - start, min(layout.accumulation, stop - start)) if stop > start else []
        table.append([range(start + first, start + last) for first, last in parts])
    return table


def _masked(sample: Sample, index: int, count: int, case: str) -> Sample:
    """Take targets away from a sample of the global batch, as the case says; `even` leaves the data as it is."""
    if case == "even":
        return sample
    keep = len(sample)
    if case == "skewed":
        keep = max(1, len(sample) >> (index % 6))
    elif case == "all_empty" or (case == "one_rank_empty" and index < math.ceil(count / 2)):
        keep = 0
    labels = np.where(np.arange(len(sample)) < keep, sample.labels, IGNORE)
    return replace(sample, labels=labels)


def _update_bound(optimizer: OptimizerConfig) -> float:
    """Relative error of a float32 update: 1e-6, but Muon's iterations x -> a x + b x^3 + c x^5 multiply the rounding of
    small singular values by `a` each time."""
    if optimizer.type != "Muon":
        return 1e-6
    growth = optimizer.setting("ns_coefficients")[0] ** optimizer.setting("ns_steps")
    return max(1e-6, torch.finfo(torch.float32).eps / 2 * growth)


def _lost_bound(config: Config) -> float:
    """Relative error of a weight that has no master: one step of the dtype that it is stored in."""
    if config.optimizer.master_weights == "float32":
        return 0.0
    precision = Precision.from_config(config.model)
    return max(torch.finfo(dtype).eps for dtype in (precision.params, precision.embedding))


class _Judge:
    """Compares one trace with the reference and says what is out of bounds."""

    def __init__(self, config: Config, case: str, layout: VerifyLayout, reference: Trace, found: Trace):
        self.config, self.case, self.layout, self.reference, self.found = config, case, layout, reference, found
        self.failures: list[str] = []
        if reference.skipped != found.skipped:
            self.failures.append("other steps were skipped")
        if case == "all_empty" and not all(found.skipped):
            self.failures.append("a step without targets was not skipped")
        if layout.out_of_memory and case != "all_empty" and not found.ran_out:
            self.failures.append("no micro-batch ran out of memory")
        if found.touched:
            self.failures.append(f"a step without targets changed {len(found.touched)} tensors: {found.touched[0]}")
        for kind in ("weights", "moments"):
            odd = [name for name, tensor in getattr(found, kind).items() if not tensor.isfinite().all()]
            if odd:
                self.failures.append(f"{kind} are not finite: {odd[0]}")

    def double(self) -> Comparison:
        gradient, worst = gradient_error(self.reference.gradients, self.found.gradients)
        self._bound("gradient", gradient, 1e-12, worst)
        weights = moments = None
        if not self.found.skipped[0]:
            noise = noise_alone(self.reference.gradients, self.found.gradients)
            weights = _largest_difference(self.reference.weights, self.found.weights, noise)
            moments = _largest_difference(self.reference.moments, self.found.moments, noise)
            self._bound("weights", weights, 1e-9)
            self._bound("moments", moments, 1e-9)
        return self._result(gradient, worst, self._curves(1e-12, 1e-9, 1e-9), weights, moments)

    def single(self) -> Comparison:
        gradient, worst = gradient_error(self.reference.gradients, self.found.gradients)
        self._bound("gradient", gradient, 1e-6, worst)
        weights = None
        if not self.found.skipped[0]:
            weights, name = self._update_error()
            self._bound("update", weights, _update_bound(self.config.optimizer), name)
        return self._result(gradient, worst, self._curves(1e-6, 1e-5, 1e-4), weights, None)

    def exact(self) -> Comparison:
        gradient, worst = gradient_error(self.reference.gradients, self.found.gradients)
        self._bound("gradient", gradient, 0.0, worst)
        weights = _largest_difference(self.reference.weights, self.found.weights, ())
        moments = _largest_difference(self.reference.moments, self.found.moments, ())
        self._bound("weights", weights, 0.0)
        self._bound("moments", moments, 0.0)
        if self.reference.digest != self.found.digest:
            self.failures.append("the bits of weights and optimizer state after the last step differ")
        return self._result(gradient, worst, self._curves(0.0, 0.0, 0.0), weights, moments)

    def low(self, truth: Trace) -> Comparison:
        if self.found.skipped[0] == NO_TARGETS:
            return self._result(None, "", (0.0, 0.0), None, None)
        own = _distance(truth.gradients, self.found.gradients)
        one = _distance(truth.gradients, self.reference.gradients)
        ratio = own / one if one else (0.0 if own == 0 else math.inf)
        self._bound(
            "gradient error over that of one micro-batch", ratio, 1.1 if self.layout.micro_batch == "padded" else 1.2
        )
        weights, name = self._update_error()
        self._bound("update", weights, max(_update_bound(self.config.optimizer), _lost_bound(self.config)), name)
        return self._result(ratio, "", self._curves(math.inf, math.inf, math.inf), weights, None)

    def _update_error(self) -> tuple[float, str]:
        """Largest distance to a float64 update from this layout's own gradient, over max(|w|, size of an update)."""
        rate = self.found.learning_rate
        wanted = _first_update(self.config, self.found.before, self.found.gradients, rate)
        worst, name = 0.0, ""
        for key, weight in self.found.weights.items():
            scale = max(float(wanted[key].norm()), rate * math.sqrt(weight.numel()))
            error = float((weight - wanted[key]).norm()) / scale
            if error >= worst or math.isnan(error):
                worst, name = error, key
        return worst, name

    def _curves(self, first: float, loss_bound: float, norm_bound: float) -> tuple[float, float]:
        """Largest relative difference of loss and norm over all steps that were taken."""
        result = []
        for name, bound in (("losses", loss_bound), ("norms", norm_bound)):
            worst = 0.0
            pairs = zip(getattr(self.reference, name), getattr(self.found, name), self.found.skipped, strict=True)
            for number, (wanted, value, skipped) in enumerate(pairs, 1):
                if skipped:
                    continue
                error = abs(value - wanted) / abs(wanted)
                self._bound(f"{name} of step {number}", error, first if number == 1 else bound)
                worst = _larger(worst, error)
            result.append(worst)
        return result[0], result[1]

    def _bound(self, what: str, error: float, bound: float, where: str = "") -> None:
        if not math.isfinite(error):
            self.failures.append(f"{what} is not finite" + (f" at {where}" if where else ""))
        elif error > bound:
            self.failures.append(f"{what} {error:.2e} > {bound:.0e}" + (f" at {where}" if where else ""))

    def _result(
        self,
        gradient: float | None,
        worst: str,
        curves: tuple[float, float],
        weights: float | None,
        moments: float | None,
    ) -> Comparison:
        taken = zip(self.reference.coefficients, self.reference.skipped, strict=True)
        clipped = [coefficient < 1 for coefficient, skipped in taken if not skipped]
        return Comparison(
            self.case,
            self.layout.name,
            bool(clipped) and all(clipped),
            gradient,
            worst,
            *curves,
            weights,
            moments,
            tuple(self.failures),
        )


def gradient_error(reference: Tensors, found: Tensors) -> tuple[float, str]:
    """Largest over parameters of |g - g_ref| / max(|g_ref|, 1e-3 |G_ref| / sqrt(P)), and the parameter's name.

    G is all gradients and P the number of parameters: the floor is for those whose true gradient is zero, such as a key
    bias, where there is only noise to compare.
    """
    if reference.keys() != found.keys():
        return math.inf, sorted(reference.keys() ^ found.keys())[0]
    floor = _gradient_floor(reference)
    worst, name = 0.0, ""
    for key, gradient in reference.items():
        difference = float((found[key] - gradient).norm())
        scale = max(float(gradient.norm()), floor)
        error = difference / scale if scale else (math.inf if difference else 0.0)
        if error >= worst or math.isnan(error):
            worst, name = error, key
    return worst, name


def _gradient_floor(gradients: Tensors) -> float:
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values()))
    return 1e-3 * total / math.sqrt(max(len(gradients), 1))


def noise_alone(reference: Tensors, found: Tensors) -> tuple[str, ...]:
    """Parameters whose true gradient is zero, such as a key bias without rotary positions.

    Their moments are rounding noise, which the update of AdamW magnifies: there is nothing of them to compare after it.
    """
    least = 1e-9 * _gradient_floor(reference)
    sizes = {n: float(g.norm()) + float(found[n].norm()) for n, g in reference.items() if n in found}
    return tuple(name for name, size in sizes.items() if 0 < size <= least)


def _distance(truth: Tensors, found: Tensors) -> float:
    """|G - G_truth| / |G_truth| over all parameters together."""
    difference = sum(float((found[name] - gradient).norm()) ** 2 for name, gradient in truth.items())
    total = sum(float(gradient.norm()) ** 2 for gradient in truth.values())
    return math.sqrt(difference / total) if total else (math.inf if difference else 0.0)


def _largest_difference(reference: Tensors, found: Tensors, without: tuple[str, ...]) -> float:
    """Largest over tensors of |a - b| / |b|, but for the parameters `without`; a moment is called `KEY.PARAMETER`."""
    worst = 0.0
    for name, tensor in reference.items():
        if name in without or name.partition(".")[2] in without:
            continue
        size = float(tensor.norm())
        difference = float((found[name] - tensor).norm())
        worst = _larger(worst, difference / size if size else difference)
    return worst


def _larger(one: float, other: float) -> float:
    """NaN where one of them is, unlike `max`, so that no bound holds."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _first_update(config: Config, weights: Tensors, gradients: Tensors, rate: float) -> Tensors:
    """The weights after the first step in float64, clipping included."""
    max_norm = config.training.max_norm
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values()))
    coefficient = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    if config.optimizer.type == "AdamW":
        return _adamw(config.optimizer, weights, gradients, rate, coefficient)
    updater = Updater(
        [(name, torch.nn.Parameter(weight.clone())) for name, weight in weights.items()],
        config.optimizer,
        lambda _: rate,
    )
    wide = torch.tensor(coefficient, dtype=torch.float64, device=next(iter(weights.values())).device)
    updater.apply({name: gradient.clone() for name, gradient in gradients.items()}, wide, torch.zeros_like(wide).bool())
    return {name: parameter.detach() for name, parameter in updater.parameters.items()}


def _adamw(
    optimizer: OptimizerConfig, weights: Tensors, gradients: Tensors, rate: float, coefficient: float
) -> Tensors:
    """From its recurrence (Loshchilov and Hutter 2019, algorithm 2)."""
    updated = {}
    for name, weight in weights.items():
        decay = optimizer.weight_decay if decays(name, weight, optimizer) else 0.0
        new = weight * (1 - rate * decay)
        if name in gradients:
            # At the first step both bias corrections undo the moments' factors: m / (1 - b1) = g, v / (1 - b2) = g^2.
            gradient = gradients[name] * coefficient
            new = new - rate * gradient / (gradient.abs() + optimizer.eps)
        updated[name] = new
    return updated
