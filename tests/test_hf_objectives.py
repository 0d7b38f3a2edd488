"""Objectives of Hugging Face models against the fp64 truth."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import (
    CASES,
    SAMPLES,
    SIZES,
    SMOOTHING,
    adapters,
    bart,
    bert,
    built,
    causal,
    collated,
    cross_entropy,
    error,
    labels_of_rows,
    llama,
    micro_batches,
    mixtral,
    one_class,
    one_step,
    pairs,
    smoothed,
    texts,
    truth,
    truth_of_mixture,
    with_labels,
)
from torch import nn

from samestep.errors import ConfigError, DataError
from samestep.hf.autocast import AutocastObjective
from samestep.hf.batch import ModelBatch
from samestep.hf.objectives import dropout_seed, objective_for
from samestep.step.step import NO_TARGETS


def gradients_of(model, samples, size, collate=collated, **options):
    """Of one step, and what it reports."""
    model = copy.deepcopy(model)
    report, found = one_step(model, objective_for(model, **options), micro_batches(samples, size, collate))
    return found, report


# ---- heads that are known


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_whole_batch_however_it_is_split(name):
    """D1: bs8 x ga1, bs2 x ga4 and bs1 x ga8 in fp32; bs3 x ga3, whose last is shorter, in fp64."""
    make, data, terms = CASES[name]
    model, samples = make(), data()
    loss, wanted = truth(model, samples, terms)
    for size in (8, 2, 1):
        found, report = gradients_of(model, samples, size)
        assert error(found, wanted) <= 1e-6, size
        assert report.loss == pytest.approx(loss, rel=1e-6)
    found, _ = gradients_of(model.double(), samples, 3)
    assert error(found, wanted) <= 1e-12


@pytest.mark.parametrize("size", [8, 3, 2, 1])
def test_smoothed_labels(size):
    model, samples = llama(), with_labels(texts())
    loss, wanted = truth(model, samples, smoothed)
    found, report = gradients_of(model, samples, size, label_smoothing_factor=SMOOTHING)
    assert error(found, wanted) <= 1e-6
    assert report.loss == pytest.approx(loss, rel=1e-6)


def smoothed_class(model, row):
    return [(1.0, *cross_entropy(model(input_ids=row["input_ids"]).logits, row["labels"], 0.2))]


def test_smoothed_labels_of_rows_and_of_what_has_no_classes():
    model, samples = bert("BertForSequenceClassification", num_labels=3), labels_of_rows("one")
    _, wanted = truth(model, samples, smoothed_class)
    found, _ = gradients_of(model, samples, 3, label_smoothing_factor=0.2)
    assert error(found, wanted) <= 1e-6
    with pytest.raises(ConfigError, match="label_smoothing_factor: BertForQuestionAnswering has no targets"):
        objective_for(bert("BertForQuestionAnswering"), label_smoothing_factor=0.2)
    number = llama("LlamaForSequenceClassification", num_labels=1)
    with pytest.raises(ConfigError, match="labels cannot be smoothed: regression"):
        gradients_of(number, labels_of_rows("number"), 3, label_smoothing_factor=0.2)


@pytest.mark.parametrize("size", [8, 3, 2, 1])
def test_the_balance_loss_of_experts_is_that_of_the_global_batch(size):
    """D6: routing shares and probabilities of all tokens of the step, padding aside."""
    model, samples = mixtral(), with_labels(texts())
    loss, wanted = truth_of_mixture(model, samples)
    found, report = gradients_of(model, samples, size)
    assert error(found, wanted) <= 1e-6
    assert report.loss == pytest.approx(loss, rel=1e-6)
    assert report.targets == sum(int((s["labels"][1:] != -100).sum()) for s in samples)
    found, _ = gradients_of(model.double(), samples, size)
    assert error(found, wanted) <= 1e-12


def test_experts_whose_balance_is_not_asked_for():
    model = mixtral()
    model.config.output_router_logits = False
    assert objective_for(model).weights == {"loss": 1.0}


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return built("GPT2LMHeadModel", transformers.GPT2Config, **sizes, eos_token_id=1, **off)


def roberta() -> nn.Module:
    """Its positions begin after that of padding."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return built("RobertaForCausalLM", transformers.RobertaConfig, **(SIZES | off), is_decoder=True)


@pytest.mark.parametrize("make", [llama, gpt2, roberta])
def test_padding_to_the_left_is_no_context_and_moves_no_position(make):
    model, samples = make(), with_labels(texts())
    samples[1]["labels"][0] = 7  # which padding would predict
    _, wanted = truth(model, samples, causal)
    for size in (8, 3):
        found, _ = gradients_of(model, samples, size, lambda part: collated(part, left=True))
        assert error(found, wanted) <= 1e-6


