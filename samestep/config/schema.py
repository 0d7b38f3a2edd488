"""What a user may write: one pydantic model per YAML section.

The docstring under each field is its help, its JSON schema text and its line in docs/config.md. Names are those of a
MindFormers PyNative file, so that such a file runs unchanged; `foreign.py` lists fields that exist only there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le
from pydantic import AfterValidator, AliasChoices, Field, model_validator

from samestep.config.kinds import (
    EPSILON_NAMES,
    ROUTER_NAMES,
    BelowOne,
    Between,
    ComputeDtype,
    Count,
    Dtype,
    Int,
    LayerRanges,
    ModuleLayers,
    Natural,
    NonNegative,
    Paths,
    Positive,
    Section,
    Text,
    WideDtype,
    shard_degree,
)
from samestep.config.optimization import LrSchedulerConfig, OptimizerConfig
from samestep.config.training import LossScaleConfig, TrainingConfig
from samestep.errors import ConfigError


class TokenizerConfig(Section):
    """How text becomes tokens."""

    type: Literal["auto", "char", "bpe", "file"] = "auto"
    """`char`: one token a character; `bpe`: trained on the training text; `file`: read from `path`; `auto`: `file` if
    `path` is given, else `bpe`."""
    path: Text | None = None
    """A `tokenizer.json`, or a Hugging Face tokenizer's folder (`tokenizer.json`; `vocab.json` and `merges.txt`; or a
    SentencePiece model, read by `transformers`); relative to the YAML file."""
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
        if self.type in ("char", "file") and self.vocab_size != type(self).model_fields["vocab_size"].default:
            raise ConfigError(
                f"a `{self.type}` tokenizer has the vocabulary of its {'text' if self.type == 'char' else 'file'}",
                field="tokenizer.vocab_size",
                fix="remove it, or write `type: bpe`",
            )
        if self.type in ("char", "bpe") and self.path is not None:
            raise ConfigError(
                f"a `{self.type}` tokenizer is made from the training text and reads no file",
                field="tokenizer.path",
                fix="write `type: file`, or remove `path`",
            )
        return self


class ParallelismConfig(Section):
    """How many ranks share the work, and how."""

    data_parallel_shard: Annotated[Int, AfterValidator(shard_degree)] = -1
    """Ranks that shard weights, gradients and optimizer state; -1 = all data-parallel ranks, 1 = do not shard."""
    reshard_after_forward_policy: Literal["default", "always", "never"] = "default"
    """Free gathered weights after the forward pass; `default`: those of the layers, but not those of the head, which
    the backward pass needs first."""
    reduce: Literal["auto", "once_per_step", "every_micro_batch"] = "auto"
    """When gradients of sharded weights are summed over the ranks: once a step, or after every micro-batch, which takes
    less memory and more traffic; `auto`: once a step where the plan finds memory for it."""
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


class DatasetConfig(Section):
    """Fields that training and validation data share."""

    type: Literal["auto", "text", "jsonl", "json", "parquet", "huggingface"] = "auto"
    """Kind of data: `text`; `jsonl`: one JSON object a line; `json`: one array of objects; `parquet`; `huggingface`: a
    folder written by `save_to_disk`, or a data set of the Hub; `auto` goes by the name's ending or the folder's
    content. Text and JSON files may end in `.gz` or `.zst`."""
    dataset_split: Text | None = None
    """Split of a Hugging Face data set; null = the only one, or `train`."""
    dataset_subset: Text | None = None
    """Subset (configuration) of a data set of the Hugging Face Hub; null = its default."""
    text_column: Text = "text"
    """Column that holds the text. Rows without it may be chats (`messages` with role and content, or `conversations`
    with from and value), `prompt` and `completion`, or `instruction`, `input` and `output`. A row or turn of another
    form, such as an unknown role in `conversations`, is an error that names it; a row without text is passed over."""
    rows: Literal["cut", "documents", "pack_documents"] = "cut"
    """How samples are made: `cut`: the joined text in pieces of `model.seq_length`; `documents`: one document a sample;
    `pack_documents`: whole documents laid into samples of `model.seq_length`."""
    document_separator: Text | None = None
    """Text between two documents of a text file; null = a file is one document. One that occurs nowhere is refused."""
    long_documents: Literal["split", "truncate", "error"] = "split"
    """A document longer than `model.seq_length`: split it, keep its start, or refuse it."""
    targets: Literal["all", "assistant"] = "all"
    """Which turns of a chat are targets; `completion` and `output` count as the assistant's."""

    @model_validator(mode="after")
    def _long_documents_fit_rows(self) -> Self:
        if self.rows == "cut" and self.long_documents != "split":
            raise ConfigError(
                f"`{self.long_documents}` has no effect with `rows: cut`, which cuts the joined text",
                field=f"{'train' if isinstance(self, TrainDatasetConfig) else 'eval'}_dataset.long_documents",
                fix="remove it, or write rows: documents or pack_documents",
            )
        return self


