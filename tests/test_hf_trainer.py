"""The Trainer for Hugging Face models: the same script, the true step, and what it refuses."""

import dataclasses
import json
import math
import signal
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hf_cases import (
    IGNORED,
    RATE,
    arguments,
    cut,
    difference,
    logged,
    rows,
    summed_loss,
    tiny_llama,
    true_run,
    weights,
)
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback

from samestep.errors import ConfigError, DataError, TrainingError
from samestep.hf import Trainer, TrainingArguments
from samestep.hf.arguments import HARMLESS, REFUSED, SUPPORTED
from samestep.hf.update import load_schedule, schedule_state

EVENTS = ["train_begin", "epoch_begin", "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
EVENTS += ["log", "prediction_step", "evaluate", "save", "epoch_end", "train_end"]


class Recorder(TrainerCallback):
    """Notes every event, with the step and the epoch at which it came."""

    def __init__(self):
        self.seen = []
        for event in EVENTS:
            setattr(self, f"on_{event}", partial(self._note, event))

    def _note(self, event, args, state, control, **kwargs):
        self.seen.append((event, state.global_step, round(state.epoch or 0.0, 6)))


# ---- the same script


def accuracy(prediction):
    guesses, wanted = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == wanted)[wanted != IGNORED].mean())}


def script(kind, args_kind, folder):
    """As people write them: callbacks, metrics, evaluation, checkpoints, the best model, TensorBoard, a prediction."""
    args = arguments(
        folder,
        args_kind,
        train_sampling_strategy="random",
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        lr_scheduler_type="linear",
        warmup_steps=2,
        report_to="tensorboard",
        logging_first_step=True,
    )
    recorder = Recorder()
    trainer = kind(
        model=tiny_llama(),
        args=args,
        train_dataset=rows(11),
        eval_dataset=rows(5, seed=2),
        compute_metrics=accuracy,
        callbacks=[recorder],
    )
    result = trainer.train()
    prediction = trainer.predict(rows(3, seed=3))
    return trainer, recorder, result, prediction


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    theirs = script(transformers.Trainer, transformers.TrainingArguments, folder / "theirs")
    return theirs, script(Trainer, TrainingArguments, folder / "ours"), folder


def test_callbacks_are_called_as_ever(both):
    (_, theirs, _, _), (_, ours, _, _), _ = both
    assert ours.seen == theirs.seen


def test_what_is_logged_is_the_same(both):
    (theirs, _, result, _), (ours, _, our_result, _), _ = both
    assert len(ours.state.log_history) == len(theirs.state.log_history)
    exact = {"loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "eval_accuracy", "total_flos"}
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.keys() == other.keys()
        for key in exact & mine.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-9), key
    assert our_result.metrics.keys() == result.metrics.keys()
    assert our_result.global_step == result.global_step == 6


