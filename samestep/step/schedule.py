"""Learning-rate schedules: a pure function of the number of updates made so far."""

from __future__ import annotations

import math
from collections.abc import Callable

from samestep.config.schema import LrSchedulerConfig

Schedule = Callable[[int], float]


def make_schedule(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """Updates made -> learning rate of the next update; between 0 and the peak, and defined beyond the end.

    Warm-up: `warmup_lr_init + (peak - warmup_lr_init) * t / warmup` for t < warmup. The shapes after it are in the
    docstrings below; wherever one has a progress p, it is held at 1 from the end of the decay on.
    """
    peak, start = config.learning_rate, config.warmup_lr_init
    warmup = config.warmup_updates(total_steps)
    shape = _SHAPES[config.type](config, total_steps)

    def rate(updates: int) -> float:
        return start + (peak - start) * updates / warmup if updates < warmup else shape(updates)

    return rate


def _progress(updates: int, begin: int, end: int) -> float:
    if updates >= end:
        return 1.0
    return (updates - begin) / (end - begin) if updates > begin else 0.0


def _half_wave(fraction: float) -> float:
    """From 1 at 0 to 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * fraction))


def _decay(config: LrSchedulerConfig, total_steps: int, remaining: Callable[[float], float]) -> Schedule:
    """end + (peak - end) * remaining(p), where p goes from 0 to 1 over the decay."""
    peak, end = config.learning_rate, config.setting("lr_end")
    first, last = config.decay_span(total_steps)
    return lambda updates: end + (peak - end) * remaining(_progress(updates, first, last))


def _constant(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """The peak."""
    return lambda updates: config.learning_rate


def _constant_with_cooldown(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """The peak for `keep_steps`, (1 + cos(2 pi num_cycles p)) / 2 down to lr_end, and lr_end2 `final_steps` later."""
    decay = _cosine(config, total_steps)
    last = config.decay_span(total_steps)[1] + config.setting("final_steps")
    after = config.lr_end2
    return lambda updates: decay(updates) if after is None or updates < last else after


def _linear(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """1 - p."""
    return _decay(config, total_steps, lambda p: 1 - p)


def _cosine(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """(1 + cos(2 pi num_cycles p)) / 2 (Loshchilov and Hutter 2017, without restarts, for num_cycles 0.5)."""
    cycles = config.setting("num_cycles")
    return _decay(config, total_steps, lambda p: _half_wave(2 * cycles * p))


def _cosine_with_restarts(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """(1 + cos(pi (num_cycles p mod 1))) / 2; at the end a whole cycle counts as finished, not as begun."""
    cycles = config.setting("num_cycles")

    def remaining(progress: float) -> float:
        fraction = cycles * progress % 1.0
        return _half_wave(1.0 if progress == 1.0 and fraction == 0.0 else fraction)

    return _decay(config, total_steps, remaining)


def _polynomial(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """(1 - p) ** power."""
    power = config.setting("power")
    return _decay(config, total_steps, lambda p: (1 - p) ** power)


def _wsd(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """Warm-up, stable, decay (Hu et al. 2024): `linear` 1 - p, `cosine` (1 + cos(pi p)) / 2, `sqrt` 1 - sqrt(p)
    (Haegele et al. 2024)."""
    shapes = {"linear": lambda p: 1 - p, "cosine": _half_wave, "sqrt": lambda p: 1 - math.sqrt(p)}
    return _decay(config, total_steps, shapes[config.setting("decay_type")])


def _inverse_sqrt(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """peak * sqrt(timescale / (t - warmup + timescale)) (Vaswani et al. 2017 where timescale is the warm-up)."""
    warmup = config.warmup_updates(total_steps)
    timescale = config.timescale or warmup or 10_000
    return lambda updates: config.learning_rate * math.sqrt(timescale / (updates - warmup + timescale))


def _cosine_annealing(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """(1 + cos(pi t / t_max)) / 2 with t since the warm-up; rises again after t_max (Loshchilov and Hutter 2017)."""
    peak, end = config.learning_rate, config.setting("lr_end")
    warmup = config.warmup_updates(total_steps)
    half_wave = config.t_max or max(1, total_steps - warmup)
    return lambda updates: end + (peak - end) * _half_wave((updates - warmup) / half_wave)


def _cosine_annealing_warm_restarts(config: LrSchedulerConfig, total_steps: int) -> Schedule:
    """(1 + cos(pi t_cur / t_i)) / 2 in cycles of t_i = t_0 * t_mult ** i updates (SGDR, Loshchilov and Hutter 2017)."""
    peak, end = config.learning_rate, config.setting("lr_end")
    warmup = config.warmup_updates(total_steps)
    first, factor = config.setting("t_0"), config.setting("t_mult")

    def rate(updates: int) -> float:
        inside, length = updates - warmup, first
        if factor == 1:
            inside %= length
        while inside >= length:
            inside, length = inside - length, length * factor
        return end + (peak - end) * _half_wave(inside / length)

    return rate


_SHAPES: dict[str, Callable[[LrSchedulerConfig, int], Schedule]] = {
    "constant": _constant,
    "constant_with_cooldown": _constant_with_cooldown,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_annealing": _cosine_annealing,
    "cosine_annealing_warm_restarts": _cosine_annealing_warm_restarts,
}
