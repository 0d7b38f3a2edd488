"""One call of `Trainer.train`: what its loop does."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import (
    SaveStrategy,
    TrainOutput,
    align_special_tokens,
    set_seed,
    speed_metrics,
)
from transformers.utils import logging

from samestep.config.training import LossScaleConfig
from samestep.errors import ConfigError, DataError, TrainingError
from samestep.hf import checkpoint
from samestep.hf.arguments import check_warmup, precision, recompute_settings, setting
from samestep.hf.batch import ModelBatch
from samestep.hf.callbacks import CallbackEvents
from samestep.hf.data import Cursor, MapWindows, Window, first_batch
from samestep.hf.layout import Reduction
from samestep.hf.lookup import out_of_range
from samestep.hf.native import NativeBatch
from samestep.hf.update import TorchUpdater, load_schedule, schedule_state
from samestep.ops.gradient_sink import GradientSink
from samestep.run.checkpoint import random_states, set_random_states
from samestep.run.loop import Loop, Pace, RunState, Work
from samestep.run.storage import write_folder
from samestep.step.recovery import Advice
from samestep.step.scaler import LossScaler
from samestep.step.step import OVERFLOW, StepReport, TrainStep

logger = logging.get_logger(__name__)

_ADVICE = Advice(
    "cut the rows shorter (max_length of the tokenizer), or write activation_checkpointing=True, bf16=True, or on "
    "several ranks fsdp=True",
    "lower per_device_train_batch_size and raise gradient_accumulation_steps as much, which changes no step, and go on "
    "with train(resume_from_checkpoint=True)",
)


class _LossLog:
    """The loss of an interval as the mean over its targets; skipped steps are no part of it."""

    def __init__(self) -> None:
        self.total, self.targets, self.skipped = 0.0, 0, 0

    def add(self, report: StepReport) -> None:
        self.skipped += report.skipped is not None
        if report.skipped is None:
            self.total += report.loss * report.targets
            self.targets += report.targets

    @property
    def mean(self) -> float:
        return self.total / self.targets if self.targets else math.nan


class Run:
    """From the arguments and the data of a Trainer to the end of its training.

    Args:
        trainer: a `samestep.hf.Trainer`.
        resumed: where to go on, or None to begin.
        ignore_keys: outputs of the model that the evaluations pass over.

    Raises:
        ConfigError, DataError, CheckpointError: before the first step, with what to do.
    """

    def __init__(self, trainer: Any, resumed: checkpoint.Resumed | None, ignore_keys: list[str] | None):
        self.trainer, self.args, self.mesh = trainer, trainer.args, trainer.mesh
        self._ignore_keys, self._resumed = ignore_keys, resumed
        self._neftune: Any = None
        self._prepare_model()
        loader = trainer.get_train_dataloader()
        self.windows = trainer.windows(loader)
        self.cursor = Cursor(**resumed.state["cursor"]) if resumed else Cursor()
        self.state = RunState(**resumed.state["run"]) if resumed else RunState()
        self.steps = self._length()
        check_warmup(self.args, self.steps)
        self._begin_trainer_state()
        self._build(loader)
        self._interval, self._all = _LossLog(), _LossLog()
        self._started = time.time()
        self._metrics: dict[str, float] = {}
        self._first_step, self._logged_step = self.state.step, self.state.step
        self._flops = _flops_per_token(trainer.model)
        self._template: Any = None
        self._saved = self._earlier_checkpoints()
        self._epoch: Iterator[Window] | None = None
        self._events = CallbackEvents(trainer)
        work = Work(
            begin=self._begin,
            take_step=self._take_step,
            evaluate=self._evaluate,
            save=self._save,
            end_step=self._end_step,
            give_up=self._give_up,
            finish=self._finish,
            close=self._close,
            say=logger.warning,
            listener_failed=lambda place, error: None,
        )
        limit = setting(self.args, "max_consecutive_skipped_steps")
        pace = Pace(self.steps, evaluate_every=None, save_every=None, skip_limit=limit)
        self.loop = Loop(trainer, self.mesh, pace, work, [self._events], self.state)
        if resumed:
            self._restore(resumed)

    # ---- before the loop

    def _prepare_model(self) -> None:
        trainer, args = self.trainer, self.args
        if trainer.model_init is not None:
            set_seed(args.seed)
            trainer.model = trainer.model_wrapped = trainer.call_model_init()
            trainer.optimizer = trainer.lr_scheduler = trainer.weights = trainer.native = trainer.updater = None
            trainer.forget_objectives()
        if not args.fsdp and getattr(trainer.model, "quantization_method", None) is None:
            trainer._move_model_to_device(trainer.model, self.mesh.device)
        has_tokens = isinstance(
            trainer.processing_class, transformers.PreTrainedTokenizerBase | transformers.ProcessorMixin
        )
        if has_tokens and hasattr(trainer.model, "config"):
            align_special_tokens(trainer.model, trainer.processing_class)
        if args.activation_checkpointing and not trainer.is_native:
            _recompute(trainer.model, recompute_settings(args))
        trainer.lay_out()
        if self._resumed:
            checkpoint.load_weights(trainer.model, self._resumed.path)
        if args.neftune_noise_alpha is not None:
            from transformers.integrations.neftune import activate_neftune

            self._neftune = activate_neftune(trainer.model, args.neftune_noise_alpha, trainer.accelerator)
        if args.torch_compile and not trainer.is_native:
            trainer.model.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)

    def _length(self) -> int:
        """The last step of the run."""
        args, per_epoch = self.args, self.windows.steps_in_epoch
        if args.max_steps > 0:
            return args.max_steps
        if per_epoch is None:
            raise ConfigError(
                "the training data does not tell its length, so the steps of the run are not known",
                field="max_steps",
                fix="write the number of steps",
            )
        if isinstance(self.windows, MapWindows):
            behind = self.cursor.samples / self.trainer.shape.samples
        else:
            behind = self.cursor.micro_batches / args.gradient_accumulation_steps
        left = (args.num_train_epochs - self.cursor.epoch) * per_epoch - behind
        return self.state.step + max(0, math.ceil(left - 1e-9))

    def _earlier_checkpoints(self) -> list[Path]:
        """Those in the output folder that this run goes on from."""
        root = Path(str(self.args.output_dir))
        if self._resumed is None or self._resumed.path.resolve().parent != root.resolve():
            return []
        step = self.state.step
        return self.mesh.from_first(
            lambda: [folder for folder in checkpoint.folders(root) if checkpoint.step_of(folder) <= step]
        )

    def _begin_trainer_state(self) -> None:
        trainer, args = self.trainer, self.args
        trainer.state = self._trainer_state()
        trainer.state.train_batch_size = args.per_device_train_batch_size
        trainer.state.compute_steps(args, self.steps)
        if self._resumed:
            steps = {kind: getattr(trainer.state, f"{kind}_steps") for kind in ("logging", "eval", "save")}
            trainer.state = TrainerState.load_from_json(str(self._resumed.path / "trainer_state.json"))
            for kind, value in steps.items():
                setattr(trainer.state, f"{kind}_steps", value)
            best = trainer.state.best_model_checkpoint
            if best is not None and not Path(best).is_dir():
                trainer.state.best_model_checkpoint = None
            trainer._load_callback_state()
        epochs = args.num_train_epochs
        if args.max_steps > 0 and self.windows.steps_in_epoch:
            epochs = self.steps / self.windows.steps_in_epoch
        trainer.hp_name = None
        trainer.state.init_training_references(trainer, self.steps, math.ceil(epochs), None)
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen

    def _build(self, loader: Any) -> None:
        """Optimizer, schedule and step."""
        trainer, args, model = self.trainer, self.args, self.trainer.model
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        trainer.create_optimizer_and_scheduler(self.steps)
        parameters = list(model.named_parameters())
        dtype = torch.float64 if any(p.dtype == torch.float64 for _, p in parameters) else torch.float32
        if trainer.updater is None or trainer.updater.optimizer is not trainer.optimizer:
            trainer.updater = TorchUpdater(parameters, trainer.optimizer, trainer.weights.stored)
        else:
            trainer.updater.renew_masters()
        self.updater = trainer.updater
        if args.save_strategy != "no" and not args.save_only_model:
            self.updater.groups()
            schedule_state(trainer.lr_scheduler)
        self._sink = GradientSink(parameters, dtype, can_resume=self.mesh.weights is None)
        self.step = TrainStep(
            trainer.runs,
            trainer.loss_objective,
            self.updater,
            self._sink,
            Reduction(trainer.runs, self.mesh, dtype),
            self.mesh,
            max_norm=args.max_grad_norm or None,
            loss_dtype=dtype,
            micro_batch_mean=setting(args, "loss_normalization") == "micro_batch_mean",
            around_passes=trainer.native.around_passes if trainer.native else nullcontext,
            scaler=LossScaler(LossScaleConfig()) if precision(args) == "fp16" else None,
            advice=_ADVICE,
        )
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = model, trainer.optimizer, trainer.lr_scheduler
        handler.train_dataloader = loader

    def _restore(self, resumed: checkpoint.Resumed) -> None:
        state = resumed.state
        checkpoint.load_updater(self.updater, resumed)
        load_schedule(self.trainer.lr_scheduler, state["updater"]["schedule"])
        if state["loss_scale"] and self.step.scaler is not None:
            self.step.scaler.load_state(state["loss_scale"])
        set_random_states(state["random"], self.mesh.world)
        for reason in resumed.passed_over:
            logger.warning(f"checkpoint passed over: {reason}")
        logger.info(f"resumed from {resumed.path} at step {self.state.step}")

    # ---- the loop

    def train(self) -> TrainOutput:
        trainer = self.trainer
        self._started = time.time()
        self.loop.run()
        number = max(self.mesh.gather(self.loop.stop_signal or 0))
        if number:
            self._stop(number)
        return TrainOutput(trainer.state.global_step, self._metrics["train_loss"], self._metrics)

    def _stop(self, number: int) -> None:
        """End the script as the signal would have, had it come to anyone else."""
        if self.state.step >= self.steps:
            how_on = "which was the last"
        elif self.args.save_strategy == "no":
            how_on = "nothing was saved"
        elif self.args.save_only_model:
            how_on = "its weights are saved, from which a new run can begin"
        else:
            how_on = "go on with train(resume_from_checkpoint=True)"
        if self.mesh.is_first:
            logger.warning(f"stopped after step {self.state.step} of {self.steps}; {how_on}")
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt

    def _begin(self) -> None:
        if self.state.step >= self.steps and self.mesh.is_first:
            logger.warning(f"all {self.steps} steps of this run were taken before: there is nothing to train")
        if self.args.eval_on_start:
            self._measure(moves_schedule=False)

    def _take_step(self) -> None:
        self.window = self._next_window()
        report = self._train_on(self._filled(self.window))
        self.loop.count(report, self.updater.updates)
        if report.skipped is None:
            self._move_schedule()
        else:
            self._warn_of_skip(report)
        self._events.on_optimizer_step(self.trainer)
        self._count_up(self.window, report)
        every = self.args.torch_empty_cache_steps
        if every and self.state.step % every == 0:
            torch.cuda.empty_cache()
        self.loop.tell("on_step_end", report)
        self._log()

    def _next_window(self) -> Window:
        if self._epoch is None:
            self._events.on_epoch_begin(self.trainer)
            self._epoch = self.windows.after(self.cursor)
        window = next(self._epoch, None)
        if window is None:
            raise DataError(
                f"the training data yields nothing after {self.state.step} of {self.steps} steps\n"
                "  fix: hand over data that begins anew with each iteration"
            )
        return window

    def _train_on(self, batches: list[Any]) -> StepReport:
        self.loop.tell("on_step_begin")
        self._events.on_fetched(self.trainer, len(batches))
        if callable(getattr(self.trainer.optimizer, "train", None)):
            self.trainer.optimizer.train()
        self.state.step += 1
        positions = float(sum(batch.positions for batch in batches if batch.samples))
        try:
            return self.step(
                batches,
                on_micro_batch=lambda index, sums: self.loop.tell("on_micro_batch", index, sums),
                on_gradients=lambda gradients: self.loop.tell("on_gradients", gradients),
                tell=lambda: (self.loop.stop_asked, positions),
            )
        except IndexError as error:
            reason = None if hasattr(error, "__notes__") else out_of_range(self.trainer.model, batches)
            if reason is None:  # or a listener's own mistake
                raise
            raise DataError(reason) from error

    def _filled(self, window: Window) -> list[Any]:
        """The micro-batches of this rank, as many as every other has."""
        trainer = self.trainer
        if self._template is None:
            self._template = first_batch(window, self.mesh)
        batches: list[Any] = [self._micro_batch(inputs, index) for index, inputs in enumerate(window.batches)]
        missing = window.count - len(batches)
        if missing:
            template = batches[-1] if batches else trainer.model_batch(self._template)
            batches += [template.empty()] * missing
        return batches

    def _micro_batch(self, inputs: Any, index: int) -> ModelBatch | NativeBatch:
        """Its random numbers are named by seed, step and place, so that a resumed run draws them again."""
        place = index * self.mesh.world.size + self.mesh.world.rank
        return self.trainer.model_batch(inputs, self.state.step + 1, place)

    def _count_up(self, window: Window, report: StepReport) -> None:
        trainer, cursor = self.trainer, self.cursor
        cursor.samples += window.samples
        cursor.micro_batches += window.count
        self.state.consumed_samples += window.samples or report.samples
        self._interval.add(report)
        self._all.add(report)
        trainer.last_report = report
        trainer.state.global_step = self.state.step
        trainer.state.epoch = cursor.epoch + (
            1.0 if window.is_last and self.windows.steps_in_epoch else self.windows.fraction(cursor, self.steps)
        )
        positions = sum(positions for _, positions in report.ranks)
        if trainer.args.include_num_input_tokens_seen != "no":
            every = trainer.args.include_num_input_tokens_seen == "all"
            trainer.state.num_input_tokens_seen += int(positions) if every else report.tokens
        trainer.state.total_flos += positions * self._flops

    def _move_schedule(self) -> None:
        schedule = self.trainer.lr_scheduler
        if not _follows_metric(schedule):
            schedule.step()

    def _warn_of_skip(self, report: StepReport) -> None:
        if not self.mesh.is_first:
            return
        step = self.state.step
        more = " (tried again with a lower loss scale)" if report.skipped == OVERFLOW else ""
        logger.warning(f"step {step} skipped: {report.skipped}{more}; weights, optimizer and schedule are unchanged")

    def _end_step(self) -> None:
        """At the end of an epoch, of the run, or where a callback ends either."""
        trainer = self.trainer
        stops_epoch = self.mesh.any(trainer.control.should_epoch_stop)
        is_over = self.state.step >= self.steps or self.loop.is_over()
        if not (self.window.is_last or stops_epoch or is_over):
            return
        if self.window.is_last or stops_epoch:
            self.cursor.epoch, self.cursor.samples, self.cursor.micro_batches = self.cursor.epoch + 1, 0, 0
        self._epoch = None
        self.loop.tell("on_epoch_end")
        self._log()
        self.loop.act()

    def _log(self) -> None:
        trainer, report = self.trainer, self.trainer.last_report
        if not (trainer.control.should_log and self.state.step > self._logged_step):
            return
        logs = {"loss": self._interval.mean, "grad_norm": report.grad_norm, "learning_rate": report.learning_rate}
        if self._interval.skipped:
            logs["skipped_steps"] = self._interval.skipped
        self._interval, self._logged_step = _LossLog(), self.state.step
        trainer.log(logs, self._started)

    def _evaluate(self) -> bool:
        """Returns whether this is the best so far, where only the best is saved."""
        is_best = self._measure(moves_schedule=True)
        return is_best and self.args.save_strategy == SaveStrategy.BEST

    def _measure(self, *, moves_schedule: bool) -> bool:
        trainer = self.trainer
        metrics = trainer.evaluate(ignore_keys=self._ignore_keys)
        if moves_schedule and _follows_metric(trainer.lr_scheduler):
            trainer.lr_scheduler.step(metrics[self._metric(metrics)])
        return self._is_best(metrics)

    def _metric(self, metrics: dict[str, float]) -> str:
        name = self.args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"{name} is not among what the evaluation measures: {', '.join(sorted(metrics))}",
                field="metric_for_best_model",
                fix="name one of them, or return it from compute_metrics",
            )
        return name

    def _is_best(self, metrics: dict[str, float]) -> bool:
        state, args = self.trainer.state, self.args
        if args.metric_for_best_model is None:
            return False
        value = metrics[self._metric(metrics)]
        best = state.best_metric
        is_best = best is None or (value > best if args.greater_is_better else value < best)
        if is_best and not math.isnan(value):
            state.best_metric = value
            if args.save_strategy != "no":
                state.best_global_step = state.global_step
        return is_best and not math.isnan(value)

    # ---- saving

    def _save(self) -> None:
        trainer, args = self.trainer, self.args
        if args.save_strategy == "no":
            return
        root = Path(args.output_dir)
        final = root / checkpoint.folder_name(self.state.step)
        self._name_best(root, final)
        weights = trainer.weights.state_dict()
        tensors = {} if args.save_only_model else self.updater.state()
        state = self._resumable(bool(tensors))

        def also(folder: Path) -> None:
            trainer._save(str(folder), weights)
            self._update_callback_states()
            trainer.state.save_to_json(str(folder / "trainer_state.json"))

        write_folder(
            final,
            {checkpoint.OPTIMIZER: tensors} if tensors else {},
            lambda: {checkpoint.STATE_FILE: state},
            self.mesh,
            fix="free disk space or set output_dir; older checkpoints are untouched",
            also=also,
        )
        self._saved = [*(folder for folder in self._saved if folder != final), final]
        self._saved = self.mesh.from_first(
            lambda: checkpoint.rotate(self._saved, args.save_total_limit, trainer.state.best_model_checkpoint)
        )
        if args.push_to_hub:
            trainer._push_from_checkpoint(str(final))
        self.loop.tell("on_save", final)

    def _name_best(self, root: Path, final: Path) -> None:
        state = self.trainer.state
        if state.best_global_step is None:
            return
        folder = root / checkpoint.folder_name(state.best_global_step)
        if self.mesh.from_first(lambda: folder == final or folder.is_dir()):
            state.best_model_checkpoint = str(folder)

    def _resumable(self, has_tensors: bool) -> str:
        updater = None
        if not self.args.save_only_model:
            updater = {
                "optimizer": type(self.updater.optimizer).__name__,
                "has_tensors": has_tensors,
                "updates": self.updater.updates,
                "groups": self.updater.groups(),
                "schedule": schedule_state(self.trainer.lr_scheduler),
            }
        return json.dumps(
            {
                "format": checkpoint.FORMAT,
                "time": time.time(),
                "run": asdict(self.state),
                "cursor": asdict(self._next_cursor()),
                "updater": updater,
                "loss_scale": self.step.scaler.state() if self.step.scaler else None,
                "random": self.mesh.gather(random_states()),
            }
        )

    def _next_cursor(self) -> Cursor:
        """Where a run goes on that is resumed from here."""
        if self.window.is_last and self._epoch is not None:
            return Cursor(self.cursor.epoch + 1)
        return self.cursor

    def _update_callback_states(self) -> None:
        self.trainer.state.stateful_callbacks = self._trainer_state().stateful_callbacks

    def _trainer_state(self) -> TrainerState:
        """A new one, with the state that the callbacks are in."""
        callbacks: list[Any] = [*self.trainer.callback_handler.callbacks, self.trainer.control]
        exportable: list[Any] = [c for c in callbacks if isinstance(c, ExportableState)]
        return TrainerState(stateful_callbacks=exportable)

    # ---- the end

    def _give_up(self) -> None:
        raise TrainingError(
            f"{self.state.consecutive_skips} steps in a row were skipped (max_consecutive_skipped_steps "
            f"{setting(self.args, 'max_consecutive_skipped_steps')})\n  fix: look at the data and the learning rate"
        )

    def _finish(self) -> None:
        trainer, args = self.trainer, self.args
        steps = self.state.step - self._first_step
        samples = steps * trainer.shape.samples
        metrics = speed_metrics("train", self._started, num_samples=samples, num_steps=steps)
        metrics["total_flos"] = trainer.state.total_flos
        metrics["train_loss"] = self._all.mean if steps else 0.0
        trainer._memory_tracker.stop_and_update_metrics(metrics)
        trainer.log(metrics)
        self._metrics = metrics
        best = trainer.state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            checkpoint.load_weights(trainer.model, Path(best))
            self.updater.renew_masters()
        if args.push_to_hub:
            trainer._finish_current_push()

    def _close(self) -> None:
        """Take off what was put on the model and its optimizer for the training."""
        self._sink.close()
        for hook in ("grad_scale", "found_inf"):
            if hasattr(self.trainer.optimizer, hook):
                setattr(self.trainer.optimizer, hook, None)
        if self._neftune is not None:
            from transformers.integrations.neftune import deactivate_neftune

            deactivate_neftune(self.trainer.model, self._neftune, self.trainer.accelerator)


def _follows_metric(schedule: Any) -> bool:
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(schedule).__name__ == "GreedyLR"


def _flops_per_token(model: Any) -> int:
    """Of a forward and a backward pass, as transformers counts them: 6 a weight outside of the embeddings."""
    return 6 * model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0


def _recompute(model: Any, settings: dict[str, Any]) -> None:
    """Turn activation checkpointing on, as transformers does it for its models."""
    every, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            f"{type(model).__name__} has no activation_checkpointing_enable", field="activation_checkpointing"
        )
    enable(activation_checkpointing_kwargs=settings or None, every_n_layers=every, offload=offload)
