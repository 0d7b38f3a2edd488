"""Fine-tunes a chat model on the bundled conversations: only the answers are targets, rows keep their own length.

examples/smollm2.sh                                              # once: fetches SmolLM2-135M
python THIS_FILE examples/models/smollm2 runs/fine_tune --steps 20
"""

import argparse
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed

from samestep.hf import Trainer, TrainingArguments

DATA = Path(__file__).parent.parent / "data" / "chitchat_120.jsonl"


def rows(tokenizer, length):
    """One row a conversation; the labels are the answers, each with its end token, and -100 elsewhere."""
    for line in DATA.read_text(encoding="utf-8").splitlines():
        ids, labels = [], []
        for message in json.loads(line)["messages"]:
            text = f"{message['role']}: {message['content']}"
            turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids += turn
            labels += turn if message["role"] == "assistant" else [-100] * len(turn)
        yield {"input_ids": ids[:length], "labels": labels[:length]}


parser = argparse.ArgumentParser()
parser.add_argument("model", help="a folder or a name on the Hub")
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

set_seed(42)
tokenizer = AutoTokenizer.from_pretrained(options.model)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
samples = [row for row in rows(tokenizer, length=512) if any(label >= 0 for label in row["labels"][1:])]
arguments = TrainingArguments(
    options.output,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=options.steps,
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=options.steps,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
    args=arguments,
    train_dataset=samples[10:],
    eval_dataset=samples[:10],
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    processing_class=tokenizer,
)
trainer.evaluate()
trainer.train()
trainer.save_model()