class TrainDatasetConfig(DatasetConfig):
    """Training data."""

    path: Paths
    """Files (`.txt`, `.jsonl`, `.json`, `.parquet`), folders or wildcards, relative to the YAML file; or
    `hf://datasets/OWNER/NAME` on the Hugging Face Hub."""
    split: Literal["documents", "tail"] | None = None
    """Take validation data from here: whole documents, or the end of the text; null = take none."""
    eval_fraction: Between = 0.1
    """Share of the data that `split` takes."""
    shuffle: bool = True
    """Shuffle the samples anew in each pass over the data."""


class EvalDatasetConfig(DatasetConfig):
    """Validation data."""

    path: Paths | None = None
    """Files, folders, wildcards or `hf://datasets/OWNER/NAME`, as in `train_dataset`; null = none."""


class EvaluationConfig(Section):
    """When and how validation data is measured."""

    interval_steps: Natural = 0
    """Training steps between evaluations; 0 = only at the end."""
    local_batch_size: Count | None = None
    """Samples of one evaluation micro-batch on one rank; null = `training.local_batch_size`, or as many of the longest
    as the micro-batches of the training have positions."""


class RopeScalingConfig(Section):
    """Rotary positions beyond the length that a model was first trained with; fields that `type` does not use are
    refused."""

    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = Field(
        "default", validation_alias=AliasChoices("type", "rope_type")
    )
    """`default`: none; `linear`: positions divided by `factor`; `dynamic`: a base that grows with the length of each
    document; `llama3`: low frequencies divided; `yarn`: low frequencies divided, attention sharpened. Also accepted:
    `rope_type`."""
    factor: Annotated[float, Ge(1)] | None = None
    """How many times longer; null (`yarn` only) = `max_position_embeddings` / `original_max_position_embeddings`."""
    original_max_position_embeddings: Count | None = None
    """Positions of the first training; `dynamic`, `llama3` and `yarn` need it."""
    low_freq_factor: Positive | None = None
    """`llama3`: wavelengths above the original length / this are divided by `factor`; null = 1."""
    high_freq_factor: Positive | None = None
    """`llama3`: wavelengths below the original length / this stay; null = 4."""
    beta_fast: Positive | None = None
    """`yarn`: pairs that turn more often than this within the original length stay; null = 32."""
    beta_slow: Positive | None = None
    """`yarn`: pairs that turn less often than this are divided by `factor`; null = 1."""
    mscale: Positive | None = None
    """`yarn`: numerator of `attention_factor`; acts only together with `mscale_all_dim`."""
    mscale_all_dim: Positive | None = None
    """`yarn`: denominator of `attention_factor`; acts only together with `mscale`."""
    attention_factor: Positive | None = None
    """`yarn`: what cosines and sines are multiplied by; null = from `factor`, `mscale` and `mscale_all_dim`."""


