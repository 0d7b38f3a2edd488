"""What a user may write: one pydantic model per YAML section.

The docstring under each field is its help, its JSON schema text and its line in docs/config.md. Names are
those of a MindFormers PyNative file, so that such a file runs unchanged; `FOREIGN` lists fields that exist only there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from samestep.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------------------
# Kinds of values
# ---------------------------------------------------------------------------------------------------------------------

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
SCHEDULE_NAMES = {
    "ConstantWarmUpLR": "constant",
    "constant_with_warmup": "constant",
    "LinearWithWarmUpLR": "linear",
    "CosineWithWarmUpLR": "cosine",
}
EPSILON_NAMES = ("layer_norm_epsilon", "rms_norm_eps", "layernorm_epsilon")
ALIASES = {f"model.{name}": f"model.{EPSILON_NAMES[0]}" for name in EPSILON_NAMES[1:]}
"""Other accepted spellings of a dotted field."""


def _whole(value: Any) -> Any:
    """`1e3` is a float in YAML; it is taken where 1000 is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _long_dtype(value: Any) -> Any:
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _schedule(value: Any) -> Any:
    return SCHEDULE_NAMES.get(value, value) if isinstance(value, str) else value


def _wide(value: str) -> str:
    if value not in ("float32", "float64"):
        raise ConfigError(
            f"{value} is too narrow for sums over micro-batches: each addition loses low bits, and the error grows "
            "with the number of accumulation steps",
            fix="write float32 or float64",
        )
    return value


