"""Text to token ids: character-level, byte-level BPE, or any `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from samestep.config.schema import TokenizerConfig
from samestep.data.sources import Document
from samestep.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"
COMMON_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
BATCH_CHARACTERS = 4_000_000


class Tokenizer:
    """Encodes plain text. Text that spells a special token is encoded as ordinary text, never as the control token.

    Attributes:
        vocab_size: one more than the largest id.
        end_id: id appended to every document.
    """

    def __init__(self, hub: HubTokenizer, end_token: str | None = None):
        self._hub = hub
        self._hub.encode_special_tokens = True
        self._hub.no_truncation()
        self._hub.no_padding()
        # Splitting at line ends cannot change character ids and is four times as fast as one long text.
        self._by_line = isinstance(hub.model, models.WordLevel)
        self.vocab_size = max(hub.get_vocab(with_added_tokens=True).values()) + 1
        self.end_id = self._find_end(end_token)
        self._unknown_id = hub.token_to_id(UNKNOWN) if self._by_line else None

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
        if self._by_line:
            return [self._encode_lines(text) for text in texts]
        encodings = self._hub.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def _encode_lines(self, text: str) -> np.ndarray:
        lines = [line + "\n" for line in text.split("\n")]
        lines[-1] = lines[-1][:-1]
        encodings = self._hub.encode_batch_fast(lines, add_special_tokens=False)
        ids = np.asarray([i for encoding in encodings for i in encoding.ids], dtype=np.int64)
        unknown = np.flatnonzero(ids == self._unknown_id)
        if len(unknown):
            raise DataError(
                f"character {text[unknown[0]]!r} is not in the tokenizer's vocabulary\n"
                "  fix: train the tokenizer on text that has it, or use tokenizer.type: bpe, which encodes every byte"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._hub.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The whole tokenizer in the `tokenizer.json` format."""
        return self._hub.to_str(pretty=True)


def build_tokenizer(config: TokenizerConfig, documents: Sequence[Document]) -> Tokenizer:
    """The tokenizer that the config names; `char` and `bpe` are trained on the documents.

    Raises:
        ConfigError: a missing or unreadable tokenizer file, or no end-of-text token.
    """
    kind = config.type
    if kind == "auto":
        kind = "file" if config.path else "bpe"
    if kind == "file":
        return load_tokenizer(config.path, config.end_token)
    texts = (document.text for document in documents)
    return Tokenizer(_character_tokenizer(texts) if kind == "char" else _train_bpe(texts, config.vocab_size))


def load_tokenizer(path: str | Path | None, end_token: str | None = None) -> Tokenizer:
    """Open a `tokenizer.json`, or the folder that holds one; `tokenizer_config.json` beside it names the end token."""
    if path is None:
        raise ConfigError("is needed for type: file", field="tokenizer.path", fix="write the path of a tokenizer.json")
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        hub = HubTokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", field="tokenizer.path") from error
    except Exception as error:  # the library raises bare Exception for a bad file
        raise ConfigError(f"{file} is not a tokenizer.json: {error}", field="tokenizer.path") from error
    return Tokenizer(hub, end_token or _configured_end(file.with_name("tokenizer_config.json")))


def _configured_end(file: Path) -> str | None:
    if not file.is_file():
        return None
    end = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    return end["content"] if isinstance(end, dict) else end


def _character_tokenizer(texts: Iterable[str]) -> HubTokenizer:
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, UNKNOWN, *sorted(characters)])}
    hub = HubTokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    hub.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")  # (?m: lets the dot match a line end too
    hub.decoder = decoders.Fuse()
    hub.add_special_tokens([END_OF_TEXT, UNKNOWN])
    return hub


def _train_bpe(texts: Iterable[str], vocab_size: int) -> HubTokenizer:
    hub = HubTokenizer(models.BPE())
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hub.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    hub.train_from_iterator(_short_pieces(texts), trainer)
    return hub


def _short_pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (line + "\n" for line in text.split("\n"))
