"""Exact mode: the same bits on every layout; sums against whole numbers of any size; what it refuses."""

from __future__ import annotations

import hashlib
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.config.load import from_dict
from samestep.config.schema import Config, ParallelismConfig
from samestep.data.dataset import Data, load_data, make_order
from samestep.errors import ConfigError
from samestep.launch import run_ranks
from samestep.ops.exact_sum import FINEST_BITS, add_fixed_, bits_for, from_fixed, to_fixed
from samestep.parallel.exact import ExactReduction, exact_sums
from samestep.parallel.mesh import Mesh, choose_device, join
from samestep.plan import make_plan, resolve_layout
from samestep.run.evaluate import evaluate
from samestep.run.setup import build_model, build_step, micro_batches
from samestep.step.step import TrainStep
from samestep.verify import parity
from samestep.verify.judge import gradient_error
from samestep.verify.layouts import parse_layouts

pytestmark = pytest.mark.usefixtures("workers")

CHATS = Path(__file__).parent.parent / "examples" / "data" / "chitchat_120.jsonl"
STEPS = 10  # over the end of an epoch
# ranks: (samples of a micro-batch, its layout)
LAYOUTS = {1: ((16, "padded"), (4, "packed"), (1, "padded")), 2: ((4, "packed"),), 4: ((2, "padded"), (4, "packed"))}
WITH_DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")


def make_config(*overrides: str) -> Config:
    """Documents of different length, 16 a step, always clipped."""
    sections: dict[str, Any] = {
        "tokenizer": {"type": "char"},
        "training": {"exact": True, "global_batch_size": 16, "max_norm": 0.1},
        "parallelism": {"data_parallel_shard": 1},
        "lr_scheduler": {"type": "constant", "learning_rate": 1e-2},
        "train_dataset": {"path": str(CHATS), "rows": "documents", "long_documents": "truncate", "split": "documents"},
        "model": {
            "seq_length": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "compute_dtype": "float32",
        },
    }
    return from_dict(sections, overrides).config


def with_split(config: Config, size: int, layout: str) -> Config:
    training = config.training.model_copy(update={"local_batch_size": size, "micro_batch": layout})
    return config.model_copy(update={"training": training})


def make_mesh() -> Mesh:
    world = join(timeout=60)
    return Mesh(resolve_layout(ParallelismConfig(data_parallel_shard=1), world.size), world, choose_device())


def make_step(config: Config, data: Data, mesh: Mesh) -> TrainStep:
    return build_step(config, build_model(config, data.tokenizer.vocab_size, mesh), mesh, "once_per_step")


def fingerprint(step: TrainStep) -> str:
    """SHA-256 of all weights, masters and moments."""
    found = hashlib.sha256()
    for tensor in [*step.updater.parameters.values(), *step.updater.state().values()]:
        found.update(tensor.detach().double().numpy().tobytes())
    return found.hexdigest()


def journey(config: Config, data: Data, mesh: Mesh, steps: int, weight: float = 1.0) -> tuple[Any, ...]:
    """Hash, losses, norms, clip coefficients, and the validation loss after the last step."""
    step = make_step(config, data, mesh)
    step.objective.weights = {"cross_entropy": weight}  # type: ignore[attr-defined]
    order, consumed, reports = make_order(config, data), 0, []
    for number in range(1, steps + 1):
        samples = order.next(consumed)
        consumed = samples.consumed
        reports.append(step(micro_batches(config, data.train, samples, number, mesh)))
    assert data.evaluation is not None
    size, exact = config.training.local_batch_size, config.training.exact
    validation = evaluate(step.model, step.objective, data.evaluation, size, mesh, exact=exact)
    curves = [[getattr(r, name) for r in reports] for name in ("loss", "grad_norm", "clip_coefficient")]
    return fingerprint(step), *curves, validation


def journeys(tasks: list[tuple[Config, int, float]], data: Data) -> list[tuple[Any, ...]]:
    """In each process."""
    mesh = make_mesh()
    return [journey(config, data, mesh, steps, weight) for config, steps, weight in tasks]


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data(make_config())


