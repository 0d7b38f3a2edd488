"""YAML written for MindFormers PyNative runs as it is, completed with a small model and real text."""

import json

import pytest
import torch

from samestep.config.load import load
from samestep.run.trainer import Trainer

MODEL = """
  model_type: llama
  seq_length: 16
  hidden_size: 32
  num_hidden_layers: 1
  num_attention_heads: 2
"""
REST = """
output_dir: {folder}/run
tokenizer: {{type: char}}
train_dataset: {{path: {corpus}}}
"""

ACCUMULATION = """
training:
  steps: 1000
  local_batch_size: 2 # Number of samples (one micro-batch) for each forward pass on a single device.
  global_batch_size: 8 # Number of global samples per step. The number of accumulated steps is 4 (8 // (1 * 2) = 4).
  max_norm: 1.0
  seed: 42
parallelism:
  data_parallel_shard: -1 # The default value is -1. In single-device mode, the value of data_parallel is inferred as 1.
  tensor_parallel: 1
  context_parallel: 1
  pipeline_parallel: 1
optimizer:
  type: AdamW
  betas: [0.9, 0.95]
  eps: 1.e-8
  weight_decay: 0.01
"""

CLIPPING = """
training:
  steps: 1000
  local_batch_size: 2
  global_batch_size: 8
  seed: 42
  max_norm: 0.5 # Tighten the clipping upper limit.
"""

PRECISION = """
  params_dtype: "float32" # Master weight FP32
  compute_dtype: "bfloat16" # Agentic computing BF16
  layernorm_compute_dtype: "float32"
  softmax_compute_dtype: "float32"
  rotary_dtype: "float32"
"""


def trained(tmp_path, yaml: str, steps: int = 3) -> Trainer:
    """The trainer after a few steps of a file that is run as written but for the number of steps."""
    corpus = tmp_path / "text.txt"
    corpus.write_text("To be, or not to be, that is the question.\n" * 40)
    file = tmp_path / "file.yaml"
    file.write_text(yaml + REST.format(folder=tmp_path, corpus=corpus))
    loaded = load(file, [f"training.steps={steps}"])
    assert loaded.warnings == []
    trainer = Trainer(loaded.config)
    trainer.train()
    return trainer


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_accumulation_is_inferred(tmp_path):
    trainer = trained(tmp_path, ACCUMULATION + "model:" + MODEL)
    assert trainer.plan.accumulation_steps == 4
    assert [row["accumulation_steps"] for row in rows(tmp_path)] == [4, 4, 4]
    group = trainer.step.updater.optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-8, 0.01)


def test_clipping_is_tightened(tmp_path):
    # The first gradient of so small a model is below 0.5: a wide initialisation makes clipping act.
    trainer = trained(tmp_path, CLIPPING + "model:" + MODEL + "  initializer_range: 0.5\n")
    for row in rows(tmp_path):
        assert row["grad_norm"] > 0.5
        assert row["clip_coefficient"] == pytest.approx(0.5 / (row["grad_norm"] + 1e-6), rel=1e-9)
    assert trainer.step.max_norm == 0.5


def test_hybrid_precision(tmp_path):
    trainer = trained(tmp_path, ACCUMULATION + "model:" + MODEL + PRECISION)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    seen = {}
    layer = trainer.model.layers["0"]
    layer.self_attn.q_proj.register_forward_hook(lambda m, args, out: seen.update(product=out.dtype))
    layer.input_layernorm.register_forward_hook(lambda m, args, out: seen.update(norm=m.compute_dtype))
    trainer.step(trainer._next_batches(), on_gradients=lambda g: seen.update(gradients={t.dtype for t in g.values()}))
    assert seen == {"product": torch.bfloat16, "norm": torch.float32, "gradients": {torch.float32}}
    assert trainer.model.rope_cos.dtype == torch.float32
    assert trainer.model.layers["0"].self_attn.attention_core.softmax_dtype == torch.float32
