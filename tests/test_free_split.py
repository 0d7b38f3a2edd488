"""How a step is cut into micro-batches does not change it: by a budget of positions, and in the middle of the step when
memory runs out. The truth is one big batch in float64, differentiated plainly."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CORPUS

from samestep.config.load import dump, from_dict
from samestep.config.schema import Config
from samestep.cost import Split, step_costs
from samestep.data.batch import Batch, collate
from samestep.data.dataset import data_facts, load_data, make_order
from samestep.data.rows import Sample
from samestep.errors import ConfigError, TrainingError
from samestep.families import resolve_model
from samestep.launch import run_ranks
from samestep.ops import Precision
from samestep.parallel.mesh import Mesh, choose_device, join
from samestep.plan import AUTO_POSITIONS, evaluation_rows, make_plan, resolve_layout, split_samples, split_step
from samestep.run.setup import build_model, build_step, micro_batches
from samestep.run.trainer import Events, Trainer
from samestep.split import positions, split_by_budget
from samestep.step.recovery import Recovery
from samestep.torch_private import is_out_of_memory
from samestep.verify import parity
from samestep.verify.layouts import parse_layouts

pytestmark = pytest.mark.usefixtures("workers")

BUDGET = ("training.local_batch_size=null", "training.local_batch_tokens=640")
NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "5767168 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture
def speeches(tiny, tmp_path):
    """`tiny` on documents of natural length: what the persons of a play say, 24 of them in a step."""
    text = tmp_path / "speeches.txt"
    text.write_text(CORPUS.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    settings = (
        f"train_dataset.path={text}",
        'train_dataset.document_separator="\\n\\n"',
        "train_dataset.rows=documents",
        "train_dataset.long_documents=truncate",
        "train_dataset.split=null",
        "model.seq_length=160",
        "training.global_batch_size=24",
        "parallelism.data_parallel_shard=1",
    )
    return lambda *overrides: tiny(*settings, *overrides)


# ---- which samples go together


@pytest.mark.parametrize(
    ("lengths", "ranks", "budget", "packed", "truth"),
    [
        ([1, 9, 2, 8], 1, 18, False, [[[1, 3], [0, 2]]]),
        ([1, 9, 2, 8], 2, 18, False, [[[1, 3]], [[0, 2]]]),
        ([1, 9, 2, 8], 1, 10, True, [[[0, 1], [2, 3]]]),
        ([5, 20, 5], 1, 10, False, [[[1], [0, 2]]]),
        ([5, 20, 5], 1, 10, True, [[[1], [0, 2]]]),
        ([3, 4], 3, 100, False, [[[1]], [[0]], []]),
        ([3, 4], 3, 100, True, [[[1]], [[0]], []]),
        ([4] * 6, 2, 12, False, [[[0, 1, 2]], [[3, 4, 5]]]),
        ([4] * 6, 1, 8, False, [[[0, 1], [2, 3], [4, 5]]]),
        ([], 2, 8, False, [[], []]),
        ([], 2, 8, True, [[], []]),
    ],
)
def test_table_by_hand(lengths, ranks, budget, packed, truth):
    assert split_by_budget(lengths, ranks, budget, packed=packed) == truth


@pytest.mark.parametrize("packed", [False, True])
def test_every_sample_once_within_the_budget_and_balanced(packed):
    draw = random.Random(3)
    for _ in range(60):
        lengths = [min(512, 1 + int(draw.lognormvariate(4, 1))) for _ in range(draw.randint(1, 150))]
        ranks, budget = draw.randint(1, 5), draw.choice((64, 700, 2048, 10**6))
        table = split_by_budget(lengths, ranks, budget, packed=packed)
        groups = [group for rank in table for group in rank]
        assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
        sizes = [positions([lengths[place] for place in group], packed) for group in groups]
        assert all(size <= budget or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
        counts = [len(rank) for rank in table]
        assert len(table) == ranks and max(counts) - min(counts) <= 1
        of_rank = [sum(positions([lengths[p] for p in group], packed) for group in rank) for rank in table]
        assert max(of_rank) - min(of_rank) <= max(sizes), "no rank has more than one micro-batch over another"


def test_less_is_padding_than_by_order(speeches):
    config = speeches(*BUDGET)
    lengths = data_facts(config, load_data(config)).step_lengths
    table = split_by_budget(lengths, 1, 640, packed=False)[0]
    by_order = split_step(len(lengths), 1, -(-len(lengths) // len(table)))[0]
    assert len(by_order) == len(table) > 3

    def padding(groups) -> int:
        return sum(positions([lengths[place] for place in group], False) for group in groups) - sum(lengths)

    assert padding(table) < 0.5 * padding([range(*pair) for pair in by_order])


# ---- configuration and plan


def test_refusals(speeches, tiny):
    with pytest.raises(ConfigError, match="given twice"):
        tiny("training.local_batch_tokens=400")
    for remainder in ("drop", "error"):
        for size in (BUDGET, ("training.local_batch_size=auto",)):
            with pytest.raises(ConfigError, match=f"`{remainder}` has no meaning"):
                tiny(*size, f"training.remainder={remainder}")
    with pytest.raises(ConfigError, match="or `auto` or null"):
        tiny("training.local_batch_size=large")
    config = speeches(*BUDGET, "training.global_batch_size=2")
    with pytest.raises(ConfigError, match="3 data-parallel ranks are more than the 2 samples"):
        make_plan(config, 3, data_facts(config, load_data(config)))


@pytest.mark.parametrize("size", [BUDGET, ("training.local_batch_size=auto",), ()])
def test_the_resolved_file_loads_again(tiny, size, tmp_path):
    config = tiny(*size)
    text = tmp_path / "resolved.yaml"
    text.write_text(dump(config), encoding="utf-8")
    from samestep.config.load import load

    assert load(text).config == config


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_plan_tells_what_the_ranks_do(speeches, ranks, kind):
    config = speeches(*BUDGET, f"training.micro_batch={kind}")
    data = load_data(config)
    plan = make_plan(config, ranks, data_facts(config, data))
    samples, seen = make_order(config, data).next(0), Counter()
    assert (plan.local_batch_size, plan.local_batch_tokens, plan.divides) == (None, 640, True)
    for rank in range(ranks):
        batches = micro_batches(config, data.train, samples, 1, rank_of(config, rank, ranks), plan.local_batch_tokens)
        assert len(batches) == plan.accumulation_steps
        table = [m for m in plan.micro_batches if m.rank == rank]
        found = [(b.samples, b.tokens, b.positions - b.tokens, b.targets) for b in batches if b.samples]
        assert found == [(m.samples, m.tokens, m.padding, m.targets) for m in table]
        for batch, planned in zip(batches, table, strict=False):
            places = batch.sample_ids[batch.sample_ids >= 0].unique().tolist()
            assert places == [int(samples.places[place]) for place in planned.places]
            seen.update(places)
    assert seen == Counter(range(24))


def rank_of(config: Config, rank: int, ranks: int) -> Mesh:
    from samestep.parallel.mesh import World

    return Mesh(resolve_layout(config.parallelism, ranks), World(rank, ranks), torch.device("cpu"))


def test_auto_takes_what_the_memory_allows(tiny):
    config = tiny("training.local_batch_size=auto", "training.global_batch_size=500", "model.vocab_size=100")
    plan = make_plan(config)
    assert plan.local_batch_tokens == AUTO_POSITIONS
    assert "no limit of memory is known" in plan.notes[0]
    spec = resolve_model(config.model, None)

    def memory(size: int) -> int:
        return step_costs(config, spec, Split(1, 1, 1, 2, size))[0].memory.on_device

    limit = int(memory(1000) / 0.8) + 10
    found = make_plan(config, memory_limit=limit).local_batch_tokens
    assert found is not None and 1000 <= found < 1100
    assert memory(found) <= 0.8 * limit < memory(found + 1)
    assert make_plan(config, memory_limit=1).local_batch_tokens == config.model.seq_length
    assert make_plan(config, memory_limit=2**50).local_batch_tokens == 32_768


def test_exact_mode_keeps_its_passes_of_one_sample(speeches):
    config = speeches(*BUDGET, "training.exact=true")
    data = load_data(config)
    batches = micro_batches(config, data.train, make_order(config, data).next(0), 1, Mesh.alone())
    assert [batch.samples for batch in batches] == [1] * 24
    table = split_samples(config, [5] * 7, 2, 400)
    assert [[list(group) for group in rank] for rank in table] == [[[0], [1], [2], [3]], [[4], [5], [6]]]


def test_rows_of_an_evaluation(tiny):
    assert evaluation_rows(tiny()) == 2
    assert evaluation_rows(tiny("evaluation.local_batch_size=5", *BUDGET)) == 5
    assert evaluation_rows(tiny(*BUDGET)) == 640 // 16
    assert evaluation_rows(tiny("training.local_batch_size=auto"), 40) == 2
    assert evaluation_rows(tiny("training.local_batch_size=auto"), 3) == 1


# ---- the step


class Fault:
    """No memory for passes of more than `limit` positions, at some `place`: forward, or half-way through backward."""

    def __init__(self, step, place: str, limit: int, times: int = 10**9):
        self.limit, self.times, self.size, self.raised = limit, times, 0, 0
        self._sums, self._place = step.objective.sums, place
        step.objective.sums = self.sums
        dict(step.model.named_parameters())["layers.0.mlp.down_proj.weight"].register_hook(self.backward)

    def sums(self, model, batch):
        self.size = batch.positions
        found = self._sums(model, batch)
        if self._place == "forward":
            self._maybe()
        return found

    def backward(self, gradient):
        if self._place == "backward":
            self._maybe()

    def _maybe(self):
        if self.size > self.limit and self.raised < self.times:
            self.raised += 1
            raise RuntimeError(NO_MEMORY)


def take_steps(config: Config, mesh: Mesh, precision: Precision, steps: int = 1, fault=None):
    """What the first step and all of them came to: loss, gradients, weights after each; and the faults raised by
    step."""
    data = load_data(config)
    model = build_model(config, data.tokenizer.vocab_size, mesh, precision)
    step = build_step(config, model, mesh, "once_per_step")
    order, consumed, found = make_order(config, data), 0, []
    trouble = Fault(step, *fault) if fault else None
    for number in range(1, steps + 1):
        samples = order.next(consumed)
        consumed = samples.consumed
        before = trouble.raised if trouble else 0
        gradients: dict[str, torch.Tensor] = {}
        report = step(
            micro_batches(config, data.train, samples, number, mesh),
            on_gradients=lambda g, into=gradients: into.update({n: t.clone() for n, t in g.items()}),
        )
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        raised = trouble.raised - before if trouble else 0
        found.append((report.loss, gradients, weights, raised, step.recovery.told))
    return found


def double(config: Config) -> Precision:
    return Precision.from_config(config.model).raised(torch.float64)


def truth_of(config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first global batch as one padded batch with plain autograd over full logits."""
    data = load_data(config)
    model = build_model(config, data.tokenizer.vocab_size, Mesh.alone(), double(config))
    samples = make_order(config, data).next(0)
    batch = collate([data.train[int(row)] for row in samples.rows], samples.places.tolist(), "padded")
    logits = model(batch).hidden @ model.loss_head.weight.T
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def assert_close(found, wanted, bound):
    assert found.keys() == wanted.keys()
    for name in wanted:
        error = float((found[name] - wanted[name]).norm() / wanted[name].norm())
        assert error <= bound, (name, error)


