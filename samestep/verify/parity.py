"""The proof: the same global batches on several layouts, compared with one process and one micro-batch.

The reference recomputes nothing, and in float64, where the logic is judged, it is not compiled: so the layouts, which
do as the config says, prove these too. In narrower dtypes a compiled run has a compiled reference, since fused kernels
round in other places.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from samestep.config.schema import Config, LossScaleConfig, LrSchedulerConfig, RecomputeConfig
from samestep.data.batch import Batch
from samestep.data.dataset import Data, data_facts, load_data, make_order
from samestep.data.order import StepSamples
from samestep.data.rows import IGNORE, Rows, Sample
from samestep.errors import ConfigError
from samestep.launch import run_ranks
from samestep.length import in_steps
from samestep.ops import Precision, random_key
from samestep.ops.float8 import check_float8
from samestep.ops.precision import is_narrow
from samestep.parallel.data import local, whole
from samestep.parallel.mesh import Mesh, choose_device, join
from samestep.plan import check_sharding, make_plan
from samestep.run.setup import build_model, build_step, collate_groups, fill_up
from samestep.step.step import NON_FINITE
from samestep.step.update import Updater
from samestep.verify.judge import Comparison, Judge, Tensors, Trace
from samestep.verify.layouts import (
    CASES,
    REFERENCE,
    VerifyLayout,
    check_size,
    default_layouts,
    grid_layouts,
    groups_of,
    resolved,
)

DTYPES = ("config", "float32", "float64", "bfloat16", "float16")


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
    if dtype == "config":
        check_float8(config.model.compute_dtype, choose_device())
    data = data or load_data(config)
    facts = data_facts(config, data)
    plan = make_plan(config, 1, facts)  # a configuration that cannot train proves nothing
    layouts = [resolved(layout, config, facts) for layout in layouts or default_layouts(config)]
    for layout in layouts:
        check_size(layout, config, facts.step_lengths)
        check_sharding(config, layout.degrees)
    peak = LrSchedulerConfig(type="constant", learning_rate=config.lr_scheduler.learning_rate)
    config = in_steps(config.model_copy(update={"lr_scheduler": peak}), plan.steps)
    scale = LossScaleConfig(fixed=config.training.loss_scale.first)
    config = config.model_copy(update={"training": config.training.model_copy(update={"loss_scale": scale})})
    precision = _precision(config, dtype)
    low = any(map(is_narrow, vars(precision).values()))
    double = _is_double(precision)
    jobs = [Job(layout, case, precision, steps) for case in cases for layout in (REFERENCE, *layouts)]
    if low and not config.training.exact:
        jobs += [Job(REFERENCE, case, precision.raised(torch.float64), 1) for case in cases]
    traces = _run_jobs(config, data, list(dict.fromkeys(jobs)))
    comparisons = []
    for case in cases:
        reference = traces[Job(REFERENCE, case, precision, steps)]
        for layout in layouts:
            judge = Judge(config, case, layout, reference, traces[Job(layout, case, precision, steps)])
            if config.training.exact:
                comparisons.append(judge.exact())
            elif low:
                comparisons.append(judge.low(traces[Job(REFERENCE, case, precision.raised(torch.float64), 1)]))
            else:
                comparisons.append(judge.double() if double else judge.single())
    name = dtype if dtype != "config" else config.model.compute_dtype
    return ParityReport(name, tuple(comparisons))


def _precision(config: Config, dtype: str) -> Precision:
    precision = Precision.from_config(config.model)
    if dtype == "config":
        return precision
    chosen = getattr(torch, dtype)
    return replace(precision, compute=chosen, linear=None) if is_narrow(chosen) else precision.raised(chosen)


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


@dataclass(frozen=True)
class Job:
    """One trace to be made."""

    layout: VerifyLayout
    case: str
    precision: Precision
    steps: int


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
    table = groups_of(config, rows.lengths()[samples.rows].tolist(), layout)
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
