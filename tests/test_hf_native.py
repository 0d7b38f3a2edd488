"""`Trainer(..., native=True)`: models of transformers run by samestep's decoder take the step of one big batch."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_cases import arguments, cut, difference, logged, rows, summed_loss, tiny_llama, true_run, weights
from hf_models import SIZES, built, causal, collated, error, llama, texts, truth, with_labels
from torch import nn

from samestep.data.batch import NOWHERE
from samestep.errors import ConfigError, DataError
from samestep.hf import Trainer
from samestep.hf.native import native_batch
from samestep.launch import run_ranks
from samestep.parallel.mesh import join

ONE_HEAD = {"num_key_value_heads": 1}


def gpt2(dropout=0.0) -> nn.Module:
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return built("GPT2LMHeadModel", transformers.GPT2Config, **sizes, eos_token_id=1, **rates)


FAMILIES = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True, attention_bias=True),
    "qwen2": lambda: built("Qwen2ForCausalLM", transformers.Qwen2Config, **(SIZES | ONE_HEAD)),
    "qwen3": lambda: built("Qwen3ForCausalLM", transformers.Qwen3Config, **(SIZES | ONE_HEAD | {"head_dim": 16})),
    "mistral": lambda: built(
        "MistralForCausalLM", transformers.MistralConfig, **(SIZES | ONE_HEAD | {"sliding_window": 5})
    ),
    "gpt2": gpt2,
}


class Gradients(transformers.TrainerCallback):
    """Of the latest step, before they are clipped."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_step(model, samples, folder, size=8, collate=collated, **changes):
    """Gradients of one step of 8 samples, and the trainer that took it."""
    seen = Gradients()
    settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": -(-8 // size), "max_steps": 1}
    trainer = Trainer(
        model=model,
        args=arguments(folder, **(settings | changes)),
        train_dataset=samples,
        data_collator=collate,
        callbacks=[seen],
        native=True,
    )
    trainer.train()
    return seen.found, trainer


def left(part):
    return collated(part, left=True)


def flattened(part):
    """As a padding-free collator lays documents: end to end in one row."""
    inputs = {name: torch.cat([sample[name] for sample in part])[None] for name in ("input_ids", "labels")}
    return inputs | {"position_ids": torch.cat([torch.arange(len(sample["input_ids"])) for sample in part])[None]}


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_whole_batch(name, tmp_path):
    """Whatever the split and the collator. In float64 rotary angles of transformers are still float32, so that the
    splits are compared with each other."""
    samples = with_labels(texts())
    loss, wanted = truth(FAMILIES[name](), samples, causal)
    for size, collate in ((8, collated), (2, left), (1, collated)):
        found, trainer = one_step(FAMILIES[name](), samples, tmp_path, size, collate)
        assert error(found, wanted) <= 1e-6, size
        assert logged(trainer) == [pytest.approx(loss, rel=1e-6)]
    whole, _ = one_step(FAMILIES[name]().double(), samples, tmp_path)
    for size, collate in ((3, left), (2, collated)):
        found, _ = one_step(FAMILIES[name]().double(), samples, tmp_path, size, collate)
        assert error(found, whole) <= 1e-12
    assert error(whole, wanted) <= (1e-12 if name == "gpt2" else 1e-6)


def first_label_dropped(samples):
    """A document that follows another is not predicted from it."""
    for sample in samples:
        sample["labels"][0] = -100
    return samples


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_documents_laid_end_to_end_do_not_see_each_other(name, tmp_path):
    samples = first_label_dropped(with_labels(texts()))
    _, wanted = truth(FAMILIES[name](), samples, causal)
    for size in (8, 3):
        found, _ = one_step(FAMILIES[name](), samples, tmp_path, size, flattened)
        assert error(found, wanted) <= 1e-6


def test_smoothed_labels(tmp_path):
    samples = with_labels(texts())
    _, wanted = truth(llama(), samples, lambda model, row: causal(model, row, 0.2))
    found, _ = one_step(llama(), samples, tmp_path, 3, label_smoothing_factor=0.2)
    assert error(found, wanted) <= 1e-6


def test_frozen_weights_stay_and_cost_no_gradient(tmp_path):
    samples, model = with_labels(texts()), llama()
    model.model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    _, wanted = truth(model, samples, causal)
    found, _ = one_step(model, samples, tmp_path, 3)
    assert "lm_head.weight" not in found and error(found, wanted) <= 1e-6


