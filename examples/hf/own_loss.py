"""A loss of one's own: the focal loss (Lin et al. 2017) of the next token, which weighs down what is easy already.

python THIS_FILE runs/own_loss --steps 30
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator, set_seed

from samestep.hf import Trainer, TrainingArguments

DATA = Path(__file__).parent.parent / "data" / "shakespeare_quickstart.txt"


class FocalTrainer(Trainer):
    loss_is_scaled_for_ga = True  # the loss is a sum, divided by the number of targets of the whole global batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:].flatten()
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels, reduction="none", ignore_index=-100)
        focal = (1 - torch.exp(-losses)) ** 2 * losses
        if num_items_in_batch is None:  # in an evaluation
            num_items_in_batch = (labels != -100).sum()
        loss = focal.sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


parser = argparse.ArgumentParser()
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()

set_seed(42)
tokens = list(DATA.read_bytes())
pieces = [tokens[start : start + 64] for start in range(0, 64 * 800, 64)]
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
arguments = TrainingArguments(
    options.output,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_steps=options.steps,
    learning_rate=2e-3,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
)
trainer = FocalTrainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
    data_collator=default_data_collator,
)
trainer.train()
