"""The loop of a run, whoever takes its steps: events, signals, when to evaluate and to save, and when it is over."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from samestep.parallel.mesh import Mesh
from samestep.step.step import OVERFLOW, StepReport

_SAME_SIGNAL_SECONDS = 1.0
"""A signal that comes again within this time is the same one, from the terminal and from the launcher."""


@dataclass
class RunState:
    """Counters of a run; all of it is in every checkpoint.

    Attributes:
        step: global batches consumed.
        updates: steps that were not skipped.
        consumed_samples: the cursor of the data.
        tokens: of the batches of all steps.
        consecutive_skips: skipped steps since the last update.
    """

    step: int = 0
    updates: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    skipped: int = 0
    consecutive_skips: int = 0


class Events:
    """Base of listeners; override what is of interest. `trainer` is the one whose run it is.

    Setting a flag asks the loop for something after the current step: `should_evaluate` and `should_save` once, then
    they are reset; `should_stop` ends the run with a save. What a listener raises ends the run; the error carries the
    listener's name as a note, and `events.jsonl` has it too.
    """

    should_stop = False
    should_save = False
    should_evaluate = False

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first step of this process; `trainer.state` is already that of the checkpoint."""

    def on_step_begin(self, trainer: Any) -> None:
        """Before the data of a step is fetched; `trainer.state.step` is still the step before."""

    def on_micro_batch(self, trainer: Any, index: int, sums: dict[str, torch.Tensor]) -> None:
        """After each backward pass, with the summed losses of the micro-batch, on the device. Reading them waits for
        the device."""

    def on_gradients(self, trainer: Any, gradients: Mapping[str, torch.Tensor]) -> None:
        """With the gradients of the whole step by name, before they are measured, clipped and used."""

    def on_step_end(self, trainer: Any, report: StepReport) -> None:
        """After the update or skip, when the row of the step is written."""

    def on_evaluate(self, trainer: Any, loss: float, targets: int) -> None:
        """After each evaluation; the loss is NaN if there was no target."""

    def on_save(self, trainer: Any, path: Path) -> None:
        """After a checkpoint is complete; with `checkpoint.async_save` that is some steps later."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last step, unless an error ended the run."""


@dataclass(frozen=True)
class Pace:
    """How long a run is and what it does on the way.

    Attributes:
        steps: the last one.
        evaluate_every, save_every: steps; 0 after the last one only; None when a listener asks for it, and then a save
            also when a signal or skipped steps end the run.
        skip_limit: skipped steps in a row that end the run; 0 for any number.
    """

    steps: int
    evaluate_every: int | None
    save_every: int | None
    skip_limit: int


@dataclass(frozen=True)
class Work:
    """What a trainer does for its loop.

    Attributes:
        begin: after the listeners heard of the beginning.
        take_step: fetches a global batch, counts it in the state, and trains on it.
        evaluate: returns whether what was found is to be saved.
        save: writes a checkpoint.
        end_step: after a step's evaluation and save.
        give_up: raises, since too many steps in a row were skipped; the state is saved.
        finish: after the last step, before the listeners hear of the end.
        close: at the end of every run, failed ones too.
        say: shows a line to the user.
        listener_failed: (place, error) -> notes what a listener raised.
    """

    begin: Callable[[], None]
    take_step: Callable[[], None]
    evaluate: Callable[[], bool]
    save: Callable[[], None]
    end_step: Callable[[], None]
    give_up: Callable[[], None]
    finish: Callable[[], None]
    close: Callable[[], None]
    say: Callable[[str], None]
    listener_failed: Callable[[str, Exception], None]


