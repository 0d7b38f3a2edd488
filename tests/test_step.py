"""The step against truths that it did not make: plain autograd on one big batch, torch.optim, closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samestep.config.schema import LrSchedulerConfig, OptimizerConfig
from samestep.data.batch import Batch, collate
from samestep.data.dataset import load_data, make_order
from samestep.data.rows import Sample
from samestep.ops.gradient_sink import GradientSink
from samestep.parallel.data import GradientReduction
from samestep.parallel.mesh import Mesh
from samestep.run.setup import build_model, build_step, micro_batches
from samestep.step.clip import clip_coefficient, squares
from samestep.step.schedule import make_schedule
from samestep.step.step import NO_TARGETS, NON_FINITE, TrainStep
from samestep.step.update import Updater, decays


class Setting:
    """Model, step and data of a tiny configuration."""

    def __init__(self, config):
        self.config = config
        self.data = load_data(config)
        self.order = make_order(config, self.data)
        self.model = build_model(config, self.data.tokenizer.vocab_size, Mesh.alone())
        self.step = build_step(config, self.model, Mesh.alone(), "once_per_step")
        self.consumed = 0

    def batches(self, step: int = 1) -> list[Batch]:
        samples = self.order.next(self.consumed)
        self.consumed = samples.consumed
        return micro_batches(self.config, self.data.train, samples, step, Mesh.alone())

    def bits(self) -> dict[str, torch.Tensor]:
        """Everything a skipped step must not touch."""
        tensors = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return tensors | {name: t.clone() for name, t in self.step.updater.state().items()}


def plain_gradients(model, batches, count) -> dict[str, torch.Tensor]:
    """Gradient of the plain cross-entropy sum over full logits, divided by `count`."""
    model.zero_grad()
    for batch in batches:
        logits = model(batch).hidden @ model.loss_head.weight.T
        (F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / count).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def assert_close(found, wanted, bound):
    assert found.keys() == wanted.keys()
    for name in wanted:
        error = (found[name] - wanted[name]).norm() / wanted[name].norm()
        assert error <= bound, (name, float(error))


def masked(batch: Batch, keep: int) -> Batch:
    """The batch with only the first `keep` labels of each row left."""
    labels = batch.labels.clone()
    labels[:, keep:] = -100
    return Batch(**{**vars(batch), "labels": labels})


# ---- accumulation


def test_eight_by_four_accumulates_to_one_batch_of_thirty_two(tiny):
    """After micro-batch k the accumulated gradient is G1 + ... + Gk, and in the end that of one batch of 32."""
    setting = Setting(tiny("training.global_batch_size=32", "training.local_batch_size=8"))
    batches = setting.batches()
    assert [batch.samples for batch in batches] == [8, 8, 8, 8]
    count = sum(batch.targets for batch in batches)
    parts = [plain_gradients(setting.model, [batch], count) for batch in batches]
    snapshots = []
    setting.step(
        batches, lambda i, _: snapshots.append({n: g.clone() for n, g in setting.step.sink.gradients().items()})
    )
    assert len(snapshots) == 4
    for k, snapshot in enumerate(snapshots, 1):
        assert_close(snapshot, {name: sum(part[name] for part in parts[:k]) for name in parts[0]}, 1e-6)
    setting = Setting(tiny("training.global_batch_size=32", "training.local_batch_size=32"))
    (whole,) = setting.batches()
    assert whole.samples == 32
    assert_close(snapshots[-1], plain_gradients(setting.model, [whole], count), 1e-6)


@pytest.mark.parametrize("keeps", [(16, 16, 16), (16, 5, 1), (0, 7, 16), (16, 0, 0)])
def test_unequal_counts_are_divided_by_the_global_count(tiny, keeps):
    setting = Setting(tiny())
    batches = [masked(batch, keep) for batch, keep in zip(setting.batches(), keeps, strict=True)]
    count = 2 * sum(keeps)
    wanted = plain_gradients(setting.model, batches, count)
    with torch.no_grad():
        loss = sum(
            F.cross_entropy(
                (setting.model(b).hidden @ setting.model.loss_head.weight.T).flatten(0, 1).double(),
                b.labels.flatten(),
                reduction="sum",
            )
            for b in batches
        )
    seen = {}
    report = setting.step(batches, on_gradients=lambda g: seen.update({n: t.clone() for n, t in g.items()}))
    assert_close(seen, wanted, 1e-6)
    assert report.targets == count
    assert report.loss == pytest.approx(float(loss) / count, rel=1e-6)
    assert report.grad_norm == pytest.approx(
        math.sqrt(sum(float(g.double().norm()) ** 2 for g in wanted.values())), rel=1e-6
    )
    assert (report.samples, report.tokens, report.accumulation_steps) == (6, 96, 3)


def test_counts_are_read_before_the_first_forward(tiny):
    setting = Setting(tiny())
    events = []
    counts, sums = setting.step.objective.counts, setting.step.objective.sums
    setting.step.objective.counts = lambda batch: events.append("count") or counts(batch)
    setting.step.objective.sums = lambda model, batch: events.append("forward") or sums(model, batch)
    setting.step(setting.batches())
    assert events == ["count"] * 3 + ["forward"] * 3


class Scalar(nn.Module):
    """Loss of a sample is w x value; one weight, gradient known by hand."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))