def gradients_of_rank(config: Config, faults: list):
    """In a worker process: `take_steps` for each fault, which the second rank has; tensors as arrays."""
    world = join(timeout=60)
    mesh = Mesh(resolve_layout(config.parallelism, world.size), world, choose_device())
    found = []
    for fault in faults:
        trouble = fault if world.rank == 1 else None
        loss, gradients, weights, *rest = take_steps(config, mesh, double(config), fault=trouble)[0]
        arrays = [{name: tensor.numpy() for name, tensor in part.items()} for part in (gradients, weights)]
        found.append((loss, *arrays, *rest))
    return found


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_by_budget_the_step_is_that_of_one_big_batch(speeches, kind):
    config = speeches(*BUDGET, f"training.micro_batch={kind}")
    loss, wanted = truth_of(config)
    found, gradients, *_ = take_steps(config, Mesh.alone(), double(config))[0]
    assert found == pytest.approx(loss, rel=1e-12)
    assert_close(gradients, wanted, 1e-12)


def test_on_two_ranks_too_and_one_of_them_may_run_out_of_memory(speeches):
    config = speeches(*BUDGET)
    loss, wanted = truth_of(config)
    weights = take_steps(config, Mesh.alone(), double(config))[0][2]
    results = run_ranks(gradients_of_rank, 2, config, [None, ("backward", 200)], timeout=90)
    for calm, stormy in results:
        for found, gradients, after, _, _ in (calm, stormy):
            assert found == pytest.approx(loss, rel=1e-12)
            assert_close({name: torch.from_numpy(array) for name, array in gradients.items()}, wanted, 1e-12)
            assert_close({name: torch.from_numpy(array) for name, array in after.items()}, weights, 1e-9)
    assert [[raised > 0 for *_, raised, _ in found] for found in results] == [[False, False], [False, True]]


