"""The proof itself: it passes where the step is the same, and it can fail."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from samestep.config.load import load
from samestep.config.schema import LossScaleConfig
from samestep.data.dataset import load_data
from samestep.errors import ConfigError
from samestep.run import setup
from samestep.step.recovery import Recovery
from samestep.step.update import Updater
from samestep.verify import parity
from samestep.verify.layouts import grid_layouts, parse_layouts

pytestmark = pytest.mark.usefixtures("workers")

EXAMPLES = Path(__file__).parent.parent / "examples"
LAYOUTS = "ga=2 ga=7 packed packed+ga=3"
SMALL = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_attention_heads=4", "model.seq_length=96"]
GPT2 = ["model.model_type=gpt2", "model.num_key_value_heads=null", "model.tie_word_embeddings=true"]


@pytest.fixture(scope="module")
def documents():
    """The documents of the example, and a smaller model than its."""
    config = load(EXAMPLES / "documents.yaml", [*SMALL, "training.max_norm=0.3"]).config
    return config, load_data(config)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_documents_take_the_same_step_however_split(documents, dtype):
    config, data = documents
    report = parity.run(config, layouts=parse_layouts(LAYOUTS), dtype=dtype, data=data)
    assert report.clipped
    assert len(report.comparisons) == 4 * 4
    assert report.passed, [c.failures for c in report.comparisons if c.failures]


@pytest.mark.parametrize("rows", ["cut", "pack_documents"])
def test_rows_of_several_documents_and_dropout(documents, rows):
    config, _ = documents
    dataset = config.train_dataset.model_copy(update={"rows": rows})
    model = config.model.model_copy(update={"hidden_dropout": 0.1, "attention_dropout": 0.1, "num_hidden_layers": 1})
    config = config.model_copy(update={"train_dataset": dataset, "model": model})
    report = parity.run(config, layouts=parse_layouts("packed+ga=2"), cases=["even"], dtype="float64")
    assert report.passed, [c.failures for c in report.comparisons if c.failures]


def test_curves_over_fifty_steps(tiny):
    config = tiny("training.steps=50", "lr_scheduler.learning_rate=1e-3")
    for dtype in ("float32", "float64"):
        report = parity.run(config, layouts=parse_layouts("ga=4 packed"), cases=["skewed"], dtype=dtype, steps=50)
        assert report.passed, [c.failures for c in report.comparisons if c.failures]


@pytest.mark.parametrize("storage", ["float32", "same"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_judged_by_their_distance_to_the_truth(tiny, dtype, storage):
    config = tiny(f"model.params_dtype={dtype if storage == 'same' else storage}", "training.global_batch_size=12")
    layouts = "ga=2 ga=6 packed" if storage == "same" else "ga=2 dp=2 fsdp=2"
    report = parity.run(config, layouts=parse_layouts(layouts), cases=["skewed", "all_empty"], dtype=dtype)
    assert report.dtype == dtype
    assert report.passed, [c.failures for c in report.comparisons if c.failures]


def test_a_loss_scale_that_overflows_proves_nothing(tiny):
    config = tiny("model.compute_dtype=float16", "training.loss_scale=1099511627776")
    with pytest.raises(ConfigError, match="not finite at the scale"):
        parity.run(config, layouts=parse_layouts("ga=2"), cases=["even"])


def test_float16_by_option_says_how_to_write_its_scale(tiny):
    """A scale is refused for a config without float16, so the advice names both fields; and it works."""
    config, layouts = tiny(), parse_layouts("ga=2")
    training = config.training.model_copy(update={"loss_scale": LossScaleConfig(fixed=2.0**40)})
    with pytest.raises(ConfigError) as refused:
        parity.run(config.model_copy(update={"training": training}), layouts=layouts, cases=["even"], dtype="float16")
    advice = refused.value.fix.partition("--dtype out and add to the command line: ")[2].split()
    assert advice == ["model.compute_dtype=float16", "training.loss_scale=1024"]
    assert parity.run(tiny(*advice), layouts=layouts, cases=["even"]).passed


def test_weights_are_cast_as_in_a_run(tiny, monkeypatch):
    """Once a step where micro-batches follow each other, never in the reference or in its float64 truth."""
    found = []
    original = setup.build_step

    def build(*arguments, casts_once):
        found.append(casts_once)
        return original(*arguments, casts_once=casts_once)

    monkeypatch.setattr(parity, "build_step", build)
    config = tiny("model.compute_dtype=bfloat16", "training.local_batch_size=4")
    report = parity.run(config, layouts=parse_layouts("ga=1 ga=2 config packed+tokens=48"), cases=["even"])
    assert report.passed, [c.failures for c in report.comparisons]
    assert found == [False, False, True, True, True, False]


def test_the_mean_of_means_differs_at_every_accumulation(documents):
    config, data = documents
    training = config.training.model_copy(update={"loss_normalization": "micro_batch_mean"})
    config = config.model_copy(update={"training": training})
    report = parity.run(config, layouts=parse_layouts("ga=1 ga=2 ga=4 ga=7"), cases=["even"], data=data)
    assert [bool(c.failures) for c in report.comparisons] == [False, True, True, True]
    assert min(c.gradient for c in report.comparisons[1:]) > 1e-2


def faulty_gradient(updater, gradients):
    gradients["norm.weight"][0] *= 1 + 1e-4


def faulty_update(updater, gradients):
    updater.optimizer.param_groups[0]["weight_decay"] = 0.02


@pytest.mark.parametrize(("fault", "word"), [(faulty_gradient, "norm.weight"), (faulty_update, "weight")])
def test_a_small_fault_in_one_layout_is_found(tiny, monkeypatch, fault, word):
    """A gradient off by 1e-4 in one element, or a doubled weight decay, in every layout but the reference."""
    original = setup.build_step
    calls = []

    def build(*arguments, **options):
        step = original(*arguments, **options)
        calls.append(step)
        if len(calls) > 1:
            gradients = step.sink.gradients

            def changed():
                found = gradients()
                fault(step.updater, found)
                return found

            step.sink.gradients = changed
        return step

    monkeypatch.setattr(parity, "build_step", build)
    for dtype in ("float32", "float64"):
        calls.clear()
        report = parity.run(tiny(), layouts=parse_layouts("ga=1"), cases=["even"], dtype=dtype)
        (comparison,) = report.comparisons
        assert any(word in failure for failure in comparison.failures), comparison


@pytest.mark.parametrize(
    ("dtype", "settings"), [("float32", ()), ("float64", ()), ("bfloat16", ()), ("float32", ("training.exact=true",))]
)
def test_numbers_that_are_none_are_found(tiny, monkeypatch, dtype, settings):
    """In one element of the weights, the moments or the gradients, or instead of a loss or a norm."""
    original = parity.trace
    layouts = parse_layouts("ga=2")
    for kind in ("weights", "moments", "gradients", "losses", "norms"):
        for value in (math.nan, math.inf):

            def poisoned(config, data, job, mesh, kind=kind, value=value):
                found = original(config, data, job, mesh)
                if job.layout != parity.REFERENCE:
                    target = getattr(found, kind)
                    target = next(iter(target.values())).view(-1) if isinstance(target, dict) else target
                    target[0] = value
                return found

            monkeypatch.setattr(parity, "trace", poisoned)
            (comparison,) = parity.run(tiny(*settings), layouts=layouts, cases=["even"], dtype=dtype).comparisons
            assert any("not finite" in failure for failure in comparison.failures), (kind, value, comparison)


def test_a_skip_that_touches_weights_is_found(tiny, monkeypatch):
    original = setup.build_step

    def build(*arguments, **options):
        step = original(*arguments, **options)
        apply = step.updater.apply

        def leaky(gradients, coefficient, skip):
            apply(gradients, coefficient, skip)
            with torch.no_grad():
                step.updater.parameters["norm.weight"].mul_(1.5)

        step.updater.apply = leaky
        return step

    monkeypatch.setattr(parity, "build_step", build)
    report = parity.run(tiny(), layouts=parse_layouts("ga=2"), cases=["all_empty"])
    assert "a step without targets changed 1 tensors: weight.norm.weight" in report.comparisons[0].failures


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_without_targets_that_decays_the_moments_is_found(tiny, monkeypatch, dtype):
    original = Updater.apply

    def never_skips(updater, gradients, coefficient, skip):
        original(updater, gradients, coefficient, torch.zeros_like(skip))

    monkeypatch.setattr(Updater, "apply", never_skips)
    config = tiny("optimizer.weight_decay=0")
    (comparison,) = parity.run(config, layouts=parse_layouts("ga=2"), cases=["all_empty"], dtype=dtype).comparisons
    assert any("without targets changed" in failure for failure in comparison.failures)


@pytest.mark.parametrize("settings", [(), ("optimizer.matched_adamw_rms=1.0",), ("optimizer.ns_steps=8",)])
def test_muon_is_judged_by_its_own_rounding(tiny, settings):
    report = parity.run(
        tiny("optimizer.type=Muon", *settings), layouts=parse_layouts("ga=3"), cases=["even"], dtype="float32"
    )
    assert report.passed, [c.failures for c in report.comparisons]


def test_one_wide_dtype_among_narrow_ones_is_judged_as_float32(tiny):
    report = parity.run(tiny("model.compute_dtype=float64"), layouts=parse_layouts("ga=3"), cases=["even"])
    assert report.passed, [c.failures for c in report.comparisons]


@pytest.mark.parametrize("text", ["ga=0", "ga=-1", "ga=x", "dp=0", "dp=2x2", "hsdp=2", "packed+tp=2", "", "ga", "oom=0",
    "config+ga=2", "config+packed", "config+tokens=9", "fsdp=2+oom=1"])  # fmt: skip
def test_layouts_that_are_none(text):
    with pytest.raises(ConfigError):
        parse_layouts(text)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layouts_of_several_ranks(tiny, dtype):
    """Ranks x micro-batches x packing, in pairs; the first half of the samples, and so a rank, may have no target."""
    dropout = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    config = tiny("training.global_batch_size=13", "training.max_norm=0.1", *dropout)
    layouts = parse_layouts("dp=2+ga=3 fsdp=2+packed fsdp=3+ga=2 hsdp=2x2+ga=3+packed fsdp=4+ga=2 dp=4")
    cases = ["skewed", "one_rank_empty"] + (["even", "all_empty"] if dtype == "float64" else [])
    report = parity.run(config, layouts=layouts, cases=cases, dtype=dtype)
    assert report.passed, [c for c in report.comparisons if c.failures]
    assert len(report.comparisons) == len(layouts) * len(cases)
    assert all(c.clipped for c in report.comparisons if c.case != "all_empty")


@pytest.mark.parametrize(
    "settings",
    [
        ["model.params_dtype=bfloat16", "model.embedding_params_dtype=float32"],
        ["optimizer.type=Muon"],
        [*GPT2, "model.embedding_params_dtype=bfloat16", "optimizer.master_weights=stochastic_rounding"],
    ],
)
def test_sharded_weights_of_other_kinds(tiny, settings):
    """In 16 bits the shards are the masters; Muon works on whole matrices; gpt2 has biases, learned positions and a
    tied head, here in another dtype than the rest."""
    config = tiny(*settings, "parallelism.reduce=every_micro_batch")
    dtype = "float64" if "optimizer.type=Muon" in settings else "config"
    layouts = parse_layouts("fsdp=2+ga=3 fsdp=2+packed")
    report = parity.run(config, layouts=layouts, cases=["skewed"], dtype=dtype, steps=2)
    assert report.passed, [c for c in report.comparisons if c.failures]


def test_the_grid_has_all_pairs_that_fit(tiny):
    names = [layout.name for layout in grid_layouts(tiny("training.global_batch_size=12"))]
    assert len(names) == len(set(names)) == 5 * 3 * 2 + 5 + 4
    assert all(f"fsdp=4+ga={k}+packed" in names for k in (1, 2, 3))
    few = [layout.name for layout in grid_layouts(tiny())]  # 6 samples
    assert "fsdp=2+ga=3+padded" in few and "fsdp=4+ga=2+padded" not in few
    exact = grid_layouts(tiny("training.global_batch_size=12", "training.exact=true"))
    assert {layout.shard for layout in exact} == {1} and not any(layout.out_of_memory for layout in exact)


def test_more_micro_batches_than_samples_are_refused(tiny):
    with pytest.raises(ConfigError, match="6 samples on 1 rank cannot make 7 micro-batches"):
        parity.run(tiny(), layouts=parse_layouts("ga=7"))


def test_out_of_memory_in_a_micro_batch_that_cannot_be_halved(tiny):
    for settings, layout, text in (
        ((), "ga=6+oom=1", "have 1, 1, 1, 1, 1, 1 samples, and number 1 shall be halved"),
        ((), "ga=2+oom=3", "have 3, 3 samples, and number 3 shall"),
        (("training.exact=true",), "oom=1", "one sample and cannot be halved"),
    ):
        with pytest.raises(ConfigError, match=text):
            parity.run(tiny(*settings), layouts=parse_layouts(layout))


def sizes_run(monkeypatch):
    """Samples of the passes of each step taken from now on."""
    steps = []
    original = setup.build_step

    def build(*arguments, **options):
        step = original(*arguments, **options)
        steps.append([])
        sums = step.objective.sums

        def noted(model, batch, passes=steps[-1]):
            passes.append(batch.samples)
            return sums(model, batch)

        step.objective.sums = noted
        return step

    monkeypatch.setattr(parity, "build_step", build)
    return steps


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (("training.local_batch_size=4",), [4, 2]),
        (("training.local_batch_size=null", "training.local_batch_tokens=32"), [2, 2, 2]),
        (("training.local_batch_size=auto", "training.micro_batch=packed"), [6]),
    ],
)
def test_the_micro_batches_of_the_config(tiny, monkeypatch, settings, sizes):
    steps = sizes_run(monkeypatch)
    report = parity.run(tiny(*settings), layouts=parse_layouts("config"), cases=["even"], dtype="float64")
    assert report.passed, report
    assert steps == [[6], sizes]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_step_stays_the_same_when_memory_runs_out(tiny, monkeypatch, dtype):
    """Padded and packed; the second micro-batch of three samples breaks off and is run again as one and two."""
    steps = sizes_run(monkeypatch)
    layouts = parse_layouts("ga=2+oom=2 packed+ga=2+oom=2 oom=1")
    config = tiny("model.hidden_dropout=0.1", "training.max_norm=0.1")
    report = parity.run(config, layouts=layouts, cases=["skewed"], dtype=dtype, steps=2)
    assert report.passed and report.clipped, report
    later = [1, 2, 1, 2]  # what did not fit is remembered
    assert steps == [[6, 6], [3, 3, 1, 2, *later], [3, 3, 1, 2, *later], [6, 3, 3, 3, 3]]


def test_memory_runs_out_on_one_rank_of_two(tiny):
    config = tiny("training.global_batch_size=12", "training.local_batch_size=null", "training.local_batch_tokens=48")
    layouts = parse_layouts("dp=2+config+oom=2 dp=2+packed+ga=2+oom=1")
    report = parity.run(config, layouts=layouts, cases=["even", "one_rank_empty", "all_empty"], dtype="float64")
    assert report.passed, report


def test_a_loss_of_gradients_when_memory_runs_out_is_found(tiny, monkeypatch):
    """If the halves add nothing at all, which is wrong for the parameters that the broken pass had not reached."""
    monkeypatch.setattr(Recovery, "_apart", lambda recovery, batch, attempt: attempt(batch.halves()[0]))
    (comparison,) = parity.run(tiny(), layouts=parse_layouts("oom=1"), cases=["even"]).comparisons
    assert any("gradient" in failure for failure in comparison.failures)


def test_a_shortage_that_never_comes_is_found(tiny, monkeypatch):
    monkeypatch.setattr(parity._Shortage, "_on_gradient", lambda *_: None)
    (comparison,) = parity.run(tiny(), layouts=parse_layouts("oom=1"), cases=["even"]).comparisons
    assert comparison.failures == ("no micro-batch ran out of memory",)


RECOMPUTE = {
    "full": ["recompute.mode=full"],
    "select": ['recompute={mode: select, select_module: {mlp: ["0-1"], self_attn: ["1"]}}'],
}


@pytest.mark.parametrize("mode", RECOMPUTE)
def test_recomputation_is_compared_with_none(tiny, mode):
    config = tiny(*RECOMPUTE[mode], "training.local_batch_size=auto", "model.hidden_dropout=0.1")
    layouts = parse_layouts("config packed+ga=2+oom=2")
    for dtype in ("float32", "float64"):
        report = parity.run(config, layouts=layouts, cases=["skewed"], dtype=dtype)
        assert report.passed, report


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


def traced_only(monkeypatch):
    """Graphs as for the compiler, run by PyTorch's own operators: making kernels takes minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