class ModelConfig(Section):
    """The network and its number formats."""

    model_type: Text = "llama"
    """Family of the network; decides defaults, biases, position encoding and gating."""
    pretrained: Text | None = None
    """Weights to begin with: a Hugging Face folder (`config.json` and safetensors), relative to the YAML file; a model
    on the Hugging Face Hub, OWNER/NAME; or a GGUF file. It decides the fields of the architecture, which need not be
    written, and the tokenizer unless one is named; null = random weights."""
    architectures: Text | list[Text] | None = None
    """Class name in a Hugging Face configuration; null = the family's."""
    vocab_size: Count | None = None
    """Rows of the embedding; null = the tokenizer's."""
    seq_length: Count
    """Tokens of one sample at most."""
    hidden_size: Count
    """Width of the residual stream."""
    num_hidden_layers: Annotated[Count, Le(10_000)]
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
    tie_word_embeddings: bool | None = None
    """Use the embedding as the output layer; null = the family's."""
    attention_bias: bool | None = None
    """Biases of the attention projections (`qwen2`: of query, key and value only); null = the family's."""
    mlp_bias: bool | None = None
    """Biases of the feed-forward layer; null = the family's."""
    qk_layernorm: bool | None = None
    """Normalize queries and keys in each head; null = the family's."""
    sliding_window: Count | None = None
    """Tokens that a position sees, itself included; null = all before it."""
    position_embedding_type: Literal["rope", "learned_absolute"] | None = None
    """How positions enter; the family decides, and another value is refused."""
    rope_theta: Positive = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Rotary positions beyond the length of the first training."""
    hidden_dropout: BelowOne = 0.0
    """Dropout after the embedding, attention and feed-forward layers."""
    attention_dropout: BelowOne = 0.0
    """Dropout of attention probabilities."""
    normalization: Text | None = None
    """Normalization layer, `RMSNorm` or `LayerNorm`; null = the family's."""
    fused_norm: bool = True
    """Use the fused normalization; false runs the reference implementation, for debugging."""
    hidden_act: Text | None = None
    """Activation of the feed-forward layer: `silu`, `fusedswiglu`, `gelu` or `gelu_tanh` (also accepted: `gelu_new`,
    `gelu_pytorch_tanh`); null = the family's."""
    layer_norm_epsilon: NonNegative | None = Field(None, validation_alias=AliasChoices(*EPSILON_NAMES))
    """Added to the variance in normalization; null = the family's. Also accepted: `rms_norm_eps`,
    `layernorm_epsilon`."""
    initializer_range: Positive = 0.02
    """Standard deviation of initial weights."""
    params_dtype: Dtype = "float32"
    """Stored weights. `bfloat16` and `float16` weights get float32 master copies unless `optimizer.master_weights` says
    otherwise."""
    embedding_params_dtype: Dtype | None = None
    """Stored embedding tables, of tokens and of learned positions, and a head tied to them; null = `params_dtype`."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Matrix products and hidden states. `float8`: the products of the layers' projections have operands in float8, all
    else is in bfloat16; for GPUs of compute capability 8.9 or more (torchao, `pip install "samestep[lowbit]"`)."""
    layernorm_compute_dtype: Dtype = "float32"
    """Normalization."""
    softmax_compute_dtype: Dtype = "float32"
    """Attention softmax."""
    rotary_dtype: Dtype = "float32"
    """Rotary position encoding."""
    router_dense_type: Dtype | None = Field(None, validation_alias=AliasChoices(*ROUTER_NAMES))
    """Router of a mixture of experts; refused for a model without one. Also accepted: `moe_router_dtype`."""
    gradient_dtype: WideDtype = "float32"
    """Accumulated gradients: float32 or float64."""
    reduce_dtype: WideDtype = "float32"
    """Gradient sums between ranks: float32 or float64."""
    loss_dtype: WideDtype = "float32"
    """Losses and their sums: float32 or float64."""

    @property
    def embedding_storage(self) -> str:
        """What the embedding tables are stored in."""
        return self.embedding_params_dtype or self.params_dtype

    @property
    def working_dtype(self) -> str:
        """What is computed in besides the products of the layers' projections."""
        return "bfloat16" if self.compute_dtype == "float8" else self.compute_dtype

    @property
    def casts_weights(self) -> bool:
        """Whether weights of the layers are cast to a 16-bit dtype for their products."""
        return self.compute_dtype in ("bfloat16", "float16") and self.compute_dtype != self.params_dtype

    @property
    def has_float16(self) -> bool:
        """Whether anything is stored or computed in float16."""
        return any(getattr(self, name) == "float16" for name in type(self).model_fields if name.endswith("dtype"))


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
    keep_best: bool = False
    """Save whenever the validation loss is the lowest so far, and keep that checkpoint besides `save_max`; `best.json`
    names it."""
    no_save_optim: bool = False
    """Save weights only; such a checkpoint cannot be resumed."""
    async_save: bool = False
    """Write while training goes on."""
    load_path: str = ""
    """Checkpoint to start from; empty = fresh weights, or the newest one of this run."""

    @model_validator(mode="after")
    def _best_is_saved(self) -> CheckpointConfig:
        if self.keep_best and not self.enable_save:
            raise ConfigError(
                "without checkpoints there is none to keep",
                field="checkpoint.keep_best",
                fix="write false, or enable_save: true",
            )
        return self