def two_documents_a_row(part):
    """Rows that hold the two halves of a sample as documents of their own, all of one width."""
    rows = []
    for sample in part:
        size = len(sample["input_ids"])
        places = torch.cat([torch.arange(size // 2), torch.arange(size - size // 2)])
        ids, labels = (F.pad(sample[name], (0, 20 - size), value=value) for name, value in FILLS)
        rows.append({"input_ids": ids, "labels": labels, "position_ids": F.pad(places, (0, 20 - size))})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


FILLS = (("input_ids", 0), ("labels", -100))


@pytest.mark.parametrize("collate", [collated, left, flattened, two_documents_a_row])
def test_dropout_does_not_depend_on_the_split(collate, tmp_path):
    """No such thing is possible with the layers of transformers, which know no samples. A model that comes in
    evaluation mode, as from `from_pretrained`, drops as well."""
    samples = with_labels(texts())
    whole, _ = one_step(gpt2(0.3).double().eval(), samples, tmp_path, 8, collate)
    still, _ = one_step(gpt2().double(), samples, tmp_path, 8, collate)
    assert error(whole, still) > 0.1
    for size in (4, 3, 1):
        found, _ = one_step(gpt2(0.3).double(), samples, tmp_path, size, collate)
        assert error(found, whole) <= 1e-12


def test_padding_has_no_gradient_of_its_own(tmp_path):
    """The embedding of transformers gives the row of `pad_token_id` none, also where it is a token of the text."""
    samples = with_labels(texts())
    samples[0]["input_ids"][:3] = 5
    for make in (llama, lambda **fields: llama(tie_word_embeddings=True, **fields)):
        _, wanted = truth(make(pad_token_id=5), samples, causal)
        for size in (8, 3):
            found, _ = one_step(make(pad_token_id=5), samples, tmp_path, size)
            assert error(found, wanted) <= 1e-6


class Replaces(transformers.TrainerCallback):
    """Puts other parameters, or other memory, into the model before a step."""

    def __init__(self, factor, in_place):
        self.factor, self.in_place = factor, in_place

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.in_place:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone() * self.factor
        else:
            state_dict = {name: tensor * self.factor for name, tensor in model.state_dict().items()}
            model.load_state_dict(state_dict, assign=True)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_weights_that_are_replaced_are_seen(make, in_place, tmp_path):
    samples, model = with_labels(texts()), make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.5
    loss, _ = truth(model, samples, causal)
    args = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1, bf16=True)
    trainer = Trainer(
        model=make(),
        args=args,
        train_dataset=samples,
        data_collator=collated,
        callbacks=[Replaces(0.5, in_place)],
        native=True,
    )
    trainer.train()
    assert logged(trainer) == [pytest.approx(loss, rel=1e-3)]
    assert logged(trainer) != [pytest.approx(truth(make(), samples, causal)[0], rel=1e-3)]


def test_no_gradient_stays_sparse_after_the_run(tmp_path):
    _, trainer = one_step(llama(), with_labels(texts()), tmp_path, 4)
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, collated(with_labels(texts()))).backward()
    assert trainer.model.model.embed_tokens.weight.grad.layout == torch.strided


def test_every_step_has_masks_of_its_own(tmp_path):
    samples = with_labels(texts())
    found = []
    for steps in (1, 2):
        model = gpt2(0.3)
        gradients, _ = one_step(model, samples, tmp_path, max_steps=steps, learning_rate=0.0)
        found.append(gradients)
    assert error(found[1], {name: g.double() for name, g in found[0].items()}) > 0.1


def test_recomputation_keeps_the_bits(tmp_path):
    samples = with_labels(texts())
    for make in (llama, lambda: gpt2(0.3)):
        plain, _ = one_step(make(), samples, tmp_path, 3)
        for settings in (None, {"every_n_layers": 2}):
            changes = {"activation_checkpointing": True, "activation_checkpointing_kwargs": settings}
            found, _ = one_step(make(), samples, tmp_path, 3, **changes)
            assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_products_in_bfloat16(tmp_path):
    """Their error does not grow with the number of micro-batches."""
    samples = with_labels(texts())
    _, wanted = truth(llama(), samples, causal)
    errors = [error(one_step(llama(), samples, tmp_path, size, bf16=True)[0], wanted) for size in (8, 1)]
    assert 1e-4 < errors[0] < 3e-2 and errors[1] <= 1.1 * errors[0]


RUN = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}


def run(folder, model, native=True, resume=None, **changes):
    data = rows(13, uneven=True)
    args = arguments(folder, **(RUN | changes))
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=rows(5), native=native)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_runs_are_those_of_one_big_batch_and_go_on_exactly(tmp_path):
    """13 samples in windows of 4; what was saved is the model, for transformers and for either kind of passes."""
    model = tiny_llama()
    losses = true_run(model, cut(rows(13, uneven=True), 4) * 2)
    trainer = run(tmp_path / "whole", tiny_llama())
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    assert difference(weights(trainer.model), weights(model)) < 1e-4
    middle = str(tmp_path / "whole" / "checkpoint-4")
    resumed = run(tmp_path / "resumed", tiny_llama(seed=7), resume=middle)
    assert difference(weights(resumed.model), weights(trainer.model)) == 0
    other = run(tmp_path / "other", tiny_llama(seed=7), native=False, resume=middle)
    assert difference(weights(other.model), weights(trainer.model)) < 1e-5
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-8")
    assert difference(weights(read), weights(trainer.model)) == 0
    prompt = torch.tensor([[3, 1, 4]])
    written = [m.generate(prompt, max_new_tokens=5, do_sample=False).tolist() for m in (read, trainer.model)]
    assert written[0] == written[1]


