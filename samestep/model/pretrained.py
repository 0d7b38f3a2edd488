"""Pretrained weights under our names: from the safetensors of a Hugging Face folder, or from a GGUF file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from samestep.config.pretrained import FIELD, check_gguf_packages, find, is_gguf
from samestep.errors import CheckpointError, ConfigError
from samestep.families import ModelSpec
from samestep.model.weights import from_hf

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_pretrained(name: str, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Weights that `model.pretrained` names, by our names, in the dtypes of their files.

    Those of a folder lie in its files until they are used, so that no rank holds more of them than it touches; those of
    a GGUF file are in memory, in float32.

    Raises:
        ConfigError: there are none, or none that can be read.
        CheckpointError: a tensor is missing, unexpected or of another shape; or a file is damaged.
    """
    place = find(name, weights=True)
    found = gguf_tensors(place) if is_gguf(place) else folder_tensors(place)
    try:
        return from_hf(found, spec)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error


def check_pretrained(name: str, spec: ModelSpec) -> None:
    """Raise what `read_pretrained` would, as far as can be known without reading a GGUF file, which takes long."""
    if not is_gguf(find(name, weights=True)):
        read_pretrained(name, spec)


def fingerprint(name: str) -> str:
    """A mark of pretrained weights, from a thousand numbers of each tensor; of a GGUF file, from all of it."""
    place, digest = find(name, weights=True), hashlib.sha256()
    if is_gguf(place):
        with place.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    for key, tensor in sorted(folder_tensors(place).items()):
        flat = tensor.flatten()
        some = flat[:: max(1, flat.numel() // 1000)].contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder by their names there; none is read from the disk before it is used.

    Raises:
        ConfigError: the folder holds no safetensors, or numbers that are no weights of 16 bits or more.
        CheckpointError: a file is missing or damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}\n  fix: fetch the folder again") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise _error(f"{folder}: {name} is stored in {kind}", "use a folder in float32, bfloat16 or float16")
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """Files of safetensors: those of the index, or the only one."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}\n  fix: fetch the folder again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {missing[0]} is missing, which {INDEX_FILE} names\n  fix: fetch the folder again"
            )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / "adapter_config.json").is_file():
        raise _error(
            f"{folder} holds an adapter, not the weights of a model", "merge it into its model with peft first"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise _error(
            f"{folder} holds {pickles[0]}, which is a pickle, and reading one may run whatever program it holds; only "
            "safetensors are read",
            'if you trust it, let transformers write safetensors beside it: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('{folder}')\"",
        )
    raise _error(f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}", "write the folder that the model was saved to")


def gguf_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a GGUF file in float32, under the names of a Hugging Face folder; a tied head is left out.

    Raises:
        ConfigError: a package is missing, or `transformers` cannot read the file.
    """
    check_gguf_packages(file)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # many kinds, of several libraries
        reason = " ".join(str(error).split())
        raise _error(f"{file}: transformers cannot read it: {reason}", "use another file") from error
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _error(reason: str, fix: str) -> ConfigError:
    return ConfigError(reason, field=FIELD, fix=fix)