def flattened(samples):
    """Documents end to end in one row, as a padding-free collator lays them; labels of all their tokens."""
    positions = torch.cat([torch.arange(len(sample["input_ids"])) for sample in samples])
    inputs = {name: torch.cat([sample[name] for sample in samples])[None] for name in ("input_ids", "labels")}
    return inputs | {"position_ids": positions[None]}


def with_shift_labels(samples):
    shifted = [F.pad(sample["labels"][1:], (0, 1), value=-100) for sample in samples]
    return flattened(samples) | {"shift_labels": torch.cat(shifted)[None]}


@pytest.mark.parametrize("collate", [flattened, with_shift_labels])
def test_packed_documents_do_not_predict_each_other(collate):
    model, samples = llama(), with_labels(texts())
    for sample in samples:
        sample["labels"][0] = 9
    _, wanted = truth(model, samples, causal)
    for size in (8, 3):
        found, report = gradients_of(model, samples, size, collate)
        assert error(found, wanted) <= 1e-6
        assert report.targets == sum(int((s["labels"][1:] != -100).sum()) for s in samples)


def gemma2() -> nn.Module:
    fields = SIZES | {"num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 3.0}
    return built("Gemma2ForCausalLM", transformers.Gemma2Config, **fields, attn_implementation="eager")


def cohere() -> nn.Module:
    return built("CohereForCausalLM", transformers.CohereConfig, **SIZES, logit_scale=0.25, bos_token_id=1)


def granite() -> nn.Module:
    return built("GraniteForCausalLM", transformers.GraniteConfig, **SIZES, logits_scaling=4.0)


def phi() -> nn.Module:
    """Its head has a bias."""
    return built("PhiForCausalLM", transformers.PhiConfig, **SIZES)


@pytest.mark.parametrize(
    ("make", "has_logits"), [(llama, False), (gemma2, True), (cohere, True), (granite, True), (phi, True)]
)
def test_logits_are_left_out_only_where_nothing_is_done_to_them(make, has_logits):
    """Capped and scaled logits are seen in the first step, however small they are."""
    model, samples = make(), with_labels(texts())
    _, wanted = truth(model, samples, causal)
    objective = objective_for(model)
    _, found = one_step(model, objective, micro_batches(samples, 3))
    assert error(found, wanted) <= 1e-6
    assert objective.has_logits is has_logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)
    objective = objective_for(model)
    one_step(model, objective, micro_batches(samples, 3))
    assert objective.has_logits is has_logits


def test_evaluation_gives_the_same_sums_and_the_logits():
    model, samples = llama(), with_labels(texts())
    objective = objective_for(model)
    one_step(model, objective, micro_batches(samples, 8))
    (batch,) = micro_batches(samples, 8)
    model.eval()
    with torch.no_grad():
        sums, outputs = objective.sums_and_outputs(model, batch)
        assert outputs.logits.shape == (*batch.inputs["input_ids"].shape, 61)
        torch.testing.assert_close(objective.sums(model, batch), sums)


def test_a_step_without_targets_is_skipped():
    model = llama()
    report, _ = one_step(model, objective_for(model), micro_batches(with_labels(texts(), [0.0] * SAMPLES), 3))
    assert report.skipped == NO_TARGETS


@pytest.mark.parametrize(
    ("make", "data"), [(llama, lambda: with_labels(texts())), (mixtral, lambda: with_labels(texts())), (bart, pairs)]
)
def test_an_empty_micro_batch_moves_nothing(make, data):
    model, batches = make(), micro_batches(data(), 3)
    same = copy.deepcopy(model)
    _, wanted = one_step(same, objective_for(same), batches)
    report, found = one_step(model, objective_for(model), [*batches, batches[0].empty()])
    assert report.samples == SAMPLES
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_targets_that_cannot_be_counted():
    model = llama()
    with pytest.raises(DataError, match="'labels' is a list, not a tensor"):
        objective_for(model).counts(ModelBatch({"input_ids": torch.ones(1, 3).long(), "labels": [1, 2]}, 1))
    with pytest.raises(DataError, match="has no 'labels'"):
        objective_for(model).counts(ModelBatch({"input_ids": torch.ones(1, 3).long()}, 1))


