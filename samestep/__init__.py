"""samestep: the optimizer step is what you asked for, however the global batch is split."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep.config.load import load
    from samestep.config.schema import Config
    from samestep.errors import SamestepError
    from samestep.plan import make_plan
    from samestep.run.trainer import Events, Trainer

__version__ = "0.1.0"
__all__ = ["Config", "Events", "SamestepError", "Trainer", "load", "make_plan"]

_HOMES = {
    "Config": "samestep.config.schema",
    "Events": "samestep.run.trainer",
    "SamestepError": "samestep.errors",
    "Trainer": "samestep.run.trainer",
    "load": "samestep.config.load",
    "make_plan": "samestep.plan",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: `import samestep` stays fast."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")
