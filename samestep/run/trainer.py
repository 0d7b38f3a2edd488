"""A whole run of a configuration: its parts, what its loop does, and the records that it keeps."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from samestep.config.load import dump
from samestep.config.schema import Config
from samestep.data.batch import Batch
from samestep.data.dataset import data_facts, load_data, make_order
from samestep.errors import CheckpointError, ConfigError, DataError, TrainingError
from samestep.families import resolve_model
from samestep.length import Progress, in_steps, usable_samples
from samestep.model.pretrained import check_pretrained, fingerprint
from samestep.ops.cpu_library import library
from samestep.ops.float8 import check_float8
from samestep.parallel.mesh import Mesh, choose_device, join
from samestep.plan import evaluation_rows, make_plan, resolve_layout
from samestep.run import checkpoint
from samestep.run.allocator import keep_freed_memory
from samestep.run.audit import DtypeAudit, on_device
from samestep.run.evaluate import evaluate
from samestep.run.loggers import check_packages, make_loggers
from samestep.run.loop import Events, Loop, Pace, RunState, Work
from samestep.run.metrics import Metrics, check_cut, cut_back
from samestep.run.monitor import StepMonitor
from samestep.run.preflight import check_folder, check_memory, checkpoint_bytes, device_memory
from samestep.run.profile import StepProfiler
from samestep.run.progress import Display, number, show_plan
from samestep.run.record import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    RunRecord,
    kept_bytes,
    record_of,
    write_record,
)
from samestep.run.report import PLAN_FILE, REPORT_FILE, can_draw, write_report
from samestep.run.resume import check_settings, find_checkpoint, fixed_settings
from samestep.run.setup import (
    TOKENIZER_FILE,
    build_model,
    build_step,
    describe_machine,
    kept_tokenizer,
    load_updater,
    load_weights,
    micro_batches,
    stored_weights,
)
from samestep.run.storage import MARKER
from samestep.run.watch import Watch
from samestep.step.optimizers import check_package
from samestep.step.step import OVERFLOW, StepReport
from samestep.torch_private import compile_seconds


def _meaning(config: Config) -> str:
    """The configuration but for its paths, which machines may have in other places."""
    lines = dump(config).splitlines()
    paths = ("path:", "output_dir:", "save_path:", "pretrained:")
    return "\n".join(line for line in lines if not line.lstrip().startswith(paths))


class Trainer:
    """Trains the model of a configuration on this process, and on those that it was launched with.

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
        self.config = config
        self.folder = Path(config.output_dir)
        self.checkpoints = Path(config.checkpoint.save_path or self.folder / "checkpoints")
        self.best: checkpoint.Best | None = None
        self._compiled_seconds = compile_seconds() if config.compile else 0.0
        self.world = join()
        self.mesh = Mesh(resolve_layout(config.parallelism, self.world.size), self.world, choose_device())
        self.device = self.mesh.device
        self._check_agreement("configuration", lambda: _meaning(config))
        check_packages(config.monitor)
        check_package(config.optimizer.state_dtype)
        check_float8(config.model.compute_dtype, self.device)
        root_field = "checkpoint.save_path" if config.checkpoint.save_path else "output_dir"
        self.last_checkpoint, passed_over = self.mesh.from_first(
            lambda: find_checkpoint(resume, self.folder, self.checkpoints, root_field)
        )
        loaded = checkpoint.open_checkpoint(self.last_checkpoint) if self.last_checkpoint else None
        self.record = self.mesh.from_first(lambda: self._check_records(loaded))
        self.state = RunState(**loaded.state["run"]) if loaded else RunState()
        if loaded:
            self.best = self._kept_best(loaded)
        self.profiler = StepProfiler(config.profiler, self.folder / "profile", self.device, self.world.rank)
        if config.training.deterministic != torch.are_deterministic_algorithms_enabled():  # it imports the compiler
            torch.use_deterministic_algorithms(config.training.deterministic)
        if config.model.pretrained and not loaded:
            name = config.model.pretrained
            check_pretrained(name, resolve_model(config.model))
            self._check_agreement("pretrained model", lambda: fingerprint(name))
        self.data = load_data(config, kept_tokenizer(loaded) if loaded else None)
        self._check_best()
        self._check_data(loaded)
        progress = Progress(self.state.step, self.state.consumed_samples, self.state.tokens)
        limit = min(self.mesh.gather(device_memory(self.device)))
        self.plan = make_plan(config, self.world.size, data_facts(config, self.data), progress, limit)
        check_memory(self.plan, self.device)
        self.mesh.from_first(lambda: self._check_folders(root_field))
        self.display = Display(
            self.plan.steps, config.monitor.log_interval, None if self.mesh.is_first else Console(quiet=True)
        )
        if loaded and config.training.exact and self.device.type == "cpu":
            torch.set_num_threads(loaded.state["threads"])  # some kernels sum in an order that depends on it
        self.order = make_order(config, self.data)
        on_cpu = self.device.type == "cpu"
        self.keeps_memory = config.keeps_freed_memory and on_cpu and keep_freed_memory()
        self._build(resumed=loaded is not None)
        self.saver = checkpoint.Saver(
            self.checkpoints,
            self.mesh,
            keep=config.checkpoint.save_max,
            in_background=config.checkpoint.async_save,
            on_saved=self._on_saved,
        )
        self.loop = self._make_loop(listeners)
        if loaded:
            self._restore(loaded)
        abandoned, lost = self.mesh.from_first(lambda: self._open_folder(loaded))
        flops_per_token = (self.plan.flops_per_step or 0) / (self.plan.tokens or 1) / self.world.size
        loggers = make_loggers(config, self.folder) if self.mesh.is_first else []
        folder = self.folder if self.mesh.is_first else None
        self.metrics = Metrics(folder, self.device, flops_per_token, loggers, self.warn)
        for text in [*warnings, *(f"checkpoint passed over: {reason}" for reason in passed_over)]:
            self.warn(text)
        if loaded:
            # Once more: a logger may have drawn from them.
            checkpoint.set_random_states(loaded.state["random"], self.world)
            self._record_resume(loaded, abandoned, lost)

    # ---- before the loop

    def _build(self, resumed: bool) -> None:
        """The model, its step, and those who watch them."""
        config, plan = self.config, self.plan
        self.model = build_model(config, self.data.tokenizer.vocab_size, self.mesh, resumed=resumed)
        self.plan = replace(plan, dtypes=on_device(plan.dtypes, self.device, self.model.precision.loss))
        self.audit = DtypeAudit(self.plan.dtypes, self.model, ranks=self.world.size, is_compiled=config.compile)
        self.step = build_step(
            in_steps(config, plan.steps), self.model, self.mesh, plan.reduce, casts_once=plan.casts_once
        )
        self.monitor = StepMonitor(config.monitor.train_state, self.model, self.step.objective, self.mesh)
        self.watch = Watch(config, self.model, self.step, self.mesh)

    def _make_loop(self, listeners: Sequence[Events]) -> Loop:
        config = self.config
        pace = Pace(
            self.plan.steps,
            evaluate_every=config.evaluation.interval_steps,
            save_every=config.checkpoint.save_interleaved_steps,
            skip_limit=config.training.max_consecutive_skipped_steps,
        )
        work = Work(
            begin=lambda: self.display.start(self.state.step),
            take_step=self._take_step,
            evaluate=self._evaluate,
            save=self._save,
            end_step=lambda: None,
            give_up=self._give_up,
            finish=self.saver.wait,
            close=self._close,
            say=self.display.say,
            listener_failed=self._record_failure,
        )
        return Loop(self, self.mesh, pace, work, list(listeners), self.state)

    def _restore(self, loaded: checkpoint.Checkpoint) -> None:
        load_weights(self.model, loaded)
        load_updater(self.step.updater, loaded)
        self._load_micro_batch_limit(loaded)
        self._load_loss_scale(loaded)
        checkpoint.set_random_states(loaded.state["random"], self.world)

    def _check_records(self, loaded: checkpoint.Checkpoint | None) -> RunRecord:
        """Before the data is read: the run folder and the configuration go with the checkpoint."""
        record = record_of(self.folder, self.checkpoints, loaded)
        if loaded:
            check_settings(self.config, loaded)
            check_cut(self.folder / METRICS_FILE, kept_bytes(record, loaded), loaded.state["run"]["step"])
        return record

    def _kept_best(self, loaded: checkpoint.Checkpoint) -> checkpoint.Best | None:
        """The best so far, if its checkpoint is still there."""
        best = loaded.state["best"] if self.config.checkpoint.keep_best else None
        if best is None:
            return None
        marker = self.checkpoints / checkpoint.folder_name(best["step"]) / MARKER
        return checkpoint.Best(**best) if self.mesh.from_first(marker.is_file) else None

    def _check_data(self, loaded: checkpoint.Checkpoint | None) -> None:
        """Every rank has the same rows, and the run so far the same training rows."""
        self._check_agreement("training data", lambda: self.data.train.fingerprint)
        held_out = self.data.evaluation
        self._check_agreement("validation data", lambda: held_out.fingerprint if held_out else None)
        if loaded and loaded.state["data_fingerprint"] != self.data.train.fingerprint:
            raise CheckpointError(
                f"{loaded.path}: the training data differs from what this run began with, so its place in the "
                "data means other samples\n  fix: restore the data and its settings, or begin a new run elsewhere"
            )

    def _check_agreement(self, what: str, mark: Callable[[], str | None]) -> None:
        """Every rank has the same of something, by its mark, which one process need not make."""
        if self.world.size == 1:
            return
        marks = self.mesh.gather(mark())
        odd = next((rank for rank, other in enumerate(marks) if other != marks[0]), None)
        if odd is not None:
            raise DataError(
                f"rank {odd} has another {what} than rank 0, so they would not take the same steps\n  fix: give all "
                "machines the same files and command, and the same versions of the packages"
            )

    def _check_folders(self, root_field: str) -> None:
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

    def _open_folder(self, loaded: checkpoint.Checkpoint | None) -> tuple[list[Path], int]:
        """Make the run folder; take later checkpoints and rows out of the way. Returns the checkpoints' new paths and
        the number of rows."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_record(self.folder, self.record)
        # Checkpoints first: each that is left needs the rows before it.
        abandoned = checkpoint.abandon_after(self.checkpoints, self.state.step) if loaded else []
        lost = cut_back(self.folder / METRICS_FILE, kept_bytes(self.record, loaded), self.folder / "metrics.lost.jsonl")
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
        if self.mesh.is_first:
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

    def _load_micro_batch_limit(self, loaded: checkpoint.Checkpoint) -> None:
        """What did not fit into these devices need not be tried again; into others it may."""
        kept = loaded.state.get("micro_batch_limit")
        if kept and self.mesh.from_first(lambda: kept["devices"] == self._devices()):
            self.step.recovery.limit = kept["positions"]

    def _load_loss_scale(self, loaded: checkpoint.Checkpoint) -> None:
        kept = loaded.state.get("loss_scale")
        if kept and self.step.scaler is not None:
            self.step.scaler.load_state(kept)

    def _devices(self) -> list[Any]:
        return [describe_machine(self.device), device_memory(self.device), self.world.size]

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
        self.loop.run()
        return self.state

    def _take_step(self) -> None:
        with self.profiler.step(self.state.step + 1):
            self._take_profiled_step()
        self._record_trace(self.profiler.finished(self.state.step))
        self.saver.poll()

    def _take_profiled_step(self) -> None:
        start = time.perf_counter()
        self.loop.tell("on_step_begin")
        fetching = time.perf_counter()
        first_sample = self.state.consumed_samples
        batches = self._next_batches()
        fetched = time.perf_counter()
        self.state.step += 1

        def tell() -> tuple[float, ...]:
            seconds = time.perf_counter() - start
            memory = self.metrics.memory.bytes() if self.world.size > 1 else 0  # alone, its row tells it
            measured = seconds, fetched - fetching, memory
            return self.loop.stop_asked, *measured, *self.step.recovery.told

        self.monitor.begin(batches, self.step.loss_scale)
        hooked = bool(self.loop.listeners) or self.monitor.active
        looks = hooked or not self.audit.is_done or self.watch.needs_gradients
        with self.audit.first_step(self.step, len(batches)):
            report = self.step(
                batches,
                on_micro_batch=self._on_micro_batch if hooked else None,
                on_gradients=self._on_gradients if looks else None,
                tell=tell,
            )
        self.loop.count(report, self.step.updater.updates)
        extra = self.monitor.read()
        self.metrics.step(self.state.step, report, self.state.consumed_samples, time.perf_counter() - start, extra)
        self._record_halving(report)
        self._agree_on_limit(report)
        if report.skipped:
            self._record_skip(report)
        elif report.loss_scale is not None and report.loss_scale != self.step.loss_scale:
            self._record_loss_scale(report.loss_scale, self.step.loss_scale)
        self._record_findings(report, batches, range(first_sample, self.state.consumed_samples))
        self.display.step(self.state.step, report)
        if self.config.compile:
            self._record_compiling()
        self.loop.tell("on_step_end", report)

    def _record_findings(self, report: StepReport, batches: Sequence[Batch], samples: range) -> None:
        if not (self.audit.is_done or report.skipped):
            self._record_audit()
        for finding in self.watch.after(self.state.step, report, batches, samples):
            self.metrics.event(finding.event, self.state.step, message=finding.message, **finding.details)
            self.display.say(f"warning: step {self.state.step}: {finding.message}")

    def _record_audit(self) -> None:
        """Of the first update. A dtype that is not the expected one does not end the run: its numbers are finite, and
        the eye of the audit may err where the operators of a device are not known to it."""
        try:
            own: dict[str, Any] = self.audit.check(self.step.updater)
        except TrainingError as error:
            own = {"difference": str(error)}
        found = self.mesh.gather(own)
        difference = next((seen for seen in found if "difference" in seen), None)
        if difference is not None:
            self.metrics.event("dtype_audit", self.state.step, **difference)
            self.warn(difference["difference"])
            return
        # A rank without targets has not seen everything.
        unseen = [kind for kind in own["compute_not_seen"] if all(kind in seen["compute_not_seen"] for seen in found)]
        sent = sorted({dtype for seen in found for dtype in seen["sent"]})
        self.metrics.event("dtype_audit", self.state.step, **own | {"compute_not_seen": unseen, "sent": sent})

    def _record_compiling(self) -> None:
        total = compile_seconds()
        seconds, self._compiled_seconds = total - self._compiled_seconds, total
        if seconds > 0:
            self.metrics.event("compiled", self.state.step, seconds=round(seconds, 3))
            self.display.say(f"step {self.state.step}: compiling took {seconds:.1f} s of it")

    def _next_batches(self) -> list[Batch]:
        """Micro-batches of the next global batch; moves the cursor. Batches of which nothing may be used are passed."""
        while True:
            samples = self.order.next(self.state.consumed_samples)
            self.state.consumed_samples = samples.consumed
            number, budget = self.state.step + 1, self.plan.local_batch_tokens
            batches = micro_batches(self.config, self.data.train, samples, number, self.mesh, budget)
            training, found = self.config.training, len(samples.rows)
            unit = self.plan.layout.data_parallel * training.least_samples
            dropped = found - usable_samples(found, unit, training.remainder)
            if dropped:
                self.metrics.event("dropped_samples", number, samples=dropped)
            if batches:
                return batches

    def _record_halving(self, report: StepReport) -> None:
        for rank, (*_, before, after) in enumerate(report.ranks):
            if before:
                sizes = {"before": int(before), "after": int(after)}
                self.metrics.event("out_of_memory", self.state.step, rank=rank, **sizes)
                self.display.say(
                    f"step {self.state.step}: rank {rank} ran out of memory in a micro-batch of {sizes['before']} "
                    f"positions; it was halved, as are all of more than {sizes['after']} from now on"
                )

    def _agree_on_limit(self, report: StepReport) -> None:
        """One limit for all ranks: a checkpoint keeps one, and a resumed run must take the same steps."""
        limits = [int(after) for *_, after in report.ranks if after]
        self.step.recovery.limit = min(limits, default=None)

    def _record_loss_scale(self, before: float, after: float) -> None:
        self.metrics.event("loss_scale", self.state.step, before=before, after=after)
        self.display.say(f"step {self.state.step}: the loss scale is now {after:g}")

    def _record_skip(self, report: StepReport) -> None:
        scales = {"loss_scale": report.loss_scale, "next_loss_scale": self.step.loss_scale}
        self.metrics.event(
            "skipped_step",
            self.state.step,
            reason=report.skipped,
            loss=str(report.loss),
            grad_norm=str(report.grad_norm),
            consecutive=self.state.consecutive_skips,
            **(scales if report.loss_scale is not None else {}),
        )
        change = f" ({report.loss_scale:g}, next {self.step.loss_scale:g})" if report.skipped == OVERFLOW else ""
        self.display.say(
            f"step {self.state.step} skipped: {report.skipped}{change}; weights and optimizer are unchanged"
        )

    def _give_up(self) -> None:
        self.saver.wait()
        raise TrainingError(
            f"{self.state.consecutive_skips} steps in a row were skipped (training.max_consecutive_skipped_steps "
            f"{self.config.training.max_consecutive_skipped_steps}); see {self.folder / EVENTS_FILE} for the reasons\n"
            f"  fix: look at the data and the learning rate; the state is saved in {self.last_checkpoint}"
        )

    def _evaluate(self) -> bool:
        """Measure the validation data; returns whether this is the best so far, with `keep_best`."""
        if self.data.evaluation is None:
            return False
        start = time.perf_counter()
        size = evaluation_rows(self.config, self.plan.local_batch_tokens)
        loss, targets = evaluate(
            self.model, self.step.objective, self.data.evaluation, size, self.mesh, exact=self.config.training.exact
        )
        self.metrics.evaluation(self.state.step, loss, targets, time.perf_counter() - start)
        self.display.say(
            f"step {self.state.step}/{self.plan.steps}  validation loss {number(loss)} ({targets} targets)"
        )
        best = math.inf if self.best is None else self.best.eval_loss
        found_best = self.config.checkpoint.keep_best and loss < best
        if found_best:
            self.best = checkpoint.Best(self.state.step, loss)
        self.loop.tell("on_evaluate", loss, targets)
        return found_best

    def _save(self) -> None:
        settings = self.config.checkpoint
        if not settings.enable_save:
            return
        metrics_bytes = self.metrics.rows.sync()
        self.saver.save(
            self.state.step,
            model=stored_weights(self.model),
            optimizer=None if settings.no_save_optim else self.step.updater.state(),
            state={
                "run_id": self.record.id,
                "run": asdict(self.state),
                "metrics_bytes": metrics_bytes,
                "settings": fixed_settings(self.config),
                "global_batch_size": self.config.training.global_batch_size,
                "data_fingerprint": self.data.train.fingerprint,
                "end_token": self.data.tokenizer.end_token,
                "threads": torch.get_num_threads(),
                "random": self.mesh.gather(checkpoint.random_states()),
                "best": asdict(self.best) if self.best else None,
                "micro_batch_limit": self._micro_batch_limit(),
                "loss_scale": self.step.scaler.state() if self.step.scaler else None,
            },
            texts={CONFIG_FILE: self._resolved_config(), TOKENIZER_FILE: self.data.tokenizer.to_json()},
            best=self.best,
        )

    def _micro_batch_limit(self) -> dict[str, Any] | None:
        limit = self.step.recovery.limit
        return {"positions": limit, "devices": self._devices()} if limit is not None else None

    def _on_saved(self, step: int, path: Path, is_best: bool) -> None:
        self.last_checkpoint = path
        self.metrics.event("checkpoint", step, path=str(path), best=is_best)
        self.loop.tell("on_save", path)

    # ---- the end

    def _close(self) -> None:
        if self.world.size == 1:  # a checkpoint that is being written is worth an end, but others may be gone
            with suppress(CheckpointError):
                self.saver.wait()
        self._record_trace(self.profiler.close())
        self.display.stop()
        self.metrics.close()
        if self.mesh.is_first and self.config.monitor.report and not isinstance(sys.exception(), KeyboardInterrupt):
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
        if self.config.cpu.keep_freed_memory and not self.keeps_memory:
            self.warn("cpu.keep_freed_memory has no effect here: it is a setting of glibc, for training on a CPU")
        if self.device.type == "cpu" and (reason := library()[1]):
            self.display.say(f"PyTorch's operators run instead of samestep's faster ones ({reason})")
        show_plan(self.plan, self.display.console)
        if self.state.step >= self.plan.steps:
            self.display.say(f"nothing to do: the run is at step {self.state.step} of {self.plan.steps}")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended the run."""
        return self.loop.is_stopped

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The signal that this process got."""
        return self.loop.stop_signal

    def _record_failure(self, place: str, error: Exception) -> None:
        self.metrics.event("listener_failed", self.state.step, listener=place, error=repr(error))
        self.display.say(f"the listener {place} failed at step {self.state.step}: {error!r}")

    def _on_micro_batch(self, index: int, sums: dict[str, torch.Tensor]) -> None:
        with self.audit.observer.aside():
            self.monitor.on_micro_batch(index, sums)
            self.loop.tell("on_micro_batch", index, sums)

    def _on_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.audit.on_gradients(gradients, self.step.sink)
        self.watch.on_gradients(gradients)
        self.monitor.on_gradients(gradients)
        self.loop.tell("on_gradients", gradients)