def test_weights_of_16_bits_add_up_in_float32():
    """D9: 64 micro-batches come to the sum of their gradients, rounded nowhere on the way."""
    model = llama().bfloat16()
    samples = [sample for sample in with_labels(texts(), [1.0] * SAMPLES) for _ in range(8)]
    batches = micro_batches(samples, 1)
    copied = copy.deepcopy(model)
    objective = objective_for(copied, logits_free=False)
    _, found = one_step(copied, objective, batches)
    total = sum(objective.counts(batch)["loss"] for batch in batches)
    parts: dict[str, torch.Tensor] = {}
    for batch in batches:
        model.zero_grad()
        (objective_for(model).sums(model, batch)["loss"] / total).backward()
        for name, parameter in model.named_parameters():
            parts[name] = parts.get(name, 0) + parameter.grad.double()
    assert error(found, parts) <= 1e-6


def test_passes_in_bfloat16_are_no_further_from_the_truth_than_with_logits():
    """Weights of 32 bits, products of 16: the head's too, but the logits themselves are not rounded."""
    model, samples = llama(), with_labels(texts())
    _, wanted = truth(model, samples, causal)
    errors = {}
    for logits_free in (True, False):
        copied = copy.deepcopy(model)
        objective = AutocastObjective(
            objective_for(copied, logits_free=logits_free), torch.bfloat16, torch.device("cpu")
        )
        _, found = one_step(copied, objective, micro_batches(samples, 3))
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        errors[logits_free] = error(found, wanted)
    assert 1e-4 < errors[True] <= 1.2 * errors[False] < 0.05


