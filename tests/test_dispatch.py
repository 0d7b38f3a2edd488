"""Which implementation the operators run."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY

from samestep.config.load import from_dict
from samestep.data.batch import Batch, collate
from samestep.data.rows import Sample
from samestep.ops import activation, attention, cross_entropy, dispatch, norm, precision, random_key, rope, swiglu
from samestep.parallel.mesh import Mesh
from samestep.run.setup import build_model


def batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    samples = []
    for length in (9, 16, 4):
        tokens = torch.randint(61, (length + 1,), generator=draw).numpy()
        samples.append(Sample(tokens[:-1], tokens[1:], np.zeros(length, np.int64), np.arange(length)))
    return collate(samples, range(3), "packed", random_key(1))


def gradients(**fields: str) -> dict[str, torch.Tensor]:
    model_section = {**TINY["model"], "vocab_size": 61, "seq_length": 32, **fields}
    config = from_dict({"train_dataset": {"path": "x.txt"}, "model": model_section}).config
    model = build_model(config, 61, Mesh.alone()).train()
    model.losses(batch(), 1e-3)[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def refuse(*_, **__):
    raise AssertionError("a fused operator was called")


FUSED = (
    (norm._RMSNormFunction, "apply"),
    (activation._SwiGlu, "apply"),
    (rope._Rope, "apply"),
    (cross_entropy._LinearCrossEntropy, "apply"),
    (precision._LowLinear, "apply"),
    *((F, name) for name in ("layer_norm", "rms_norm", "silu", "gelu", "scaled_dot_product_attention", "linear")),
)


@pytest.mark.parametrize(
    "fields", [{}, {"normalization": "LayerNorm", "hidden_act": "gelu"}, {"hidden_act": "gelu_tanh"}], ids=str
)
def test_the_reference_switch_runs_twins_only_to_the_same_gradients(fields, monkeypatch):
    fused = gradients(**fields)
    monkeypatch.setattr(dispatch, "_REFERENCE_OPS", True)
    for place, name in FUSED:
        monkeypatch.setattr(place, name, refuse)
    twins = gradients(**fields)
    assert fused.keys() == twins.keys()
    # A bias of keys has no true gradient, only noise: hence the part of all gradients in the bound.
    total = torch.stack([g.norm() for g in twins.values()]).norm() / len(twins) ** 0.5
    for name, gradient in fused.items():
        assert (gradient - twins[name]).norm() <= 2e-6 * torch.maximum(twins[name].norm(), 1e-3 * total), name


def test_single_operators_under_the_reference_switch(monkeypatch):
    gate, up = torch.randn(2, 3, 8).unbind()
    fused = swiglu(gate, up, 0.5), activation.SiLU()(gate), activation.SiLU(inplace=True)(gate.clone())
    monkeypatch.setattr(dispatch, "_REFERENCE_OPS", True)
    for place, name in FUSED:
        monkeypatch.setattr(place, name, refuse)
    overwritten = gate.clone().requires_grad_() * 1
    twins = swiglu(gate, up, 0.5), activation.SiLU()(gate), activation.SiLU(inplace=True)(overwritten)
    for ours, twin in zip(fused, twins, strict=True):
        torch.testing.assert_close(ours, twin)
    assert twins[2] is overwritten
    twins[2].sum().backward()
    q = torch.randn(1, 5, 2, 4)
    torch.testing.assert_close(attention(q, q, q, window=2), attention(q, q, q, spans=[(0, 0, 5)], window=2))


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_the_switch_is_read_from_the_environment(value, expected, monkeypatch):
    monkeypatch.setenv("SAMESTEP_REFERENCE_OPS", value)
    assert runpy.run_path(dispatch.__file__)["reference_ops"]() is expected


def test_kernels_are_for_gpus_and_float32_or_less(monkeypatch):
    monkeypatch.setattr(dispatch, "_HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "_INTERPRETED", False)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert dispatch.use_triton(cuda, torch.bfloat16, torch.float32)
    assert not dispatch.use_triton(cuda, torch.bfloat16, torch.float64)
    assert not dispatch.use_triton(cpu, torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not dispatch.use_triton(cuda, torch.float32)
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "_HAS_TRITON", False)
    assert not dispatch.use_triton(cuda, torch.float32)
