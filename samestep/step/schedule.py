"""Learning-rate schedules: a pure function of the number of updates made so far."""

from __future__ import annotations

import math
from collections.abc import Callable

from samestep.config.schema import LrSchedulerConfig

Schedule = Callable[[int], float]


def make_schedule(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """Updates made -> learning rate of the next update.

    Warm-up: `warmup_lr_init + (peak - warmup_lr_init) * t / warmup` for t < warmup. After it, with
    p = (t - warmup) / (total - warmup) held at 1 beyond the end:
    `constant` peak; `linear` lr_end + (peak - lr_end) * (1 - p);
    `cosine` lr_end + (peak - lr_end) * (1 + cos(2 pi num_cycles p)) / 2, and lr_end from the end on.
    """
    peak, end, start = config.learning_rate, config.lr_end, config.warmup_lr_init
    warmup = config.warmup_steps if config.warmup_ratio is None else round(config.warmup_ratio * total_steps)

    def rate(updates: int) -> float:
        if updates < warmup:
            return start + (peak - start) * updates / warmup
        if config.type == "constant":
            return peak
        if updates >= total_steps:
            return end
        progress = (updates - warmup) / (total_steps - warmup)
        if config.type == "linear":
            return end + (peak - end) * (1 - progress)
        return end + (peak - end) * 0.5 * (1 + math.cos(2 * math.pi * config.num_cycles * progress))

    return rate
