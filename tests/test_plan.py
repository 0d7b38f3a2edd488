"""The plan: every number against one worked out by hand, every refusal with its way out."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from samestep import pass_memory
from samestep.config.load import from_dict
from samestep.config.schema import Config, TrainingConfig
from samestep.errors import ConfigError
from samestep.families import (
    ACTIVATIONS,
    NORMALIZATIONS,
    flops_per_token,
    parameter_count,
    parameter_shapes,
    resolve_model,
)
from samestep.length import DataFacts, Progress, run_length, usable_samples
from samestep.model.decoder import Decoder
from samestep.ops import Precision, cross_entropy
from samestep.ops.activation import ACTIVATION_MAP
from samestep.ops.norm import get_norm_cls
from samestep.plan import Layout, Plan, make_plan, resolve_layout, split_evenly, split_step
from samestep.run.progress import show_plan

MODEL = {
    "vocab_size": 100,
    "seq_length": 10,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "compute_dtype": "float32",
}


def config_of(**fields: Any) -> Config:
    """`training__steps=3` sets training.steps."""
    data: dict[str, Any] = {"train_dataset": {"path": "a.txt"}, "model": dict(MODEL)}
    for name, value in fields.items():
        section, _, field = name.partition("__")
        data.setdefault(section, {})[field] = value
    return from_dict(data).config


def batch_of(whole: int, local: int, **fields: Any) -> Config:
    return config_of(training__global_batch_size=whole, training__local_batch_size=local, **fields)


def facts_of(samples: int, *lengths: int, vocab_size: int = 100) -> DataFacts:
    """Samples with these lengths in the first global batch; the last position of each is no target."""
    targets = tuple(n - 1 for n in lengths)
    return DataFacts(samples, 10 * samples, 9 * samples, lengths, targets, vocab_size)


def refusal(config: Config, world_size: int = 1, facts: DataFacts | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make_plan(config, world_size, facts)
    assert caught.value.field and caught.value.fix, "a refusal says where, and what to write instead"
    return caught.value


# ---- layout


@pytest.mark.parametrize(
    ("world", "fields", "truth"),
    [
        (1, {}, (1, 1, 1, 1, 1, 1)),
        (8, {}, (8, 1, 8, 1, 1, 1)),
        (8, {"data_parallel_shard": -5}, (8, 1, 8, 1, 1, 1)),
        (8, {"data_parallel_shard": 1}, (8, 8, 1, 1, 1, 1)),
        (8, {"data_parallel_shard": 2}, (8, 4, 2, 1, 1, 1)),
        (24, {"data_parallel_shard": 2, "tensor_parallel": 3, "context_parallel": 2}, (4, 2, 2, 3, 2, 1)),
        (12, {"pipeline_parallel": 3, "tensor_parallel": 4}, (1, 1, 1, 4, 1, 3)),
    ],
)
def test_layout(world: int, fields: dict[str, int], truth: tuple[int, ...]):
    config = config_of(**{f"parallelism__{name}": value for name, value in fields.items()})
    assert resolve_layout(config.parallelism, world) == Layout(world, *truth)


def test_degrees_that_do_not_divide():
    error = refusal(batch_of(8, 1, parallelism__data_parallel_shard=3), 8)
    assert error.field == "parallelism.data_parallel_shard"
    assert "3 does not divide the data-parallel degree 8" in str(error)
    assert "-1 (all of it) or one of 1, 2, 4, 8" in str(error)
    error = refusal(batch_of(8, 1, parallelism__tensor_parallel=2, parallelism__pipeline_parallel=3), 8)
    assert error.field == "parallelism.pipeline_parallel"
    assert "= 2 x 1 x 3 = 6 does not divide the 8 ranks" in str(error)
    assert "one of 1, 2, 4, 8, or start 6 ranks" in str(error)
    with pytest.raises(ConfigError, match="0 ranks cannot hold a shard"):
        config_of(parallelism__data_parallel_shard=0)


# ---- the batch


@pytest.mark.parametrize(
    ("whole", "local", "world", "accumulation"),
    [(8, 2, 1, 4), (8, 2, 2, 2), (8, 2, 4, 1), (7, 2, 1, 4), (7, 2, 2, 2), (13, 3, 2, 3), (13, 3, 4, 2), (5, 5, 1, 1)],
)
def test_accumulation_is_the_samples_of_a_rank_over_the_local_batch_rounded_up(
    whole: int, local: int, world: int, accumulation: int
):
    plan = make_plan(batch_of(whole, local), world)
    assert plan.accumulation_steps == accumulation
    assert (plan.samples_trained, plan.samples_dropped) == (whole, 0)


@pytest.mark.parametrize(
    ("samples", "ranks", "local", "truth"),
    [
        (7, 1, 3, [[(0, 3), (3, 6), (6, 7)]]),
        (7, 2, 3, [[(0, 3), (3, 4)], [(4, 7)]]),
        (7, 3, 3, [[(0, 3)], [(3, 5)], [(5, 7)]]),
        (7, 4, 1, [[(0, 1), (1, 2)], [(2, 3), (3, 4)], [(4, 5), (5, 6)], [(6, 7)]]),
        (2, 4, 2, [[(0, 1)], [(1, 2)], [], []]),
        (0, 2, 2, [[], []]),
    ],
)
def test_micro_batch_table_by_hand(samples: int, ranks: int, local: int, truth: list[list[tuple[int, int]]]):
    assert split_step(samples, ranks, local) == truth


def test_every_sample_is_in_one_micro_batch():
    for samples, ranks, local in itertools.product(range(30), range(1, 5), range(1, 7)):
        table = split_step(samples, ranks, local)
        assert len(table) == ranks
        assert [i for rank in table for start, stop in rank for i in range(start, stop)] == list(range(samples))
        sizes = [sum(stop - start for start, stop in rank) for rank in table]
        assert max(sizes) - min(sizes) <= 1
        for rank in table:
            assert all(stop - start == local for start, stop in rank[:-1])
            assert all(0 < stop - start <= local for start, stop in rank)
    assert split_evenly(7, 3) == [(0, 3), (3, 5), (5, 7)]


def test_remainder():
    assert [usable_samples(n, 4, "use") for n in (0, 3, 4, 11)] == [0, 3, 4, 11]
    assert [usable_samples(n, 4, "drop") for n in (0, 3, 4, 11)] == [0, 0, 4, 8]
    for world, trained, nearest in ((1, 10, ()), (2, 8, (8, 12)), (3, 6, (6, 12))):
        plan = make_plan(batch_of(10, 2, training__remainder="drop"), world)
        assert (plan.samples_trained, plan.samples_dropped, plan.nearest_dividing) == (trained, 10 - trained, nearest)
        assert plan.divides == (not nearest)
        assert all(m.samples == 2 for m in plan.micro_batches)
        notes = "".join(plan.notes)
        assert (f"{10 - trained} samples of every global batch are discarded" in notes) == (trained < 10)
        assert (" or ".join(map(str, nearest)) + " would divide exactly" in notes) == (trained < 10)
    error = refusal(batch_of(10, 2, training__remainder="error"), 2)
    assert error.field == "training.global_batch_size" and "write 8 or 12, or remainder: use" in str(error)
    assert make_plan(batch_of(12, 2, training__remainder="error"), 2).divides


def test_more_ranks_times_samples_than_the_global_batch():
    error = refusal(batch_of(8, 4), 4)
    assert error.field == "training.global_batch_size"
    assert "4 x 4 = 16 is more than global_batch_size 8" in str(error)
    assert "raise global_batch_size to 16 or more, or lower local_batch_size to 2 or less" in str(error)
    make_plan(batch_of(16, 4), 4)
    make_plan(batch_of(8, 2), 4)
    error = refusal(batch_of(3, 1), 4)
    assert "raise global_batch_size to 4 or more, or lower local_batch_size to 1 and the data-parallel" in str(error)
    assert "ranks to 3 or less" in str(error)
    make_plan(batch_of(3, 1), 3)


@pytest.mark.parametrize(
    ("samples", "whole", "local", "world", "remainder", "last", "steps", "rest"),
    [
        (20, 6, 2, 1, "use", "use", 4, 2),
        (20, 6, 2, 1, "use", "drop", 3, 2),
        (18, 6, 2, 1, "use", "use", 3, 0),
        (19, 6, 2, 1, "drop", "use", 3, 1),  # one sample makes no micro-batch of two, so no step
        (19, 6, 2, 1, "drop", "drop", 3, 1),
        (21, 6, 2, 1, "drop", "use", 4, 3),
        (21, 6, 2, 2, "drop", "use", 3, 3),
        (4, 6, 2, 1, "use", "use", 1, 4),
        (20, 6, 2, 1, "error", "use", 4, 2),
    ],
)
def test_steps_of_an_epoch(
    samples: int, whole: int, local: int, world: int, remainder: str, last: str, steps: int, rest: int
):
    config = batch_of(
        whole, local, training__steps=12, training__remainder=remainder, training__last_batch=last
    )  # fmt: skip
    plan = make_plan(config, world, facts_of(samples, *[10] * min(whole, samples)))
    assert (plan.steps_per_epoch, plan.last_batch_samples, plan.epochs) == (steps, rest, 12 / steps)


def test_data_smaller_than_the_batch():
    plan = make_plan(batch_of(8, 2, training__remainder="drop"), 1, facts_of(5, 10, 10, 10, 10, 10))
    assert (plan.samples_trained, plan.samples_dropped, plan.accumulation_steps) == (4, 1, 2)
    assert "The last batch of every epoch has 5 samples (last_batch: use), of which 1 are discarded" in plan.notes[-1]
    error = refusal(batch_of(8, 2, training__last_batch="drop"), 1, facts_of(5, *[10] * 5))
    assert error.field == "training.last_batch"
    assert "5 samples, fewer than global_batch_size 8" in str(error) and "global_batch_size of 5 or less" in str(error)
    error = refusal(batch_of(8, 4, training__remainder="drop"), 2, facts_of(5, *[10] * 5))
    assert error.field == "training.remainder" and "local_batch_size 2 or less" in str(error)
    error = refusal(batch_of(4, 2, training__remainder="error"), 1, facts_of(7, *[10] * 4))
    assert "last batch of an epoch has 3 samples, no multiple of data_parallel x local_batch_size = 2" in str(error)
    make_plan(batch_of(4, 2, training__remainder="error", training__last_batch="drop"), 1, facts_of(7, *[10] * 4))


# ---- schedule


@pytest.mark.parametrize(("warmup", "fine"), [(0, True), (10, True), (11, False)])
def test_warm_up_longer_than_the_run(warmup: int, fine: bool):
    config = config_of(training__steps=10, lr_scheduler__warmup_steps=warmup)
    if fine:
        make_plan(config)
    else:
        error = refusal(config)
        assert error.field == "lr_scheduler.warmup_steps" and "11 steps is longer than the run" in str(error)
        make_plan(config_of(training__steps=10, lr_scheduler__warmup_steps=11, lr_scheduler__warmup_ratio=1.0))


def test_a_rate_that_ends_above_its_peak():
    rising = {"lr_scheduler__learning_rate": 1e-3, "lr_scheduler__lr_end": 1e-2}
    assert refusal(config_of(lr_scheduler__type="linear", **rising)).field == "lr_scheduler.lr_end"


# ---- tokens


def test_tokens_targets_and_padding_by_hand():
    facts = facts_of(50, 10, 4, 7, 1, 9)
    padded = make_plan(batch_of(5, 2), 2, facts)  # rank 0: (10, 4) (7); rank 1: (1, 9)
    found = [(m.rank, m.index, m.places, m.samples, m.tokens, m.padding, m.targets) for m in padded.micro_batches]
    assert found == [(0, 0, (0, 1), 2, 14, 6, 12), (0, 1, (2,), 1, 7, 0, 6), (1, 0, (3, 4), 2, 10, 8, 8)]
    assert (padded.tokens, padded.padding, padded.targets) == (31, 14, 26)
    packed = make_plan(batch_of(5, 2, training__micro_batch="packed"), 2, facts)
    assert (packed.tokens, packed.padding, packed.targets) == (31, 0, 26)
    without = make_plan(batch_of(5, 2), 2)
    assert (without.tokens, without.padding, without.targets, without.epochs) == (50, 0, 50, None)
    unknown = make_plan(batch_of(5, 2, train_dataset__rows="documents"), 2)
    assert (unknown.tokens, unknown.padding, unknown.targets, unknown.flops_per_step) == (None, None, None, None)
    assert [m.samples for m in unknown.micro_batches] == [2, 1, 2]


def test_a_plan_is_json():
    plan = make_plan(batch_of(5, 2), 2, facts_of(50, 10, 4, 7, 1, 9))
    values = json.loads(json.dumps(plan.as_dict()))
    assert values["memory"]["total"] == plan.memory.total
    assert [cost["reduce"] for cost in values["reductions"]] == ["once_per_step", "every_micro_batch"]
    assert values["micro_batches"][1]["tokens"] == 7


def test_notes():
    def notes(config: Config, world: int = 1) -> str:
        return "\n".join(make_plan(config, world).notes)

    assert make_plan(batch_of(2, 2)).notes == ()
    assert "a negative value means all of data parallel" in notes(config_of(parallelism__data_parallel_shard=-2))
    assert "negative" not in notes(config_of(parallelism__data_parallel_shard=-1))
    assert "depends on how the batch is split" in notes(config_of(training__loss_normalization="micro_batch_mean"))
    assert "reference attention" in notes(config_of(model__attention_dropout=0.1))
    assert "every sample is trained once. 4 or 6 would divide exactly" in notes(batch_of(5, 2))


# ---- the model


def spec_of(**fields: Any):
    return resolve_model(config_of(**{f"model__{name}": value for name, value in fields.items()}).model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("heads", [(3, 1, None), (3, 3, None), (6, 2, 4)])
@pytest.mark.parametrize("hidden_act", ["silu", "fusedswiglu", "gelu"])
def test_shapes_are_those_of_the_decoder(tied: bool, normalization: str, heads: Any, hidden_act: str):
    spec = spec_of(
        tie_word_embeddings=tied,
        normalization=normalization,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        hidden_act=hidden_act,
    )
    decoder = Decoder(spec, Precision.from_config(config_of().model))
    truth = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert list(parameter_shapes(spec).items()) == list(truth.items()), "names, shapes and order"
    assert parameter_count(spec) == sum(parameter.numel() for parameter in decoder.parameters())


def test_parameters_by_hand():
    # hidden 12, heads of 4: q 12 x 12, k and v 4 x 12, o 12 x 12; gate, up, down 20 x 12; two norms of 12
    layer = 12 * 12 + 2 * 4 * 12 + 12 * 12 + 3 * 20 * 12 + 2 * 12
    assert parameter_count(spec_of()) == 2 * 100 * 12 + 2 * layer + 12
    assert parameter_count(spec_of(tie_word_embeddings=True)) == 100 * 12 + 2 * layer + 12
    assert parameter_count(spec_of(normalization="LayerNorm")) == 2 * 100 * 12 + 2 * (layer + 24) + 24


def test_flops_by_hand():
    products = 100 * 12 + 2 * (12 * 12 + 2 * 4 * 12 + 12 * 12 + 3 * 20 * 12)
    scores = 2 * 3 * 4  # layers x heads x features: forward 2 + 2 FLOPs for each earlier position, backward twice that
    for tied in (False, True):
        spec = spec_of(tie_word_embeddings=tied)
        assert flops_per_token(spec, 5.5) == 6 * products + 12 * scores * 5.5
    plan = make_plan(batch_of(2, 1), 1, facts_of(4, 4, 2))
    attended = 1 + 2 + 3 + 4 + 1 + 2
    assert plan.flops_per_step == pytest.approx(6 * 6 * products + 12 * scores * attended, rel=1e-14)
    whole_rows = make_plan(batch_of(2, 1))
    assert whole_rows.flops_per_step == pytest.approx(20 * 6 * products + 12 * scores * 2 * 55, rel=1e-14)


def test_memory_by_hand():
    count = parameter_count(spec_of())

    def memory(config: Config, world: int = 1):
        return make_plan(config, world, facts_of(40, *[10] * config.training.global_batch_size)).memory

    plain = memory(batch_of(4, 2))
    assert (plain.parameters, plain.gradients, plain.optimizer, plain.masters) == (4 * count, 4 * count, 8 * count, 0)
    # 20 positions in float32. Of a layer with heads of 4, attention runs part by part: it keeps input and output of its
    # norm, 2 x 12, and a number; q and the output, 2 x 12; k and v, 2 x 4; a sum of exponentials for each of 3 heads.
    # The MLP keeps its input, a number of the norm, and 2 x 20. The last norm keeps its input. The backward begins with
    # the gradient of the residual, makes two tensors of the MLP's inner size, and two of the hidden size.
    kept = 2 * (24 + 1 + 24 + 8 + 3 + 12 + 1 + 40) + 12
    assert plain.activations == 20 * 4 * (kept + 3 * 12 + 2 * 20)
    # Logits of all positions; the gradient of the weight; hidden states, their gradient, and two copies for the chunk.
    assert plain.logits == 4 * (20 * 100 + 100 * 12 + 4 * 20 * 12)
    low = memory(batch_of(4, 2, model__params_dtype="bfloat16", model__compute_dtype="bfloat16"))
    assert (low.parameters, low.gradients, low.optimizer, low.masters) == (2 * count, 4 * count, 8 * count, 4 * count)
    # Norms and sums in float32. SwiGLU's backward widens gate and gradient, and makes two tensors in float32.
    assert low.activations == 20 * (2 * (2 * (48 + 24 + 8 + 60) + 4 * (2 + 3)) + 2 * 12 + 2 * 2 * 12 + 4 * 4 * 20)
    assert low.logits == 4 * (20 * 100 + 2 * 100 * 12 + 3 * 20 * 12) + 2 * 20 * 12  # with a float32 copy of the weight
    double = memory(batch_of(4, 2, model__params_dtype="float64", model__gradient_dtype="float64"))
    assert (double.parameters, double.gradients, double.optimizer) == (8 * count, 8 * count, 16 * count)
    sharded = memory(batch_of(4, 2), 2)
    assert sharded.parameters == 4 * -(-count // 2) and sharded.activations == plain.activations
    replicated = memory(batch_of(4, 2, parallelism__data_parallel_shard=1), 2)
    # Of one micro-batch no gradients are there at its loss. Most is held when activations are gone, and flat copies of
    # the gradients made.
    held = plain.parameters + plain.buffers + plain.optimizer + 2**22  # the last is of matrix products
    assert replicated == replace(plain, transfers=4 * count, total=held + 2 * 4 * count)
    exact = memory(batch_of(4, 2, parallelism__data_parallel_shard=1, training__exact=True))
    assert exact.gradients == 12 * count  # fixed-point sums, and what is made of them
    assert plain.buffers == 10 * 4 * 4  # cosine and sine of 10 positions for heads of 4
    assert (plain.gathered, plain.transfers, plain.host) == (0, 0, 0)
    # Most at the loss of the second micro-batch, before the backward of the layers has its temporaries.
    assert plain.total == held + plain.gradients + 20 * 4 * kept + plain.logits
    matrices = 2 * (2 * 12 * 12 + 2 * 4 * 12 + 3 * 20 * 12)
    wanted = {"SGD": 0, "Lion": count, "Muon": 2 * count - matrices}
    for kind, numbers in wanted.items():
        assert memory(batch_of(4, 2, optimizer__type=kind)).optimizer == 4 * numbers
    assert memory(batch_of(4, 2, optimizer__type="Adafactor")).optimizer < count


def test_memory_of_a_pass_by_hand():
    def memory(*lengths: int, **fields: Any):
        return make_plan(batch_of(len(lengths), 2, **fields), 1, facts_of(40, *lengths)).memory

    wide = {"model__vocab_size": 5000, "model__tie_word_embeddings": True}
    # Of 5 and of 10 positions. Two micro-batches: the end has more than the loss, which has 10 rows of logits and one
    # gradient of the head. There are the sums, that gradient, which waits, and the embedding's, all 5000 x 12.
    ends = memory(5, 5, 2, 3, **wide)
    assert ends.total == 4 * ends.parameters + 2 * 4 * 5000 * 12 + ends.buffers + 2**22
    # One micro-batch: the embedding's gradient becomes part of the sums, and the head's has waited for it.
    once = memory(5, 5, **wide)
    assert once.total == 4 * once.parameters + 4 * 5000 * 12 + once.buffers + 2**22
    # Documents in groups: their outputs, and the outputs in order.
    assert memory(5, 5, training__micro_batch="packed").activations - memory(5, 5).activations == 10 * 4 * 2 * 12
    # Without a tied head and with two positions most is held in the update: Lion makes a tensor as large as the head.
    lion = memory(1, 1, optimizer__type="Lion", model__vocab_size=5000)
    assert lion.total == 3 * lion.parameters + 4 * 5000 * 12 + lion.buffers + 2**22


def test_the_plan_knows_the_chunks_of_the_head():
    assert cross_entropy._CHUNK_BYTES["cpu"] == pass_memory._CHUNK_BYTES


LAYER = 2 * 12 * 12 + 2 * 4 * 12 + 3 * 12 * 20 + 2 * 12
REST = 2 * 100 * 12 + 12


@pytest.mark.parametrize(
    ("policy", "layers", "rest", "gathered"),
    [
        ("default", 2, 1, REST + LAYER),
        ("always", 2, 2, REST + LAYER),
        ("never", 1, 1, REST + 2 * LAYER),
    ],
)
def test_costs_of_sharding_by_hand(policy: str, layers: int, rest: int, gathered: int):
    config = batch_of(16, 2, parallelism__reshard_after_forward_policy=policy)
    once, every = make_plan(config, 2).reductions
    count = 2 * LAYER + REST
    # Of a ring of two, a rank sends half of what it gathers and of what it reduces; all sizes are even.
    gathers = 4 * 4 * (layers * 2 * LAYER + rest * REST) // 2
    assert once.sent == gathers + 4 * count // 2
    assert every.sent == gathers + 4 * 4 * count // 2
    assert once.memory.gradients >= 4 * count > every.memory.gradients
    assert {once.memory.gathered, every.memory.gathered} == {4 * gathered}
    assert make_plan(config, 2).memory == once.memory
    of_layers = batch_of(16, 2, parallelism__reshard_after_forward_policy=policy, model__num_hidden_layers=40)
    once, every = make_plan(of_layers, 2).reductions
    assert every.memory.total + 4 * 20 * LAYER - 40 * REST < once.memory.total


def test_traffic_of_replicas_by_hand():
    count = 2 * LAYER + REST
    config = batch_of(32, 2, parallelism__data_parallel_shard=1)
    assert make_plan(config, 4).sent_bytes == 2 * 4 * count * 3 // 4  # once, however many micro-batches
    config = batch_of(32, 2, parallelism__data_parallel_shard=2)
    gathers = 4 * 4 * (2 * 2 * LAYER + REST) // 2
    once, every = make_plan(config, 4).reductions
    assert once.sent == gathers + 4 * count // 2 + 2 * (4 * count // 2) // 2
    assert every.sent == gathers + 4 * (4 * count // 2 + 2 * (4 * count // 2) // 2)
    assert make_plan(batch_of(8, 2)).sent_bytes == 0


def test_reduce():
    def reduce(limit: int | None, config: Config, world: int = 2) -> str:
        return make_plan(config, world, memory_limit=limit).reduce

    many = {"model__num_hidden_layers": 40}
    auto = batch_of(16, 2, **many)
    once, every = (cost.memory.total for cost in make_plan(auto, 2).reductions)
    assert every < once
    assert reduce(None, auto) == reduce(once, auto) == "once_per_step"
    assert reduce(once - 1, auto) == reduce(1, auto) == "every_micro_batch"
    assert reduce(1, batch_of(16, 2, parallelism__reduce="once_per_step", **many)) == "once_per_step"
    asked = batch_of(16, 2, parallelism__reduce="every_micro_batch", **many)
    assert reduce(None, asked) == "every_micro_batch"
    assert make_plan(asked, 2).memory.total == every
    assert not any("no effect" in note for note in make_plan(asked, 2).notes)


@pytest.mark.parametrize(
    ("whole", "world", "shard", "why"),
    [(4, 2, -1, "one micro-batch"), (16, 2, 1, "no weights"), (16, 1, -1, "no weights")],
)
def test_reduce_without_effect(whole: int, world: int, shard: int, why: str):
    fields = {"parallelism__reduce": "every_micro_batch", "parallelism__data_parallel_shard": shard}
    plan = make_plan(batch_of(whole, 2, **fields), world)
    assert plan.reduce == "once_per_step"
    assert any("every_micro_batch has no effect" in note and why in note for note in plan.notes)
    assert plan.reductions[0].memory == plan.reductions[1].memory
    assert plan.reductions[0].sent == plan.reductions[1].sent


def test_offloaded_memory_is_not_of_the_device():
    plan = make_plan(batch_of(16, 2, parallelism__cpu_offload=True), 2)
    memory, kept = plan.memory, make_plan(batch_of(16, 2), 2).memory
    assert memory.total == kept.total and kept.host == 0
    assert memory.host == kept.parameters + kept.optimizer
    every = make_plan(batch_of(16, 2, parallelism__cpu_offload=True, parallelism__reduce="every_micro_batch"), 2).memory
    assert every.host == memory.host + kept.parameters  # its part of the gradients
    assert memory.on_device == memory.total - memory.host
    assert make_plan(batch_of(16, 2, parallelism__cpu_offload=True)).memory.host == 0


def shown(plan: Plan) -> str:
    console = Console(width=200, file=io.StringIO())
    show_plan(plan, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_shown_plan():
    text = shown(make_plan(batch_of(28, 2, parallelism__data_parallel_shard=2), 8))
    assert "replicate 4 x shard 2" in text
    rows = [line.split() for line in text.splitlines() if re.match(r"^ +[0-7] +[01] ", line)]
    # 28 samples on 8 ranks: four have four, four have three.
    assert [row[:4] for row in rows][:2] == [["0", "0", "2", "20"], ["0", "1", "2", "20"]]
    assert "8 more" in text
    once, every = (line for line in text.splitlines() if line.startswith("reduce"))
    assert "once_per_step" in once and once.rstrip().endswith("(chosen)")
    assert "every_micro_batch" in every and "(chosen)" not in every
    assert "\nreduce" not in shown(make_plan(batch_of(28, 2)))


def test_padding_counts_as_memory():
    def activations(config: Config, *lengths: int) -> int:
        return make_plan(config, 1, facts_of(40, *lengths)).memory.activations

    assert activations(batch_of(4, 2), 10, 1, 5, 5) == activations(batch_of(4, 2), 10, 10, 5, 5)
    packed = batch_of(4, 2, training__micro_batch="packed")
    assert activations(packed, 10, 1, 5, 5) * 20 == activations(packed, 10, 10, 5, 5) * 11


@pytest.mark.parametrize(
    ("fields", "field", "fix"),
    [
        ({"model_type": "gpt5"}, "model_type", "llama"),
        ({"architectures": "GPT2LMHeadModel"}, "architectures", "LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures", "LlamaForCausalLM"),
        ({"num_key_value_heads": 2}, "num_key_value_heads", "write one of: 1, 3"),
        ({"num_key_value_heads": 6}, "num_key_value_heads", "write one of: 1, 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 1}, "num_attention_heads", "a hidden_size of 10 or 15"),
        ({"num_attention_heads": 13, "num_key_value_heads": 1}, "num_attention_heads", "a hidden_size of 13"),
        ({"head_dim": 5}, "head_dim", "even head_dim such as 6"),
        ({"max_position_embeddings": 9}, "max_position_embeddings", "write 10 or more"),
        ({"hidden_act": "tanh"}, "hidden_act", "gelu, silu, fusedswiglu"),
        ({"normalization": "layernorm"}, "normalization", "RMSNorm, LayerNorm"),
        ({"vocab_size": None}, "vocab_size", "a tokenizer"),
    ],
)
def test_a_model_that_cannot_be(fields: dict[str, Any], field: str, fix: str):
    error = refusal(config_of(**{f"model__{name}": value for name, value in fields.items()}))
    assert error.field == f"model.{field}"
    assert fix in (error.fix or "")


def test_the_vocabulary_must_hold_every_token():
    error = refusal(config_of(), 1, facts_of(4, 10, vocab_size=101))
    assert error.field == "model.vocab_size" and "write 101 or more" in str(error)
    assert make_plan(config_of(), 1, facts_of(4, 10, vocab_size=99)).parameters == parameter_count(spec_of())
    free = config_of(model__vocab_size=None)
    assert make_plan(free, 1, facts_of(4, 10, vocab_size=100)).parameters == parameter_count(spec_of())


def test_what_is_left_open_is_inferred():
    spec = spec_of(intermediate_size=None, num_key_value_heads=None)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_positions, spec.hidden_act) == (3, 4, 10, "silu")
    assert spec.intermediate_size == 64  # 8/3 of 12 is 32, up to a multiple of 64
    assert spec_of(hidden_size=4096, num_attention_heads=32, intermediate_size=None).intermediate_size == 10944
    assert (spec_of().norm_eps, spec_of(layer_norm_epsilon=0.0).norm_eps) == (1e-5, 0.0)
    assert spec_of(hidden_act="FusedSwiGLU").hidden_act == "fusedswiglu"


def test_names_are_those_of_the_operators():
    assert set(ACTIVATIONS) == set(ACTIVATION_MAP)
    for name in NORMALIZATIONS:
        get_norm_cls(name)


def test_plans_are_plain_values():
    one, two = (make_plan(batch_of(5, 2), 2, facts_of(50, 10, 4, 7, 1, 9)) for _ in range(2))
    assert isinstance(one, Plan) and one == two


# ---- the length of a run


def walked(training: TrainingConfig, unit: int, lengths: Callable[[int], np.ndarray], consumed: int, done: int) -> int:
    """Steps until `tokens` or `epochs` are reached from a cursor on, batch by batch."""
    samples, size = len(lengths(0)), training.global_batch_size
    steps, tokens = 0, done
    while True:
        epoch, place = divmod(consumed, samples)
        if training.epochs is not None and epoch >= training.epochs:
            return steps
        batch = lengths(epoch)[place : place + size]
        consumed += len(batch)
        if len(batch) < size and training.last_batch == "drop":
            continue
        used = len(batch) // unit * unit if training.remainder == "drop" else len(batch)
        if training.tokens is not None and tokens >= training.tokens:
            return steps
        steps += used > 0
        tokens += int(batch[:used].sum())


@pytest.mark.parametrize("remainder", ["use", "drop"])
@pytest.mark.parametrize("last_batch", ["use", "drop"])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("cursor", [0, 8, 29, 30, 75])
def test_the_length_of_a_run_is_that_of_a_walk_through_its_batches(remainder, last_batch, equal, cursor):
    def lengths(epoch: int) -> np.ndarray:
        return np.full(30, 7) if equal else np.random.default_rng(epoch).permutation(np.arange(5, 35))

    facts = DataFacts(30, 0, 0, (7,), (7,), 5, lengths)
    for length in ({"tokens": 1}, {"tokens": 590}, {"tokens": 9000}, {"epochs": 1}, {"epochs": 4}):
        for size, unit in ((4, 1), (4, 3), (7, 2), (30, 4), (1, 1)):
            training = TrainingConfig(
                global_batch_size=size, local_batch_size=unit, remainder=remainder, last_batch=last_batch, **length
            )
            progress = Progress(5, cursor, 7 * cursor)
            wanted = 5 + walked(training, unit, lengths, cursor, 7 * cursor)
            assert run_length(training, unit, facts, progress) == wanted, (length, size, unit)


def test_a_part_of_an_epoch_after_another_batch_size():
    facts = DataFacts(30, 300, 300, (10,), (10,), 5)
    training = TrainingConfig(epochs=1.5, global_batch_size=4)  # 8 steps an epoch; half of one ends at sample 16
    assert run_length(training, 1, facts) == 12
    assert run_length(training, 1, facts, Progress(10, 20)) == 10 + 3 + 4
    assert run_length(training, 1, facts, Progress(20, 31)) == 20 + 4
    assert run_length(training, 1, facts, Progress(24, 46)) == 24
    assert run_length(training, 1, facts, Progress(99, 75)) == 99


@pytest.mark.parametrize("last_batch", ["use", "drop"])
def test_two_billion_tokens_are_counted_at_once(last_batch):
    lengths = np.full(10_001, 16)
    facts = DataFacts(10_001, 160_016, 160_016, (16,), (16,), 5, lambda epoch: lengths)
    training = TrainingConfig(tokens=2 * 10**9, global_batch_size=2, last_batch=last_batch)
    start = time.perf_counter()
    steps = run_length(training, 1, facts)
    assert time.perf_counter() - start < 1
    if last_batch == "drop":
        assert steps == 2 * 10**9 // 32
    else:
        whole, left = divmod(2 * 10**9, 160_016)
        assert steps == whole * 5001 + math.ceil(left / 32)