class ScalarObjective:
    """`batch` is a list of values, one a target."""

    weights = {"value": 1.0, "watched": 0.0}  # noqa: RUF012

    def counts(self, batch):
        return {"value": len(batch), "watched": 1}

    def sums(self, model, batch):
        return {"value": (model.w * torch.tensor(batch)).sum(), "watched": torch.tensor(7.0)}


class Values(list):
    """A micro-batch of plain numbers."""

    samples = tokens = 1

    def to(self, device):
        return self


def scalar_step(**options):
    model = Scalar()
    config = OptimizerConfig(weight_decay=0.0)
    updater = Updater(list(model.named_parameters()), config, lambda updates: 0.5)
    sink = GradientSink(list(model.named_parameters()), torch.float32)
    mesh = Mesh.alone()
    reduction = GradientReduction(model, mesh, "once_per_step", torch.float32)
    return TrainStep(model, ScalarObjective(), updater, sink, reduction, mesh, **({"max_norm": None} | options))


def test_mean_of_means_is_another_objective():
    """Counts 1 and 3 with losses 4 and 1: the true mean is (4 + 3) / 4, the mean of means (4 + 1) / 2."""
    batches = [Values([4.0]), Values([1.0, 1.0, 1.0])]
    assert scalar_step()(batches).loss == 1.75
    assert scalar_step(micro_batch_mean=True)(batches).loss == 2.5


def test_a_term_of_weight_zero_is_reported_and_not_trained():
    step = scalar_step()
    report = step([Values([2.0])])
    assert (report.loss, report.grad_norm, report.terms) == (2.0, 2.0, {"value": 2.0, "watched": 7.0})


def test_a_parameter_without_gradient_is_left_alone_and_others_get_their_own():
    step = scalar_step()
    step([Values([2.0])])
    assert step.model.w.item() == pytest.approx(0.5)  # first AdamW step: lr x sign
    assert step.model.unused.tolist() == [1.0, 1.0, 1.0]


# ---- norm and clipping


def norm(gradients) -> float:
    return math.sqrt(squares(gradients, lambda gradient, _: gradient, torch.device("cpu")).sum())


def test_norm_of_sixteen_million_elements():
    torch.manual_seed(0)
    gradients = [torch.randn(4096, 4096).mul_(1e-3).add_(1e-4), torch.randn(7), torch.randn(3, 65536).T]
    truth = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm(gradients) == pytest.approx(truth, rel=1e-6)


