"""Checkpoints of the Trainer for Hugging Face models: complete or not there, exact to go on from, no pickle."""

import json
import os
import pickle
import random
import shutil
import signal

import numpy as np
import pytest
import torch
import transformers
from hf_cases import arguments, difference, logged, rows, tiny_llama, weights

from samestep.errors import CheckpointError, ConfigError
from samestep.hf import Trainer
from samestep.hf.checkpoint import find, folders
from samestep.run.storage import defect

SETTINGS = {
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "train_sampling_strategy": "random",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
}


def trainer(folder, *, seed=0, kind=Trainer, model=None, **settings):
    model = model or tiny_llama(seed, dropout=0.2)
    return kind(
        model=model,
        args=arguments(folder, **(SETTINGS | settings)),
        train_dataset=rows(11, uneven=True),
        eval_dataset=rows(4),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 6 steps in 2 epochs with dropout, saved after each."""
    folder = tmp_path_factory.mktemp("whole")
    found = trainer(folder)
    found.train()
    return found, folder


def resumed(folder, whole, resume, **settings):
    again = trainer(folder, seed=5, **settings)
    again.train(resume_from_checkpoint=resume)
    return difference(weights(again.model), weights(whole[0].model)), again


@pytest.mark.parametrize("step", [1, 2, 3, 4, 6])
def test_a_run_goes_on_bit_exactly(step, whole, tmp_path):
    """In the middle of an epoch, at its end (step 3), and at the end of the run."""
    distance, again = resumed(tmp_path, whole, str(whole[1] / f"checkpoint-{step}"))
    assert distance == 0
    assert [row.get("loss") for row in again.state.log_history] == [
        row.get("loss") for row in whole[0].state.log_history
    ]
    assert again.state.epoch == 2 and again.state.global_step == 6


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd", "adafactor", "rmsprop"])
def test_any_optimizer_goes_on_bit_exactly(optimizer, tmp_path):
    first = trainer(tmp_path / "a", optim=optimizer)
    first.train()
    assert resumed(tmp_path / "b", (first, None), str(tmp_path / "a" / "checkpoint-4"), optim=optimizer)[0] == 0


def test_float32_masters_go_on_bit_exactly(tmp_path):
    first = trainer(tmp_path / "a", model=tiny_llama(dtype=torch.bfloat16))
    first.train()
    again = trainer(tmp_path / "b", model=tiny_llama(5, dtype=torch.bfloat16))
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert difference(again.updater.masters, first.updater.masters) == 0


def adapted(seed):
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def tied(seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def of_experts(seed):
    """Whose weights are stored under other names, and in other shapes, than it holds them."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "bos_token_id": None}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, eos_token_id=None, output_router_logits=True)
    )


class Plain(torch.nn.Module):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)

    def forward(self, input_ids, labels=None):
        logits = self.out(self.embed(input_ids))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("make", [adapted, tied, of_experts, Plain])
def test_any_model_goes_on_bit_exactly(make, tmp_path):
    first = trainer(tmp_path / "a", model=make(0))
    first.train()
    again = trainer(tmp_path / "b", model=make(5))
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert difference(weights(again.model), weights(first.model)) == 0


def test_random_numbers_of_the_users_code_go_on(tmp_path):
    class Drawing(transformers.TrainerCallback):
        def __init__(self):
            self.drawn = []

        def on_step_end(self, args, state, control, **kwargs):
            self.drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))

    first, again = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    one, other = Drawing(), Drawing()
    first.add_callback(one)
    again.add_callback(other)
    first.train()
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert other.drawn == one.drawn[2:]