class TensorboardConfig(Section):
    """TensorBoard files in `output_dir`/tensorboard."""

    enable: bool = True
    """Write them."""
    log_interval: Count = 1
    """Training steps between points."""
    queue_size: Count = 1000
    """Points held in memory before they are written."""


class WandbConfig(Section):
    """Weights & Biases; needs `pip install "samestep[wandb]"`."""

    enable: bool = False
    """Send the numbers of the run."""
    project: Text = "samestep"
    """Project that the run belongs to."""
    name: Text | None = None
    """Name of the run; null = the last part of `output_dir`."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: write below `output_dir`/wandb only; `wandb sync` sends it later."""
    log_interval: Count = 1
    """Training steps between points."""


class MlflowConfig(Section):
    """MLflow; needs `pip install "samestep[mlflow]"`."""

    enable: bool = False
    """Send the numbers of the run."""
    tracking_uri: Text | None = None
    """Server, database or folder; null = the variable MLFLOW_TRACKING_URI, or MLflow's own default."""
    experiment: Text = "samestep"
    """Experiment that the run belongs to; made if it is missing."""
    log_interval: Count = 1
    """Training steps between points."""


class TrainStateConfig(Section):
    """Extra numbers of each step, in `metrics.jsonl` and wherever else numbers are sent."""

    local_norm: bool | str | list[str] = ""
    """Gradient norm of each parameter in each micro-batch: true = all parameters, or those whose name contains one of
    these texts."""
    local_loss: bool = False
    """Loss of each micro-batch of a rank: its sum / its own targets."""
    device_norm: bool = False
    """Gradient norm of each parameter over the whole step, before clipping."""
    device_loss: bool = False
    """Loss of a rank: sum / targets of its micro-batches."""


class MonitorConfig(Section):
    """What is shown while training."""

    log_interval: Count = 10
    """Training steps between progress lines when the output is not a terminal."""
    report: bool = True
    """Write `report.html` at the end of the run, where `samestep[report]` is installed."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """TensorBoard files."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""
    train_state: TrainStateConfig = TrainStateConfig()
    """Extra numbers of each step."""
    watch_steps: Natural = 20
    """Updates after which a warning names trained parameters of which no bit has changed; 0 = do not look."""
    loss_spike_zscore: NonNegative = 6.0
    """Warn of a loss so many standard deviations above the median of the last 50 steps, at most once in 50 steps; the
    deviation is 1.4826 x their median absolute deviation, and 1 % of the median at least; 0 = do not look."""
    check_finite: bool = False
    """When a step is skipped because its norm is not finite, run its micro-batches forward once more to name the first
    module whose output is not finite."""


