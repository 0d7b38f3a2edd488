"""The arguments of the Hugging Face Trainer: which of them count here, and which are refused and why.

No argument is passed over in silence. docs/hf_trainer.md shows the tables of this file to users.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import torch
import transformers

from samestep.errors import ConfigError, ConfigErrors


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` and what samestep adds to them; the former alone will do as well.

    Several processes on a machine without an accelerator train on its CPU, as if `use_cpu=True` had been written.

    Args:
        loss_normalization: `global_targets` divides the summed loss by the targets of the global batch, so that the
            step does not depend on the split; `micro_batch_mean` averages the means of the micro-batches.
        max_consecutive_skipped_steps: skipped steps in a row that end the run with an error; 0 for any number.
        data_parallel_shard: with `fsdp`, over how many ranks the weights are split; -1: all. Fewer make groups that are
            replicas of each other (HSDP).
    """

    loss_normalization: str = field(default="global_targets")
    max_consecutive_skipped_steps: int = field(default=0)
    data_parallel_shard: int = field(default=-1)

    def __post_init__(self) -> None:
        if _launched_ranks() > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()


SUPPORTED = frozenset(
    """output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
    fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode neftune_noise_alpha
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_total_limit push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy length_column_name ddp_backend ddp_timeout fsdp fsdp_config skip_memory_metrics
    loss_normalization max_consecutive_skipped_steps data_parallel_shard""".split()  # noqa: SIM905 - a line each would hide them
)
"""Arguments that mean here what they mean there, or what docs/hf_trainer.md says."""

HARMLESS = {
    "auto_find_batch_size": "a micro-batch that does not fit is halved inside its step, always and at the same step",
    "eval_use_gather_object": "predictions are gathered as objects, always",
    "ddp_find_unused_parameters": "a parameter that took no part in a step needs no search",
    "ddp_bucket_cap_mb": "gradients meet once a step, in buckets of a fixed size",
    "ddp_broadcast_buffers": "there is no DDP",
    "ddp_static_graph": "there is no DDP",
    "save_on_each_node": "all ranks write to one file system",
    "logging_nan_inf_filter": "a step that is not finite is skipped, and its loss is in no mean",
    "use_cache": "keys and values are kept for generation only",
    "do_train": "for scripts",
    "do_eval": "for scripts",
    "do_predict": "for scripts",
    "resume_from_checkpoint": "for scripts, which hand it to `train`",
    "local_rank": "torchrun says it",
}
"""Arguments without effect, and why none is needed."""

REFUSED = {
    "deepspeed": ("its engine takes its own steps", "write fsdp=True to shard weights, gradients and optimizer state"),
    "parallelism_config": ("only data parallelism is there for these models", "write fsdp=True, or leave it out"),
    "average_tokens_across_devices": (
        "False would divide by the targets of each rank alone: ranks with few targets would weigh more",
        "leave it True",
    ),
    "ignore_data_skip": ("a resumed run would train on samples twice", "leave it False; going on is exact"),
    "use_liger_kernel": (
        "it replaces the losses of the model; samestep has a fused loss of its own",
        "leave it False",
    ),
    "liger_kernel_config": ("it replaces the losses of the model", "leave it out"),
    "enable_jit_checkpoint": ("SIGTERM ends a run with a save, always", "leave it False"),
    "debug": ("its hooks watch the loop of transformers", "leave it empty; a step that is not finite is skipped"),
}
"""Arguments that are refused unless they have their default: reason, and what to write instead."""

_LAYERWISE = "_layerwise"
_WITHOUT_STEP = ("lomo", "adalomo")

_ACCELERATE_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed takes its own steps; write fsdp=True instead",
    "ACCELERATE_USE_FSDP": "write fsdp=True in the arguments, and start with torchrun",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM takes its own steps; start with torchrun",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "only data parallelism is there; start with torchrun",
}
_FSDP_KEYS = {
    "version",
    "reshard_after_forward",
    "min_num_params",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "cpu_ram_efficient_loading",
    "state_dict_type",
    "activation_checkpointing",
    "cpu_offload",
    "xla",
    "xla_fsdp_v2",
    "xla_fsdp_grad_ckpt",
}


def setting(args: transformers.TrainingArguments, name: str) -> Any:
    """An argument that samestep adds, or its default where plain `transformers.TrainingArguments` are used."""
    return getattr(args, name, getattr(TrainingArguments, name))


def check(args: transformers.TrainingArguments) -> None:
    """Before anything slow.

    Raises:
        ConfigError: what is wrong; all of it where there are several mistakes.
    """
    errors = [*_refusals(args), *_environment(args), *_ranges(args), *_choices(args)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)


def check_warmup(args: transformers.TrainingArguments, steps: int) -> None:
    """Once the length of the run is known.

    Raises:
        ConfigError: the learning rate would never reach its peak.
    """
    if args.warmup_steps >= 1 and args.warmup_steps > steps:
        raise ConfigError(
            f"{args.warmup_steps:g} is more than the {steps} steps of the run: the learning rate would never reach its "
            "peak",
            field="warmup_steps",
            fix="write fewer, or a share of the run, such as 0.1",
        )


