"""Text to token ids: character-level, byte-level BPE, or any `tokenizer.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from samestep.config.pretrained import check_gguf_packages
from samestep.config.schema import TokenizerConfig
from samestep.data.sources import Document
from samestep.errors import ConfigError, DataError

Item = TypeVar("Item")
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"
COMMON_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
BATCH_CHARACTERS = 1_000_000
"""Text given to the tokenizers library at once: it takes some 130 bytes a character until it is done."""

_PIECE_CHARACTERS = 100_000
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")
_EACH_CHARACTER = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")  # (?m: lets the dot match a line end too


class Tokenizer:
    """Encodes plain text. Text that spells a special token is encoded as ordinary text, never as the control token.

    Attributes:
        vocab_size: one more than the largest id.
        end_id: id appended to every document; `end_token` is its text.
    """

    def __init__(self, hub: HubTokenizer, end_token: str | None = None):
        self._hub = hub
        self._hub.encode_special_tokens = True
        self._hub.no_truncation()
        self._hub.no_padding()
        self.end_id = self._find_end(end_token)
        self.end_token = hub.id_to_token(self.end_id)
        self.vocab_size = max(hub.get_vocab(with_added_tokens=True).values()) + 1
        self._character_ids = _character_ids(hub)
        self._cuttable = _is_cuttable(hub)

    def _find_end(self, end_token: str | None) -> int:
        for name in (end_token,) if end_token else COMMON_END_TOKENS:
            token_id = self._hub.token_to_id(name)
            if token_id is not None:
                return token_id
        raise ConfigError(
            f"the tokenizer has no token {end_token!r}" if end_token else "cannot tell which token ends a document",
            field="tokenizer.end_token",
            fix="write the end-of-text token of this tokenizer",
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [tokens], without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text; the memory in use beside them does not grow with the texts."""
        if self._character_ids is not None:
            return [_look_up(text, self._character_ids) for text in texts]
        pieces = [(number, piece) for number, text in enumerate(texts) for piece in self._pieces(text)]
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        for batch in in_batches(pieces, lambda piece: len(piece[1])):
            encodings = self._hub.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
            for (number, _), encoding in zip(batch, encodings, strict=True):
                parts[number].append(np.asarray(encoding.ids, dtype=np.int64))
        return [np.concatenate(part) for part in parts]

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while self._cuttable and len(text) - start > _PIECE_CHARACTERS:
            cut = _SAFE_CUT.search(text, start + _PIECE_CHARACTERS)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def decode(self, ids: Iterable[int]) -> str:
        return self._hub.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The whole tokenizer in the `tokenizer.json` format."""
        return self._hub.to_str(pretty=True)


def in_batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items in lists that end once they hold `BATCH_CHARACTERS`; `size` counts those of an item."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _character_ids(hub: HubTokenizer) -> np.ndarray | None:
    """For a character tokenizer: code point -> id, or -1, which the last entry is; int64. None for any other."""
    is_split = isinstance(hub.pre_tokenizer, pre_tokenizers.Split)
    if not is_split or hub.pre_tokenizer.__getstate__() != _EACH_CHARACTER.__getstate__() or hub.normalizer is not None:
        return None
    ids = {ord(token): i for token, i in hub.get_vocab(with_added_tokens=False).items() if len(token) == 1}
    table = np.full(max(ids, default=0) + 2, -1, dtype=np.int64)
    table[list(ids)] = list(ids.values())
    return table


def _look_up(text: str, character_ids: np.ndarray) -> np.ndarray:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    ids = character_ids[np.minimum(codes, len(character_ids) - 1)]
    unknown = np.flatnonzero(ids < 0)
    if len(unknown):
        raise DataError(
            f"character {text[unknown[0]]!r} is not in the tokenizer's vocabulary\n"
            "  fix: train the tokenizer on text that has it, or use tokenizer.type: bpe, which encodes every byte"
        )
    return ids


def _is_cuttable(hub: HubTokenizer) -> bool:
    """Whether no token spans a `_SAFE_CUT`. GPT-2's pattern joins a line end only with white space around it."""
    splitter = hub.pre_tokenizer
    return (
        isinstance(splitter, pre_tokenizers.ByteLevel)
        and splitter.use_regex
        and not splitter.add_prefix_space
        and hub.normalizer is None
        and all(token.special for token in hub.get_added_tokens_decoder().values())
    )


def build_tokenizer(config: TokenizerConfig, documents: Sequence[Document]) -> Tokenizer:
    """The tokenizer that the config names; `char` and `bpe` are trained on the documents, and given `end_token`.

    Raises:
        ConfigError: a missing or unreadable tokenizer file, or no end-of-text token.
    """
    kind = config.type
    if kind == "auto":
        kind = "file" if config.path else "bpe"
    if kind == "file":
        return load_tokenizer(config.path, config.end_token)
    texts = (document.text for document in documents)
    end = config.end_token or END_OF_TEXT
    hub = _character_tokenizer(texts, end) if kind == "char" else _train_bpe(texts, config.vocab_size, end)
    return Tokenizer(hub, end)


