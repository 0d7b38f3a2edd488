"""Weights of a run, a GGUF file or a Hugging Face folder, written as a Hugging Face folder."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from samestep.config.load import load as load_config
from samestep.config.pretrained import (
    CONFIG_JSON,
    SETTINGS,
    check_gguf_packages,
    find,
    gguf_config,
    is_gguf,
    read_config,
)
from samestep.config.schema import TokenizerConfig
from samestep.data.tokenize import Tokenizer
from samestep.errors import CheckpointError, ConfigError
from samestep.families import ModelSpec, parameter_shapes, resolve_model
from samestep.model.pretrained import INDEX_FILE, SINGLE_FILE, folder_tensors, gguf_tensors
from samestep.model.weights import check_tensors, hf_config, hf_place, hf_shapes, to_hf
from samestep.run import checkpoint
from samestep.run.record import CONFIG_FILE, holds_run
from samestep.run.setup import TOKENIZER_FILE, find_checkpoint_of, kept_tokenizer
from samestep.run.storage import MARKER, Stored, sync_folder, sync_tree

DTYPES = ("float32", "bfloat16", "float16")
SHARD_BYTES = 5 * 10**9
"""Largest file of weights, unless one tensor alone is larger."""
_QWEN_DIGITS = r"|\p{N}|"
"""In the pattern by which Qwen's tokenizer splits text; others take several digits together."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Source:
    """A model that can be written as a Hugging Face folder.

    Attributes:
        config: content of its `config.json`.
        tensors: shape and stored dtype of each tensor by its name in a Hugging Face folder, in the order of writing.
        read: names -> those tensors, on the CPU.
        write_rest: writes the tokenizer and whatever else goes with it into a folder.
        notes: what the user should know.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    read: Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
    write_rest: Callable[[Path], None]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """What `convert` wrote: the number of files with weights, their parameters and bytes, and what to know of them."""

    folder: Path
    files: int
    parameters: int
    dtype: str
    size: int
    notes: tuple[str, ...]


def convert(source: Path, out: Path, dtype: str | None = None, *, shard_bytes: int = SHARD_BYTES) -> Written:
    """Write a Hugging Face folder, which `AutoModelForCausalLM` and `AutoTokenizer` open.

    Args:
        source: a run's folder or one of its checkpoints; a GGUF file; or a Hugging Face folder, to change its dtype.
        out: the folder; it is complete, or it does not exist.
        dtype: one of `DTYPES`; None keeps the dtype that each tensor is stored in (a GGUF file: float32).
        shard_bytes: largest file of weights, unless one tensor alone is larger.

    Raises:
        ConfigError: `out` is not empty, `source` is no model, or one that `transformers` does not have.
        CheckpointError: the source is damaged, or has values that the dtype cannot hold.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is no choice", field="--dtype", fix=f"write one of: {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty", field="OUT", fix="name another folder, or remove it")
    model = open_source(source)
    chosen = None if dtype is None else getattr(torch, dtype)
    temporary = out.absolute().parent / f".writing-{out.absolute().name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        written = _write(temporary, model, chosen, shard_bytes)
        temporary.rename(out)  # also onto an empty folder
        sync_folder(out.absolute().parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{out} cannot be written: {reason}", field="OUT", fix="free disk space, or name another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Written(out, *written, model.notes)


def open_source(source: Path) -> Source:
    """Find out what `source` is; reads the weights of a GGUF file, and no others.

    Raises:
        ConfigError: it is none of those that `convert` takes.
        CheckpointError: a checkpoint that is damaged or not complete.
    """
    # Checkpoints for transformers have the same marker, but are Hugging Face folders.
    is_checkpoint = (source / MARKER).is_file() and (source / checkpoint.STATE_FILE).is_file()
    if checkpoint.is_step_folder(source) or is_checkpoint or holds_run(source):
        return _of_run(source)
    if not source.exists():
        raise ConfigError(f"{source}: there is no such folder or file", field="RUN", fix="name the folder of a run")
    try:
        place = find(str(source.absolute()))
    except ConfigError as error:
        raise ConfigError(
            f"{source} is neither a run nor other weights: {error.reason}",
            field="RUN",
            fix="name the folder of a run, a GGUF file, or a Hugging Face folder",
        ) from error
    return _of_gguf(place) if is_gguf(place) else _of_folder(place)


# ---------------------------------------------------------------------------------------------------------------------
# A run
# ---------------------------------------------------------------------------------------------------------------------


def _of_run(folder: Path) -> Source:
    path = find_checkpoint_of(folder)
    loaded = checkpoint.open_checkpoint(path, need_optimizer=False)
    config = load_config(path / CONFIG_FILE).config
    tokenizer = kept_tokenizer(loaded)
    spec = resolve_model(config.model, tokenizer.vocab_size)
    shapes = {name: stored.shape for name, stored in loaded.model.items()}
    check_tensors(shapes, parameter_shapes(spec), str(path))
    origin = _origin(config.tokenizer)
    written = hf_config(spec) | _special_ids(origin) | {"eos_token_id": tokenizer.end_id}
    parts: dict[str, list[str]] = defaultdict(list)
    for name in parameter_shapes(spec):
        parts[hf_place(name, spec).name].append(name)

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        own = [name for theirs in names for name in parts[theirs]]
        targets = {name: torch.empty(loaded.model[name].shape, dtype=loaded.model[name].dtype) for name in own}
        loaded.read("model", targets)
        return to_hf(targets, spec)

    stored = {name: Stored(shape, loaded.model[parts[name][0]].dtype) for name, shape in hf_shapes(spec).items()}
    return Source(
        written,
        stored,
        read,
        lambda out: _write_tokenizer(out, tokenizer, spec, path, origin),
        _tokenizer_notes(spec.family, tokenizer),
    )


def _origin(tokenizer: TokenizerConfig) -> Path | None:
    """The folder or GGUF file that a run's tokenizer came from."""
    if tokenizer.path is None:
        return None
    path = Path(tokenizer.path)
    return path.parent if path.is_file() and not is_gguf(path) else path


def _tokenizer_notes(family: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    splitter = json.loads(tokenizer.to_json())["pre_tokenizer"] or {}
    is_qwen = any(
        _QWEN_DIGITS in part.get("pattern", {}).get("Regex", "") for part in splitter.get("pretokenizers", [])
    )
    if family != "qwen2" or is_qwen:
        return ()
    return (
        "AutoTokenizer splits the text of every qwen2 by the rule of Qwen's own tokenizer, which this one is not; "
        "open it with transformers.PreTrainedTokenizerFast.from_pretrained",
    )


def _special_ids(origin: Path | None) -> dict[str, Any]:
    """Tokens that begin and pad, if the tokenizer came with a model that has them; else none, not a family's own."""
    config = read_config(origin) if origin is not None and (origin / CONFIG_JSON).is_file() else {}
    return {key: config.get(key) for key in ("bos_token_id", "pad_token_id")}


def _write_tokenizer(
    out: Path, tokenizer: Tokenizer, spec: ModelSpec, checkpoint_folder: Path, origin: Path | None
) -> None:
    """The tokenizer of a run; what only its origin knows, such as a chat template, is taken from there."""
    settings: dict[str, Any] = {"model_max_length": spec.max_positions}
    generation: dict[str, Any] = {"eos_token_id": tokenizer.end_id}
    if origin is not None and origin.is_file() and is_gguf(origin):
        _write_gguf_tokenizer(origin, out)
        settings = _read_json(out / _TOKENIZER_CONFIG)
    elif origin is not None and origin.is_dir():
        for name in (_CHAT_TEMPLATE, _GENERATION_CONFIG):
            if (origin / name).is_file():
                shutil.copyfile(origin / name, out / name)
        if (origin / _TOKENIZER_CONFIG).is_file():
            settings = _read_json(origin / _TOKENIZER_CONFIG)
        if (out / _GENERATION_CONFIG).is_file():
            own = _read_json(out / _GENERATION_CONFIG)
            generation |= {key: value for key, value in own.items() if value is not None}
            ends = generation["eos_token_id"]
            ends = ends if isinstance(ends, list) else [ends]
            if tokenizer.end_id not in ends:
                generation["eos_token_id"] = [tokenizer.end_id, *ends]
    # This class takes tokenizer.json as it is; those of a family would build parts of it anew.
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
    settings.setdefault("clean_up_tokenization_spaces", False)
    shutil.copyfile(checkpoint_folder / TOKENIZER_FILE, out / TOKENIZER_FILE)
    _write_json(out / _TOKENIZER_CONFIG, settings)
    _write_json(out / _GENERATION_CONFIG, generation)


# ---------------------------------------------------------------------------------------------------------------------
# Other folders and files
# ---------------------------------------------------------------------------------------------------------------------


def _of_folder(folder: Path) -> Source:
    tensors = folder_tensors(folder)

    def write_rest(out: Path) -> None:
        for file in sorted(file for pattern in SETTINGS for file in folder.glob(pattern)):
            if file.name != CONFIG_JSON:
                shutil.copyfile(file, out / file.name)

    return Source(read_config(folder), _stored(tensors), _reader(tensors), write_rest)


def _of_gguf(file: Path) -> Source:
    config, tensors = gguf_config(file), gguf_tensors(file)
    tokens = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
    }

    def write_rest(out: Path) -> None:
        _write_gguf_tokenizer(file, out)
        _write_json(out / _GENERATION_CONFIG, tokens)

    return Source(config, _stored(tensors), _reader(tensors), write_rest)


def _write_gguf_tokenizer(file: Path, out: Path) -> None:
    check_gguf_packages(file)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as error:  # many kinds, of several libraries
        raise CheckpointError(f"{file}: transformers cannot read its tokenizer: {error}") from error
    tokenizer.save_pretrained(str(out))


def _stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    return {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _reader(tensors: Mapping[str, torch.Tensor]) -> Callable[[Sequence[str]], Mapping[str, torch.Tensor]]:
    return lambda names: {name: tensors[name] for name in names}


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def _write(folder: Path, model: Source, dtype: torch.dtype | None, shard_bytes: int) -> tuple[int, int, str, int]:
    """Write all files; returns the number of those with weights, parameters, dtype and bytes of the weights."""
    model.write_rest(folder)
    dtypes = {name: _written_dtype(stored.dtype, dtype) for name, stored in model.tensors.items()}
    sizes = {name: math.prod(stored.shape) * dtypes[name].itemsize for name, stored in model.tensors.items()}
    shards = _shards(sizes, shard_bytes)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        name_of_file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        found = model.read(names)
        tensors = {name: _cast(name, found[name], dtypes[name]) for name in names}
        save_file(tensors, folder / name_of_file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, name_of_file)
    total = sum(sizes.values())
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
    widest = str(reduce(torch.promote_types, (kind for kind in dtypes.values() if kind.is_floating_point)))
    widest = widest.removeprefix("torch.")
    config = {key: value for key, value in model.config.items() if key != "dtype"}
    _write_json(folder / CONFIG_JSON, config | {"torch_dtype": widest})  # a name that every version reads
    mode = (folder / CONFIG_JSON).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors are written for the owner alone
    sync_tree(folder)
    sync_folder(folder)
    return len(shards), sum(math.prod(stored.shape) for stored in model.tensors.values()), widest, total


def _written_dtype(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return stored if wanted is None or not stored.is_floating_point else wanted


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut wherever the next tensor would make a file larger than the limit."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype).contiguous()
    if dtype == torch.float16 and tensor.dtype != dtype and not cast.isfinite().all() and tensor.isfinite().all():
        raise CheckpointError(
            f"{name} has values up to {tensor.abs().max():.3g}, but float16 ends at 65504\n"
            "  fix: write --dtype bfloat16"
        )
    return cast


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}\n  fix: repair or remove it") from error


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
