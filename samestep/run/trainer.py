"""A whole run: the loop around the step, and the events user code can listen to."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from samestep.config.load import dump
from samestep.config.schema import Config
from samestep.data.batch import Batch
from samestep.data.dataset import data_facts, load_data, make_order
from samestep.errors import CheckpointError, ConfigError, TrainingError
from samestep.plan import Progress, in_steps, make_plan
from samestep.run import checkpoint
from samestep.run.evaluate import evaluate
from samestep.run.loggers import check_packages, make_loggers
from samestep.run.metrics import Metrics, check_cut, cut_back
from samestep.run.monitor import StepMonitor
from samestep.run.preflight import check_folder, check_memory, checkpoint_bytes
from samestep.run.profile import StepProfiler
from samestep.run.progress import Display, number, show_plan
from samestep.run.record import CONFIG_FILE, METRICS_FILE, record_of, write_record
from samestep.run.report import PLAN_FILE, REPORT_FILE, can_draw, write_report
from samestep.run.resume import check_settings, find_checkpoint, fixed_settings
from samestep.run.setup import (
    TOKENIZER_FILE,
    build_model,
    build_step,
    choose_device,
    describe_machine,
    kept_tokenizer,
    load_weights,
    micro_batches,
)
from samestep.step.step import StepReport


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
    """Base of listeners; override what is of interest.

    Setting a flag asks the loop for something after the current step: `should_evaluate` and `should_save` once, then
    they are reset; `should_stop` ends the run with a save. What a listener raises ends the run; the error carries the
    listener's name as a note, and `events.jsonl` has it too.
    """

    should_stop = False
    should_save = False
    should_evaluate = False

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step of this process; `trainer.state` is already that of the checkpoint."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Before the data of a step is fetched; `trainer.state.step` is still the step before."""

    def on_micro_batch(self, trainer: Trainer, index: int, sums: dict[str, torch.Tensor]) -> None:
        """After each backward pass, with the summed losses of the micro-batch, on the device. Reading them waits for
        the device."""

    def on_gradients(self, trainer: Trainer, gradients: Mapping[str, torch.Tensor]) -> None:
        """With the gradients of the whole step by name, before they are measured, clipped and used."""

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """After the update or skip, when the row of the step is written."""

    def on_evaluate(self, trainer: Trainer, loss: float, targets: int) -> None:
        """After each evaluation; the loss is NaN if there was no target."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint is complete."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, unless an error ended the run."""