def test_verify_knows_budgets(speeches):
    config = speeches()
    layouts = parse_layouts("tokens=640 tokens=640+packed tokens=90")
    report = parity.run(config, layouts=layouts, cases=["even", "skewed"], dtype="float64")
    assert report.passed, [c.failures for c in report.comparisons]
    with pytest.raises(ConfigError, match="decides how many"):
        parse_layouts("tokens=400+ga=2")


# ---- no memory


@pytest.mark.parametrize(
    ("place", "kind", "tied"),
    [
        ("forward", "padded", True),
        ("forward", "packed", False),
        ("backward", "padded", False),
        ("backward", "packed", False),
        ("backward", "padded", True),
    ],
)
def test_a_micro_batch_that_does_not_fit_is_halved_in_the_step(speeches, place, kind, tied):
    """Twelve samples, then six, then three: gradients and weights are those of the undisturbed step, which is that of
    one big batch; later steps begin with what fits."""
    settings = (f"training.micro_batch={kind}", f"model.tie_word_embeddings={tied}".lower(), "training.max_norm=0.5")
    config = speeches("training.local_batch_size=12", *settings)
    calm = take_steps(config, Mesh.alone(), double(config), 2)
    stormy = take_steps(config, Mesh.alone(), double(config), 2, (place, 400))
    assert_close(stormy[0][1], truth_of(config)[1], 1e-12)
    for (loss, gradients, weights, _, told), undisturbed in zip(stormy, calm, strict=True):
        assert loss == pytest.approx(undisturbed[0], rel=1e-9)
        assert_close(gradients, undisturbed[1], 1e-9)
        assert_close(weights, undisturbed[2], 1e-9)
        assert told[1] <= 400
    assert_close(stormy[0][1], calm[0][1], 1e-12)
    assert stormy[0][3] >= 2 and stormy[0][4][0] > 600
    assert (stormy[1][3], stormy[1][4][0]) == (0, 0)


