"""The Trainer of transformers with samestep's step: `from samestep.hf import Trainer`.

It is a `transformers.Trainer`: constructor, callbacks, metrics, optimizers and what else does not touch the step are
inherited. Replaced are the data (no sample dropped or taken twice), the step (count, accumulate, reduce, clip, update
or skip), the loop, the evaluation loss, and the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_pt_utils import find_batch_size, nested_detach
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, has_length
from transformers.utils import logging

from samestep.errors import ConfigError, DataError
from samestep.hf import checkpoint
from samestep.hf.arguments import check, check_native, precision, recompute_settings, setting
from samestep.hf.autocast import AutocastObjective
from samestep.hf.batch import ModelBatch
from samestep.hf.data import (
    EvalBatches,
    MapWindows,
    Order,
    RankBatches,
    RankPart,
    Shape,
    StreamWindows,
    Windows,
    lengths_of,
)
from samestep.hf.evaluate import Evaluation
from samestep.hf.layout import Weights, make_mesh
from samestep.hf.native import NativeBatch, NativeModel, NativeObjective, native_batch
from samestep.hf.objectives import dropout_seed, objective_for
from samestep.hf.run import Run
from samestep.hf.update import TorchUpdater
from samestep.hf.user_step import StepObjective
from samestep.ops import random_key
from samestep.parallel.data import free
from samestep.step.step import StepReport

logger = logging.get_logger(__name__)

NOT_CALLED = {
    "_get_train_sampler": "override get_train_dataloader instead",
    "_get_eval_sampler": "override get_eval_dataloader instead",
    "_get_dataloader": "override get_train_dataloader or get_eval_dataloader instead",
    "get_batch_samples": "override get_train_dataloader or the data collator instead",
    "_get_num_items_in_batch": "samestep counts the targets of the global batch itself",
    "_inner_training_loop": "use callbacks, or override training_step or compute_loss",
    "_run_epoch": "use callbacks, or override training_step or compute_loss",
    "_maybe_log_save_evaluate": "use callbacks, or override log, evaluate or _save",
    "_save_checkpoint": "override _save, which writes the model, or use the callback on_save",
    "_load_from_checkpoint": "load other weights before train()",
    "_save_optimizer_and_scheduler": "checkpoints are samestep's own",
    "_load_optimizer_and_scheduler": "checkpoints are samestep's own",
    "_save_rng_state": "checkpoints are samestep's own",
    "_load_rng_state": "checkpoints are samestep's own",
    "_clip_grad_norm": "the clip coefficient is folded into the update",
    "_get_grad_norm": "samestep measures the norm",
    "_wrap_model": "the model is not wrapped",
    "_prepare_for_training": "use the callback on_train_begin",
    "_prepare_inputs": "use the data collator, which makes the inputs of training and evaluation alike",
    "compute_loss_context_manager": "write bf16 or fp16, or override compute_loss",
    "_init_training_state": "use the callback on_train_begin",
    "_finalize_training": "use the callback on_train_end",
    "_determine_best_metric": "write metric_for_best_model and greater_is_better",
    "_load_best_model": "write load_best_model_at_end",
    "_track_num_input_tokens": "write include_num_input_tokens_seen",
    "store_flos": "override log",
    "floating_point_ops": "override log",
}
"""Methods of transformers that are never called here, and what to override instead."""


class Trainer(transformers.Trainer):
    """Trains, evaluates and predicts as `transformers.Trainer` does, by an optimizer step that does not depend on how
    the global batch is split. docs/hf_trainer.md says what differs.

    Args:
        args: `samestep.hf.TrainingArguments`, or those of transformers.
        native: run the passes of a causal language model of a known family by samestep's decoder, which computes with
            the weights of the model: packed, without logits in training, with dropout that does not depend on the
            split. No hook on its modules is called.

    The others are those of `transformers.Trainer`.

    Attributes:
        mesh: the ranks.
        is_native: what `native` says.
        native: what runs the passes in place of the model, once the weights are laid out; None where the model does.
        weights: how they are laid over the ranks, once they are.
        updater: of the latest training.
        last_report: of the latest step.

    Raises:
        ConfigError: an argument is refused, or a method is overridden that is never called.
    """

    model: Any
    eval_dataset: Any

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        *,
        native: bool = False,
    ):
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check(args)
        _check_overrides(type(self))
        if args.n_gpu > 1:
            logger.warning(
                f"this process uses one of {args.n_gpu} GPUs; start with torchrun --nproc-per-node {args.n_gpu} for all"
            )
            args._n_gpu = 1
        self.mesh = make_mesh(args)
        if self.mesh.world.size > 1 and args.batch_eval_metrics:
            raise ConfigError("is for one process", field="batch_eval_metrics", fix="leave it False")
        if args.fsdp and any(optimizers):
            raise ConfigError(
                "they were made for weights that are not sharded yet",
                field="optimizers",
                fix="override create_optimizer",
            )
        if precision(args) == "fp16" and _overrides(self, "training_step"):
            raise ConfigError(
                "a training_step of your own runs backward itself, without the loss scale that float16 needs",
                field="fp16",
                fix="write bf16=True, or override compute_loss instead",
            )
        if setting(args, "loss_normalization") == "micro_batch_mean" and _overrides(self, "training_step"):
            raise ConfigError(
                "a training_step of your own decides by itself what a loss is divided by",
                field="loss_normalization",
                fix="leave it out, or override compute_loss instead",
            )
        if native:
            _check_native(self, args, compute_loss_func)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.last_report: StepReport | None = None
        self.is_native = native
        self.native: NativeModel | None = None
        self.weights: Weights | None = None
        self.updater: TorchUpdater | None = None
        self._objectives: dict[str, Any] = {}

    # ---- parts

    def create_accelerator_and_postprocess(self) -> None:
        """An accelerator that scripts may ask who they are; it wraps nothing."""
        self.accelerator = Accelerator(cpu=self.args.use_cpu)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.args.fsdp:  # else each rank takes its part of the weights to its device
            super()._move_model_to_device(model, device)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Products in bfloat16 or float16 where the arguments say so."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=self._autocast_dtype, cache_enabled=bool(cache_enabled))

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision(self.args)]

    @property
    def loss_objective(self) -> Any:
        """What the step knows of the model and its loss: the user's loss where there is one."""
        return self._objective("step") if _overrides(self, "training_step") else self.eval_objective

    @property
    def eval_objective(self) -> Any:
        """The same, where no `training_step` has a part in it."""
        return self._objective("user" if _overrides(self, "compute_loss") else "model")

    def lay_out(self) -> None:
        """Lay the weights over the ranks, if they are not yet. A collective."""
        if self.weights is None:
            if self.is_native:
                self.native = NativeModel(self.model, precision(self.args), self.mesh.device)
            self.weights = Weights(self.model, self.mesh, self.args, self.native)
            if self.native is not None and self.args.torch_compile:
                self.native.compile()
            if self.native is not None and self.args.activation_checkpointing:
                self.native.recompute(recompute_settings(self.args).get("every_n_layers", 1))

    @property
    def runs(self) -> nn.Module:
        """What runs the passes."""
        return self.model if self.native is None else self.native.decoder

    def _objective(self, kind: str) -> Any:
        if kind == "step":
            return StepObjective(self, self.eval_objective)
        if kind not in self._objectives and self.is_native:
            self.lay_out()
            assert self.native is not None
            self._objectives[kind] = NativeObjective(self.native, self.args.label_smoothing_factor)
        elif kind not in self._objectives:
            made = objective_for(
                self.model,
                compute_loss=self.compute_loss if kind == "user" else None,
                compute_loss_func=self.compute_loss_func,
                loss_is_scaled_for_ga=self.loss_is_scaled_for_ga,
                label_smoothing_factor=self.args.label_smoothing_factor,
                label_names=self.label_names,
                loss_normalization=setting(self.args, "loss_normalization"),
                logits_free=not self.args.torch_compile,
            )
            dtype = self._autocast_dtype
            self._objectives[kind] = made if dtype is None else AutocastObjective(made, dtype, self.mesh.device)
        return self._objectives[kind]

    def forget_objectives(self) -> None:
        """The model is another one."""
        self._objectives.clear()

    def model_batch(self, inputs: Any, step: int = 0, place: int = 0) -> ModelBatch | NativeBatch:
        """What a data collator made, as a micro-batch of the step.

        Args:
            step, place: of training, and of the micro-batch in the global batch: they name its random numbers.
        """
        seed = self.args.seed
        if self.native is not None:
            key, size = random_key("step", seed, step), self.shape.micro if step else 1
            return native_batch(
                inputs, self.native.spec.max_positions, samples=size, first=place * size, dropout_key=key
            )
        return ModelBatch(inputs, find_batch_size(inputs) or 1, dropout_seed(seed, step, place) if step else None)

    # ---- data

    @property
    def shape(self) -> Shape:
        """How a global batch is cut."""
        args, world = self.args, self.mesh.world
        return Shape(args.per_device_train_batch_size, args.gradient_accumulation_steps, world.size, world.rank)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The micro-batches of this rank, a pass with each iteration.

        What an override returns yields the micro-batches of this rank, which need not be as many as on other ranks.
        """
        if self.train_dataset is None:
            raise DataError("there is no training data\n  fix: hand train_dataset to the Trainer")
        dataset, collator = self._for_model(self.train_dataset, "training")
        if isinstance(dataset, IterableDataset) or not has_length(dataset):
            if self.args.dataloader_drop_last:
                raise ConfigError(
                    "it is not known which samples of a stream are the last",
                    field="dataloader_drop_last",
                    fix="leave it False: the samples that are left are a smaller step",
                )
            return self._loader(RankPart(dataset, self.shape), collator, batch_size=self.shape.micro)
        order = Order(
            len(dataset),
            self.args.train_sampling_strategy,
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
            lengths=self._lengths(self.train_dataset),
            group=self.shape.samples,
        )
        batches = RankBatches(order, self.shape, drop_last=self.args.dataloader_drop_last)
        return self._loader(dataset, collator, batch_sampler=batches)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The batches of this rank's share of a data set: neighbouring samples, none of them twice."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        if eval_dataset is None:
            raise DataError("there is no evaluation data\n  fix: hand eval_dataset to the Trainer, or to evaluate")
        return self._share(eval_dataset, "evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As `get_eval_dataloader`."""
        return self._share(test_dataset, "test")

    def _share(self, dataset: Any, description: str) -> DataLoader[Any]:
        size, world = self.args.per_device_eval_batch_size, self.mesh.world
        dataset, collator = self._for_model(dataset, description)
        if isinstance(dataset, IterableDataset) or not has_length(dataset):
            part = RankPart(dataset, Shape(size, 1, world.size, world.rank))
            return self._loader(part, collator, batch_size=size)
        return self._loader(dataset, collator, batch_sampler=EvalBatches(len(dataset), size, world.size, world.rank))

    def _for_model(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """A data set and a collator that keep to the columns that the model takes."""
        if hasattr(dataset, "remove_columns") and has_length(dataset):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _lengths(self, dataset: Any) -> list[int] | None:
        if self.args.train_sampling_strategy != "group_by_length":
            return None
        names = getattr(self.processing_class, "model_input_names", None)
        return lengths_of(dataset, self.args.length_column_name, names[0] if names else None)

    def _loader(self, dataset: Any, collator: Any, **how: Any) -> DataLoader[Any]:
        args = self.args
        return DataLoader(
            dataset,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.mesh.device.type != "cpu",
            # A worker that stays keeps its copy of a stream, with the place where that began.
            persistent_workers=args.dataloader_persistent_workers and not isinstance(dataset, RankPart),
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
            generator=torch.Generator().manual_seed(args.seed),  # else each pass would draw from the global one
            **how,
        )

    def windows(self, loader: Any) -> Windows:
        """The global batches of a run, from what `get_train_dataloader` gave."""
        batches, part = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
        if isinstance(batches, RankBatches):
            return MapWindows(loader, batches, self.shape)
        if isinstance(part, RankPart):
            if self.args.dataloader_num_workers > 1:
                raise ConfigError(
                    "several processes cannot read one stream in one order",
                    field="dataloader_num_workers",
                    fix="write 1 or 0 for data without length, or override get_train_dataloader",
                )
            return StreamWindows(loader, self.shape, self.mesh, part)
        return StreamWindows(loader, self.shape, self.mesh)

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the last step. SIGINT and SIGTERM end the run after the step in which they arrive, with a save.

        Args:
            resume_from_checkpoint: True for the newest complete checkpoint in `output_dir`, or the path of one.
            trial: must be None.

        Raises:
            CheckpointError: the run cannot go on from there.
            TrainingError: `max_consecutive_skipped_steps` was reached.
            KeyboardInterrupt, SystemExit: after SIGINT, SIGTERM; the run is saved, unless `save_strategy` is `no`.
        """
        if trial is not None:
            raise ConfigError("hyperparameter search is not there", field="trial", fix="call train() for each trial")
        self._memory_tracker.start()
        resumed = None
        if resume_from_checkpoint:
            root = Path(str(self.args.output_dir))
            resumed = self.mesh.from_first(lambda: checkpoint.find(resume_from_checkpoint, root))
        self.is_in_train = True
        try:
            return Run(self, resumed, ignore_keys_for_eval).train()
        finally:
            self.is_in_train = False

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch, for overrides to call; the loss is its share of the global batch's.

        An override leaves its gradients in the parameters; they are summed over micro-batches and ranks as they are.
        """
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss.backward()
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The summed loss of a batch divided by `num_items_in_batch`, the targets of the global batch over all ranks,
        or by its own targets where that is None. Override it for another loss."""
        objective = self._objective("model")
        batch = self.model_batch(inputs).to(self.mesh.device)
        sums, outputs = objective.sums_and_outputs(model, batch)
        loss = _mean(objective, sums, objective.counts(batch), num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    # ---- evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss is sum / count over all targets, however the data is cut into batches and over ranks."""
        self.lay_out()
        evaluation = Evaluation(self, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        output = evaluation.run(dataloader)
        free(self.runs)
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """The mean loss of a batch (None without labels), its logits and its labels."""
        return self._predict(model, inputs, prediction_loss_only, ignore_keys)[1:]

    def predict_batch(
        self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[dict[str, torch.Tensor] | None, Any, Any, Any]:
        """Summed losses of a batch (None where an override tells only their mean), mean loss, logits, labels."""
        if _overrides(self, "prediction_step"):
            return None, *self.prediction_step(model, inputs, loss_only, ignore_keys)
        return self._predict(model, inputs, loss_only, ignore_keys)

    @torch.no_grad()
    def _predict(
        self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[dict[str, torch.Tensor] | None, Any, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            ignore_keys = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or []
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        if not has_labels:
            if self.native is not None:
                outputs = self.eval_objective.outputs(self.model_batch(inputs).to(self.mesh.device))
            else:
                with self.compute_loss_context_manager():
                    outputs = model(**inputs)
            return None, None, None if loss_only else _logits(outputs, ignore_keys), None
        objective, batch = self.eval_objective, self.model_batch(inputs).to(self.mesh.device)
        labels = nested_detach(tuple(inputs.get(name) for name in self.label_names))
        if loss_only:
            sums, logits = objective.sums(model, batch), None
        else:
            sums, outputs = objective.sums_and_outputs(model, batch)
            logits = _logits(outputs, ignore_keys)
        counts = objective.counts(batch)
        loss = _mean(objective, sums, counts, None).detach()
        return sums, loss, logits, None if loss_only else labels[0] if len(labels) == 1 else labels

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that `from_pretrained` reads it. With sharded weights a collective."""
        state = self.weights.state_dict() if self.weights is not None else None
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        dtypes = {tensor.dtype for tensor in (state_dict or {}).values() if tensor.is_floating_point()}
        super()._save(output_dir, state_dict)
        if len(dtypes) == 1:  # those of a sharded model, which transformers takes for one in the dtype of its shards
            checkpoint.correct_dtype(Path(output_dir or str(self.args.output_dir)), dtypes.pop())


def _overrides(trainer: Trainer, name: str) -> bool:
    return getattr(type(trainer), name) is not getattr(Trainer, name)


def _check_native(trainer: Trainer, args: transformers.TrainingArguments, compute_loss_func: Any) -> None:
    check_native(args)
    if compute_loss_func is not None or _overrides(trainer, "compute_loss") or _overrides(trainer, "training_step"):
        raise ConfigError(
            "a loss of your own needs the outputs of the model, which does not run",
            field="native",
            fix="write native=False",
        )


def _check_overrides(kind: type) -> None:
    for name, fix in NOT_CALLED.items():
        if getattr(kind, name, None) is not getattr(transformers.Trainer, name, None):
            raise ConfigError(f"{kind.__name__} overrides {name}, which samestep never calls", fix=fix)


def _mean(objective: Any, sums: Mapping[str, torch.Tensor], counts: Mapping[str, int], items: Any) -> torch.Tensor:
    """The weighed sum of terms, each divided by `items`, or by its own count where that is None."""
    terms = [(term, weight) for term, weight in objective.weights.items() if weight]
    return torch.stack([w * sums[t] / (max(counts[t], 1) if items is None else items) for t, w in terms]).sum()


def _logits(outputs: Any, ignore_keys: list[str]) -> Any:
    if isinstance(outputs, dict):
        found = tuple(value for key, value in outputs.items() if key not in [*ignore_keys, "loss"])
    else:
        found = tuple(outputs)
    logits = nested_detach(found)
    return logits[0] if len(logits) == 1 else logits
