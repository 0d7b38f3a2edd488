"""The ways in which `verify` splits a global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from samestep.config.schema import Config, ParallelismConfig
from samestep.errors import ConfigError
from samestep.length import DataFacts
from samestep.parallel.mesh import choose_device
from samestep.plan import Layout, make_plan, resolve_layout, split_evenly, split_samples, wants_one_cast
from samestep.run.preflight import device_memory
from samestep.split import split_by_budget

CASES = ("even", "skewed", "one_rank_empty", "all_empty")


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


REFERENCE = VerifyLayout("reference")


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


def resolved(layout: VerifyLayout, config: Config, facts: DataFacts) -> VerifyLayout:
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
    passes = len(lengths) if config.training.exact else max(map(len, groups_of(config, lengths, layout)))
    return wants_one_cast(config, layout.shard, passes)


def check_size(layout: VerifyLayout, config: Config, lengths: Sequence[int]) -> None:
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
    sizes = [len(group) for group in groups_of(config, lengths, layout)[-1]]
    if layout.out_of_memory > len(sizes) or sizes[layout.out_of_memory - 1] < 2:
        raise ConfigError(
            f"{layout.name}: the last rank's micro-batches have {', '.join(map(str, sizes))} samples, and number "
            f"{layout.out_of_memory} shall be halved",
            field="--layouts",
            fix="name one with two samples or more",
        )


def groups_of(config: Config, lengths: Sequence[int], layout: VerifyLayout) -> list[list[Sequence[int]]]:
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
