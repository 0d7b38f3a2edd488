"""`model.pretrained`: where pretrained weights are, and what they decide in a configuration. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.config.huggingface import spec_from_hf
from samestep.config.kinds import ACTIVATION_ALIASES, ALIASES
from samestep.errors import ConfigError

FIELD = "model.pretrained"
CONFIG_JSON = "config.json"
SETTINGS = (
    CONFIG_JSON,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
)
"""Files of a Hugging Face folder beside its weights."""
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
"""Its weights. Some models have a second copy of theirs in other files."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "*.model")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_GGUF = ".gguf"
_OF_ALL_MODELS = (
    "architectures",
    "transformers_version",
    "quantization_config",
    "is_encoder_decoder",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "problem_type",
    "id2label",
    "label2id",
)
"""Settings of `transformers` that say nothing of a decoder."""
_DECIDED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "hidden_act",
)
"""Fields that every `config.json` decides."""
_RESOLVED = (
    "rope_theta",
    "rope_scaling",
    "layer_norm_epsilon",
    "sliding_window",
    "attention_bias",
    "initializer_range",
)
"""Further fields that a resolved file has, if only to say that there is nothing."""
_FREE = ("hidden_dropout", "attention_dropout")
"""Fields of a `config.json` that a configuration may set to something else: they are of the training."""
_IMPLIED: dict[str, dict[str, Any]] = {
    "llama": {"normalization": "RMSNorm", "position_embedding_type": "rope", "qk_layernorm": False},
    "qwen2": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "qk_layernorm": False,
        "attention_bias": True,
        "mlp_bias": False,
    },
    "qwen3": {"normalization": "RMSNorm", "position_embedding_type": "rope", "qk_layernorm": True, "mlp_bias": False},
    "mistral": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "qk_layernorm": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "gpt2": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "attention_bias": True,
        "mlp_bias": True,
    },
}
"""Family -> fields that no `config.json` has, with the only value that its weights fit."""


def absolute_place(name: Any, folder: Path) -> Any:
    """A path that is there, made absolute; the name of a model on the Hub, and what is no text, as it is."""
    if not isinstance(name, str) or not name:
        return name
    path = (folder / Path(name).expanduser()).absolute()
    return str(path) if path.exists() or not _is_hub_name(name) else name


def _is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not name.endswith(_GGUF)


def is_gguf(place: Path) -> bool:
    """Whether a place that `find` gave is a GGUF file; else it is a Hugging Face folder."""
    return place.suffix == _GGUF


def find(name: str, *, weights: bool = False) -> Path:
    """The Hugging Face folder, or the GGUF file, of pretrained weights.

    Args:
        name: absolute path of a folder with a `config.json` or one GGUF file, or of a GGUF file; or a model on the
            Hugging Face Hub.
        weights: whether weights are wanted as well; else what is fetched from the Hub leaves them out.

    Raises:
        ConfigError: there is none, or the Hub cannot be reached.
    """
    path = Path(name)
    if path.is_absolute():  # else a folder of the working directory would stand in for a name on the Hub
        if path.is_dir():
            return _in_folder(path)
        if path.is_file() and is_gguf(path):
            return path
    if path.is_absolute() and path.exists():
        raise _error(f"{path} is neither a folder nor a {_GGUF} file", "write the folder that holds config.json")
    if _is_hub_name(name):
        return _fetched(name, (*SETTINGS, *WEIGHTS) if weights else SETTINGS)
    raise _error(f"{path}: there is no such folder or file", "write a folder, a .gguf file, or a name on the Hub")


