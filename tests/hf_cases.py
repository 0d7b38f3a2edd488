"""Tiny models, data and a written-out truth for the tests of the Hugging Face Trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED = -100
RATE = 1e-2


def tiny_llama(seed: int = 0, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)


def rows(count: int, *, width: int = 8, seed: int = 1, uneven: bool = False) -> list[dict[str, torch.Tensor]]:
    """Samples of `width` tokens; with `uneven` from 1 target to all of them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = torch.randint(0, 32, (width,), generator=generator)
        labels = ids.clone()
        if uneven:
            labels[2 + number * 3 % (width - 1) :] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(folder: Path, kind: Any = None, **changes: Any) -> Any:
    from samestep.hf import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "sequential",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
    }
    return (kind or TrainingArguments)(**(settings | changes))


def summed_loss(model: nn.Module, batch: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """Sum of the cross-entropy over all targets of samples, one at a time, and their number."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for sample in batch:
        wanted = sample["labels"][1:]
        if (wanted != IGNORED).any():
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1].double()
            total = total + nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        targets += int((wanted != IGNORED).sum())
    return total, targets


def true_run(
    model: nn.Module, windows: list[list[dict[str, torch.Tensor]]], max_norm: float = 0.5, decay: float = 0.1
) -> list[float]:
    """Trains by one big batch a step, written out with plain PyTorch; returns the losses. Windows without targets are
    passed over."""
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for window in windows:
        optimizer.zero_grad()
        total, targets = summed_loss(model, window)
        if not targets:
            losses.append(math.nan)
            continue
        loss = total / targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def cut(samples: list[Any], size: int) -> list[list[Any]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def logged(trainer: transformers.Trainer, key: str = "loss") -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights, whole ones of sharded ones."""
    found = {name: p.detach() for name, p in model.named_parameters()}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for name, p in found.items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].detach().double() - other[name].detach().double()).abs().max()) for name in one)
