"""The Trainer for Hugging Face models on two ranks: the step of one, whatever each of them has."""

import pytest
import torch
from hf_cases import arguments, cut, difference, logged, rows, summed_loss, tiny_llama, true_run, weights

from samestep.errors import ConfigError
from samestep.hf import Trainer
from samestep.launch import run_ranks
from samestep.parallel.mesh import join

pytestmark = pytest.mark.usefixtures("workers")

WINDOWS = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 3}
HALF = {"per_device_eval_batch_size": 2, "save_strategy": "steps", "save_steps": 2}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def adapted(seed=0):
    """Low-rank adapters, away from their start of zeros, on a model that is not trained."""
    from peft import LoraConfig, get_peft_model

    model = tiny_llama(seed)
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def run(folder, data, make=tiny_llama, **settings):
    args = arguments(folder, **settings)
    model = make(seed=args.process_index)  # those of the first rank count
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=rows(5))
    trainer.train()
    found = weights(trainer.model)
    return {
        "loss": logged(trainer),
        "grad_norm": logged(trainer, "grad_norm"),
        "eval_loss": logged(trainer, "eval_loss"),
        "weights": found,
        "predictions": trainer.predict(rows(5)).predictions,
    }


def work(folder):
    """All cases in one start of the ranks, which takes longer than they do."""
    join(timeout=60)
    data = rows(13, uneven=True)
    found = {
        "replicated": run(folder / "replicated", data, **WINDOWS, **HALF),
        "sharded": run(folder / "sharded", data, fsdp=True, **WINDOWS, **HALF),
        "adapters": run(folder / "adapters", data, adapted, **WINDOWS),
        "adapters, sharded": run(folder / "adapters, sharded", data, adapted, fsdp=True, **WINDOWS),
        "one sample": run(folder / "one", data[:1], num_train_epochs=2),
        "stream": run(folder / "stream", Stream(data), gradient_accumulation_steps=2, max_steps=4),
    }
    refused = {
        "adafactor": {"optim": "adafactor"},
        "no such layer": {"fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecodeLayer"]}},
    }
    for kind, settings in refused.items():
        try:
            run(folder / kind, data, max_steps=1, fsdp=True, **settings)
        except ConfigError as error:
            found[kind] = str(error)
    for kind in ("replicated", "sharded"):
        args = arguments(folder / kind, **WINDOWS, **HALF, fsdp=kind == "sharded")
        trainer = Trainer(model=tiny_llama(seed=7), args=args, train_dataset=data, eval_dataset=rows(5))
        trainer.train(resume_from_checkpoint=str(folder / kind / "checkpoint-2"))
        found[f"resumed {kind}"] = {"weights": weights(trainer.model)}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return *run_ranks(work, 2, folder, timeout=150), folder


@pytest.fixture(scope="module")
def truth():
    model, data = tiny_llama(), rows(13, uneven=True)
    losses = true_run(model, cut(data, 8) * 2)
    total, targets = summed_loss(model, rows(5))
    return losses, float(total.detach()) / targets, weights(model)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_ranks_take_the_step_of_one(kind, found, truth):
    """D10: 13 samples in windows of 8: the last one leaves rank 1 with 2 samples, rank 0 with 3, none of them twice."""
    first, second, _ = (ranks[kind] if isinstance(ranks, dict) else None for ranks in found)
    losses, eval_loss, wanted = truth
    assert first["loss"] == second["loss"] and first["grad_norm"] == second["grad_norm"]
    assert first["loss"] == pytest.approx(losses, rel=1e-5)
    assert difference(first["weights"], second["weights"]) == 0
    assert difference(first["weights"], wanted) < 1e-4
    assert first["eval_loss"][-1] == pytest.approx(eval_loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["adapters", "adapters, sharded"])
def test_two_ranks_train_adapters_as_one(kind, found):
    """And no other weight."""
    model, first = adapted(), found[0][kind]
    before = weights(model)
    losses = true_run(model, cut(rows(13, uneven=True), 8) * 2)
    wanted = weights(model)
    moved = {name for name in before if not torch.equal(before[name], wanted[name])}
    assert moved == {name for name in before if "lora" in name}
    assert first["loss"] == pytest.approx(losses, rel=1e-5)
    assert difference(first["weights"], found[1][kind]["weights"]) == 0
    assert difference(first["weights"], wanted) < 1e-4
    assert all(torch.equal(first["weights"][name], before[name]) for name in before.keys() - moved)


def test_predictions_come_in_the_order_of_the_data(found):
    first, second, _ = found
    model = tiny_llama()
    model.load_state_dict(first["replicated"]["weights"], strict=False)
    wanted = torch.stack([model(input_ids=row["input_ids"][None]).logits[0] for row in rows(5)]).detach().numpy()
    assert abs(first["replicated"]["predictions"] - wanted).max() < 1e-5
    assert (second["replicated"]["predictions"] == first["replicated"]["predictions"]).all()


def test_a_rank_may_have_nothing(found):
    model, data = tiny_llama(), rows(1, uneven=True)
    losses = true_run(model, [data, data])
    assert found[0]["one sample"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert difference(found[1]["one sample"]["weights"], weights(model)) < 1e-4


def test_a_stream_is_dealt_out_as_well(found):
    """The tail window of 5 samples is stepped, and nothing of it reaches the next pass."""
    model = tiny_llama()
    losses = true_run(model, cut(rows(13, uneven=True), 8) * 2)
    assert found[0]["stream"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert difference(found[0]["stream"]["weights"], weights(model)) < 1e-4


def test_an_optimizer_that_needs_whole_weights_is_refused(found):
    assert "Adafactor cannot work on the parts of a weight" in found[0]["adafactor"]


def test_a_misspelt_layer_is_refused(found):
    assert "LlamaForCausalLM has no layer of class LlamaDecodeLayer" in found[0]["no such layer"]
    assert "such as LlamaDecoderLayer" in found[0]["no such layer"]


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_run_goes_on_exactly(kind, found):
    first, _, _ = found
    assert difference(first[f"resumed {kind}"]["weights"], first[kind]["weights"]) == 0


def test_a_run_goes_on_with_another_number_of_ranks(found):
    first, _, folder = found
    for kind in ("replicated", "sharded"):
        settings = WINDOWS | HALF | {"gradient_accumulation_steps": 4}
        args = arguments(folder / "alone" / kind, **settings)
        data = rows(13, uneven=True)
        trainer = Trainer(model=tiny_llama(seed=7), args=args, train_dataset=data, eval_dataset=rows(5))
        trainer.train(resume_from_checkpoint=str(folder / kind / "checkpoint-2"))
        assert trainer.state.global_step == 4
        assert difference(weights(trainer.model), first[kind]["weights"]) < 1e-4