def _clip_threshold(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or (math.isfinite(value) and value > 0):
        return value
    if value == 0:
        why = "0 would scale every gradient to zero"
    elif value < 0:
        why = "a negative value would reverse every gradient"
    else:
        why = f"{value} is not a finite number"
    raise ConfigError(f"{why}; the largest gradient norm must be > 0", fix="write null to measure without clipping")


def _shard_degree(value: int) -> int:
    if value == 0:
        raise ConfigError("0 ranks cannot hold a shard", fix="write -1 for all data-parallel ranks, or 1 not to shard")
    return value


Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, BeforeValidator(_whole), Gt(0)]
Natural = Annotated[int, BeforeValidator(_whole), Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Ratio = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Between = Annotated[float, Gt(0), Lt(1)]
Text = Annotated[str, MinLen(1)]
Paths = Text | Annotated[list[Text], MinLen(1)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16", "float64"], BeforeValidator(_long_dtype)]
WideDtype = Annotated[Dtype, AfterValidator(_wide)]


class Section(BaseModel):
    """Base of all sections: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=False,
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------------------------------


class TokenizerConfig(Section):
    """How text becomes tokens."""

    type: Literal["auto", "char", "bpe", "file"] = "auto"
    """`char`: one token a character; `bpe`: trained on the training text; `file`: read from `path`; `auto`: `file` if
    `path` is given, else `bpe`."""
    path: Text | None = None
    """A `tokenizer.json`, or a folder that holds one; relative to the YAML file."""
    vocab_size: Count = 4096
    """Tokens of a `bpe` tokenizer when it is trained here."""
    end_token: Text | None = None
    """Token that ends every document; null = found by its usual names."""

    @model_validator(mode="after")
    def _path_fits_type(self) -> TokenizerConfig:
        if self.type == "file" and self.path is None:
            raise ConfigError(
                "type is `file`, but no file is named",
                field="tokenizer.path",
                fix="write `path: FOLDER/tokenizer.json`",
            )
        if self.type in ("char", "bpe") and self.path is not None:
            raise ConfigError(
                f"a `{self.type}` tokenizer is made from the training text and reads no file",
                field="tokenizer.path",
                fix="write `type: file`, or remove `path`",
            )
        return self


class TrainingConfig(Section):
    """The optimizer step and how many of them."""

    steps: Count = 1000
    """Optimizer steps of the run (global batches consumed, skipped ones included)."""
    local_batch_size: Count = 1
    """Samples of one micro-batch on one rank."""
    global_batch_size: Count = 1
    """Samples of one optimizer step over all ranks; the accumulation steps follow from it."""
    max_norm: Annotated[Positive | None, BeforeValidator(_clip_threshold)] = 1.0
    """Largest global L2 norm of the gradient; null measures without clipping."""
    max_consecutive_skipped_steps: Natural = 0
    """Skipped (non-finite) steps in a row that end the run; 0 = no limit."""
    seed: Natural = 42
    """Seed of weights, data order and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels; slower."""
    loss_normalization: Literal["global_targets", "micro_batch_mean"] = "global_targets"
    """`global_targets`: divide by the targets of the whole global batch; `micro_batch_mean`: average the means of the
    micro-batches, which makes the step depend on the split."""
    remainder: Literal["use", "drop", "error"] = "use"
    """Samples of a global batch past the last multiple of data-parallel ranks x `local_batch_size`: use them,
    drop them, or refuse to start."""
    last_batch: Literal["use", "drop"] = "use"
    """The short global batch at the end of the data: use it or drop it."""
    micro_batch: Literal["padded", "packed"] = "padded"
    """Lay samples out padded to the longest, or end to end with block-diagonal attention; the step is the same."""
    z_loss_weight: NonNegative = 0.0
    """Weight of the squared log-partition (z-loss) added to the loss; 0 = off."""
    rampup_batch_size: Annotated[list[Natural], MinLen(3), MaxLen(3)] | None = None
    """Grow the global batch: `[start, increment, samples]`."""


class ParallelismConfig(Section):
    """How many ranks share the work, and how."""

    data_parallel_shard: Annotated[Int, AfterValidator(_shard_degree)] = -1
    """Ranks that shard weights, gradients and optimizer state; -1 = all data-parallel ranks, 1 = do not shard."""
    reshard_after_forward_policy: Literal["default", "always", "never"] = "default"
    """Free gathered weights after the forward pass; `default`: unless pipeline parallel is used."""
    dense_fsdp_shard_size: Count | None = None
    """Smaller shard degree for weights outside the experts; null = `data_parallel_shard`."""
    cpu_offload: bool = False
    """Keep sharded weights and optimizer state in CPU memory."""
    tensor_parallel: Count = 1
    """Ranks that split each weight matrix."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel ranks; acts only with `tensor_parallel` > 1."""
    context_parallel: Count = 1
    """Ranks that split each sequence."""
    context_parallel_method: Literal["colossal", "ulysses", "hybrid"] = "colossal"
    """How context-parallel ranks exchange keys and values: ring, all-to-all over heads, or both."""
    ulysses_degree_in_cp: Count | None = None
    """Ranks of `context_parallel` that use all-to-all over heads."""
    pipeline_parallel: Count = 1
    """Pipeline stages."""
    pipeline_parallel_schedule: Literal["1f1b", "interleaved_1f1b", "gpipe"] = "1f1b"
    """Order of forward and backward passes in the pipeline."""
    pipeline_parallel_layers_per_stage: str | list[str] | None = "auto"
    """Layers of each stage, such as `["0-3", "4-7"]`; `auto` or null splits evenly."""
    pipeline_parallel_interleave_num: Count = 1
    """Pieces of the network on each pipeline rank."""
    expert_parallel: Count = 1
    """Ranks that split the experts of a layer."""


class OptimizerConfig(Section):
    """The update rule."""

    type: Literal["AdamW"] = "AdamW"
    """Name of the optimizer."""
    betas: Annotated[list[BelowOne], MinLen(2), MaxLen(2)] = [0.9, 0.95]
    """Decay of the first and second moment."""
    eps: NonNegative = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, times the learning rate each update."""
    weight_decay_include: list[Text] | None = None
    """Parameters that decay: exact names, substrings or wildcards; wins over `weight_decay_exclude`."""
    weight_decay_exclude: list[Text] | None = None
    """Parameters that do not decay, besides vectors and biases."""


class LrSchedulerConfig(Section):
    """The learning rate over the updates of the run; its length is always `training.steps`."""

    type: Annotated[Literal["constant", "linear", "cosine"], BeforeValidator(_schedule)] = "constant"
    """Shape after the warm-up. Also accepted: `ConstantWarmUpLR`, `constant_with_warmup`, `LinearWithWarmUpLR`,
    `CosineWithWarmUpLR`."""
    learning_rate: Positive = 1e-5
    """Peak learning rate."""
    warmup_steps: Natural = 0
    """Updates that rise from `warmup_lr_init` to the peak."""
    warmup_ratio: Ratio | None = None
    """Warm-up as a fraction of `training.steps`; if given, it overrides `warmup_steps`."""
    warmup_lr_init: NonNegative = 0.0
    """Learning rate of the first warm-up update."""
    lr_end: NonNegative = 0.0
    """Learning rate at the end of `linear` and `cosine`."""
    num_cycles: Positive = 0.5
    """Cosine waves after the warm-up (`cosine` only); 0.5 falls once."""


class DatasetConfig(Section):
    """Fields that training and validation data share."""

    type: Literal["auto", "text", "jsonl"] = "auto"
    """Kind of file; `auto` goes by the name's ending."""
    text_column: Text = "text"
    """Field of a JSON line that holds the text."""
    rows: Literal["cut", "documents", "pack_documents"] = "cut"
    """How samples are made: `cut`: the joined text in pieces of `model.seq_length`; `documents`: one document a sample;
    `pack_documents`: whole documents laid into samples of `model.seq_length`."""
    document_separator: Text | None = None
    """Text between two documents of a text file; null = a file is one document."""
    long_documents: Literal["split", "truncate", "error"] = "split"
    """A document longer than `model.seq_length`: split it, keep its start, or refuse it."""
    targets: Literal["all", "assistant"] = "all"
    """Chat rows (field `messages`): which turns are targets."""


class TrainDatasetConfig(DatasetConfig):
    """Training data."""

    path: Paths
    """Text files, `.jsonl` files, folders or wildcards; relative to the YAML file."""
    split: Literal["documents", "tail"] | None = None
    """Take validation data from here: whole documents, or the end of the text; null = take none."""
    eval_fraction: Between = 0.1
    """Share of the data that `split` takes."""
    shuffle: bool = True
    """Shuffle the samples anew in each pass over the data."""


class EvalDatasetConfig(DatasetConfig):
    """Validation data."""

    path: Paths | None = None
    """Text files, `.jsonl` files, folders or wildcards, relative to the YAML file; null = none."""


class EvaluationConfig(Section):
    """When and how validation data is measured."""

    interval_steps: Natural = 0
    """Training steps between evaluations; 0 = only at the end."""
    local_batch_size: Count | None = None
    """Samples of one evaluation micro-batch on one rank; null = `training.local_batch_size`."""


class ModelConfig(Section):
    """The network and its number formats."""

    model_type: Text = "llama"
    """Family of the network; decides defaults, biases, position encoding and gating."""
    architectures: Text | list[Text] | None = None
    """Class name in a Hugging Face configuration; null = the family's."""
    vocab_size: Count | None = None
    """Rows of the embedding; null = the tokenizer's."""
    seq_length: Count
    """Tokens of one sample at most."""
    hidden_size: Count
    """Width of the residual stream."""
    num_hidden_layers: Count
    """Decoder layers."""
    num_attention_heads: Count
    """Query heads of each layer."""
    num_key_value_heads: Count | None = None
    """Key and value heads of each layer; null = as many as query heads."""
    head_dim: Count | None = None
    """Width of one head; null = `hidden_size` / `num_attention_heads`."""
    intermediate_size: Count | None = None
    """Width of the feed-forward layer; null = 4 x `hidden_size`, gated 8/3 x rounded up to a multiple of 64."""
    max_position_embeddings: Count | None = None
    """Positions the network can tell apart; null = `seq_length`."""
    tie_word_embeddings: bool = False
    """Use the embedding as the output layer."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position frequencies."""
    hidden_dropout: BelowOne = 0.0
    """Dropout after the embedding, attention and feed-forward layers."""
    attention_dropout: BelowOne = 0.0
    """Dropout of attention probabilities."""
    normalization: Text = "RMSNorm"
    """Normalization layer, such as `RMSNorm` or `LayerNorm`."""
    fused_norm: bool = True
    """Use the fused normalization; false runs the reference implementation, for debugging."""
    hidden_act: Text | None = None
    """Activation of the feed-forward layer, such as `silu` or `gelu`; null = the family's."""
    layer_norm_epsilon: NonNegative | None = Field(None, validation_alias=AliasChoices(*EPSILON_NAMES))
    """Added to the variance in normalization; null = the family's. Also accepted: `rms_norm_eps`,
    `layernorm_epsilon`."""
    initializer_range: Positive = 0.02
    """Standard deviation of initial weights."""
    params_dtype: Dtype = "float32"
    """Stored weights. `bfloat16` and `float16` weights get float32 master copies."""
    compute_dtype: Dtype = "bfloat16"
    """Matrix products."""
    layernorm_compute_dtype: Dtype = "float32"
    """Normalization."""
    softmax_compute_dtype: Dtype = "float32"
    """Attention softmax."""
    rotary_dtype: Dtype = "float32"
    """Rotary position encoding."""
    gradient_dtype: WideDtype = "float32"
    """Accumulated gradients: float32 or float64."""
    reduce_dtype: WideDtype = "float32"
    """Gradient sums between ranks: float32 or float64."""
    loss_dtype: WideDtype = "float32"
    """Losses and their sums: float32 or float64."""


class CheckpointConfig(Section):
    """What is saved, and when."""

    enable_save: bool = True
    """Save checkpoints, the last one at the end of the run."""
    save_path: str = ""
    """Folder of the checkpoints; empty = `checkpoints` in `output_dir`."""
    save_max: Count = 5
    """Checkpoints of this run to keep."""
    save_interleaved_steps: Count = 1000
    """Training steps between checkpoints."""
    no_save_optim: bool = False
    """Save weights only; such a checkpoint cannot be resumed."""
    async_save: bool = False
    """Write while training goes on."""
    load_path: str = ""
    """Checkpoint to start from; empty = fresh weights, or the newest one of this run."""


class TensorboardConfig(Section):
    """TensorBoard files in `output_dir`/tensorboard."""

    enable: bool = True
    """Write them."""
    log_interval: Count = 1
    """Training steps between points."""


class TrainStateConfig(Section):
    """Extra numbers of each step."""

    local_norm: bool | str | list[str] = ""
    """Gradient norms of each micro-batch: all, or of parameters whose name contains one of these."""
    local_loss: bool = False
    """Loss of each micro-batch of a rank."""
    device_norm: bool = False
    """Gradient norm of each parameter at the end of a step."""


class MonitorConfig(Section):
    """What is shown while training."""

    log_interval: Count = 10
    """Training steps between progress lines when the output is not a terminal."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """TensorBoard files."""
    train_state: TrainStateConfig = TrainStateConfig()
    """Extra numbers of each step."""


class RecomputeConfig(Section):
    """Activations that are computed again in the backward pass to save memory."""

    mode: Literal["None", "full", "select"] = "None"
    """`None`: keep all activations; `full`: recompute whole layers; `select`: recompute chosen modules."""
    full_recompute_layer: list[str] | None = None
    """Layers to recompute, such as `["0-3", "7"]`."""
    select_module: dict[str, list[str]] | None = None
    """Modules to recompute: pattern of the name inside a layer -> layers."""
    exclude_op: dict[str, list[str]] | None = None
    """Operators not to recompute: pattern -> layers."""


class ProfilerConfig(Section):
    """Time and memory traces; these fields act only with `enable_profiling`."""

    enable_profiling: bool = False
    """Record a trace."""
    start_step: Count = 1
    """First training step recorded."""
    end_step: Count = 1
    """Last training step recorded."""
    output_path: Text | None = None
    """Folder of the traces; null = `profile` in `output_dir`."""
    profiler_rank: list[Natural] | None = None
    """Ranks that record; null = all."""
    profiler_level: Literal[0, 1, 2] = 0
    """Detail of the trace."""
    profile_memory: bool = False
    """Record memory."""
    profile_cpu: bool = True
    """Record CPU work."""
    with_stack: bool = True
    """Record call stacks."""


class Config(Section):
    """Everything a run needs to know."""

    output_dir: Text = "runs/default"
    """Folder of the run; relative to the current directory."""
    compile: bool = False
    """Compile the network."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    training: TrainingConfig = TrainingConfig()
    """The optimizer step and how many of them."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """How many ranks share the work, and how."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule."""
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    """The learning rate over the run."""
    train_dataset: TrainDatasetConfig
    """Training data."""
    eval_dataset: EvalDatasetConfig = EvalDatasetConfig()
    """Validation data."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When and how validation data is measured."""
    model: ModelConfig
    """The network and its number formats."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved, and when."""
    monitor: MonitorConfig = MonitorConfig()
    """What is shown while training."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Activations that are computed again."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Time and memory traces."""
    callbacks: list[Any] = []
    """Registered callbacks."""


# ---------------------------------------------------------------------------------------------------------------------
# Fields without effect
# ---------------------------------------------------------------------------------------------------------------------

_ACCELERATOR = "a switch of its own hardware"
_EXPERTS = "only mixture-of-experts models use it"
_LATENT = "only latent attention uses it"
_YARN = "only yarn position encoding uses it"
_FAMILY = "the model family decides"
_FILES = "concerns only how its own checkpoint files are laid out"

FOREIGN: dict[str, str] = {
    "context": "set up its own launcher and hardware",
    "use_remove_redundant_dataset": "had no effect there either",
    "recompute_comm": "communication is never computed again",
    "swap": "activations are not moved off the device",
    "training.use_skip_step_on_nan": "non-finite steps are always skipped",
    "parallelism.data_parallel_shard_strategy": "had no effect there either",
    "parallelism.disable_gradient_division": "gradients are always summed, never averaged",
    "parallelism.context_parallel_async": _ACCELERATOR,
    "parallelism.pipeline_parallel_microbatch_size": "follows from training.global_batch_size",
    "parallelism.pipeline_parallel_overlap_*": _ACCELERATOR,
    "parallelism.pipeline_parallel_enable_dxdw_split": _ACCELERATOR,
    "parallelism.pipeline_parallel_p2p_transport": _ACCELERATOR,
    "parallelism.enable_mc2": _ACCELERATOR,
    "parallelism.enable_loss_parallel": "had no effect there either",
    "parallelism.npu_nums_per_device": _ACCELERATOR,
    "parallelism.moe_token_dispatcher_type": _EXPERTS,
    "parallelism.expert_parallel_*": _EXPERTS,
    "optimizer.enable_fused_opt": _ACCELERATOR,
    "optimizer.use_fused": _ACCELERATOR,
    "lr_scheduler.total_steps": "always training.steps",
    "*_dataset.drop_remainder": "use training.last_batch",
    "*_dataset.num_parallel_workers": "data is read without worker settings",
    "*_dataset.prefetch_size": "data is read without worker settings",
    "*_dataset.numa_enable": _ACCELERATOR,
    "*_dataset.use_distribute_dataset": "every rank reads its own samples",
    "*_dataset.balance_enabled": "the split does not change the step, so it is not a setting",
    "*_dataset.dataloader": "its loaders do not exist here; write `path: FILE` with a text file, a .jsonl file, "
    "a folder or a wildcard",
    "model.use_flash_attention": "the attention implementation is chosen by device and dtype",
    "model.input_layout": _ACCELERATOR,
    "model.sparse_mode": _ACCELERATOR,
    "model.apply_rope_fusion": "fused operators are chosen by device and dtype",
    "model.bias_swiglu_fusion": "fused operators are chosen by device and dtype",
    "model.use_fused_*": "fused operators are chosen by device and dtype",
    "model.gated_linear_unit": _FAMILY,
    "model.add_bias_linear": _FAMILY,
    "model.*_token_id": "the tokenizer decides",
    "model.embedding_params_dtype": "the embedding is stored in model.params_dtype",
    "model.chunk_loss_num": "logits are never kept at full size by a setting",
    "model.calculate_per_token_loss": "see training.loss_normalization",
    "model.moe_*": _EXPERTS,
    "model.router_dense_type": _EXPERTS,
    "model.routed_scaling_factor": _EXPERTS,
    "model.first_k_dense_replace": _EXPERTS,
    "model.num_experts_per_tok": _EXPERTS,
    "model.scoring_func": _EXPERTS,
    "model.norm_topk_prob": _EXPERTS,
    "model.topk_group": _EXPERTS,
    "model.n_group": _EXPERTS,
    "model.use_pad_tokens": _EXPERTS,
    "model.mla_qkv_concat": _LATENT,
    "model.qk_rope_head_dim": _LATENT,
    "model.qk_nope_head_dim": _LATENT,
    "model.v_head_dim": _LATENT,
    "model.mtp_loss_*": "only multi-token prediction uses it",
    "model.scaling_factor": _YARN,
    "model.beta_fast": _YARN,
    "model.beta_slow": _YARN,
    "model.mscale*": _YARN,
    "checkpoint.prefix": _FILES,
    "checkpoint.remove_redundancy": _FILES,
    "checkpoint.load_balanced": _FILES,
    "checkpoint.load_worker_number": _FILES,
    "checkpoint.save_global_layout_cache": _FILES,
    "checkpoint.reshard_worker_num": _FILES,
    "monitor.health_checkpoint": "had no effect there either",
    "monitor.train_state.device_loss": "the loss of every step is always reported",
    "monitor.tensorboard.output_dir": "always tensorboard in output_dir",
    "monitor.tensorboard.queue_size": "the writer's own",
    "monitor.moe_monitor": _EXPERTS,
    "profiler.mstx": _ACCELERATOR,
}
"""Fields of a MindFormers file that mean nothing here -> why; wildcards allowed. Accepted, removed, named in one
warning."""

UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    "run_mode": ("train",),
    "compile": (False,),
    "callbacks": ([],),
    "lora_config": (None,),
    "inference": (None,),
    "swap.enable": (False,),
    "training.rampup_batch_size": (None,),
    "parallelism.reshard_after_forward_policy": ("default",),
    "parallelism.dense_fsdp_shard_size": (None,),
    "parallelism.cpu_offload": (False,),
    "parallelism.context_parallel_method": ("colossal",),
    "parallelism.context_parallel_mask_type": ("causal",),
    "parallelism.ulysses_degree_in_cp": (None,),
    "parallelism.pipeline_parallel_schedule": ("1f1b",),
    "parallelism.pipeline_parallel_layers_per_stage": ("auto", None),
    "parallelism.pipeline_parallel_interleave_num": (1,),
    "optimizer.amsgrad": (False,),
    "optimizer.maximize": (False,),
    "optimizer.enable_cpu_offload": (False,),
    "lr_scheduler.decay_steps": (None,),
    "lr_scheduler.decay_ratio": (None,),
    "model.multi_latent_attention": (False, None),
    "model.kv_lora_rank": (None,),
    "model.q_lora_rank": (None,),
    "model.qk_layernorm": (False, None),
    "model.position_embedding_type": ("rope", "learned_absolute", None),
    "model.rope_scaling": (None,),
    "model.n_routed_experts": (None, 0),
    "model.num_moe_experts": (None, 0),
    "model.n_shared_experts": (None, 0),
    "model.num_nextn_predict_layers": (None, 0),
    "model.mtp_num_layers": (None, 0),
    "checkpoint.async_save": (False,),
    "checkpoint.load_path": ("",),
    "checkpoint.no_load_optim": (False,),
    "checkpoint.save_trainable_only": (False,),
    "checkpoint.base_load_path": ("",),
    "monitor.train_state.local_norm": ("", False, []),
    "monitor.train_state.local_loss": (False,),
    "monitor.train_state.device_norm": (False,),
    "recompute.mode": ("None",),
    "recompute.full_recompute_layer": (None,),
    "recompute.select_module": (None,),
    "recompute.exclude_op": (None,),
    "profiler.enable_profiling": (False,),
}
"""Fields whose effect this version does not have -> the only values accepted. Those that are not in the schema are
fields of a MindFormers file that would change the result, so they cannot be ignored."""


def foreign_reason(field: str) -> str | None:
    """Why a dotted field means nothing here, or None if it is not in `FOREIGN`."""
    return next((reason for pattern, reason in FOREIGN.items() if fnmatchcase(field, pattern)), None)


# ---------------------------------------------------------------------------------------------------------------------
# Looking at the schema
# ---------------------------------------------------------------------------------------------------------------------


def section_class(info: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or None for a plain value."""
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted field below a section, sections themselves included."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        if inner := section_class(info):
            yield from walk(inner, f"{prefix}{name}.")


FIELDS: dict[str, FieldInfo] = dict(walk(Config))
"""Dotted field or section -> its description."""


def field_homes(name: str) -> list[str]:
    """Sections that have a field of this name (`""` is the top level)."""
    return [field.rpartition(".")[0] for field in (*FIELDS, *ALIASES) if field.rpartition(".")[2] == name]


def describe(info: FieldInfo) -> str:
    """The values a field takes, in words, such as `whole number > 0 or null`."""
    return _describe(info.annotation, info.metadata)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, UnionType):
        return " or ".join(_describe(argument, []) for argument in arguments)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        size = next((f"{rule.max_length} " for rule in metadata if isinstance(rule, MaxLen)), "")
        item = _describe(arguments[0], [])
        return (
            "list of text"
            if item == "text"
            else f"list of {size}values" + (f", each {item}" if item != "value" else "")
        )
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(annotation, "value") + _bounds(metadata)


def _bounds(metadata: list[Any]) -> str:
    signs = {Gt: "> {0.gt}", Ge: ">= {0.ge}", Lt: "< {0.lt}", Le: "<= {0.le}"}
    parts = [signs[type(rule)].format(rule) for rule in metadata if type(rule) in signs]
    return " " + " and ".join(parts) if parts else ""