def test_evaluation_and_predictions_are_those_of_the_model(tmp_path):
    samples = with_labels(texts())
    for make in (llama, gpt2):
        model = make()
        args = arguments(tmp_path, per_device_eval_batch_size=3)
        trainer = Trainer(model=model, args=args, data_collator=left, native=True)
        loss, _ = truth(make(), samples, causal)
        assert trainer.evaluate(samples)["eval_loss"] == pytest.approx(loss, rel=1e-6)
        unlabelled = [{"input_ids": sample["input_ids"]} for sample in samples]
        for data in (samples, unlabelled):
            found = trainer.predict(data).predictions
            for row, sample in zip(found, samples, strict=True):
                wanted = model(input_ids=sample["input_ids"][None]).logits[0].detach().numpy()
                here = row[(row != -100).all(-1)][-len(wanted) :]
                assert abs(here - wanted).max() < 1e-5


def test_a_row_of_padding_alone_changes_nothing(tmp_path):
    samples = with_labels(texts())
    _, wanted = truth(llama(), samples, causal)

    def with_empty(part):
        inputs = collated([*part, {name: value[:1] for name, value in part[0].items()}])
        inputs["attention_mask"][-1], inputs["labels"][-1] = 0, -100
        return inputs

    found, trainer = one_step(llama(), samples, tmp_path, 3, with_empty)
    assert error(found, wanted) <= 1e-6 and trainer.last_report.samples == 11


def test_nothing_is_padded_and_nothing_is_lost():
    inputs = collated(with_labels(texts()), left=True)
    batch = native_batch(inputs, 64, first=8)
    assert batch.input_ids.shape == (1, int(inputs["attention_mask"].sum()))
    assert (batch.document_ids != NOWHERE).all() and set(batch.sample_ids[0].tolist()) == set(range(8, 16))
    values = torch.randn(1, batch.positions, 3)
    whole = batch.as_collated(values)
    assert torch.equal(whole[inputs["attention_mask"] != 0], values[0])
    assert not whole[inputs["attention_mask"] == 0].any()


# ---- what is refused


def messages(model, tmp_path, **options):
    with pytest.raises(ConfigError) as caught:
        changes = options.pop("args", {})
        trainer = Trainer(
            model=model, args=arguments(tmp_path, max_steps=1, **changes), train_dataset=rows(4), native=True, **options
        )
        trainer.train()
    return str(caught.value)


class Other(transformers.LlamaForCausalLM):
    """Might compute anything."""


def test_models_that_the_decoder_is_not_are_refused(tmp_path):
    assert "the decoder has no Other; it has GPT2LMHeadModel, " in messages(Other(tiny_llama().config), tmp_path)
    assert "the decoder has no MixtralForCausalLM" in messages(
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**(SIZES | ONE_HEAD))), tmp_path
    )
    changed = tiny_llama()
    changed.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    assert "the decoder gives other logits than this LlamaForCausalLM" in messages(changed, tmp_path)
    far = llama()
    far.model.rotary_emb.inv_freq[-1] *= 1.01  # seen at far positions only
    assert "the decoder gives other logits" in messages(far, tmp_path)
    without = gpt2(0.3)
    without.transformer.drop.p = 0.0
    assert "has the dropout rate 0.0, which its config.json does not tell" in messages(without, tmp_path)
    assert "attention_dropout: Input should be less than 1" in messages(tiny_llama(dropout=1.0), tmp_path)
    mixed = tiny_llama()
    mixed.lm_head.bfloat16()
    assert "several kinds: torch.bfloat16, torch.float32" in messages(mixed, tmp_path)
    split = llama(tie_word_embeddings=True)
    split.lm_head.weight = nn.Parameter(split.lm_head.weight.detach().clone())
    assert "ties the head to the embedding" in messages(split, tmp_path)


def test_adapters_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = tiny_llama()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), adapted)
    assert "adapters" in messages(adapted, tmp_path)
    assert "the decoder has no PeftModelForCausalLM" in messages(
        peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, task_type="CAUSAL_LM")), tmp_path
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neftune_noise_alpha", 5.0),
        ("bf16_full_eval", True),
        ("torch_compile_mode", "max-autotune"),
        ("label_names", ["targets"]),
        ("activation_checkpointing_kwargs", {"offload": True}),
        ("activation_checkpointing_kwargs", {"every_n_layers": 0}),
    ],
)
def test_arguments_that_need_the_model_are_refused(name, value, tmp_path):
    assert name in messages(tiny_llama(), tmp_path, args={name: value})