def test_checkpoints_and_the_best_model_are_the_same(both):
    (theirs, _, _, _), (ours, _, _, _), folder = both
    assert sorted(p.name for p in (folder / "ours").glob("checkpoint-*")) == sorted(
        p.name for p in (folder / "theirs").glob("checkpoint-*")
    )
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric)
    assert difference(weights(ours.model), weights(theirs.model)) < 1e-5
    for name in ("model.safetensors", "config.json", "trainer_state.json", "training_args.bin"):
        assert list((folder / "ours").glob(f"checkpoint-*/{name}"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(ours.state.best_model_checkpoint)
    assert difference(weights(loaded), weights(ours.model)) == 0


def test_predictions_are_the_same(both):
    (_, _, _, theirs), (_, _, _, ours), _ = both
    assert np.allclose(ours.predictions, theirs.predictions, atol=1e-5)
    assert np.array_equal(ours.label_ids, theirs.label_ids)
    assert ours.metrics.keys() - {"test_model_preparation_time"} == theirs.metrics.keys() - {
        "test_model_preparation_time"
    }
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)


def test_tensorboard_has_the_same_curves(both):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def tags(name):
        found = set()
        for file in both[2].glob(f"{name}/**/events.out.tfevents.*"):
            read = EventAccumulator(str(file))
            read.Reload()
            found |= set(read.Tags()["scalars"])
        return found

    assert tags("ours") == tags("theirs")
    assert "train/loss" in tags("ours")


# ---- the step


@pytest.mark.parametrize("micro,accumulation", [(6, 1), (2, 3), (1, 6)])
def test_updates_are_those_of_one_big_batch(micro, accumulation, tmp_path):
    """Uneven targets, and at the end of each epoch a window of 2 samples."""
    data, model, truth = rows(14, uneven=True), tiny_llama(dtype=torch.float64), tiny_llama(dtype=torch.float64)
    args = arguments(
        tmp_path,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        optim="adamw_torch",
    )
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    losses = true_run(truth, cut(data, 6) * 2)
    assert trainer.state.global_step == 6
    assert logged(trainer) == pytest.approx(losses, rel=1e-12)
    assert difference(weights(model), weights(truth)) < 1e-12


def test_data_shorter_than_a_window_is_a_window(tmp_path):
    data, model, truth = rows(3, uneven=True), tiny_llama(dtype=torch.float64), tiny_llama(dtype=torch.float64)
    args = arguments(tmp_path, gradient_accumulation_steps=8, num_train_epochs=2)
    Trainer(model=model, args=args, train_dataset=data).train()
    true_run(truth, [data, data])
    assert difference(weights(model), weights(truth)) < 1e-12


def test_d8_a_last_window_of_one_micro_batch_of_four_has_its_whole_gradient(tmp_path):
    """Divided by four all the same, as accelerate's `accumulate` does, it would be a quarter. The optimizer is one that
    sees the size of a gradient."""
    data, model, truth = rows(10, uneven=True), tiny_llama(dtype=torch.float64), tiny_llama(dtype=torch.float64)
    settings = {"gradient_accumulation_steps": 4, "num_train_epochs": 1}
    settings |= {"optim": "sgd", "weight_decay": 0.0, "max_grad_norm": 0.0}
    trainer = Trainer(model=model, args=arguments(tmp_path, **settings), train_dataset=data)
    trainer.train()
    norms = []
    for window in cut(data, 8):
        total, targets = summed_loss(truth, window)
        gradients = torch.autograd.grad(total / targets, list(truth.parameters()))
        norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
        with torch.no_grad():
            for parameter, gradient in zip(truth.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-12)
    assert difference(weights(model), weights(truth)) < 1e-14


def all_masked(samples):
    return [{**sample, "labels": torch.full_like(sample["labels"], IGNORED)} for sample in samples]


def test_a_window_without_targets_changes_nothing(tmp_path):
    """D11, and it is told."""
    data = rows(12, uneven=True)
    data[4:8] = all_masked(data[4:8])
    model, truth = tiny_llama(dtype=torch.float64), tiny_llama(dtype=torch.float64)
    trainer = Trainer(
        model=model, args=arguments(tmp_path, per_device_train_batch_size=4, num_train_epochs=1), train_dataset=data
    )
    seen = []
    trainer.add_callback(_Weights(seen))
    trainer.train()
    true_run(truth, cut(data, 4))
    assert difference(seen[0], seen[1]) == 0 and difference(seen[1], seen[2]) > 0
    assert difference(weights(model), weights(truth)) < 1e-12
    assert [row.get("skipped_steps") for row in trainer.state.log_history if "loss" in row] == [None, 1, None]


class _Weights(TrainerCallback):
    def __init__(self, seen):
        self.seen = seen

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(weights(model))


class _Spoilt(Trainer):
    """Has a loss that is not a number in the second step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.state.global_step == 1 and torch.is_grad_enabled():
            loss = loss * math.nan
        return (loss, outputs) if return_outputs else loss

    loss_is_scaled_for_ga = True


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, tmp_path):
    """D11: no weight becomes NaN, and the schedule waits."""
    args = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2, optim=optimizer, lr_scheduler_type="linear")
    trainer = _Spoilt(model=tiny_llama(), args=args, train_dataset=rows(20))
    seen = []
    trainer.add_callback(_Weights(seen))
    trainer.train()
    assert difference(seen[0], seen[1]) == 0 and difference(seen[1], seen[2]) > 0
    assert logged(trainer, "learning_rate") == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 * 2 / 3])
    assert trainer.updater.updates == 2 and trainer.state.global_step == 3


def test_too_many_skips_end_the_run_with_a_save(tmp_path):
    args = arguments(tmp_path, max_steps=9, max_consecutive_skipped_steps=2, save_strategy="steps", save_steps=100)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=all_masked(rows(20)))
    with pytest.raises(TrainingError, match="2 steps in a row were skipped"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "complete.json").is_file()


def test_narrow_weights_are_updated_by_float32_masters(tmp_path):
    """A step of 1e-5 is lost in bfloat16, not in its master."""
    model = tiny_llama(dtype=torch.bfloat16)
    args = arguments(tmp_path, max_steps=3, learning_rate=1e-5)
    trainer = Trainer(model=model, args=args, train_dataset=rows(6))
    before = weights(model)
    trainer.train()
    moved = [float((trainer.updater.masters[name].float() != before[name].float()).float().mean()) for name in before]
    assert min(moved) > 0.5
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trainer.updater.masters[name].bfloat16())


@pytest.mark.parametrize("kind", ["bf16", "fp16", "activation_checkpointing", "neftune_noise_alpha"])
def test_ways_to_run_the_passes(kind, tmp_path):
    trainer = Trainer(
        model=tiny_llama(), args=arguments(tmp_path / "a", max_steps=3), train_dataset=rows(6, uneven=True)
    )
    other = Trainer(
        model=tiny_llama(),
        args=arguments(tmp_path / "b", max_steps=3, **{kind: True}),
        train_dataset=rows(6, uneven=True),
    )
    trainer.train()
    other.train()
    distance = np.abs(np.array(logged(trainer)) - logged(other)).max()
    if kind == "activation_checkpointing":
        assert distance < 1e-6
    else:
        assert 0 < distance < 0.2
    assert all(p.dtype == torch.float32 for p in other.model.parameters())


# ---- evaluation


def test_the_evaluation_loss_does_not_depend_on_the_batches(tmp_path):
    """D12."""
    data, model = rows(7, uneven=True), tiny_llama()
    total, targets = summed_loss(model, data)
    for size in (1, 2, 7):
        args = arguments(tmp_path, per_device_eval_batch_size=size)
        trainer = Trainer(model=model, args=args, eval_dataset=data)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(total.detach()) / targets, rel=1e-6)


def test_several_evaluation_sets(tmp_path):
    trainer = Trainer(
        model=tiny_llama(), args=arguments(tmp_path), eval_dataset={"one": rows(3), "two": rows(4, seed=5)}
    )
    metrics = trainer.evaluate()
    assert {"eval_one_loss", "eval_two_loss", "eval_one_runtime", "eval_two_samples_per_second"} <= metrics.keys()


# ---- what users override


def test_flags_of_callbacks(tmp_path):
    class Flags(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 2
            control.should_evaluate = state.global_step == 3
            control.should_training_stop = state.global_step == 5

    recorder = Recorder()
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments(tmp_path, num_train_epochs=3),
        train_dataset=rows(8),
        eval_dataset=rows(2),
        callbacks=[recorder, Flags],
    )
    trainer.train()
    assert trainer.state.global_step == 5
    assert [step for event, step, _ in recorder.seen if event == "epoch_begin"] == [0, 2]
    assert [step for event, step, _ in recorder.seen if event == "evaluate"] == [3]


def test_early_stopping_saves_no_more_than_asked(tmp_path):
    args = arguments(
        tmp_path,
        max_steps=20,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        learning_rate=0.0,
        save_total_limit=3,
    )
    trainer = Trainer(
        model=tiny_llama(),
        args=args,
        train_dataset=rows(8),
        eval_dataset=rows(2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.state.best_global_step == 1
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_a_signal_ends_the_run_with_a_save(tmp_path):
    class Signal(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

    args = arguments(tmp_path, max_steps=9, save_strategy="steps", save_steps=100)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=rows(8), callbacks=[Signal])
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 128 + signal.SIGTERM and trainer.state.global_step == 2
    assert (tmp_path / "checkpoint-2" / "complete.json").is_file()


def test_an_interrupted_script_ends_where_it_would(tmp_path):
    class Signal(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                signal.raise_signal(signal.SIGINT)

    trainer = Trainer(
        model=tiny_llama(), args=arguments(tmp_path, max_steps=9), train_dataset=rows(8), callbacks=[Signal]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_finished_run_has_nothing_to_do(tmp_path):
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    Trainer(model=tiny_llama(), args=args, train_dataset=rows(8)).train()
    model = tiny_llama(seed=7)
    found = Trainer(model=model, args=args, train_dataset=rows(8)).train(resume_from_checkpoint=True)
    assert found.global_step == 2 and found.training_loss == found.metrics["train_loss"] == 0.0


@pytest.mark.parametrize("native", [False, True])
def test_what_a_look_up_misses_is_told(native, tmp_path):
    data = rows(4)
    data[1]["input_ids"][3] = 40
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, max_steps=2), train_dataset=data, native=native)
    with pytest.raises(DataError, match="token id 40, but the model knows 0 to 31"):
        trainer.train()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=6))
    trainer = Trainer(model=model, args=arguments(tmp_path, max_steps=2), train_dataset=rows(4), native=native)
    with pytest.raises(DataError, match=r"row has 8 tokens, but the model has 6 positions|positions 0 to 5"):
        trainer.train()


class OwnStep(Trainer):
    """Runs backward itself and counts its calls."""

    calls = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.calls += 1
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_training_step_of_the_users_own(tmp_path):
    data, truth = rows(8, uneven=True), tiny_llama()
    args = arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    trainer = OwnStep(model=tiny_llama(), args=args, train_dataset=data)
    trainer.train()
    losses = true_run(truth, cut(data, 4))
    assert trainer.calls == 4
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    assert difference(weights(trainer.model), weights(truth)) < 1e-5


class OwnLoss(Trainer):
    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss = total / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_the_users_own(tmp_path):
    data, truth = rows(8, uneven=True), tiny_llama()
    args = arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    trainer = OwnLoss(model=tiny_llama(), args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    true_run(truth, cut(data, 4))
    assert difference(weights(trainer.model), weights(truth)) < 1e-5
    total, targets = summed_loss(truth, data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(total.detach()) / targets, rel=1e-5)


def test_an_optimizer_and_a_schedule_of_the_users_own(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    args = arguments(tmp_path, max_steps=3)
    trainer = Trainer(model=model, args=args, train_dataset=rows(6), optimizers=(optimizer, schedule))
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([0.5, 0.25, 0.5 / 3])


def test_a_schedule_that_follows_the_evaluation(tmp_path):
    args = arguments(
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "mode": "max"},
    )
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=rows(8), eval_dataset=rows(8))
    trainer.train()
    assert logged(trainer, "learning_rate")[-1] < 1e-2


def test_plain_arguments_of_transformers_will_do(tmp_path):
    args = arguments(tmp_path, transformers.TrainingArguments, max_steps=1)
    assert Trainer(model=tiny_llama(), args=args, train_dataset=rows(2)).train().global_step == 1


def test_train_may_be_called_twice(tmp_path):
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, max_steps=2), train_dataset=rows(4))
    first = trainer.train().training_loss
    assert trainer.train().training_loss < first
    assert trainer.state.global_step == 2


# ---- what is refused


def test_every_argument_of_transformers_is_known():
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    lists = (SUPPORTED, set(HARMLESS), set(REFUSED), {"accelerator_config"})
    assert set.union(*map(set, lists)) == known
    assert sum(map(len, lists)) == len(known)


ABSURD = [
    ("gradient_accumulation_steps", -2),
    ("gradient_accumulation_steps", 0),
    ("per_device_train_batch_size", 0),
    ("num_train_epochs", -3),
    ("num_train_epochs", math.nan),
    ("max_steps", 0),
    ("max_steps", -5),
    ("max_grad_norm", -1.0),
    ("max_grad_norm", math.nan),
    ("weight_decay", -1.0),
    ("learning_rate", math.nan),
    ("label_smoothing_factor", 2.0),
    ("save_total_limit", 0),
    ("logging_steps", -1),
    ("adam_beta2", 1.0),
    ("train_sampling_strategy", "batch_rebalance"),
    ("average_tokens_across_devices", False),
    ("ignore_data_skip", True),
    ("use_liger_kernel", True),
    ("optim", "galore_adamw_layerwise"),
    ("loss_normalization", "mean"),
    ("data_parallel_shard", 2),
    ("accelerator_config", {"split_batches": True}),
]


@pytest.mark.parametrize("name,value", ABSURD)
def test_what_makes_no_sense_is_refused_by_name(name, value, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){name}.*fix:"):
        Trainer(model=tiny_llama(), args=arguments(tmp_path, **{name: value}), train_dataset=rows(4))


def test_what_accelerate_would_do_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP"):
        Trainer(model=tiny_llama(), args=arguments(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="bf16=True"):
        Trainer(model=tiny_llama(), args=arguments(tmp_path))


def test_training_works_in_any_thread(tmp_path):
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, max_steps=2), train_dataset=rows(4))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 2 and not trainer.is_in_train


def test_several_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)max_grad_norm.*weight_decay"):
        Trainer(model=tiny_llama(), args=arguments(tmp_path, max_grad_norm=-1.0, weight_decay=-1.0))


def test_a_warmup_longer_than_the_run_is_refused(tmp_path):
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, max_steps=3, warmup_steps=10), train_dataset=rows(4))
    with pytest.raises(ConfigError, match="never reach its peak"):
        trainer.train()


def test_overriding_what_is_never_called_is_refused(tmp_path):
    class Sampling(Trainer):
        def _get_train_sampler(self, dataset=None):
            return None

    with pytest.raises(ConfigError, match="get_train_dataloader instead"):
        Sampling(model=tiny_llama(), args=arguments(tmp_path))


def test_missing_data_is_told(tmp_path):
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path))
    with pytest.raises(DataError, match="train_dataset"):
        trainer.train()
    with pytest.raises(DataError, match="eval_dataset"):
        trainer.evaluate()


def test_the_state_can_be_read_by_transformers(tmp_path):
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    Trainer(model=tiny_llama(), args=args, train_dataset=rows(4)).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and state["max_steps"] == 2 and len(state["log_history"]) == 2


def test_the_documentation_names_what_is_refused():
    page = (Path(__file__).parent.parent / "docs" / "hf_trainer.md").read_text(encoding="utf-8")
    for name in [*REFUSED, "loss_normalization", "max_consecutive_skipped_steps", "data_parallel_shard"]:
        assert f"`{name}" in page, name


# ---- what a second look found


def test_a_model_in_bfloat16_is_trained_twice(tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    for turn in range(2):
        trainer = Trainer(model, arguments(tmp_path / str(turn), max_steps=1), train_dataset=rows(8))
        trainer.train()
        assert trainer.state.global_step == 1
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_samplers_of_ones_own_hear_of_the_epoch(tmp_path):
    epochs = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    class Mine(Trainer):
        def get_train_dataloader(self):
            data = self.train_dataset
            return torch.utils.data.DataLoader(data, 4, sampler=Sampler(data), collate_fn=self.data_collator)

    Mine(tiny_llama(), arguments(tmp_path, num_train_epochs=2, max_steps=-1), train_dataset=rows(8)).train()
    assert epochs == [0, 1]


def test_a_schedule_with_numbers_as_keys_comes_back():
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])

    before, after = make(), make()
    for _ in range(3):
        before.optimizer.step()
        before.step()
    after.optimizer.param_groups[0]["lr"] = before.get_last_lr()[0]  # comes with the optimizer
    load_schedule(after, json.loads(json.dumps(schedule_state(before))))
    for schedule in (before, after) * 3:
        schedule.optimizer.step()
        schedule.step()
    assert after.get_last_lr() == before.get_last_lr() == [pytest.approx(0.01)]


def test_a_step_of_ones_own_tells_the_whole_loss(tmp_path):
    class Mine(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch)

    def model():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        return transformers.BertForQuestionAnswering(config)

    data = [
        {"input_ids": [1, 2, 3, 4], "attention_mask": [1] * 4, "start_positions": i % 4, "end_positions": 3}
        for i in range(8)
    ]
    found = []
    for kind in (Trainer, Mine):
        args = arguments(tmp_path / kind.__name__, max_steps=1, label_names=["start_positions", "end_positions"])
        trainer = kind(model().eval(), args, train_dataset=data, eval_dataset=data)
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("method", ["_prepare_inputs", "floating_point_ops", "compute_loss_context_manager"])
def test_a_method_that_training_would_not_call_is_refused(tmp_path, method):
    kind = type("Mine", (Trainer,), {method: lambda self, *_: None})
    with pytest.raises(ConfigError, match=f"Mine overrides {method}, which samestep never calls"):
        kind(tiny_llama(), arguments(tmp_path), train_dataset=rows(8))
