"""Traces of chosen steps by torch.profiler, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from samestep.config.schema import ProfilerConfig
from samestep.errors import ConfigError


class StepProfiler:
    """Records the steps `start_step` to `end_step` of a run into one trace, each step a named range.

    Args:
        folder: of the trace, where the settings name none.
        rank: of this process.

    Raises:
        ConfigError: nothing would be recorded on this device.
    """

    def __init__(self, settings: ProfilerConfig, folder: Path, device: torch.device, rank: int = 0):
        ranks = settings.profiler_rank
        self.enabled = settings.enable_profiling and (ranks is None or rank in ranks)
        self._settings, self._rank = settings, rank
        self._folder = Path(settings.output_path) if settings.output_path else folder
        self._activities = [ProfilerActivity.CPU] if settings.profile_cpu else []
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        if self.enabled and not self._activities:
            raise ConfigError(
                "without CPU work nothing is left to record on a CPU", field="profiler.profile_cpu", fix="write true"
            )
        self._recording: profile | None = None
        self._steps = (0, 0)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the work of one step."""
        if not self.enabled or not self._settings.start_step <= number <= self._settings.end_step:
            yield
            return
        if self._recording is None:
            self._start(number)
        with record_function(f"step {number}"):
            yield
        self._steps = (self._steps[0], number)

    def _start(self, number: int) -> None:
        settings = self._settings
        self._recording = profile(
            activities=self._activities,
            record_shapes=settings.profiler_level >= 1,
            with_flops=settings.profiler_level >= 2,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
        )
        self._steps = (number, number)
        self._recording.start()

    def finished(self, number: int) -> Path | None:
        """After a step: the trace, if that was the last step to record."""
        return self.close() if number >= self._settings.end_step else None

    def close(self) -> Path | None:
        """Write what was recorded; None if there is nothing."""
        if self._recording is None:
            return None
        recording, self._recording = self._recording, None
        recording.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{self._steps[0]}-{self._steps[1]}-rank-{self._rank}.json.gz"
        recording.export_chrome_trace(str(path))
        return path
