"""A first configuration: the fields most runs set, each with its help from the schema as a comment."""

from __future__ import annotations

import textwrap
from typing import Any

from samestep.config.document import literal
from samestep.config.fields import FIELDS

DATA_FILE = "text.txt"

_VALUES: dict[str, Any] = {
    "output_dir": "runs/first",
    "tokenizer.type": "auto",
    "tokenizer.vocab_size": 4096,
    "training.steps": 1000,
    "training.global_batch_size": 16,
    "training.local_batch_size": 8,
    "training.max_norm": 1.0,
    "training.seed": 42,
    "optimizer.type": "AdamW",
    "optimizer.betas": [0.9, 0.95],
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.type": "cosine",
    "lr_scheduler.learning_rate": 1e-3,
    "lr_scheduler.lr_end": 1e-4,
    "lr_scheduler.warmup_ratio": 0.05,
    "train_dataset.path": DATA_FILE,
    "train_dataset.rows": "cut",
    "train_dataset.split": "tail",
    "train_dataset.eval_fraction": 0.1,
    "evaluation.interval_steps": 100,
    "model.model_type": None,
    "model.seq_length": 128,
    "model.hidden_size": 128,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 4,
    "model.compute_dtype": "float32",
    "checkpoint.save_interleaved_steps": 500,
    "checkpoint.keep_best": True,
    "monitor.log_interval": 10,
}
"""Small enough to learn on a laptop's CPU."""


def template(family: str) -> str:
    """YAML that trains a small model of `family` on the text file `DATA_FILE` beside it."""
    lines = [f"# Train a small {family} on {DATA_FILE}. All fields: docs/config.md, or `samestep schema`."]
    section = ""
    for name, value in {**_VALUES, "model.model_type": family}.items():
        home, _, leaf = name.rpartition(".")
        if home != section:
            section = home
            lines += ["", *_comment(home, ""), f"{home}:"]
        indent = "  " if home else ""
        lines += [*_comment(name, indent), f"{indent}{leaf}: {_plain(value)}"]
    return "\n".join(lines) + "\n"


def _comment(field: str, indent: str) -> list[str]:
    text = " ".join((FIELDS[field].description or "").split())
    return textwrap.wrap(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else literal(value)