def test_dropout_is_drawn_again_by_a_resumed_run():
    """D13: the masks go by (seed, step, first sample), whatever has been drawn before."""
    model, samples = bert("BertForMaskedLM", hidden_dropout_prob=0.3), with_labels(texts())

    def gradients(step):
        torch.rand(7)
        batches = micro_batches(samples, 4, seed=dropout_seed(1, step, 0))
        copied = copy.deepcopy(model)
        return one_step(copied, objective_for(copied), batches)[1]

    first, again, other = gradients(1), gradients(1), gradients(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert error(other, {name: g.double() for name, g in first.items()}) > 0.01


def test_adapters():
    pytest.importorskip("peft")
    model, samples = adapters(), with_labels(texts())
    _, wanted = truth(model, samples, causal)
    assert all("lora" in name for name in wanted)
    for size in (8, 3, 2, 1):
        found, _ = gradients_of(model, samples, size)
        assert error(found, wanted) <= 1e-6


def test_a_learned_prompt_predicts_the_first_token():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(llama(), settings)
    samples = with_labels(texts())

    def prompted(model, row):
        logits = model(input_ids=row["input_ids"], attention_mask=torch.ones_like(row["input_ids"])).logits
        return [(1.0, *cross_entropy(logits[0, 2:-1], row["labels"][0]))]

    _, wanted = truth(model, samples, prompted)
    for size in (8, 3, 2, 1):
        found, _ = gradients_of(model, samples, size)
        assert error(found, wanted) <= 1e-6


# ---- losses of the user


def of_outputs(outputs, labels, num_items_in_batch=None):
    """As in the documentation of the Trainer."""
    logits = outputs["logits"]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss / num_items_in_batch


def of_shifted_outputs(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize("scaled", [None, True])
@pytest.mark.parametrize("size", [8, 3, 2, 1])
def test_a_loss_divided_by_the_count(size, scaled, recwarn):
    for model, samples, function, terms in (
        (bert("BertForSequenceClassification", num_labels=3), labels_of_rows("one"), of_outputs, one_class),
        (llama(), with_labels(texts()), of_shifted_outputs, causal),
    ):
        loss, wanted = truth(model, samples, terms)
        options = {"compute_loss_func": function, "loss_is_scaled_for_ga": scaled}
        found, report = gradients_of(model, samples, size, **options)
        assert error(found, wanted) <= 1e-6
        assert report.loss == pytest.approx(loss, rel=1e-6)
    assert not recwarn.list


class MyTrainer:
    """What a subclass may write as `compute_loss`."""

    def scaled(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss_sum = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss = loss_sum / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def mean(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss

    def older(self, model, inputs, return_outputs=False):
        return self.mean(model, inputs, return_outputs)

    def mixed(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = sum(p.square().sum() for p in model.parameters())
        return self.scaled(model, inputs, False, num_items_in_batch) + 1e-3 * weights


@pytest.mark.parametrize("size", [8, 3, 2, 1])
@pytest.mark.parametrize(("name", "scaled"), [("scaled", True), ("scaled", None), ("mean", False), ("older", False)])
def test_an_override_of_compute_loss(name, scaled, size, recwarn):
    """D2, D3 and D4: unequal counts, some of 0; a mean is weighed by its own count."""
    model, samples = llama(), with_labels(texts())
    loss, wanted = truth(model, samples, causal)
    options = {"compute_loss": getattr(MyTrainer(), name), "loss_is_scaled_for_ga": scaled}
    found, report = gradients_of(model, samples, size, **options)
    assert error(found, wanted) <= 1e-6
    assert report.loss == pytest.approx(loss, rel=1e-6)
    assert not recwarn.list


def test_the_literal_rule_divides_by_the_micro_batches_that_were_run():
    model, samples = llama(), with_labels(texts(6), keep=(1.0, 0.3, 0.8, 0.6, 0.5, 0.9))
    exact = copy.deepcopy(model).double()
    means = []
    for i in range(0, 6, 2):
        batch = collated(samples[i : i + 2])
        logits = exact(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        means.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()))
    loss = torch.stack(means).mean()
    loss.backward()
    wanted = {name: p.grad for name, p in exact.named_parameters()}
    for options in ({}, {"compute_loss": MyTrainer().mean, "loss_is_scaled_for_ga": False}):
        copied = copy.deepcopy(model)
        objective = objective_for(copied, loss_normalization="micro_batch_mean", **options)
        report, found = one_step(copied, objective, micro_batches(samples, 2), micro_batch_mean=True)
        assert error(found, wanted) <= 1e-6
        assert report.loss == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "scaled", "text"),
    [
        ("mean", None, "should be divided by num_items_in_batch, but it is not"),
        ("older", None, "should be divided by num_items_in_batch, but it is not"),
        ("mixed", None, "only a part of it is"),
        ("mean", True, "it is True, but the loss is neither divided by num_items_in_batch nor a sum"),
        ("scaled", False, "it is False, but the loss is divided"),
    ],
)
def test_a_loss_that_is_not_what_it_is_said_to_be_ends_the_run(name, scaled, text):
    """D2: in the first step, with what to write instead."""
    options = {"compute_loss": getattr(MyTrainer(), name), "loss_is_scaled_for_ga": scaled}
    with pytest.raises(ConfigError, match=f"loss_is_scaled_for_ga: .*{text}"):
        gradients_of(llama(), with_labels(texts()), 3, **options)


def test_a_sum_divided_by_a_number_of_the_users_is_taken_as_it_is():
    """It is the same for every split, and says so (True)."""
    model, samples = llama(), with_labels(texts())

    def fixed(outputs, labels, num_items_in_batch=None):
        return of_shifted_outputs(outputs, labels, 50)

    _, wanted = truth(model, samples, lambda model, row: [(1.0, causal(model, row)[0][1], 50 / SAMPLES)])
    found, _ = gradients_of(model, samples, 3, compute_loss_func=fixed, loss_is_scaled_for_ga=True)
    assert error(found, wanted) <= 1e-6


def test_a_part_that_is_not_divided_is_told():
    options = {"compute_loss": MyTrainer().mixed, "loss_is_scaled_for_ga": True}
    with pytest.warns(UserWarning, match="a part of the loss is not divided by num_items_in_batch"):
        gradients_of(llama(), with_labels(texts()), 3, **options)


def unshifted(outputs, labels, num_items_in_batch=None):
    loss = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize("first", [-100, 5])
def test_positions_that_are_not_those_counted_are_told(first):
    """D4b: the documentation's function on a causal language model; also where the numbers happen to agree."""
    samples = with_labels(texts())
    for sample in samples:
        sample["labels"][0] = first
    with pytest.warns(UserWarning, match=r"compares .* rows of the logits with labels"):
        gradients_of(llama(), samples, 3, compute_loss_func=unshifted)


@pytest.mark.parametrize("size", [8, 4, 2])
def test_a_mean_with_class_weights_is_told(size):
    """It is divided by the sum of the weights. Every micro-batch has both classes as often, in the same order."""

    def weighed(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 3.0]))

    model, samples = bert("BertForSequenceClassification", num_labels=2), labels_of_rows("one")
    for i, sample in enumerate(samples):
        sample["labels"] = torch.tensor(i % 2)
    with pytest.warns(UserWarning, match="a mean with class weights is none"):
        gradients_of(model, samples, size, compute_loss_func=weighed, loss_is_scaled_for_ga=False)


def test_a_mean_over_something_else_is_told():
    def of_rows(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, labels[:, 1:], reduction="none").sum(1).mean()

    options = {"compute_loss_func": of_rows, "loss_is_scaled_for_ga": False}
    with pytest.warns(UserWarning, match="should be the mean over the targets of its micro-batch"):
        gradients_of(llama(), with_labels(texts()), 4, **options)


