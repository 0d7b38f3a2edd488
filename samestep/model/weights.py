"""Parameter names to and from Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from samestep.errors import CheckpointError
from samestep.families import ModelSpec, parameter_shapes

_HEAD = "loss_head.weight"
_HF_HEAD = "lm_head.weight"


def hf_name(name: str) -> str:
    """Our name -> Hugging Face's, for the llama family."""
    return _HF_HEAD if name == _HEAD else f"model.{name}"


def own_name(name: str) -> str:
    """Hugging Face's name -> ours, for the llama family."""
    return _HEAD if name == _HF_HEAD else re.sub(r"^model\.", "", name)


def from_hf(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Tensors of a Hugging Face model under our names.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape; the message names it.
    """
    renamed = {own_name(name): tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if spec.tied:
        renamed.pop(_HEAD, None)
    check_tensors({name: tuple(tensor.shape) for name, tensor in renamed.items()}, parameter_shapes(spec))
    return renamed


def to_hf(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under Hugging Face's names; a tied head is left out, as `save_pretrained` does."""
    return {hf_name(name): tensor for name, tensor in tensors.items()}


def check_tensors(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str = "the given weights"
) -> None:
    """Raise CheckpointError unless both name the same tensors with the same shapes."""
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        parts = [
            f"{title}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for title, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointError(f"{where}: tensors do not match the model; " + "; ".join(parts))
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(f"{where}: {name} has shape {list(found[name])}, but the model needs {list(shape)}")