def check_native(args: transformers.TrainingArguments) -> None:
    """Whether the arguments go with `Trainer(native=True)`.

    Raises:
        ConfigError: the first that does not.
    """
    full_eval = args.bf16_full_eval or args.fp16_full_eval
    refused = {
        "neftune_noise_alpha": (args.neftune_noise_alpha, "it hooks into a module of the model, which does not run"),
        "bf16_full_eval, fp16_full_eval": (full_eval, "they change the dtype of weights that the decoder shares"),
        "torch_compile_backend": (args.torch_compile_backend not in (None, "inductor"), "only inductor is there"),
        "torch_compile_mode": (args.torch_compile_mode, "the decoder compiles the parts of its layers in its own way"),
        "activation_checkpointing_kwargs": (recompute_settings(args).get("offload"), "offload is not there"),
        "label_names": ((args.label_names or ["labels"]) != ["labels"], "targets are called labels"),
    }
    for name, (is_wrong, reason) in refused.items():
        if is_wrong:
            raise ConfigError(f"does not go with native=True: {reason}", field=name, fix="leave it out, or native")
    every = recompute_settings(args).get("every_n_layers", 1)
    if not _is_count(every):
        raise ConfigError(
            f"{every!r} is no number of layers",
            field="activation_checkpointing_kwargs.every_n_layers",
            fix="write 1 or more",
        )


def recompute_settings(args: transformers.TrainingArguments) -> dict[str, Any]:
    """What `activation_checkpointing_kwargs` says; text was read when the arguments were made."""
    found = args.activation_checkpointing_kwargs
    return dict(found) if isinstance(found, dict) else {}


def _refusals(args: transformers.TrainingArguments) -> Iterator[ConfigError]:
    for known in fields(args):
        name = known.name
        default = known.default if known.default_factory is MISSING else known.default_factory()
        value = getattr(args, name)
        if name in SUPPORTED or name in HARMLESS or value == default or not (value or default):
            continue
        if name == "accelerator_config":
            yield from _accelerator(value)
            continue
        reason, fix = REFUSED.get(name, ("this version of samestep does not know it", "leave it at its default"))
        yield ConfigError(f"{value!r} is refused: {reason}", field=name, fix=fix)


def _accelerator(config: Any) -> Iterator[ConfigError]:
    default = type(config)().to_dict()
    for name, value in config.to_dict().items():
        if value != default.get(name):
            yield ConfigError(
                f"{value!r} is refused: samestep deals out the data itself, each sample once",
                field=f"accelerator_config.{name}",
                fix="leave accelerator_config out",
            )


def _launched_ranks() -> int:
    """What a launcher such as torchrun says, which also says where the others are."""
    count = os.environ.get("WORLD_SIZE", "1") if "MASTER_ADDR" in os.environ else "1"
    return int(count) if count.isdecimal() else 1


def _environment(args: transformers.TrainingArguments) -> Iterator[ConfigError]:
    """What a launcher would have a run do."""
    if _launched_ranks() > 1 and args.world_size == 1:
        yield ConfigError(
            f"{_launched_ranks()} processes were started, but each of them would train alone: transformers joins "
            "processes on a CPU only where it is told to",
            field="use_cpu",
            fix="write use_cpu=True, or take TrainingArguments from samestep.hf",
        )
    wanted = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if wanted not in ("no", precision(args)):
        yield ConfigError(
            f"the environment variable ACCELERATE_MIXED_PRECISION is {wanted}, but the arguments say {precision(args)}",
            field="bf16, fp16",
            fix="write bf16=True or fp16=True in the arguments, or unset the variable",
        )
    for name, fix in _ACCELERATE_SWITCHES.items():
        if os.environ.get(name, "false").lower() in ("1", "true", "yes", "on", "y", "t"):
            yield ConfigError(f"the environment variable {name} is set", fix=fix)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _at_least_zero(value: Any) -> bool:
    return _is_finite(value) and value >= 0


def _is_fraction(value: Any) -> bool:
    return _is_finite(value) and 0 <= value < 1


_RANGES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "per_device_train_batch_size": (_is_count, "no number of samples", "write 1 or more"),
    "per_device_eval_batch_size": (_is_count, "no number of samples", "write 1 or more"),
    "gradient_accumulation_steps": (_is_count, "no number of micro-batches", "write 1 or more"),
    "max_grad_norm": (_at_least_zero, "no threshold", "write a number > 0, or 0 for no clipping"),
    "learning_rate": (_at_least_zero, "no learning rate", "write a number >= 0"),
    "weight_decay": (_at_least_zero, "no weight decay: it would make weights grow", "write a number >= 0"),
    "adam_beta1": (_is_fraction, "no decay rate", "write a number from 0 to 1, below 1"),
    "adam_beta2": (_is_fraction, "no decay rate", "write a number from 0 to 1, below 1"),
    "adam_epsilon": (_at_least_zero, "no floor of a denominator", "write a number >= 0"),
    "label_smoothing_factor": (_is_fraction, "no share of the probability", "write a number from 0 to 1, below 1"),
    "warmup_steps": (_at_least_zero, "no number of steps", "write steps, or a share of the run below 1"),
    "eval_delay": (_at_least_zero, "no number of steps or epochs", "write 0 or more"),
    "dataloader_num_workers": (lambda v: v == 0 or _is_count(v), "no number of processes", "write 0 or more"),
    "max_consecutive_skipped_steps": (lambda v: v == 0 or _is_count(v), "no number of steps", "write 0 or more"),
}