def test_gradients_kept_beside_the_weights(speeches):
    """Weights in float32, gradients in float64: those are added by a hook."""
    config = speeches("training.local_batch_size=12", "model.gradient_dtype=float64")
    precision = Precision.from_config(config.model)
    (calm,), (stormy,) = (take_steps(config, Mesh.alone(), precision, 1, fault) for fault in (None, ("backward", 400)))
    assert stormy[3] >= 2
    assert_close(stormy[1], calm[1], 1e-6)
    assert_close(stormy[1], truth_of(config)[1], 1e-5)


def test_a_passing_shortage(speeches):
    """One failure half-way: what was added before it is neither lost nor added again."""
    config = speeches("training.local_batch_size=8")
    (found,) = take_steps(config, Mesh.alone(), double(config), 1, ("backward", 0, 1))
    assert found[3] == 1
    assert_close(found[1], truth_of(config)[1], 1e-12)


def samples_of(*lengths: int) -> list[Sample]:
    """Samples of two documents where they are longer than 4."""
    made = []
    for number, length in enumerate(lengths):
        first = length // 2 if length > 4 else length
        documents = np.repeat([0, 1], [first, length - first])
        inside = np.concatenate([np.arange(first), np.arange(length - first)])
        tokens = np.arange(100 * number, 100 * number + length + 1)
        made.append(Sample(tokens[:-1], tokens[1:], documents, inside))
    return made


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("lengths", [(3, 2), (7, 1, 4), (2, 9, 5, 3, 6)])
def test_halves_are_what_their_samples_alone_would_be(layout, lengths):
    samples, places = samples_of(*lengths), [10 + 3 * i for i in range(len(lengths))]
    count = len(lengths) // 2
    found = collate(samples, places, layout, 77).halves()
    wanted = (
        collate(samples[:count], places[:count], layout, 77),
        collate(samples[count:], places[count:], layout, 77),
    )
    for half, alone in zip(found, wanted, strict=True):
        for name, value in vars(alone).items():
            same = torch.equal(getattr(half, name), value) if torch.is_tensor(value) else getattr(half, name) == value
            assert same, name


def fail(error: Exception):
    def attempt(batch: Batch):
        raise error

    return attempt


@pytest.mark.parametrize(("limit", "truth"), [(None, [15]), (15, [15]), (10, [5, 8]), (4, [5, 4, 3]), (1, [5, 4, 3])])
def test_parts_of_a_micro_batch_that_is_too_large(limit, truth):
    batch = collate(samples_of(5, 4, 3), (5, 4, 3), "padded")
    recovery = Recovery(None)
    recovery.limit = limit
    assert [part.positions for part in recovery.parts(batch)] == truth