def copied(whole, folder):
    for step in (2, 3):
        shutil.copytree(whole[1] / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return folder


def test_the_newest_complete_one_is_taken(whole, tmp_path, caplog):
    root = copied(whole, tmp_path)
    file = next((root / "checkpoint-3" / "optimizer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    distance, again = resumed(root, whole, True)
    assert distance == 0
    assert (root / "checkpoint-3" / "complete.json").is_file() and again.state.global_step == 6


@pytest.mark.parametrize(
    "name", ["optimizer", "samestep.json", "model.safetensors", "complete.json", "trainer_state.json"]
)
def test_what_is_missing_is_told(name, whole, tmp_path):
    folder = copied(whole, tmp_path) / "checkpoint-3"
    target = folder / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with pytest.raises(CheckpointError, match=r"missing|complete\.json"):
        trainer(tmp_path).train(resume_from_checkpoint=str(folder))


def test_nothing_to_go_on_from_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="begin without resume_from_checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_a_checkpoint_of_transformers_is_not_unpickled(tmp_path):
    args = arguments(tmp_path, transformers.TrainingArguments, max_steps=1, save_strategy="steps", save_steps=1)
    transformers.Trainer(model=tiny_llama(), args=args, train_dataset=rows(4)).train()
    with pytest.raises(CheckpointError, match=r"was written by transformers\.Trainer.*from_pretrained"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_nothing_is_unpickled(whole, tmp_path, monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError("unpickled")

    again = trainer(tmp_path, seed=5)
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    again.train(resume_from_checkpoint=str(whole[1] / "checkpoint-4"))
    assert difference(weights(again.model), weights(whole[0].model)) == 0


def test_a_checkpoint_without_optimizer_ends_in_a_clear_error(tmp_path):
    first = trainer(tmp_path, save_only_model=True)
    first.train()
    assert not (tmp_path / "checkpoint-6" / "optimizer").exists()
    with pytest.raises(CheckpointError, match="save_only_model"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_another_optimizer_ends_in_a_clear_error(whole, tmp_path):
    with pytest.raises(CheckpointError, match="optimizer AdamW, but this run has SGD"):
        trainer(tmp_path, optim="sgd", optim_args="momentum=0.9").train(
            resume_from_checkpoint=str(whole[1] / "checkpoint-4")
        )


def test_another_model_ends_in_a_clear_error(whole, tmp_path):
    config = transformers.LlamaConfig.from_pretrained(whole[1] / "checkpoint-4")
    config.intermediate_size = 40
    with pytest.raises(CheckpointError, match="shape"):
        trainer(tmp_path, model=transformers.LlamaForCausalLM(config)).train(
            resume_from_checkpoint=str(whole[1] / "checkpoint-4")
        )


def test_what_cannot_be_stored_is_told_before_the_run(tmp_path):
    class Schedule(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self):
            return {"function": print}

    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    run = Trainer(
        model=model,
        args=arguments(tmp_path, **SETTINGS),
        train_dataset=rows(4),
        optimizers=(optimizer, Schedule(optimizer, lambda step: 1.0)),
    )
    with pytest.raises(ConfigError, match="without pickle"):
        run.train()
    assert not folders(tmp_path)


def test_old_ones_are_deleted_but_not_the_best(tmp_path):
    class Scripted(Trainer):
        def evaluate(self, *arguments, **settings):
            metrics = {"eval_loss": {2: 1.0}.get(self.state.global_step, 2.0)}
            self.log(metrics)
            return metrics

    found = trainer(
        tmp_path,
        kind=Scripted,
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
    )
    found.train()
    assert [folder.name for folder in folders(tmp_path)] == ["checkpoint-2", "checkpoint-6"]
    best = tiny_llama().from_pretrained(tmp_path / "checkpoint-2")
    assert difference(weights(found.model), weights(best)) == 0


def test_checkpoints_of_an_earlier_run_are_not_in_the_way(tmp_path):
    """Neither are they deleted, nor is the run resumed from them, though their steps are later."""
    trainer(tmp_path, max_steps=6, save_steps=3).train()
    trainer(tmp_path, max_steps=2, save_total_limit=1).train()
    assert [folder.name for folder in folders(tmp_path)] == ["checkpoint-2", "checkpoint-3", "checkpoint-6"]
    assert find(True, tmp_path).path.name == "checkpoint-2"


def test_only_the_best_may_be_saved(tmp_path):
    class Scripted(Trainer):
        def evaluate(self, *arguments, **settings):
            metrics = {"eval_loss": [9, 5.0, 7.0, 4.0, 6.0, 8.0, 9.0][self.state.global_step]}
            self.log(metrics)
            return metrics

    trainer(
        tmp_path, kind=Scripted, eval_strategy="steps", eval_steps=1, save_strategy="best", metric_for_best_model="loss"
    ).train()
    assert [folder.name for folder in folders(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


class Dying(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(folder):
    """In a process of its own."""
    torch.set_num_threads(1)
    trainer(folder, kind=Dying).train()


def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_run(whole, tmp_path, workers):
    process = workers.Process(target=train_and_die, args=(tmp_path,))
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    assert [folder.name for folder in folders(tmp_path)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert all(defect(folder, "optimizer") is None for folder in folders(tmp_path))
    assert list(tmp_path.glob(".writing-checkpoint-4/model.safetensors"))
    assert resumed(tmp_path, whole, True)[0] == 0
    assert not list(tmp_path.glob(".writing-*"))


def test_a_full_disk_leaves_older_checkpoints(tmp_path, monkeypatch):
    class Full(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            if self.state.global_step == 2:
                raise OSError(28, "No space left on device")
            super()._save(output_dir, state_dict)

    with pytest.raises(CheckpointError, match="No space left"):
        trainer(tmp_path, kind=Full).train()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-1"]


def test_the_state_of_callbacks_comes_back(tmp_path):
    early = transformers.EarlyStoppingCallback(early_stopping_patience=100)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    settings |= {"load_best_model_at_end": True, "learning_rate": 0.0}
    first = trainer(tmp_path, **settings)
    first.add_callback(early)
    first.train()
    counted = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert counted["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"] == 3
    again = trainer(tmp_path / "b", restore_callback_states_from_checkpoint=True, **settings)
    again.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=4))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.global_step == 6


def test_the_loss_of_a_resumed_run_is_the_same(whole, tmp_path):
    again = trainer(tmp_path, seed=5)
    again.train(resume_from_checkpoint=str(whole[1] / "checkpoint-4"))
    assert logged(again) == logged(whole[0])
    assert logged(again, "learning_rate") == logged(whole[0], "learning_rate")