class RecomputeConfig(Section):
    """Activations that are computed again in the backward pass to save memory. The other fields act only with a `mode`
    that uses them."""

    mode: Literal["None", "full", "select"] = "None"
    """`None`: keep all activations; `full`: recompute whole layers; `select`: recompute chosen modules."""
    full_recompute_layer: LayerRanges | None = None
    """Layers to recompute as a whole, such as `["0-3", "7"]`; null = all with `full`, none with `select`."""
    select_module: ModuleLayers | None = None
    """With `select`: regular expression of a module's name inside a layer -> layers, such as `mlp: ["0-3"]`; modules
    are `input_layernorm`, `self_attn`, `self_attn.attention_core`, `post_attention_layernorm` and `mlp`."""
    exclude_op: dict[str, list[str]] | None = None
    """Operators not to recompute: pattern -> layers."""

    @model_validator(mode="after")
    def _select_chooses(self) -> Self:
        if self.mode == "select" and not self.select_module:
            raise ConfigError(
                "mode is `select`, but no module is chosen",
                field="recompute.select_module",
                fix='write for example {mlp: ["0-3"]}, or mode: full',
            )
        return self


class SwapConfig(Section):
    """Activations that are kept in CPU memory until the backward pass needs them."""

    enable: bool = False
    """Move the activations of all layers to CPU memory; no effect on a CPU device, where they are there already."""


class CpuConfig(Section):
    """Training on a CPU."""

    keep_freed_memory: bool | None = None
    """Keep the memory that tensors free for those after them, instead of giving it back to the system: fewer page
    faults, more memory. Needs glibc. null = where all samples have one length (`train_dataset.rows: cut`)."""


class ProfilerConfig(Section):
    """Time and memory traces; these fields act only with `enable_profiling`."""

    enable_profiling: bool = False
    """Record a trace, `steps-A-B-rank-R.json.gz`, for ui.perfetto.dev or chrome://tracing."""
    start_step: Count = 1
    """First training step recorded."""
    end_step: Count = 1
    """Last training step recorded."""
    output_path: Text | None = None
    """Folder of the traces; null = `profile` in `output_dir`."""
    profiler_rank: list[Natural] | None = None
    """Ranks that record; null = all."""
    profiler_level: Literal[0, 1, 2] = 0
    """Detail of the trace: 1 adds the shapes of operands, 2 also FLOPs."""
    profile_memory: bool = False
    """Record memory."""
    profile_cpu: bool = True
    """Record CPU work."""
    with_stack: bool = True
    """Record call stacks."""

    @model_validator(mode="after")
    def _steps_in_order(self) -> ProfilerConfig:
        if self.start_step > self.end_step:
            raise ConfigError(
                f"start_step {self.start_step} is after end_step {self.end_step}",
                field="profiler.end_step",
                fix=f"write {self.start_step} or more",
            )
        return self