def _in_folder(folder: Path) -> Path:
    if (folder / CONFIG_JSON).is_file():
        return folder
    found = sorted(folder.glob(f"*{_GGUF}"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found)
        raise _error(f"{folder} holds several GGUF files: {names}", f"write one of them, such as {found[0]}")
    if (folder / "config.resolved.yaml").is_file():
        raise _error(
            f"{folder} is a run of samestep, not a Hugging Face folder",
            f"samestep convert {folder} --to hf OUT, then write OUT",
        )
    raise _error(f"{folder} holds no {CONFIG_JSON}", "write the folder that the model was saved to")


def _fetched(name: str, patterns: tuple[str, ...]) -> Path:
    """The Hub's files of a model in the cache of this machine."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # many kinds, of several libraries
        raise _error(
            f"there is no folder {name}, and the Hugging Face Hub does not give it: {' '.join(str(error).split())}",
            "write the path of a folder; or check the name, the network and, for a closed model, `hf auth login`",
        ) from error
    if not (folder / CONFIG_JSON).is_file():
        raise _error(f"{name} on the Hugging Face Hub has no {CONFIG_JSON}", "write another model")
    return folder


def read_config(place: Path) -> dict[str, Any]:
    """The `config.json` of a place that `find` gave; of a GGUF file what `transformers` makes of its metadata.

    Raises:
        ConfigError: it cannot be read, or a package is missing.
    """
    if is_gguf(place):
        return gguf_config(place)
    file = place / CONFIG_JSON
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _error(f"{file} cannot be read: {error}", "repair it, or fetch the folder again") from error
    if not isinstance(config, dict):
        raise _error(f"{file} does not hold the settings of a model", "repair it, or fetch the folder again")
    return config


def gguf_config(file: Path) -> dict[str, Any]:
    """The `config.json` that a GGUF file would have, without the quantization that reading it undoes.

    Raises:
        ConfigError: a package is missing, or `transformers` does not know its architecture.
    """
    check_gguf_packages(file)
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name).to_dict()
    except Exception as error:  # many kinds, of several libraries
        reason = " ".join(str(error).split())
        raise _error(f"{file}: transformers cannot read it: {reason}", "use another file") from error
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    kept = {key: value for key, value in config.items() if key not in _OF_ALL_MODELS and not key.startswith("_")}
    return {"architectures": [name]} | kept


def check_gguf_packages(file: Path) -> None:
    """Raise ConfigError unless the packages that read a GGUF file are there."""
    try:
        from transformers.utils import is_gguf_available
    except ImportError:
        missing = "transformers"
    else:
        if is_gguf_available():
            return
        missing = "gguf"
    raise _error(f"{file} is read by transformers and gguf, but {missing} is missing", 'pip install "samestep[gguf]"')


def architecture(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of the `model` section that a `config.json` decides, nothing left to infer.

    Args:
        where: its file, for errors.

    Raises:
        ConfigError: a model that does not exist here.
    """
    try:
        fields = spec_from_hf(config)
    except ConfigError as error:
        raise _error(f"{where}: {error.field}: {error.reason}", error.fix) from error
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
    fields["head_dim"] = fields.get("head_dim") or hidden // heads
    fields["intermediate_size"] = fields["intermediate_size"] or 4 * hidden
    fields.setdefault("sliding_window", None)
    return fields


def fill_from_pretrained(data: dict[str, Any]) -> list[ConfigError]:
    """Fill what `model.pretrained` decides into a configuration: its architecture, and the tokenizer if none is named.

    A resolved file has all of it, so that a run can be evaluated and gone on with where the folder is gone, and without
    asking the Hub.

    Args:
        data: sections as plain data, changed in place.

    Returns:
        One error for each field that contradicts the weights.

    Raises:
        ConfigError: the weights cannot be found, or are of a model that does not exist here.
    """
    model = data.get("model")
    name = model.get("pretrained") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(name, str) or not name:
        return []
    if not _is_at_hand(Path(name)) and _is_resolved(model, data.get("tokenizer")):
        return []
    place = find(name)
    where = str(place if is_gguf(place) else place / CONFIG_JSON)
    errors = _fill_model(model, architecture(read_config(place), where), where)
    return errors + _fill_tokenizer(data.get("tokenizer"), place)


def _is_at_hand(path: Path) -> bool:
    held = path.is_file() or (path / CONFIG_JSON).is_file() or any(path.glob(f"*{_GGUF}"))
    return path.is_absolute() and held


def _is_resolved(model: Mapping[str, Any], tokenizer: Any) -> bool:
    decided = all(model.get(field) is not None for field in _DECIDED) and all(field in model for field in _RESOLVED)
    return decided and isinstance(tokenizer, dict) and tokenizer.get("path") is not None


def _fill_model(model: dict[str, Any], fields: Mapping[str, Any], where: str) -> list[ConfigError]:
    errors = []
    for field, value in fields.items():
        names = [field, *(a.rpartition(".")[2] for a, full in ALIASES.items() if full == f"model.{field}")]
        given = next((model[name] for name in names if model.get(name) not in (None, {})), None)
        if given is None:
            for other in names:
                model.pop(other, None)
            model[field] = value
        elif field not in _FREE and _meaning(field, given) != _meaning(field, value):
            errors.append(_contradiction(field, given, value, where))
    for field, value in _IMPLIED[fields["model_type"]].items():
        if field not in fields and model.get(field) not in (None, value):
            errors.append(_contradiction(field, model[field], value, where))
    return errors


def _meaning(field: str, value: Any) -> Any:
    """Equal for values that are written differently and mean the same."""
    if field == "rope_scaling" and isinstance(value, dict):
        kept = {"type" if key == "rope_type" else key: part for key, part in value.items() if part is not None}
        return {"type": "default"} | kept
    if field == "hidden_act" and isinstance(value, str):
        name = ACTIVATION_ALIASES.get(value.lower(), value.lower())
        return "silu" if name == "fusedswiglu" else name
    return value


def _contradiction(field: str, given: Any, value: Any, where: str) -> ConfigError:
    return ConfigError(
        f"{_shown(given)} contradicts the pretrained weights: {where} has {_shown(value)}",
        field=f"model.{field}",
        fix="remove it: the weights decide it",
    )


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _fill_tokenizer(section: Any, place: Path) -> list[ConfigError]:
    """The tokenizer of the weights, where the section names none."""
    if not isinstance(section, dict):
        return []
    kind = section.get("type") or "auto"
    if kind in ("char", "bpe"):
        return [
            ConfigError(
                f"a `{kind}` tokenizer is made from the training text, and its ids mean nothing to pretrained weights",
                field="tokenizer.type",
                fix="remove the section: the tokenizer of the weights is used; or name its file in tokenizer.path",
            )
        ]
    if section.get("path") is None:
        if not is_gguf(place) and not any(any(place.glob(pattern)) for pattern in _TOKENIZER_FILES):
            return [
                ConfigError(
                    f"{place} holds no tokenizer, and no other is named",
                    field="tokenizer.path",
                    fix="write the tokenizer.json that the weights were trained with",
                )
            ]
        section["path"] = str(place)
    return []


def _error(reason: str, fix: str | None) -> ConfigError:
    return ConfigError(reason, field=FIELD, fix=fix)