def everywhere(config: Config, data: Data, ranks: tuple[int, ...], steps: int, weight: float = 1.0):
    """The journeys on all layouts of these numbers of ranks, of every rank."""
    found = []
    for size in ranks:
        tasks = [(with_split(config, *split), steps, weight) for split in LAYOUTS[size]]
        results = [journeys(tasks, data)] if size == 1 else run_ranks(journeys, size, tasks, data, timeout=120)
        found += [journey for rank in results for journey in rank]
    return found


# ---- the promise


def test_ten_steps_have_the_same_bits_on_every_layout(data):
    found = everywhere(make_config(*WITH_DROPOUT), data, (1, 2, 4), STEPS)
    assert len(found) == 3 + 2 + 8
    _, losses, _, coefficients, _ = found[0]
    assert losses[-1] < losses[0] and max(coefficients) < 1
    assert all(journey == found[0] for journey in found)


def test_the_default_mode_does_not_have_the_same_bits(data):
    """So the test above can fail."""
    found = everywhere(make_config("training.exact=false"), data, (1, 2), 4)
    assert len({journey[0] for journey in found}) == 4
    first, *others = (losses[0] for _, losses, *_ in found)
    assert others == pytest.approx([first] * len(others), rel=1e-6)


def test_bfloat16_weights_and_a_tied_head(data):
    config = make_config("model.params_dtype=bfloat16", "model.tie_word_embeddings=true")
    found = everywhere(config, data, (1, 2), 3)
    assert all(journey == found[0] for journey in found)


def test_gradients_too_large_for_the_unit(data):
    """A loss of 1e7 times the size: the passes are made again, and clipping undoes it."""
    config = make_config()
    large, plain = everywhere(config, data, (1, 2), 2, 1e7), everywhere(config, data, (1,), 2)[0]
    assert all(journey == large[0] for journey in large)
    assert large[0][2][0] == pytest.approx(1e7 * plain[2][0], rel=1e-5)
    assert 1e7 * plain[2][0] > 2.0 ** (62 - FINEST_BITS - 5)


def test_gradients_are_those_of_the_default_mode(data):
    found: list[dict[str, torch.Tensor]] = []
    for exact in ("true", "false"):
        config = make_config(f"training.exact={exact}", "training.local_batch_size=16")
        samples = make_order(config, data).next(0)
        step = make_step(config, data, Mesh.alone())
        step(
            micro_batches(config, data.train, samples, 1, Mesh.alone()),
            on_gradients=lambda gradients: found.append({n: g.double() for n, g in gradients.items()}),
        )
    error, worst = gradient_error(found[1], found[0])
    assert 0 < error < 1e-6, worst


# ---- what is not finite


def spoil_on_the_last_rank(number: float, config: Config, data: Data) -> tuple[str | None, float, bool]:
    """(reason to skip, loss, whether the state is unchanged) of a step in which one gradient of one rank is spoilt."""
    mesh = make_mesh()
    step = make_step(config, data, mesh)
    if mesh.world.rank == mesh.world.size - 1:
        spoilt = step.updater.parameters["norm.weight"]
        spoilt.register_hook(lambda gradient: gradient + torch.tensor([number] + [0.0] * (len(gradient) - 1)))
    before = fingerprint(step)
    samples = make_order(config, data).next(0)
    report = step(micro_batches(config, data.train, samples, 1, mesh))
    return report.skipped, report.loss, fingerprint(step) == before


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_a_gradient_of_one_rank_that_is_not_finite_skips_the_step(data, number):
    """gloo's maximum over ranks loses a NaN that is not the first rank's."""
    for reason, loss, unchanged in run_ranks(spoil_on_the_last_rank, 2, number, make_config(), data, timeout=60):
        assert reason == "non-finite gradient norm"
        assert math.isfinite(loss) and unchanged


# ---- sums


def units(number: float, bits: int) -> int:
    """Cut towards zero, in whole numbers of any size."""
    return math.trunc(Fraction(number) * Fraction(2) ** bits)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e4, 1e30])
