"""The face for Hugging Face models: `from samestep.hf import Trainer, TrainingArguments` (docs/hf_trainer.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.hf.arguments import TrainingArguments
    from samestep.hf.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments"]

_HOMES = {"Trainer": "samestep.hf.trainer", "TrainingArguments": "samestep.hf.arguments"}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, and transformers with them."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'samestep.hf' has no attribute {name!r}")
