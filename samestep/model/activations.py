"""How the layers of a decoder make and keep what their backward pass needs: computed again, in CPU memory, compiled.

Each function here puts something around the `forward` of modules, inside of the hooks that sharding adds to their call:
weights that a layer computes with again are gathered already. Names of parameters stay. Compile first, then recompute,
then move to the CPU, so that each goes around the one before.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep.errors import ConfigError
from samestep.model import blocks
from samestep.model.attention import Context
from samestep.model.decoder import Decoder, Layer
from samestep.recompute import WHOLE


def recompute(model: Decoder, modules: Sequence[Sequence[str]]) -> None:
    """Keep only the inputs of modules, and run them again in the backward pass (Chen et al. 2016), to the same bits.

    Args:
        modules: of each layer, names inside it; `""` is the layer itself.
    """
    for layer, names in zip(cast(Iterable[Layer], model.layers.values()), modules, strict=True):
        for name in names:
            module = layer.get_submodule(name)
            again = partial(_recomputed_layer, layer) if name == WHOLE else _recomputed
            module.forward = partial(again, module.forward)


def _recomputed_layer(layer: Layer, forward: Callable[..., Any], x_BSC: torch.Tensor, context: Context) -> Any:
    # Decided once: who watches the parts may be gone when they run again.
    fixed = replace(context, runs_as_one=not blocks.are_watched(layer))
    return _recomputed(forward, x_BSC, fixed)


def _recomputed(forward: Callable[..., Any], *inputs: Any) -> Any:
    # Dropout is a function of names, not of a generator's state, so there is none to restore.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def keep_in_cpu_memory(model: Decoder) -> None:
    """Move what the layers keep to CPU memory in the forward pass, and back when the backward pass reads it; to pinned
    memory where the device is another, while it goes on. Weights stay where they are."""
    for layer in model.layers.values():
        layer.forward = partial(_kept_in_cpu_memory, layer, layer.forward)


def _kept_in_cpu_memory(layer: nn.Module, forward: Callable[..., Any], *inputs: Any) -> Any:
    # By their memory: products keep a transposed view of a weight, and sharded weights have theirs only in here.
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if tensor.untyped_storage().data_ptr() in weights:
            return tensor.device, tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        return tensor.device, kept.copy_(tensor, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        return forward(*inputs)


def _unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, kept = packed
    return kept.to(device, non_blocking=True)


def compile_layers(model: Decoder) -> None:
    """Compile the parts of every layer that are functions of tensors alone, each as one graph for any batch shape.

    Attention over documents and dropout stay out: they go by numbers that change with every micro-batch, and their
    kernels gain nothing. Compilation happens at the first call; equal parts of all layers share it.

    Raises:
        ConfigError: on a CPU without a C++ compiler.
    """
    _check_compiler(model.device)
    compiled = partial(torch.compile, fullgraph=True, dynamic=True)
    for layer in cast(Iterable[Layer], model.layers.values()):
        for module in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp):
            module.forward = compiled(module.forward)
        layer.self_attn.project = compiled(layer.self_attn.project)  # type: ignore[method-assign]


def _check_compiler(device: torch.device) -> None:
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"on a CPU torch.compile needs a C++ compiler, and there is no `{compiler}`",
            field="compile",
            fix="install g++, set the variable CXX, or write false",
        )