def test_a_sum_is_that_of_whole_numbers(size):
    generator = random.Random(3)
    parts = torch.tensor([[generator.gauss(0, size) for _ in range(7)] for _ in range(100)])
    bits = bits_for(float(parts.abs().max()), len(parts))
    wanted = [sum(units(float(x), bits) for x in column) for column in parts.T]
    assert max(map(abs, wanted)) < 2**62
    total, scratch = torch.zeros(7, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    for row in torch.randperm(100):
        add_fixed_(total, parts[row].clone(), bits, scratch)
    assert total.tolist() == wanted
    assert to_fixed(parts.double(), bits).sum(0).tolist() == wanted
    truth = [float(Fraction(n) / Fraction(2) ** bits) for n in wanted]
    assert from_fixed(total, bits, torch.float64).tolist() == truth
    error = max(abs(t - math.fsum(map(float, column))) for t, column in zip(truth, parts.T, strict=True))
    assert error < 100 * 2.0**-bits


@pytest.mark.parametrize("summands", [1, 2, 3, 16, 1000, 2**20])
@pytest.mark.parametrize("largest", [0.0, 2.0**-140, 1.0, 2.0**13, 3e38])
def test_the_largest_sum_fits(largest, summands):
    bits = bits_for(largest, summands)
    assert bits <= FINEST_BITS
    assert summands * units(largest, bits) < 2**62


def test_sums_that_are_not_finite():
    parts = torch.tensor([[1.5, math.nan, -math.inf], [2.0**40, 1.0, 1.0]], dtype=torch.float64)
    total = exact_sums(parts, 2, Mesh.alone())
    assert total[0] == 2.0**40 + 1.5 and total[1:].isnan().all()


# ---- validation loss on several ranks


def validation(config: Config, data: Data, rows: int) -> tuple[float, int]:
    mesh = make_mesh()
    step = make_step(config, data, mesh)
    assert data.evaluation is not None
    return evaluate(step.model, step.objective, [data.evaluation[i] for i in range(rows)], 2, mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_validation_loss_of_the_default_mode_on_two_ranks(data, rows):
    config = make_config("training.exact=false")
    loss, targets = validation(config, data, rows)
    found = run_ranks(validation, 2, config, data, rows, timeout=60)
    assert found[0] == found[1] or rows == 0
    assert [n for _, n in found] == [targets] * 2
    if rows:
        assert found[0][0] == pytest.approx(loss, rel=1e-6)
    else:
        assert targets == 0 and all(math.isnan(value) for value, _ in found)


# ---- what it refuses


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("training.loss_normalization=micro_batch_mean", "training.loss_normalization"),
        ("training.remainder=drop", "training.remainder"),
        ("model.gradient_dtype=float64", "model.gradient_dtype"),
        ("model.params_dtype=float64", "model.params_dtype"),
    ],
)
def test_settings_that_depend_on_the_split_are_refused(override, field):
    with pytest.raises(ConfigError, match="exact: false") as caught:
        make_config(override)
    assert caught.value.field == field


def refusal() -> str:
    """What a rank is told that has a thread more for each rank before it."""
    world = join(timeout=60)
    torch.set_num_threads(1 + world.rank)
    mesh = Mesh(resolve_layout(ParallelismConfig(data_parallel_shard=1), world.size), world, choose_device())
    with pytest.raises(ConfigError) as caught:
        ExactReduction(mesh, 16)
    return str(caught.value)


def test_ranks_that_may_round_differently_are_refused():
    assert all("OMP_NUM_THREADS=1" in text for text in run_ranks(refusal, 2, timeout=60))
    with pytest.raises(ConfigError, match="data_parallel_shard: 1"):
        make_plan(make_config("model.vocab_size=100", "parallelism.data_parallel_shard=-1"), 2)


# ---- verify


def test_verify_judges_by_bits(data, monkeypatch):
    config = make_config()
    layouts = parse_layouts("ga=4 packed")
    report = parity.run(config, layouts=layouts, cases=["skewed"], steps=2, data=data)
    assert report.passed, [c.failures for c in report.comparisons]
    monkeypatch.setattr("samestep.run.setup.ExactSink.gradients", off_by_one_bit())
    report = parity.run(config, layouts=layouts[:1], cases=["skewed"], data=data)
    assert any("norm.weight" in failure for failure in report.comparisons[0].failures)
    with pytest.raises(ConfigError, match="--dtype"):
        parity.run(config, dtype="float64", data=data)


def off_by_one_bit():
    """The gradients of every call but the first have another last bit in one element."""
    from samestep.ops.gradient_sink import ExactSink

    original, calls = ExactSink.gradients, []

    def gradients(sink):
        found = original(sink)
        if calls:
            first = found["norm.weight"][:1]
            first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))
        calls.append(sink)
        return found

    return gradients