class Trainer:
    """Trains the model of a configuration on this process.

    Args:
        resume: `none` (refuse a folder that holds a run), `auto` (go on from the newest complete checkpoint, or begin
            where there is none), or the path of a checkpoint, or of a run folder for its newest one.
        listeners: told of every event.
        warnings: what loading the configuration had to say.

    Raises:
        ConfigError, DataError, CheckpointError: before anything slow and before any file is touched, with what to do.
    """

    def __init__(
        self, config: Config, *, resume: str = "none", listeners: Sequence[Events] = (), warnings: Sequence[str] = ()
    ):
        self.config, self.listeners = config, list(listeners)
        self.folder = Path(config.output_dir)
        self.checkpoints = Path(config.checkpoint.save_path or self.folder / "checkpoints")
        self.state = RunState()
        self.best: checkpoint.Best | None = None
        self.stop_signal: signal.Signals | None = None
        check_packages(config.monitor)
        root_field = "checkpoint.save_path" if config.checkpoint.save_path else "output_dir"
        self.last_checkpoint, passed_over = find_checkpoint(resume, self.folder, self.checkpoints, root_field)
        loaded = checkpoint.load(self.last_checkpoint) if self.last_checkpoint else None
        self.record = record_of(self.folder, self.checkpoints, loaded)
        if loaded:
            self._check_records(loaded)
        self.device = choose_device()
        self.profiler = StepProfiler(config.profiler, self.folder / "profile", self.device)
        torch.use_deterministic_algorithms(config.training.deterministic)
        self.data = load_data(config, kept_tokenizer(loaded) if loaded else None)
        self._check_best()
        if loaded:
            self._check_data(loaded)
        progress = Progress(self.state.step, self.state.consumed_samples, self.state.tokens)
        self.plan = make_plan(config, 1, data_facts(config, self.data), progress)
        self._check_machine(root_field)
        self.display = Display(self.plan.steps, config.monitor.log_interval)
        self.order = make_order(config, self.data)
        self.model = build_model(config, self.data.tokenizer.vocab_size).to(self.device)
        self.step = build_step(in_steps(config, self.plan.steps), self.model)
        self.monitor = StepMonitor(config.monitor.train_state, self.model, self.step.objective)
        if loaded:
            load_weights(self.model, loaded)
            self.step.updater.load_state(loaded.optimizer, self.state.updates)
            checkpoint.set_random_states(loaded.state["random"])
        abandoned, lost = self._open_folder(loaded)
        flops_per_token = (self.plan.flops_per_step or 0) / (self.plan.tokens or 1)
        loggers = make_loggers(config, self.folder)
        self.metrics = Metrics(self.folder, self.device, flops_per_token, loggers, self.warn)
        for text in [*warnings, *(f"checkpoint passed over: {reason}" for reason in passed_over)]:
            self.warn(text)
        if loaded:
            checkpoint.set_random_states(loaded.state["random"])  # once more: a logger may have drawn from them
            self._record_resume(loaded, abandoned, lost)

    # ---- before the loop

    def _check_records(self, loaded: checkpoint.Checkpoint) -> None:
        """Before the data is read: the run folder and the configuration go with the checkpoint."""
        check_settings(self.config, loaded)
        self.state = RunState(**loaded.state["run"])
        check_cut(self.folder / METRICS_FILE, self._kept_bytes(loaded), self.state.step)
        best = loaded.state["best"] if self.config.checkpoint.keep_best else None
        if best and (self.checkpoints / checkpoint.folder_name(best["step"]) / checkpoint.MARKER).is_file():
            self.best = checkpoint.Best(**best)

    def _check_data(self, loaded: checkpoint.Checkpoint) -> None:
        if loaded.state["data_fingerprint"] != self.data.train.fingerprint:
            raise CheckpointError(
                f"{loaded.path}: the training data differs from what this run began with, so its place in the "
                "data means other samples\n  fix: restore the data and its settings, or begin a new run elsewhere"
            )

    def _check_machine(self, root_field: str) -> None:
        check_memory(self.plan, self.device)
        check_folder(self.folder, "output_dir")
        if self.config.checkpoint.enable_save:
            check_folder(self.checkpoints, root_field, checkpoint_bytes(self.plan))

    def _check_best(self) -> None:
        if self.config.checkpoint.keep_best and self.data.evaluation is None:
            raise ConfigError(
                "there is no validation data by which to know the best checkpoint",
                field="checkpoint.keep_best",
                fix="write eval_dataset.path or train_dataset.split, or keep_best: false",
            )

    def _kept_bytes(self, loaded: checkpoint.Checkpoint | None) -> int:
        """Size to which `metrics.jsonl` is cut back: 0 for a run that begins, be it from another run's checkpoint."""
        return loaded.state["metrics_bytes"] if loaded and self.record.owns(loaded) else 0

    def _open_folder(self, loaded: checkpoint.Checkpoint | None) -> tuple[list[Path], int]:
        """Make the run folder; take later checkpoints and rows out of the way. Returns the checkpoints' new paths and
        the number of rows."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_record(self.folder, self.record)
        # Checkpoints first: each that is left needs the rows before it.
        abandoned = checkpoint.abandon_after(self.checkpoints, self.state.step) if loaded else []
        lost = cut_back(self.folder / METRICS_FILE, self._kept_bytes(loaded), self.folder / "metrics.lost.jsonl")
        (self.folder / CONFIG_FILE).write_text(self._resolved_config(), encoding="utf-8")
        (self.folder / TOKENIZER_FILE).write_text(self.data.tokenizer.to_json(), encoding="utf-8")
        (self.folder / PLAN_FILE).write_text(json.dumps(self.plan.as_dict(), indent=1), encoding="utf-8")
        return abandoned, lost

    def _resolved_config(self) -> str:
        """With the end token that was found: `tokenizer.json` does not tell it."""
        end_token = {"end_token": self.data.tokenizer.end_token}
        tokenizer = self.config.tokenizer.model_copy(update=end_token)
        return dump(self.config.model_copy(update={"tokenizer": tokenizer}))

    def _record_resume(self, loaded: checkpoint.Checkpoint, abandoned: Sequence[Path], lost: int) -> None:
        checkpoint.write_best(self.checkpoints, self.best)  # it may know of evaluations that are now undone
        step = self.state.step
        self.metrics.event("resume", step, checkpoint=str(loaded.path), rows_moved_to_lost=lost)
        self.display.say(f"resumed from {loaded.path} at step {step}")
        if abandoned:
            self.metrics.event("abandoned_checkpoints", step, paths=[str(path) for path in abandoned])
            self.display.say(f"later checkpoints were set aside: {', '.join(path.name for path in abandoned)}")
        before, size = loaded.state["global_batch_size"], self.config.training.global_batch_size
        if size != before:
            self.metrics.event("global_batch_size", step, before=before, after=size, steps=self.plan.steps)
            self.display.say(self._explain_batch_size(before, size))

    def _explain_batch_size(self, before: int, size: int) -> str:
        training, total = self.config.training, self.plan.steps
        name = next(name for name in ("steps", "epochs", "tokens") if getattr(training, name) is not None)
        reason = (
            "training.steps stays as it is, so the run sees another number of samples"
            if name == "steps"
            else f"to reach training.{name} {getattr(training, name)}"
        )
        return (
            f"global_batch_size {before} -> {size}: goes on with sample {self.state.consumed_samples}, the next unseen "
            f"one; {max(0, total - self.state.step)} steps are left and the schedule ends at step {total} ({reason})"
        )

    # ---- the loop

    def train(self) -> RunState:
        """Run to the last step, or to the end of the step in which SIGINT or SIGTERM arrives; both end with a save.

        Raises:
            TrainingError: `max_consecutive_skipped_steps` was reached (saved before).
        """
        self._introduce()
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._tell("on_train_begin")
            self.display.start(self.state.step)
            while self.state.step < self.plan.steps and not self._stopping():
                self._take_step()
                found_best = False
                if self._wanted("should_evaluate") or self._due(self.config.evaluation.interval_steps):
                    found_best = self._evaluate()
                wanted = self._wanted("should_save")
                due = self._due(self.config.checkpoint.save_interleaved_steps)
                if wanted or due or found_best or self._stopping():
                    self._save()
                self._check_skips()
            self._tell("on_train_end")
        finally:
            self._close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.state

    def _take_step(self) -> None:
        with self.profiler.step(self.state.step + 1):
            self._take_profiled_step()
        self._record_trace(self.profiler.finished(self.state.step))

    def _take_profiled_step(self) -> None:
        start = time.perf_counter()
        self._tell("on_step_begin")
        batches = self._next_batches()
        self.state.step += 1
        self.monitor.begin(batches)
        hooked = bool(self.listeners) or self.monitor.active
        report = self.step(batches, *((self._on_micro_batch, self._on_gradients) if hooked else ()))
        self.state.updates = self.step.updater.updates
        self.state.tokens += report.tokens
        self.state.skipped += report.skipped is not None
        self.state.consecutive_skips = self.state.consecutive_skips + 1 if report.skipped else 0
        extra = self.monitor.read()
        self.metrics.step(self.state.step, report, self.state.consumed_samples, time.perf_counter() - start, extra)
        if report.skipped:
            self._record_skip(report)
        self.display.step(self.state.step, report)
        self._tell("on_step_end", report)

    def _next_batches(self) -> list[Batch]:
        """Micro-batches of the next global batch; moves the cursor. Batches of which nothing may be used are passed."""
        while True:
            samples = self.order.next(self.state.consumed_samples)
            self.state.consumed_samples = samples.consumed
            batches = micro_batches(self.config, self.data.train, samples, self.state.step + 1)
            used = sum(batch.samples for batch in batches)
            if used < len(samples.rows):
                self.metrics.event("dropped_samples", self.state.step + 1, samples=len(samples.rows) - used)
            if batches:
                return batches

    def _record_skip(self, report: StepReport) -> None:
        self.metrics.event(
            "skipped_step",
            self.state.step,
            reason=report.skipped,
            loss=str(report.loss),
            grad_norm=str(report.grad_norm),
            consecutive=self.state.consecutive_skips,
        )
        self.display.say(f"step {self.state.step} skipped: {report.skipped}; weights and optimizer are unchanged")

    def _check_skips(self) -> None:
        limit = self.config.training.max_consecutive_skipped_steps
        if limit and self.state.consecutive_skips >= limit:
            raise TrainingError(
                f"{self.state.consecutive_skips} steps in a row were skipped (training.max_consecutive_skipped_steps "
                f"{limit}); see {self.metrics.events.path} for the reasons\n  fix: look at the data and the learning "
                f"rate; the state is saved in {self.last_checkpoint}"
            )

    def _evaluate(self) -> bool:
        """Measure the validation data; returns whether this is the best so far, with `keep_best`."""
        if self.data.evaluation is None:
            return False
        start = time.perf_counter()
        size = self.config.evaluation.local_batch_size or self.config.training.local_batch_size
        loss, targets = evaluate(self.model, self.step.objective, self.data.evaluation, size, self.device)
        self.metrics.evaluation(self.state.step, loss, targets, time.perf_counter() - start)
        self.display.say(
            f"step {self.state.step}/{self.plan.steps}  validation loss {number(loss)} ({targets} targets)"
        )
        best = math.inf if self.best is None else self.best.eval_loss
        found_best = self.config.checkpoint.keep_best and loss < best
        if found_best:
            self.best = checkpoint.Best(self.state.step, loss)
        self._tell("on_evaluate", loss, targets)
        return found_best

    def _save(self) -> None:
        settings = self.config.checkpoint
        if not settings.enable_save:
            return
        metrics_bytes = self.metrics.rows.sync()
        self.last_checkpoint = checkpoint.save(
            self.checkpoints,
            self.state.step,
            model=dict(self.model.named_parameters()),
            optimizer=None if settings.no_save_optim else self.step.updater.state(),
            state={
                "run_id": self.record.id,
                "run": asdict(self.state),
                "metrics_bytes": metrics_bytes,
                "settings": fixed_settings(self.config),
                "global_batch_size": self.config.training.global_batch_size,
                "data_fingerprint": self.data.train.fingerprint,
                "end_token": self.data.tokenizer.end_token,
                "random": checkpoint.random_states(),
                "best": asdict(self.best) if self.best else None,
            },
            texts={CONFIG_FILE: self._resolved_config(), TOKENIZER_FILE: self.data.tokenizer.to_json()},
            keep=settings.save_max,
            best=self.best,
        )
        is_best = self.best is not None and self.best.step == self.state.step
        self.metrics.event("checkpoint", self.state.step, path=str(self.last_checkpoint), best=is_best)
        self._tell("on_save", self.last_checkpoint)

    # ---- the end

    def _close(self) -> None:
        self._record_trace(self.profiler.close())
        self.display.stop()
        self.metrics.close()
        if self.config.monitor.report and not isinstance(sys.exception(), KeyboardInterrupt):
            self._write_report()

    def _write_report(self) -> None:
        if not can_draw():
            return
        try:
            write_report([self.folder], self.folder / REPORT_FILE)
        except Exception as error:  # a page about the run must not end the run
            self.display.say(f"warning: no report: {type(error).__name__}: {error}")

    def _record_trace(self, path: Path | None) -> None:
        if path is not None:
            self.metrics.event("profile", self.state.step, path=str(path))
            self.display.say(f"trace of steps written to {path}")

    # ---- small helpers

    def warn(self, text: str) -> None:
        """Show a warning and write it to events.jsonl."""
        self.metrics.event("warning", self.state.step, message=text)
        self.display.say(f"warning: {text}")

    def _introduce(self) -> None:
        self.display.say(f"samestep: {self.folder}  on {describe_machine(self.device)}")
        show_plan(self.plan, self.display.console)
        if self.state.step >= self.plan.steps:
            self.display.say(f"nothing to do: the run is at step {self.state.step} of {self.plan.steps}")

    def _due(self, interval: int) -> bool:
        step = self.state.step
        return step == self.plan.steps or bool(interval and step % interval == 0)

    def _stopping(self) -> bool:
        limit = self.config.training.max_consecutive_skipped_steps
        failing = bool(limit) and self.state.consecutive_skips >= limit
        return failing or self.stop_signal is not None or any(listener.should_stop for listener in self.listeners)

    def _wanted(self, flag: str) -> bool:
        wanted = any(getattr(listener, flag) for listener in self.listeners)
        for listener in self.listeners:
            setattr(listener, flag, False)
        return wanted

    def _tell(self, event: str, *details: Any) -> None:
        for listener in self.listeners:
            try:
                getattr(listener, event)(self, *details)
            except Exception as error:
                place = f"{type(listener).__name__}.{event}"
                error.add_note(f"raised by the listener {place} at step {self.state.step}")
                self.metrics.event("listener_failed", self.state.step, listener=place, error=repr(error))
                self.display.say(f"the listener {place} failed at step {self.state.step}: {error!r}")
                raise

    def _on_micro_batch(self, index: int, sums: dict[str, torch.Tensor]) -> None:
        self.monitor.on_micro_batch(index, sums)
        self._tell("on_micro_batch", index, sums)

    def _on_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.monitor.on_gradients(gradients)
        self._tell("on_gradients", gradients)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal is not None:
            raise KeyboardInterrupt
        self.stop_signal = signal.Signals(number)
        self.display.say(f"{self.stop_signal.name}: finishing this step, then saving (once more to stop at once)")