def test_norm_of_nothing_is_zero_and_of_bfloat16_is_wide():
    assert norm([]) == 0.0
    gradient = torch.full((70_000,), 3.0, dtype=torch.bfloat16)
    assert norm([gradient]) == pytest.approx(3 * math.sqrt(70_000), rel=1e-6)


def test_coefficient():
    norm = torch.tensor(4.0, dtype=torch.float64)
    assert float(clip_coefficient(norm, 1.0)) == pytest.approx(1 / (4 + 1e-6), rel=1e-12)
    assert float(clip_coefficient(norm, 5.0)) == 1.0
    assert float(clip_coefficient(norm, None)) == 1.0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("max_norm", ["0.25", "null"])
def test_twenty_steps_equal_plain_clipping_and_torch_adamw_in_float64(tiny, dtype, max_norm):
    fields = ("params_dtype", "compute_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype")
    fields += ("gradient_dtype", "reduce_dtype", "loss_dtype")
    config = tiny(
        *(f"model.{field}={dtype}" for field in fields), f"training.max_norm={max_norm}", "optimizer.weight_decay=0.1"
    )
    setting = Setting(config)
    twins = {name: nn.Parameter(p.detach().double()) for name, p in setting.model.named_parameters()}
    matrices = [p for p in twins.values() if p.ndim > 1]
    vectors = [p for p in twins.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for number in range(1, 21):
        seen = {}
        report = setting.step(setting.batches(number), on_gradients=lambda g, seen=seen: seen.update(_doubled(g)))
        for group in optimizer.param_groups:
            group["lr"] = report.learning_rate
        for name, twin in twins.items():
            twin.grad = seen[name]
        if max_norm != "null":
            norm = math.sqrt(sum(float(g.square().sum()) for g in seen.values()))
            for gradient in seen.values():
                gradient.mul_(min(1.0, float(max_norm) / (norm + 1e-6)))
            assert report.clip_coefficient == pytest.approx(min(1.0, 0.25 / (norm + 1e-6)), rel=1e-6)
            assert report.clip_coefficient < 1
        optimizer.step()
    bound = 2e-5 if dtype == "float32" else 1e-12
    assert_close({n: p.detach().double() for n, p in setting.model.named_parameters()}, twins, bound)


def _doubled(gradients):
    return {name: gradient.double().clone() for name, gradient in gradients.items()}


# ---- skipping


def poison(setting, value):
    """Make one element of one gradient `value` in the next backward."""
    parameter = setting.model.layers["0"].mlp.up_proj.weight

    def hook(gradient):
        gradient = gradient.clone()
        gradient[0, 0] = value
        return gradient

    return parameter.register_hook(hook)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_norm", ["1.0", "null"])
def test_a_non_finite_step_changes_no_bit(tiny, value, storage, max_norm):
    setting = Setting(tiny(f"model.params_dtype={storage}", f"training.max_norm={max_norm}"))
    for number in (1, 2, 3):
        assert setting.step(setting.batches(number)).skipped is None
    before, rate = setting.bits(), setting.step.updater.learning_rate
    handle = poison(setting, value)
    report = setting.step(setting.batches(4))
    handle.remove()
    assert report.skipped == NON_FINITE
    after = setting.bits()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (setting.step.updater.updates, setting.step.updater.learning_rate) == (3, rate)
    assert report.learning_rate == rate
    assert setting.step(setting.batches(5)).skipped is None
    assert setting.step.updater.updates == 4
    assert {float(t) for n, t in setting.bits().items() if n.startswith("step.")} == {4.0}


def test_a_skipped_first_step_leaves_a_run_as_if_it_had_not_been(tiny):
    skipping, clean = Setting(tiny()), Setting(tiny())
    first, second = skipping.batches(1), skipping.batches(2)
    handle = poison(skipping, math.nan)
    assert skipping.step(first).skipped == NON_FINITE
    handle.remove()
    skipping.step(second)
    clean.step(second)
    assert all(torch.equal(a, b) for a, b in zip(skipping.bits().values(), clean.bits().values(), strict=True))


def test_a_step_without_targets_changes_no_bit_and_prints_no_number(tiny):
    setting = Setting(tiny("optimizer.weight_decay=0.5"))
    setting.step(setting.batches(1))
    before = setting.bits()
    report = setting.step([masked(batch, 0) for batch in setting.batches(2)])
    assert report.skipped == NO_TARGETS
    assert report.targets == 0
    assert all(math.isnan(value) for value in (report.loss, report.grad_norm, report.clip_coefficient))
    assert all(torch.equal(before[name], value) for name, value in setting.bits().items())
    assert setting.step.updater.updates == 1


# ---- storage in 16 bits


def test_masters_carry_what_storage_cannot(tiny):
    schedule = ("lr_scheduler.type=constant", "lr_scheduler.learning_rate=1e-5", "lr_scheduler.warmup_steps=0")
    setting = Setting(tiny("model.params_dtype=bfloat16", *schedule))
    first = {name: p.detach().clone() for name, p in setting.model.named_parameters()}
    assert all(p.dtype == torch.bfloat16 for p in first.values())
    for number in range(1, 4):
        setting.step(setting.batches(number))
    for name, parameter in setting.model.named_parameters():
        master = setting.step.updater.masters[name]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), parameter)
        assert (master != first[name].float()).float().mean() > 0.8
    norm = dict(setting.model.named_parameters())["norm.weight"]
    assert torch.equal(norm, first["norm.weight"])  # 3e-5 is under the resolution of bfloat16 at 1.0