def _ranges(args: transformers.TrainingArguments) -> Iterator[ConfigError]:
    for name, (is_right, reason, fix) in _RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not is_right(value):
            yield ConfigError(f"{value!r} is {reason}", field=name, fix=fix)
    if args.max_steps != -1 and not _is_count(args.max_steps):
        yield ConfigError(
            f"{args.max_steps!r} is no length", field="max_steps", fix="write 1 or more, or -1 for epochs"
        )
    if args.max_steps == -1 and not (_is_finite(args.num_train_epochs) and args.num_train_epochs > 0):
        yield ConfigError(
            f"{args.num_train_epochs!r} is no length", field="num_train_epochs", fix="write a number > 0, or max_steps"
        )
    if args.save_total_limit is not None and not _is_count(args.save_total_limit):
        yield ConfigError(
            f"{args.save_total_limit!r} would keep no checkpoint",
            field="save_total_limit",
            fix='write 1 or more, leave it out to keep all, or write save_strategy="no"',
        )
    for kind in ("logging", "eval", "save"):
        strategy, steps = getattr(args, f"{kind}_strategy"), getattr(args, f"{kind}_steps")
        if strategy == "steps" and not (_is_finite(steps) and steps > 0):
            yield ConfigError(
                f"{steps!r} is no interval", field=f"{kind}_steps", fix="write 1 or more, or a share of the run below 1"
            )


def _choices(args: transformers.TrainingArguments) -> Iterator[ConfigError]:
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith(_LAYERWISE) or optimizer in _WITHOUT_STEP:
        yield ConfigError(
            f"{optimizer} is refused: it updates weights inside of the backward pass, before the gradient of the "
            "global batch is there",
            field="optim",
            fix=f"write {optimizer.removesuffix(_LAYERWISE) if optimizer.endswith(_LAYERWISE) else 'adafactor'}",
        )
    if args.train_sampling_strategy not in ("random", "sequential", "group_by_length"):
        yield ConfigError(
            f"{args.train_sampling_strategy!r} is refused: it would make the global batch depend on the ranks",
            field="train_sampling_strategy",
            fix="write random, sequential or group_by_length",
        )
    if setting(args, "loss_normalization") not in ("global_targets", "micro_batch_mean"):
        yield ConfigError(
            f"there is no {setting(args, 'loss_normalization')!r}",
            field="loss_normalization",
            fix="write global_targets or micro_batch_mean",
        )
    if args.bf16 and args.fp16:
        yield ConfigError("both are set", field="bf16, fp16", fix="write one of them")
    yield from _sharding(args)


def _sharding(args: transformers.TrainingArguments) -> Iterator[ConfigError]:
    shard = setting(args, "data_parallel_shard")
    if not args.fsdp:
        if shard != -1:
            yield ConfigError(f"{shard} has no effect without fsdp", field="data_parallel_shard", fix="write fsdp=True")
        return
    config = fsdp_settings(args)
    if shard != -1 and (not _is_count(shard) or args.world_size % shard):
        yield ConfigError(
            f"{shard} does not divide the {args.world_size} ranks", field="data_parallel_shard", fix="write -1 for all"
        )
    unknown = sorted(set(config) - _FSDP_KEYS)
    if unknown:
        yield ConfigError("is not known here", field=f"fsdp_config.{unknown[0]}", fix="remove it")
    if int(config.get("version", 2)) != 2:
        yield ConfigError(
            "FSDP1 is refused", field="fsdp_config.version", fix="write 2; data_parallel_shard makes HSDP"
        )
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "activation_checkpointing", "cpu_offload"):
        if config.get(name):
            fix = "write activation_checkpointing=True instead" if name.startswith("act") else "remove it"
            yield ConfigError("is refused", field=f"fsdp_config.{name}", fix=fix)
    if config.get("min_num_params"):
        yield ConfigError("is refused: each layer is a unit", field="fsdp_config.min_num_params", fix="remove it")


def fsdp_settings(args: transformers.TrainingArguments) -> dict[str, Any]:
    """What `fsdp_config` says; a file was read when the arguments were made."""
    return args.fsdp_config if isinstance(args.fsdp_config, dict) else {}


Precision = Literal["no", "bf16", "fp16"]


def precision(args: transformers.TrainingArguments) -> Precision:
    """What products are computed in; weights and sums of gradients stay as they are."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