def load_tokenizer(path: str | Path | None, end_token: str | None = None) -> Tokenizer:
    """Open a `tokenizer.json`, a Hugging Face tokenizer's folder, or the tokenizer of a GGUF file.

    The folder holds a `tokenizer.json`; or GPT-2's `vocab.json` and `merges.txt`; or what only `transformers` can
    convert, such as a SentencePiece model. `tokenizer_config.json` or `special_tokens_map.json` names the end token.

    Raises:
        ConfigError: no such file, one that cannot be read, or `transformers` is needed and missing.
    """
    if path is None:
        raise ConfigError("is needed for type: file", field="tokenizer.path", fix="write the path of a tokenizer.json")
    place = Path(path)
    if place.suffix == ".gguf":
        hub, end = _from_gguf(place)
        return Tokenizer(hub, end_token or end)
    folder = place if place.is_dir() else place.parent
    if place.is_dir() and not (place / "tokenizer.json").is_file():
        hub = _read_byte_pairs(folder) if _is_gpt2(folder) else _convert(folder)
    else:
        hub = _read_json(folder / "tokenizer.json" if place.is_dir() else place)
    return Tokenizer(hub, end_token or _configured_end(folder))


def _read_json(file: Path) -> HubTokenizer:
    try:
        return HubTokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", field="tokenizer.path") from error
    except Exception as error:  # the library raises bare Exception for a bad file
        raise ConfigError(f"{file} is not a tokenizer.json: {error}", field="tokenizer.path") from error


def _is_gpt2(folder: Path) -> bool:
    """Whether a folder holds byte pairs that are split by GPT-2's rule, which other classes change."""
    kind = _setting(folder / "tokenizer_config.json", "tokenizer_class")
    names = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
    return kind in names and all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))


def _read_byte_pairs(folder: Path) -> HubTokenizer:
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise ConfigError(
            f"{folder}: vocab.json and merges.txt cannot be read: {error}", field="tokenizer.path"
        ) from error
    hub = HubTokenizer(model)
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hub.decoder = decoders.ByteLevel()
    end = _configured_end(folder) or END_OF_TEXT
    if hub.token_to_id(end) is not None:
        hub.add_special_tokens([end])
    return hub


def _convert(folder: Path) -> HubTokenizer:
    files = sorted(file.name for file in folder.iterdir())
    if not any(name.endswith((".model", ".json", ".txt")) for name in files):
        raise ConfigError(
            f"{folder} holds no tokenizer; it holds {', '.join(files) or 'nothing'}",
            field="tokenizer.path",
            fix="write the folder of a tokenizer.json, of vocab.json and merges.txt, or of a SentencePiece model",
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and only transformers can make one from its files",
            field="tokenizer.path",
            fix='pip install "samestep[hf]" sentencepiece protobuf',
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:  # many kinds, of several libraries
        raise ConfigError(
            f"{folder}: transformers cannot read the tokenizer: {' '.join(str(error).split())}",
            field="tokenizer.path",
            fix="write the folder of a tokenizer.json; for a SentencePiece model, pip install sentencepiece protobuf",
        ) from error


def _from_gguf(file: Path) -> tuple[HubTokenizer, str | None]:
    """The tokenizer of a GGUF file, and its end token."""
    check_gguf_packages(file)
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as error:  # many kinds, of several libraries
        raise ConfigError(
            f"{file}: transformers cannot read the tokenizer: {' '.join(str(error).split())}",
            field="tokenizer.path",
            fix="write the tokenizer.json that the weights were trained with",
        ) from error
    return found.backend_tokenizer, found.eos_token


def _configured_end(folder: Path) -> str | None:
    names = ("tokenizer_config.json", "special_tokens_map.json")
    return next((end for name in names if (end := _setting(folder / name, "eos_token"))), None)


def _setting(file: Path, name: str) -> str | None:
    """A text setting of a tokenizer, or the content of a token's description."""
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get(name)
        return value["content"] if isinstance(value, dict) else value
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{file} cannot be read as a tokenizer's settings: {error}",
            field="tokenizer.end_token",
            fix="write the end-of-text token, or repair or remove that file",
        ) from error


def _character_tokenizer(texts: Iterable[str], end: str) -> HubTokenizer:
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    vocabulary = {token: i for i, token in enumerate([end, UNKNOWN, *sorted(characters)])}
    hub = HubTokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    hub.pre_tokenizer = _EACH_CHARACTER
    hub.decoder = decoders.Fuse()
    hub.add_special_tokens([end, UNKNOWN])
    return hub


def _train_bpe(texts: Iterable[str], vocab_size: int, end: str) -> HubTokenizer:
    hub = HubTokenizer(models.BPE())
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hub.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    hub.train_from_iterator(_short_pieces(texts), trainer)
    return hub


def _short_pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (line + "\n" for line in text.split("\n"))
