"""Parameter names to and from Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samestep.errors import CheckpointError
from samestep.families import ModelSpec, parameter_shapes

_HEAD = "loss_head.weight"
_HF_HEAD = "lm_head.weight"
_HF_EMBEDDING = "model.embed_tokens.weight"


def hf_name(name: str) -> str:
    """Our name -> Hugging Face's, for the llama family."""
    return _HF_HEAD if name == _HEAD else f"model.{name}"


def own_name(name: str) -> str:
    """Hugging Face's name -> ours, for the llama family."""
    return _HEAD if name == _HF_HEAD else name.removeprefix("model.")


def from_hf(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Tensors of a Hugging Face causal language model under our names, not copied.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape, or a head differs from the embedding
            that it is tied to; the message names it.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    head = found.pop(_HF_HEAD, None) if spec.tied else None
    wanted = {hf_name(name): shape for name, shape in parameter_shapes(spec).items()}
    check_tensors({name: tuple(tensor.shape) for name, tensor in found.items()}, wanted)
    if head is not None and not torch.equal(head, found[_HF_EMBEDDING].to(head.dtype)):
        raise CheckpointError(
            f"the given weights: {_HF_HEAD} differs from {_HF_EMBEDDING}, but the model ties them\n"
            "  fix: set model.tie_word_embeddings to false"
        )
    return {own_name(name): tensor for name, tensor in found.items()}


def to_hf(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under Hugging Face's names.

    Give them as `named_parameters` does, without a second name for a tied head: `save_pretrained` leaves it out too.
    """
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
