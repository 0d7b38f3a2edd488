"""The loss scale of float16, in whose range small gradients would vanish."""

from __future__ import annotations

import torch

from samestep.config.schema import LossScaleConfig

_LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """What losses are multiplied by before their backward pass (Micikevicius et al. 2018, section 3.2).

    By the rules of PyTorch's `GradScaler`: a step whose gradients overflow lowers the scale by `backoff_factor`,
    `growth_interval` steps in a row without overflow raise it by `growth_factor`. Unlike there it never falls below
    `min_scale`: gradients that are not finite even then are not the scale's fault. A `fixed` scale stays as it is.

    It needs no word between ranks: all of them see the same norm.

    Attributes:
        scale: of the next step.
        good_steps: since the scale last changed.
    """

    def __init__(self, config: LossScaleConfig):
        self._config = config
        self.scale = config.first
        self.good_steps = 0

    def update(self, finite: bool) -> bool:
        """After a step that had targets; `finite` is its norm. Returns whether a lower scale is tried in the next."""
        config, before = self._config, self.scale
        if config.fixed is not None:
            return False
        if not finite:
            self.scale, self.good_steps = max(before * config.backoff_factor, config.min_scale), 0
            return self.scale < before
        self.good_steps += 1
        if self.good_steps >= config.growth_interval:
            grown, self.good_steps = before * config.growth_factor, 0
            self.scale = grown if grown <= _LARGEST else before
        return False

    def state(self) -> dict[str, float]:
        """JSON values for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        """Take over what `state` gave; a `fixed` scale stays as configured."""
        if self._config.fixed is None:
            self.scale, self.good_steps = state["scale"], int(state["good_steps"])