def test_what_cannot_be_halved_ends_with_a_way_out(tiny):
    one, three = (collate(samples_of(*lengths), list(lengths), "padded") for lengths in ((5,), (5, 4, 3)))
    step = build_step(tiny(), build_model(tiny(), 50, Mesh.alone()), Mesh.alone(), "once_per_step")
    for error in (RuntimeError(NO_MEMORY), torch.cuda.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        assert is_out_of_memory(error)
    for batch in (one, three):
        with pytest.raises(TrainingError, match=r"1 sample and 5 positions[\s\S]*lower model.seq_length"):
            Recovery(step.sink).run(batch, fail(RuntimeError(NO_MEMORY)))
    with pytest.raises(TrainingError, match=r"sharded weights[\s\S]*lower training.local_batch_size"):
        Recovery(None).run(three, fail(MemoryError()))
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not is_out_of_memory(other)
    with pytest.raises(RuntimeError, match="mat1"):
        Recovery(step.sink).run(three, fail(other))


def train_in_trouble(config: Config, faulty_rank: int):
    """In a worker process: a run in which one rank has little memory; the steps that were halved there."""
    trainer = Trainer(config)
    if trainer.world.rank == faulty_rank:
        Fault(trainer.step, "backward", 400)
    trainer.train()
    return trainer.step.recovery.told


def test_a_run_goes_on_and_writes_it_down(speeches, tmp_path):
    base = ("training.local_batch_size=6", "training.steps=3", "checkpoint.enable_save=false")
    calm, stormy = (speeches(*base, f"output_dir={tmp_path}/{name}") for name in ("calm", "stormy"))
    Trainer(calm).train()
    results = run_ranks(train_in_trouble, 2, stormy, 1, timeout=90)
    assert results[0] == (0, results[1][1]) and results[1][1] <= 400, "the size that fits is that of all ranks"
    events = [event for event in lines(stormy, "events.jsonl") if event["event"] == "out_of_memory"]
    assert [(event["step"], event["rank"]) for event in events] == [(1, 1)]
    assert events[0]["before"] > 400 >= events[0]["after"] == results[1][1]
    for found, wanted in zip(lines(stormy, "metrics.jsonl"), lines(calm, "metrics.jsonl"), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert (found["targets"], found["samples"]) == (wanted["targets"], wanted["samples"])


def test_a_resumed_run_remembers_what_fits(speeches, tmp_path, monkeypatch):
    """It takes the steps of the run that was not interrupted, to the bit: it halves the same micro-batches. On another
    device it tries the configured size again."""
    base = ("training.local_batch_size=12", "checkpoint.save_interleaved_steps=2", "training.steps=4")
    whole, broken = (speeches(*base, f"output_dir={tmp_path}/{name}") for name in ("whole", "broken"))
    for config, stop in ((whole, False), (broken, True)):
        trainer = Trainer(config, listeners=[StopAt(2)] if stop else [])
        fault = Fault(trainer.step, "backward", 400, times=2)
        trainer.train()
        assert fault.raised == 2
    limit = trainer.step.recovery.limit
    assert limit is not None and limit < 500
    state = json.loads((trainer.last_checkpoint / "state.json").read_text())
    assert state["micro_batch_limit"]["positions"] == limit
    with monkeypatch.context() as patch:
        patch.setattr("samestep.run.trainer.device_memory", lambda device: 2**50)
        assert Trainer(broken, resume="auto").step.recovery.limit is None
    resumed = Trainer(broken, resume="auto")
    assert resumed.step.recovery.limit == limit
    resumed.train()
    rows = [[(row["loss"], row["grad_norm"]) for row in lines(c, "metrics.jsonl")] for c in (whole, broken)]
    assert len(rows[0]) == 4 and rows[0] == rows[1]


class StopAt(Events):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer, report):
        self.should_stop = trainer.state.step == self.step


def lines(config: Config, name: str) -> list[dict]:
    return [json.loads(line) for line in (Path(config.output_dir) / name).read_text().splitlines()]


def test_auto_trains(speeches):
    trainer = Trainer(speeches("training.local_batch_size=auto", "training.steps=2", "checkpoint.enable_save=false"))
    trainer.train()
    assert trainer.plan.local_batch_tokens is not None
    assert [row["samples"] for row in lines(trainer.config, "metrics.jsonl")] == [24, 24]
    from_dict(trainer.config.model_dump())
