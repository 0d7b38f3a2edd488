"""Fields that have no effect: those of a MindFormers file that mean nothing here, and those this version has not."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

_ACCELERATOR = "a switch of its own hardware"
_EXPERTS = "only mixture-of-experts models use it"
_LATENT = "only latent attention uses it"
_YARN = "yarn position encoding is set in model.rope_scaling"
_FAMILY = "the model family decides"
_FILES = "concerns only how its own checkpoint files are laid out"

FOREIGN: dict[str, str] = {
    "context": "set up its own launcher and hardware",
    "use_remove_redundant_dataset": "had no effect there either",
    "recompute_comm": "communication is never computed again",
    "swap.default_prefetch": "activations come back when their layer needs them",
    "swap.layer_swap": "the activations of all layers are moved",
    "swap.op_swap": "the activations of all layers are moved",
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
    "optimizer.use_fused_adamw": _ACCELERATOR,
    "optimizer.comm_strategy": _ACCELERATOR,
    "optimizer.*_batch_memory_gb": _ACCELERATOR,
    "optimizer.qk_clip_threshold": "acts only with qk_clip_enabled",
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
    "model.add_bias_linear": "see model.attention_bias and model.mlp_bias",
    "model.*_token_id": "the tokenizer decides",
    "model.chunk_loss_num": "logits are never kept at full size by a setting",
    "model.calculate_per_token_loss": "see training.loss_normalization",
    "model.moe_*": _EXPERTS,
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
    "monitor.tensorboard.output_dir": "always tensorboard in output_dir",
    "monitor.moe_monitor": _EXPERTS,
    "profiler.mstx": _ACCELERATOR,
}
"""Fields of a MindFormers file that mean nothing here -> why; wildcards allowed. Accepted, removed, named in one
warning."""

UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    "run_mode": ("train",),
    "callbacks": ([],),
    "lora_config": (None,),
    "inference": (None,),
    "training.rampup_batch_size": (None,),
    "parallelism.dense_fsdp_shard_size": (None,),
    "parallelism.context_parallel_method": ("colossal",),
    "parallelism.context_parallel_mask_type": ("causal",),
    "parallelism.ulysses_degree_in_cp": (None,),
    "parallelism.pipeline_parallel_schedule": ("1f1b",),
    "parallelism.pipeline_parallel_layers_per_stage": ("auto", None),
    "parallelism.pipeline_parallel_interleave_num": (1,),
    "optimizer.amsgrad": (False,),
    "optimizer.maximize": (False,),
    "optimizer.enable_cpu_offload": (False,),
    "optimizer.qk_clip_enabled": (False,),
    "model.multi_latent_attention": (False, None),
    "model.kv_lora_rank": (None,),
    "model.q_lora_rank": (None,),
    "model.n_routed_experts": (None, 0),
    "model.num_moe_experts": (None, 0),
    "model.n_shared_experts": (None, 0),
    "model.num_nextn_predict_layers": (None, 0),
    "model.mtp_num_layers": (None, 0),
    "checkpoint.load_path": ("",),
    "checkpoint.no_load_optim": (False,),
    "checkpoint.save_trainable_only": (False,),
    "checkpoint.base_load_path": ("",),
    "recompute.exclude_op": (None,),
}
"""Fields whose effect this version does not have -> the only values accepted. Those that are not in the schema are
fields of a MindFormers file that would change the result, so they cannot be ignored."""


def foreign_reason(field: str) -> str | None:
    """Why a dotted field means nothing here, or None if it is not in `FOREIGN`."""
    return next((reason for pattern, reason in FOREIGN.items() if fnmatchcase(field, pattern)), None)