def test_accumulation_is_wider_than_storage(tiny):
    setting = Setting(tiny("model.params_dtype=bfloat16"))
    seen = {}
    setting.step(setting.batches(), on_gradients=seen.update)
    assert {gradient.dtype for gradient in seen.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor", "Lion", "Muon"])
@pytest.mark.parametrize(
    ("storage", "sums"),
    [("float32", "float64"), ("bfloat16", "float64"), ("float64", "float32"), ("float64", "float64")],
)
def test_sums_may_be_wider_or_narrower_than_storage(tiny, kind, storage, sums):
    """One update with such sums is that of float32 sums up to rounding."""

    def updated(storage, sums):
        dtypes = (f"model.params_dtype={storage}", f"model.gradient_dtype={sums}")
        setting = Setting(tiny(*dtypes, f"optimizer.type={kind}", "lr_scheduler.warmup_steps=0"))
        seen = {}
        assert setting.step(setting.batches(), on_gradients=seen.update).skipped is None
        assert {str(gradient.dtype) for gradient in seen.values()} == {f"torch.{sums}"}
        return {name: setting.step.updater.trained(name).detach().double() for name in seen}

    assert_close(updated(storage, sums), updated("bfloat16" if storage == "bfloat16" else "float32", "float32"), 1e-3)


# ---- groups and schedules


@pytest.mark.parametrize(
    ("name", "shape", "rules", "wanted"),
    [
        ("layers.0.mlp.up_proj.weight", (4, 4), {}, True),
        ("layers.0.input_layernorm.weight", (4,), {}, False),
        ("norm.bias", (4,), {}, False),
        ("embed_tokens.weight", (4, 4), {"weight_decay_exclude": ["embed_tokens"]}, False),
        ("layers.1.mlp.up_proj.weight", (4, 4), {"weight_decay_exclude": ["layers.*.mlp.*"]}, False),
        ("norm.weight", (4,), {"weight_decay_include": ["norm.weight"]}, True),
        ("norm.weight", (4,), {"weight_decay_include": ["norm"], "weight_decay_exclude": ["norm"]}, True),
        ("layers.1.mlp.up_proj.weight", (4, 4), {"weight_decay_exclude": ["layers.2"]}, True),
    ],
)
def test_which_parameters_decay(name, shape, rules, wanted):
    assert decays(name, torch.empty(shape), OptimizerConfig(**rules)) is wanted


def test_decay_reaches_the_right_parameters(tiny):
    setting = Setting(tiny("optimizer.weight_decay=0.25", "optimizer.weight_decay_exclude=[embed_tokens]"))
    groups = {
        id(p): group["weight_decay"] for group in setting.step.updater.optimizer.param_groups for p in group["params"]
    }
    found = {name: groups[id(setting.step.updater.trained(name))] for name, _ in setting.model.named_parameters()}
    assert found["embed_tokens.weight"] == found["norm.weight"] == 0.0
    assert found["loss_head.weight"] == found["layers.1.self_attn.q_proj.weight"] == 0.25


PEAK, END, START, WARMUP, TOTAL = 3e-3, 1e-4, 1e-5, 10, 110
POINTS = (0, 1, 5, 9, 10, 11, 35, 60, 85, 109, 110, 120)


def in_warmup(t):
    return START + (PEAK - START) * t / WARMUP


def closed_form(kind, t):
    if t < WARMUP:
        return in_warmup(t)
    if kind == "constant":
        return PEAK
    part = min((t - WARMUP) / (TOTAL - WARMUP), 1.0)
    return PEAK + (END - PEAK) * part if kind == "linear" else END + (PEAK - END) * math.cos(math.pi * part / 2) ** 2


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedule_against_its_closed_form(kind):
    end = {} if kind == "constant" else {"lr_end": END}
    config = LrSchedulerConfig(type=kind, learning_rate=PEAK, warmup_lr_init=START, warmup_steps=WARMUP, **end)
    rate = make_schedule(config, TOTAL)
    for t in POINTS:
        assert rate(t) == pytest.approx(closed_form(kind, t), rel=1e-12, abs=1e-18), t


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedule_without_warmup_starts_at_the_peak_and_ratio_sets_the_warmup(kind):
    assert make_schedule(LrSchedulerConfig(type=kind, learning_rate=PEAK), TOTAL)(0) == PEAK
    rate = make_schedule(LrSchedulerConfig(type=kind, learning_rate=PEAK, warmup_ratio=0.1, warmup_steps=3), 100)
    assert [rate(0), rate(5), rate(10)] == [0.0, PEAK / 2, PEAK]
    every = make_schedule(LrSchedulerConfig(type=kind, learning_rate=PEAK, warmup_ratio=1.0), 10)
    assert every(9) == pytest.approx(PEAK * 0.9)
    assert math.isfinite(every(10))


def test_the_reported_rate_is_the_one_used(tiny):
    """With eps 0 the first AdamW update moves every weight by exactly its learning rate."""
    setting = Setting(tiny("optimizer.eps=0", "optimizer.weight_decay=0", "lr_scheduler.warmup_steps=0"))
    before = setting.model.norm.weight.detach().clone()
    report = setting.step(setting.batches())
    assert report.learning_rate == 1e-2
    moved = (setting.model.norm.weight.detach() - before).abs()
    assert torch.allclose(moved, torch.full_like(moved, report.learning_rate), rtol=1e-4)


# ---- the order of samples inside a micro-batch


def test_padded_and_packed_micro_batches_hold_the_same_numbers():
    samples = [
        Sample(*(torch.arange(n).numpy() + k for k in (5, 6)), torch.zeros(n).long().numpy(), torch.arange(n).numpy())
        for n in (3, 1, 4)
    ]
    padded, packed = collate(samples, [7, 8, 9], "padded"), collate(samples, [7, 8, 9], "packed")
    assert padded.input_ids.shape == (3, 4)
    assert packed.input_ids.shape == (1, 8)
    keep = padded.sample_ids >= 0
    for field in ("input_ids", "labels", "position_ids", "document_ids", "sample_ids"):
        assert getattr(padded, field)[keep].tolist() == getattr(packed, field)[0].tolist()
    assert padded.spans is None
    assert packed.spans == ((0, 0, 3), (0, 3, 4), (0, 4, 8))
    assert (padded.labels[~keep] == -100).all()