class Loop:
    """The loop of one run on this rank. All ranks run it alike.

    Args:
        trainer: handed to the listeners.
        listeners: told of every event; their flags count wherever they are set.

    Attributes:
        state: counters; the trainer's `take_step` moves `step` and `consumed_samples`.
        stop_signal: SIGINT or SIGTERM once this process got it.
    """

    def __init__(self, trainer: Any, mesh: Mesh, pace: Pace, work: Work, listeners: Sequence[Events], state: RunState):
        self._trainer, self._mesh, self._pace, self._work = trainer, mesh, pace, work
        self.listeners, self.state = listeners, state
        self.stop_signal: signal.Signals | None = None
        self._signalled_at = 0.0
        self._stop_agreed = False
        self._is_listened_to = False
        self._is_saved_at_end = False

    def run(self) -> None:
        """Run to the last step, or to the end of the step in which SIGINT or SIGTERM arrives."""
        self._is_listened_to = self._mesh.any(bool(self.listeners))
        with self._signals():
            try:
                self.tell("on_train_begin")
                self._work.begin()
                while self.state.step < self._pace.steps and not self.is_over():
                    self._work.take_step()
                    self.act()
                    self._work.end_step()
                    if self._skips_too_often():
                        self._work.give_up()
                self._work.finish()
                self.tell("on_train_end")
            finally:
                self._work.close()

    def act(self) -> None:
        """Evaluate and save, if it is time to or a listener wants it."""
        found_best = False
        if self._wanted("should_evaluate") or self._due(self._pace.evaluate_every):
            found_best = self._work.evaluate()
        wanted = self._wanted("should_save")
        due = self._due(self._pace.save_every)
        ends = self._ends_with_save()
        if wanted or due or found_best or (ends and not self._is_saved_at_end):
            self._work.save()
            self._is_saved_at_end = ends

    def count(self, report: StepReport, updates: int) -> None:
        """Count a step that was taken.

        Args:
            report: in which the first number that each rank told is `stop_asked` of it.
            updates: made so far.
        """
        self._stop_agreed |= any(asked for asked, *_ in report.ranks)
        self.state.updates = updates
        self.state.tokens += report.tokens
        self.state.skipped += report.skipped is not None
        if report.skipped != OVERFLOW:  # which ends by itself: the scale can only fall so often
            self.state.consecutive_skips = self.state.consecutive_skips + 1 if report.skipped else 0

    def tell(self, event: str, *details: Any) -> None:
        """Call a method of all listeners."""
        for listener in self.listeners:
            try:
                getattr(listener, event)(self._trainer, *details)
            except Exception as error:
                place = f"{type(listener).__name__}.{event}"
                error.add_note(f"raised by the listener {place} at step {self.state.step}")
                self._work.listener_failed(place, error)
                raise

    @property
    def stop_asked(self) -> float:
        """What this rank tells the others with each step: 1 once a signal has arrived."""
        return float(self.stop_signal is not None)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended the run. Alone it counts as soon as it is there; with others, once all have heard."""
        return self._stop_agreed or (self._mesh.world.size == 1 and self.stop_signal is not None)

    def _due(self, interval: int | None) -> bool:
        step = self.state.step
        return interval is not None and (step == self._pace.steps or bool(interval and step % interval == 0))

    def is_over(self) -> bool:
        """Whether something but the last step ends the run. A collective where any rank has listeners."""
        return self._skips_too_often() or self.is_stopped or self._asked("should_stop")

    def _ends_with_save(self) -> bool:
        if self._pace.save_every is not None:
            return self.is_over()
        return self._skips_too_often() or self.is_stopped

    def _skips_too_often(self) -> bool:
        return bool(self._pace.skip_limit) and self.state.consecutive_skips >= self._pace.skip_limit

    def _asked(self, flag: str) -> bool:
        """Whether a listener on any rank has set its flag. A collective where any rank has listeners."""
        return self._is_listened_to and self._mesh.any(any(getattr(listener, flag) for listener in self.listeners))

    def _wanted(self, flag: str) -> bool:
        wanted = self._asked(flag)
        for listener in self.listeners:
            setattr(listener, flag, False)
        return wanted

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python hears signals in the main one alone
            yield
            return
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stop_signal is not None:
            # A launcher passes on to its processes what the terminal has sent them as well.
            if self._mesh.world.size > 1 and now - self._signalled_at < _SAME_SIGNAL_SECONDS:
                return
            raise KeyboardInterrupt
        self.stop_signal, self._signalled_at = signal.Signals(number), now
        self._work.say(f"{self.stop_signal.name}: finishing this step, then saving (once more to stop at once)")