def test_a_function_of_outputs_gets_those_of_a_decoder_that_needs_the_labels():
    def summed(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch

    model, samples = bart(), pairs()
    _, wanted = truth(model, samples, CASES["bart"][2])
    found, _ = gradients_of(model, samples, 3, compute_loss_func=summed)
    assert error(found, wanted) <= 1e-6


# ---- heads that are not known


class Foreign(nn.Module):
    """Predicts the label of each position, and averages as it pleases."""

    def __init__(self, mean):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out, self.mean = nn.Embedding(61, 8), nn.Linear(8, 61), mean

    def forward(self, input_ids, attention_mask=None, labels=None, num_items_in_batch=None):
        logits = self.out(self.embed(input_ids).tanh())
        if labels is None:
            return {"logits": logits}
        return {"loss": self.mean(logits, labels, num_items_in_batch), "logits": logits}


def over_targets(logits, labels, count):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def by_count(logits, labels, count):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def over_rows(logits, labels, count):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1).mean()


def foreign(model, row):
    return [(1.0, *cross_entropy(model(row["input_ids"])["logits"][0], row["labels"][0]))]


@pytest.mark.parametrize("mean", [over_targets, by_count])
@pytest.mark.parametrize("size", [8, 3, 2, 1])
def test_the_loss_of_an_unknown_head(mean, size):
    model, samples = Foreign(mean), with_labels(texts())
    _, wanted = truth(model, samples, foreign)
    found, _ = gradients_of(model, samples, size)
    assert error(found, wanted) <= 1e-6


@pytest.mark.parametrize("size", [8, 3, 2, 1])
def test_an_unknown_head_that_averages_otherwise_ends_the_run(size):
    with pytest.raises(ConfigError, match="Foreign is no head that is known"):
        gradients_of(Foreign(over_rows), with_labels(texts()), size)


class Renamed(transformers.LlamaForCausalLM):
    """A causal language model by name, whose loss is another: each position predicts its own label."""

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask=attention_mask)
        if labels is not None:
            outputs["loss"] = F.cross_entropy(outputs.logits[:, 1:].flatten(0, 1), labels[:, 1:].flatten())
        return outputs


@pytest.mark.parametrize("size", [8, 3])
def test_a_head_that_is_not_what_its_name_says_is_trained_by_its_own_loss(size):
    torch.manual_seed(3)
    model, samples = Renamed(llama().config), with_labels(texts())

    def terms(model, row):
        return [(1.0, *cross_entropy(model(row["input_ids"]).logits[0, 1:], row["labels"][0, 1:]))]

    _, wanted = truth(model, samples, terms)
    found, _ = gradients_of(model, samples, size)
    assert error(found, wanted) <= 1e-6


class Named(Foreign):
    def forward(self, input_ids, attention_mask=None, marks=None):
        return super().forward(input_ids, labels=marks)


def test_labels_of_another_name():
    def collate(part):
        inputs = collated(part)
        return inputs | {"marks": inputs.pop("labels")}

    samples = with_labels(texts())
    _, wanted = truth(Foreign(over_targets), samples, foreign)
    found, _ = gradients_of(Named(over_targets), samples, 3, collate, label_names=["marks"])
    assert error(found, wanted) <= 1e-6


# ---- micro-batches


def test_halves_are_rows_and_what_has_no_rows_has_no_halves():
    (batch,) = micro_batches(with_labels(texts(5)), 5, seed=3)
    assert batch.is_divisible
    first, second = batch.halves()
    assert (first.samples, second.samples, first.rows, second.rows) == (2, 3, 2, 3)
    assert first.seed != second.seed
    for name, value in batch.inputs.items():
        assert torch.equal(torch.cat([first.inputs[name], second.inputs[name]]), value)
    assert (batch.tokens, batch.positions) == (19 + 4 + 12 + 7 + 16, 5 * 19)
    packed = ModelBatch(flattened(with_labels(texts(5))), 5)
    assert not packed.is_divisible
    axes = ModelBatch({**batch.inputs, "position_ids": torch.zeros(5, 5, 19)}, 5)
    assert not axes.is_divisible


def test_a_micro_batch_that_does_not_fit_is_run_in_halves(monkeypatch):
    model, samples = llama(), with_labels(texts())
    _, wanted = truth(model, samples, causal)
    objective = objective_for(model)
    sums = objective.sums

    def tight(model, batch):
        if batch.rows > 2:
            raise torch.OutOfMemoryError("no")
        return sums(model, batch)

    monkeypatch.setattr(objective, "sums", tight)
    report, found = one_step(model, objective, micro_batches(samples, 8))
    assert error(found, wanted) <= 1e-6
    assert report.accumulation_steps == 1
