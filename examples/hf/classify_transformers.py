"""A classification head: was a line of Shakespeare a question? The mark at its end is cut off first.

python THIS_FILE runs/classify --steps 60
"""

import argparse
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    set_seed,
)

from transformers import Trainer, TrainingArguments

DATA = Path(__file__).parent.parent / "data" / "shakespeare_quickstart.txt"


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


parser = argparse.ArgumentParser()
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

set_seed(42)
lines = [line.strip() for line in DATA.read_text(encoding="utf-8").splitlines()]
questions = [line for line in lines if line.endswith("?")]
others = [line for line in lines if line.endswith(".")][: len(questions)]
trained = ByteLevelBPETokenizer()
trained.train_from_iterator(lines, vocab_size=1000, special_tokens=["<pad>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<pad>")
samples = [
    {"input_ids": tokenizer(line[:-1])["input_ids"], "labels": label}
    for pair in zip(questions, others, strict=True)
    for line, label in zip(pair, (1, 0), strict=True)
    if len(line) > 8
]
config = BertConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    num_labels=2,
)
arguments = TrainingArguments(
    options.output,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    max_steps=options.steps,
    learning_rate=1e-3,
    logging_steps=20,
    eval_strategy="steps",
    eval_steps=options.steps,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=samples[200:],
    eval_dataset=samples[:200],
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=accuracy,
)
trainer.train()