def test_losses_of_ones_own_are_refused(tmp_path):
    assert "a loss of your own" in messages(tiny_llama(), tmp_path, compute_loss_func=lambda *given, **named: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda i: i | {"token_type_ids": i["input_ids"]},
            "collator made attention_mask, input_ids, labels, token_type_ids",
        ),
        (lambda i: i | {"attention_mask": i["attention_mask"][:, None]}, "attention_mask as [rows, positions]"),
        (
            lambda i: i | {"position_ids": i["attention_mask"].cumsum(1) + 50},
            "position 69, but the model has",
        ),
        (lambda i: i | {"labels": i["input_ids"].clone()}, "write -100 into labels wherever attention_mask is 0"),
    ],
)
def test_inputs_that_the_decoder_does_not_take_are_refused(change, message):
    with pytest.raises(DataError) as caught:
        native_batch(change(collated(with_labels(texts()))), 64)
    assert message in str(caught.value)


# ---- two ranks


def work(folder):
    """All cases in one start of the ranks, which takes longer than they do."""
    join(timeout=60)
    found = {}
    for kind, changes in (
        ("replicated", {}),
        ("sharded", {"fsdp": True}),
        ("sharded bf16", {"fsdp": True, "model": tiny_llama().bfloat16()}),
    ):
        settings = {"per_device_train_batch_size": 1, **changes}
        trainer = run(folder / kind, settings.pop("model", None) or tiny_llama(), **settings)
        predictions = trainer.predict(rows(5)).predictions
        found[kind] = {
            "loss": logged(trainer),
            "weights": weights(trainer.model),
            "predictions": torch.as_tensor(predictions),
            "eval_loss": trainer.evaluate()["eval_loss"],
        }
    read = transformers.AutoModelForCausalLM.from_pretrained(folder / "sharded bf16" / "checkpoint-8", dtype="auto")
    config = json.loads((folder / "sharded bf16" / "checkpoint-8" / "config.json").read_text())
    found["stored"] = config["dtype"], read.lm_head.weight.dtype
    middle = str(folder / "sharded" / "checkpoint-4")
    resumed = run(folder / "go on", tiny_llama(seed=7), resume=middle, per_device_train_batch_size=1, fsdp=True)
    found["resumed"] = weights(resumed.model)
    args = arguments(folder / "look first", **RUN, per_device_train_batch_size=1, fsdp=True)
    looked = Trainer(
        model=tiny_llama(seed=7), args=args, train_dataset=rows(13, uneven=True), eval_dataset=rows(5), native=True
    )
    looked.evaluate()
    looked.train(resume_from_checkpoint=middle)
    found["evaluated, resumed"] = weights(looked.model)
    found["gpt2"] = messages(gpt2(), folder / "gpt2", args={"fsdp": True})
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, 2, tmp_path_factory.mktemp("ranks"), timeout=150)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_ranks_take_the_step_of_one(kind, ranks):
    first, second = ranks
    model = tiny_llama()
    losses = true_run(model, cut(rows(13, uneven=True), 4) * 2)
    assert first[kind]["loss"] == second[kind]["loss"] == pytest.approx(losses, rel=1e-5)
    assert difference(first[kind]["weights"], second[kind]["weights"]) == 0
    assert difference(first[kind]["weights"], weights(model)) < 1e-4
    total, targets = summed_loss(model, rows(5))
    assert first[kind]["eval_loss"] == pytest.approx(float(total.detach()) / targets, rel=1e-5)
    wanted = torch.stack([model(input_ids=row["input_ids"][None]).logits[0] for row in rows(5)]).detach()
    assert (first[kind]["predictions"] - wanted).abs().max() < 1e-3


def test_weights_of_16_bits(ranks, tmp_path):
    """They have float32 masters, or shards, so the run is close to that in float32."""
    losses = true_run(tiny_llama(), cut(rows(13, uneven=True), 4) * 2)
    assert ranks[0]["sharded bf16"]["loss"] == pytest.approx(losses, rel=2e-2)
    assert ranks[0]["stored"] == ("bfloat16", torch.bfloat16)
    trainer = run(tmp_path, tiny_llama().bfloat16())
    assert logged(trainer) == pytest.approx(losses, rel=2e-2)
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16


def test_a_sharded_run_goes_on_exactly(ranks):
    for kind in ("resumed", "evaluated, resumed"):
        assert difference(ranks[0][kind], ranks[0]["sharded"]["weights"]) == 0
    assert "gpt2 keeps weights joined" in ranks[0]["gpt2"]