class Config(Section):
    """Everything a run needs to know."""

    output_dir: Text = "runs/default"
    """Folder of the run; relative to the current directory."""
    compile: bool = False
    """Compile norms, projections and feed-forward of every layer (`torch.compile`): faster steps after a slow first
    one."""
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
    swap: SwapConfig = SwapConfig()
    """Activations that are kept in CPU memory."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Time and memory traces."""
    cpu: CpuConfig = CpuConfig()
    """Training on a CPU."""
    callbacks: list[Any] = []  # noqa: RUF012 (pydantic copies it)
    """Registered callbacks."""

    @property
    def micro_batch(self) -> Literal["padded", "packed"]:
        """How samples are laid into micro-batches."""
        return self.training.micro_batch or ("padded" if self.train_dataset.rows == "cut" else "packed")

    @property
    def keeps_freed_memory(self) -> bool:
        """Whether memory that tensors free is kept, where a CPU trains."""
        setting = self.cpu.keep_freed_memory
        return self.train_dataset.rows == "cut" if setting is None else setting

    @model_validator(mode="after")
    def _one_source_of_validation_data(self) -> Config:
        if self.eval_dataset.path is not None and self.train_dataset.split is not None:
            raise ConfigError(
                "validation data comes from eval_dataset.path, so nothing would be split off the training data",
                field="train_dataset.split",
                fix="remove train_dataset.split, or eval_dataset.path",
            )
        return self

    @model_validator(mode="after")
    def _masters_have_weights(self) -> Config:
        choice = self.optimizer.master_weights
        stored = {self.model.params_dtype, self.model.embedding_storage}
        if choice != "float32" and not stored & {"bfloat16", "float16"}:
            raise ConfigError(
                f"{choice} has no effect: no weight is stored in bfloat16 or float16, and only those have masters",
                field="optimizer.master_weights",
                fix="remove it, or write model.params_dtype: bfloat16",
            )
        if choice == "stochastic_rounding" and "float16" in stored:
            raise ConfigError(
                "stochastic rounding is for bfloat16, but weights are stored in float16",
                field="optimizer.master_weights",
                fix="write float32, or model.params_dtype: bfloat16",
            )
        return self

    @model_validator(mode="after")
    def _state_is_of_float32(self) -> Config:
        stored = {self.model.params_dtype, self.model.embedding_storage}
        if self.optimizer.state_dtype != "float32" and "float64" in stored:
            raise ConfigError(
                f"{self.optimizer.state_dtype} is for weights of 32 bits or less; those in float64 keep their state in "
                "float64",
                field="optimizer.state_dtype",
                fix="write float32, or model.params_dtype: float32",
            )
        return self

    @model_validator(mode="after")
    def _weights_are_cast(self) -> Config:
        choice, model = self.training.cast_weights, self.model
        if choice == "auto" or (model.casts_weights and not self.compile):
            return self
        reason = (
            f"nothing is cast to 16 bits with params_dtype {model.params_dtype} and compute_dtype {model.compute_dtype}"
            if not model.casts_weights
            else "compiled layers cast inside of their kernels, in every pass"
        )
        raise ConfigError(f"{choice} has no effect: {reason}", field="training.cast_weights", fix="remove it")

    @model_validator(mode="after")
    def _exact_kernels_are_fixed(self) -> Config:
        if self.training.exact and self.compile:
            raise ConfigError(
                "compiled kernels are made for the first shapes that come, and may add up in another order after "
                "others, which `training.exact: true` rules out",
                field="compile",
                fix="write false, or training.exact: false",
            )
        return self

    @model_validator(mode="after")
    def _float16_is_scaled(self) -> Config:
        """float16 takes a loss scale, which nothing else does, and which exact mode does not."""
        if self.model.has_float16 and self.training.exact:
            raise ConfigError(
                "float16 needs a scaled loss, and the unit of the integers in which `training.exact: true` adds "
                "gradients is made for losses as they are",
                field="training.exact",
                fix="write false, or bfloat16 for float16",
            )
        if not self.model.has_float16 and self.training.loss_scale != LossScaleConfig():
            raise ConfigError(
                "it has no effect: only float16 needs a scaled loss, and no dtype of the model is float16",
                field="training.loss_scale",
                fix="remove it, or write model.compute_dtype: float16",
            )
        return self

    @model_validator(mode="after")
    def _exact_gradients_are_float32(self) -> Config:
        for field in ("gradient_dtype", "reduce_dtype", "params_dtype", "embedding_params_dtype"):
            if self.training.exact and getattr(self.model, field) == "float64":
                raise ConfigError(
                    "`training.exact: true` adds gradients as integers, cut from float32, so float64 would be lost",
                    field=f"model.{field}",
                    fix="write float32, or training.exact: false",
                )
        return self