COMPILED = ("compile=true", "model.num_hidden_layers=1", 'recompute={mode: select, select_module: {mlp: ["0"]}}')


@needs_compiler
def test_compiled_layers_take_the_same_step(tiny, monkeypatch):
    """Of one row, packed: compiled once."""
    traced_only(monkeypatch)
    config = tiny(*COMPILED, "training.local_batch_size=auto", "training.micro_batch=packed")
    report = parity.run(config, layouts=parse_layouts("config+oom=1"), cases=["even"], dtype="float64")
    assert report.passed, report


def traced_jobs(*arguments):
    """In a worker process: `parity.trace_jobs` with layers that are traced only."""
    with pytest.MonkeyPatch.context() as patch:
        traced_only(patch)
        return TRACE_JOBS(*arguments)


TRACE_JOBS = parity.trace_jobs


@needs_compiler
def test_compiled_and_recomputed_layers_on_sharded_weights(tiny, monkeypatch):
    config = tiny(*COMPILED, "model.hidden_dropout=0.1")
    monkeypatch.setattr(parity, "trace_jobs", traced_jobs)
    report = parity.run(config, layouts=parse_layouts("fsdp=2+packed"), cases=["skewed"], dtype="float64")
    assert report.passed, report


def test_command_line_and_exit_codes(cli, tmp_path):
    config = str(EXAMPLES / "documents.yaml")
    out = tmp_path / "result.json"
    code, text, _ = cli("verify", config, "--layouts", "ga=2", "--cases", "even", "--json", out)
    assert code == 0, text
    assert "PASSED: 1 same (float32, clipping active)" in text
    assert json.loads(out.read_text())["passed"] is True
    mean = "training.loss_normalization=micro_batch_mean"
    code, text, _ = cli("verify", config, mean, "--layouts", "ga=2", "--cases", "even")
    assert code == 1
    assert "FAILED: 1 of 1 differ" in text
    code, _, text = cli("verify", config, "--layouts", "tp=2")
    assert (code, text.splitlines()[0]) == (2, "error: --layouts: 'tp=2' is no axis of a layout")
