"""Tiny Hugging Face models and samples of each kind, and the fp64 truth of their steps: one sample at a time, without
padding, in plain torch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from samestep.config.schema import OptimizerConfig
from samestep.hf.batch import ModelBatch
from samestep.ops.gradient_sink import GradientSink
from samestep.parallel.data import GradientReduction
from samestep.parallel.mesh import Mesh
from samestep.step.step import TrainStep
from samestep.step.update import Updater

VOCABULARY, SAMPLES = 61, 8
SMOOTHING = 0.2
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
Samples = list[dict[str, torch.Tensor]]


def built(kind: str, config, **fields) -> nn.Module:
    torch.manual_seed(3)
    model = getattr(transformers, kind)(config(**fields))
    with torch.no_grad():  # as far from the start as a trained one, so that mistakes show
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


def llama(kind="LlamaForCausalLM", **fields) -> nn.Module:
    return built(kind, transformers.LlamaConfig, **(SIZES | {"num_key_value_heads": 1} | fields))


def bert(kind: str, **fields) -> nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return built(kind, transformers.BertConfig, **(SIZES | off | fields))


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return built(
        "T5ForConditionalGeneration", transformers.T5Config, **sizes, dropout_rate=0.0, decoder_start_token_id=0
    )


def bart() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    return built(
        "BartForConditionalGeneration",
        transformers.BartConfig,
        **sizes,
        max_position_embeddings=64,
        dropout=0.0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=3,
        forced_eos_token_id=None,
    )


def mixtral(coefficient=0.5) -> nn.Module:
    return built(
        "MixtralForCausalLM",
        transformers.MixtralConfig,
        **(SIZES | {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}),
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        sliding_window=None,
        experts_implementation="eager",  # the faster ones know no float64
    )


def adapters() -> nn.Module:
    """A language model whose low-rank adapters alone are trained, away from their start of zeros."""
    import peft

    model = llama()
    torch.manual_seed(4)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    adapted = peft.get_peft_model(model, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return adapted


def texts(count=SAMPLES, lengths=(19, 4, 12, 7, 16, 3, 9, 14)) -> Samples:
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(4, VOCABULARY, (n,), generator=generator)} for n in lengths[:count]]


def with_labels(samples: Samples, keep=(1.0, 0.3, 0.8, 0.0, 0.5, 0.9, 0.2, 0.6), classes=VOCABULARY) -> Samples:
    """Labels at a share of the positions: many, few, and none."""
    generator = torch.Generator().manual_seed(6)
    for sample, share in zip(samples, keep, strict=False):
        size = sample["input_ids"].shape
        labels = torch.randint(classes, size, generator=generator)
        sample["labels"] = labels.masked_fill(torch.rand(size, generator=generator) >= share, -100)
    return samples


def labels_of_rows(kind: str) -> Samples:
    make = {
        "one": lambda generator: torch.randint(3, (), generator=generator),
        "several": lambda generator: torch.randint(2, (3,), generator=generator).float(),
        "number": lambda generator: torch.randn((), generator=generator),
        "numbers": lambda generator: torch.randn(3, generator=generator),
    }[kind]
    samples, generator = texts(), torch.Generator().manual_seed(7)
    for sample in samples:
        sample["labels"] = make(generator)
    return samples


def answers() -> Samples:
    samples = texts()
    for i, sample in enumerate(samples):
        size = len(sample["input_ids"])
        sample["start_positions"] = torch.tensor(size + 3 if i == 2 else i % size)
        sample["end_positions"] = torch.tensor(size + 1 if i in (2, 4) else size - 1)
    return samples


def pairs() -> Samples:
    samples = texts()
    generator = torch.Generator().manual_seed(8)
    for sample, size in zip(samples, (3, 11, 5, 1, 8, 2, 13, 4), strict=True):
        sample["labels"] = torch.randint(4, VOCABULARY, (size,), generator=generator)
    return samples


def collated(samples: Samples, left=False) -> dict[str, torch.Tensor]:
    """Padded to the longest, with a mask."""
    fills = {"labels": -100, "input_ids": 0}
    samples = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in samples]
    inputs = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if len({value.shape for value in values}) > 1:
            width = max(map(len, values))
            pads = [(width - len(v), 0) if left else (0, width - len(v)) for v in values]
            values = [F.pad(v, pad, value=fills.get(name, 0)) for v, pad in zip(values, pads, strict=True)]
        inputs[name] = torch.stack(values)
    return inputs


def micro_batches(samples: Samples, size: int, collate=collated, **options) -> list[ModelBatch]:
    parts = [samples[i : i + size] for i in range(0, len(samples), size)]
    return [ModelBatch(collate(part), len(part), **options) for part in parts]


def one_step(model, objective, batches, mesh=None, reduction=None, **options):
    """What a step reports, and its gradients before they are clipped."""
    mesh = mesh or Mesh.alone()
    named = list(model.named_parameters())
    dtype = torch.promote_types(named[0][1].dtype, torch.float32)
    updater = Updater(named, OptimizerConfig(weight_decay=0.0), lambda updates: 0.0)
    sink = GradientSink(named, dtype)
    reduction = reduction or GradientReduction(model, mesh, "once_per_step", dtype)
    step = TrainStep(model, objective, updater, sink, reduction, mesh, max_norm=None, loss_dtype=dtype, **options)
    seen: dict[str, torch.Tensor] = {}
    report = step(batches, on_gradients=lambda found: seen.update({name: g.clone() for name, g in found.items()}))
    return report, seen


def truth(model, samples, terms) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in fp64; `terms(model, row)` -> [(weight, sum, count)] of a batch of one."""
    model = copy.deepcopy(model).double().train()
    found = [terms(model, row) for row in rows_of(samples)]
    loss = sum(
        parts[0][0] * sum(part[1] for part in parts) / sum(part[2] for part in parts)
        for parts in zip(*found, strict=True)
    )
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def rows_of(samples: Samples) -> Samples:
    return [{name: value[None] for name, value in sample.items()} for sample in samples]


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, relative to their norm."""
    assert wanted.keys() <= found.keys()
    assert all(not found[name].any() for name in found.keys() - wanted.keys())
    square = sum(float((found[name].double() - wanted[name]).square().sum()) for name in wanted)
    return (square / sum(float(g.square().sum()) for g in wanted.values())) ** 0.5


# ---- the truth of each kind, of one sample


def cross_entropy(logits, targets, smoothing=0.0):
    """Sum and count, written out."""
    kept = targets != -100
    log_p = logits[kept].log_softmax(-1)
    nll = -log_p.gather(1, targets[kept][:, None]).sum()
    return (1 - smoothing) * nll - smoothing * log_p.mean(1).sum(), int(kept.sum())


def causal(model, row, smoothing=0.0):
    logits = model(input_ids=row["input_ids"]).logits
    return [(1.0, *cross_entropy(logits[0, :-1], row["labels"][0, 1:], smoothing))]


def smoothed(model, row):
    return causal(model, row, SMOOTHING)


def per_position(model, row):
    return [(1.0, *cross_entropy(model(input_ids=row["input_ids"]).logits[0], row["labels"][0]))]


def one_class(model, row):
    return [(1.0, *cross_entropy(model(input_ids=row["input_ids"]).logits, row["labels"]))]


def several_classes(model, row):
    logits, wanted = model(input_ids=row["input_ids"]).logits, row["labels"].double()
    p = logits.sigmoid()
    return [(1.0, -(wanted * p.log() + (1 - wanted) * (1 - p).log()).sum(), wanted.numel())]


def numbers(model, row):
    logits = model(input_ids=row["input_ids"]).logits
    return [(1.0, (logits.flatten() - row["labels"].flatten().double()).square().sum(), row["labels"].numel())]


def answer(model, row):
    outputs = model(input_ids=row["input_ids"])
    terms = []
    for logits, name in ((outputs.start_logits, "start_positions"), (outputs.end_logits, "end_positions")):
        place = int(row[name])
        inside = place < logits.shape[1]
        terms.append((0.5, -logits[0].log_softmax(-1)[place] if inside else logits.sum() * 0, int(inside)))
    return terms


def seq2seq(model, row):
    shifted = torch.cat([torch.tensor([[model.config.decoder_start_token_id]]), row["labels"][:, :-1]], 1)
    logits = model(input_ids=row["input_ids"], decoder_input_ids=shifted).logits
    return [(1.0, *cross_entropy(logits[0], row["labels"][0]))]


def truth_of_mixture(model, samples) -> tuple[float, dict[str, torch.Tensor]]:
    """Cross-entropy and balance loss of a whole batch, as the paper writes them."""
    model = copy.deepcopy(model).double().train()
    losses, count, routers = [], 0, []
    for row in rows_of(samples):
        outputs = model(input_ids=row["input_ids"])
        total, targets = cross_entropy(outputs.logits[0, :-1], row["labels"][0, 1:])
        losses.append(total)
        count += targets
        routers += outputs.router_logits
    p = torch.cat(routers).softmax(-1)
    chosen = F.one_hot(p.topk(2).indices, p.shape[1]).sum(1).double()
    balance = p.shape[1] * (chosen.mean(0) * p.mean(0)).sum()
    loss = sum(losses) / count + model.config.router_aux_loss_coef * balance
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


CASES = {
    "causal": (llama, lambda: with_labels(texts()), causal),
    "causal, head tied": (lambda: llama(tie_word_embeddings=True), lambda: with_labels(texts()), causal),
    "masked": (lambda: bert("BertForMaskedLM"), lambda: with_labels(texts()), per_position),
    "tokens": (
        lambda: bert("BertForTokenClassification", num_labels=5),
        lambda: with_labels(texts(), classes=5),
        per_position,
    ),
    "tokens of a decoder": (
        lambda: llama("LlamaForTokenClassification", num_labels=5, classifier_dropout=0.0),
        lambda: with_labels(texts(), classes=5),
        per_position,
    ),
    "class": (lambda: bert("BertForSequenceClassification", num_labels=3), lambda: labels_of_rows("one"), one_class),
    "class of a decoder": (
        lambda: llama("LlamaForSequenceClassification", num_labels=3),
        lambda: labels_of_rows("one"),
        one_class,
    ),
    "classes": (
        lambda: llama("LlamaForSequenceClassification", num_labels=3),
        lambda: labels_of_rows("several"),
        several_classes,
    ),
    "number": (
        lambda: llama("LlamaForSequenceClassification", num_labels=1),
        lambda: labels_of_rows("number"),
        numbers,
    ),
    "numbers": (
        lambda: bert("BertForSequenceClassification", num_labels=3, problem_type="regression"),
        lambda: labels_of_rows("numbers"),
        numbers,
    ),
    "answer": (lambda: bert("BertForQuestionAnswering"), answers, answer),
    "t5": (t5, pairs, seq2seq),
    "bart": (bart, pairs, seq2seq),
}
"""Kind of head -> model, samples, truth of a sample."""
