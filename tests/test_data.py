"""Data: what a file holds, what its tokens are, which samples they make, and in which order those are trained."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models, pre_tokenizers

from samestep.config.load import from_dict
from samestep.config.schema import Config, EvalDatasetConfig, TokenizerConfig, TrainDatasetConfig
from samestep.data.batch import collate
from samestep.data.dataset import data_facts, load_data, make_order
from samestep.data.order import GlobalOrder, permutation
from samestep.data.rows import Rows, TokenStore, build_rows, split_documents, split_tail, tokenize
from samestep.data.sources import Document, read_documents
from samestep.data.tokenize import Tokenizer, build_tokenizer, load_tokenizer
from samestep.errors import ConfigError, DataError
from samestep.parallel.mesh import Mesh
from samestep.plan import make_plan
from samestep.run.setup import micro_batches

END = "<|endoftext|>"
CORPUS = Path(__file__).parent.parent / "examples" / "data" / "shakespeare_quickstart.txt"


def document(*segments: tuple[str, bool] | str) -> Document:
    return Document(tuple((s, True) if isinstance(s, str) else s for s in segments), "here")


def made(kind: str, *texts: str, **settings: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(type=kind, **settings), [document(text) for text in texts])


def dataset(path: Path | str = "unused", **settings: Any) -> TrainDatasetConfig:
    return TrainDatasetConfig(path=str(path), **settings)


def store(*sizes: int) -> TokenStore:
    """Documents of these many tokens, numbered 0, 1, 2, ... from end to end; every token is a target."""
    total = sum(sizes)
    return TokenStore(
        np.arange(total, dtype=np.uint32), np.ones(total, dtype=bool), np.cumsum(sizes, dtype=np.int64).reshape(-1)
    )


def spans(rows: Rows) -> list[list[list[int]]]:
    """Row -> span -> its tokens, read back from inputs and labels."""
    result = []
    for i in range(len(rows)):
        sample = rows[i]
        result.append([])
        for number in sorted(set(sample.documents.tolist())):
            here = sample.documents == number
            inputs, labels = sample.input_ids[here].tolist(), sample.labels[here].tolist()
            assert inputs[1:] == labels[:-1]
            assert sample.positions[here].tolist() == list(range(len(inputs)))
            result[-1].append([inputs[0], *labels])
    return result


def config_of(folder: Path, text: str, *overrides: str) -> Config:
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="")
    data = {
        "tokenizer": {"type": "char"},
        "train_dataset": {"path": str(folder / "text.txt")},
        "model": {"seq_length": 2, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    return from_dict(data, overrides).config


# ---- files


def test_json_lines_of_every_legal_shape(tmp_path: Path):
    rows = ['{"text": "one"}', "", '{"text": "a\u2028b\u0085c\\u000bd\\fe"}', "  ", '{"text": ""}', '{"messages": []}']
    rows.append('{"text": "\\ud83d\\ude00 \\u0000", "id": 3}')
    for end, last, bom in itertools.product(("\n", "\r\n"), ("", "\n"), (b"", b"\xef\xbb\xbf")):
        file = tmp_path / "a.jsonl"
        file.write_bytes(bom + (end.join(rows) + last).encode())
        found = read_documents(dataset(file))
        assert [d.text for d in found] == ["one", "a\u2028b\u0085c\x0bd\x0ce", "😀 \x00"]
        assert [d.where for d in found] == [f"{file}: row {n}" for n in (1, 3, 7)]


def test_text_files_keep_their_bytes(tmp_path: Path):
    for name, raw, expected in (
        ("a.txt", b"\xef\xbb\xbfa\r\nb\r\n", ["a\r\nb\r\n"]),
        ("b.md", "x\u2028y\x85\ufeff".encode(), ["x\u2028y\x85\ufeff"]),
    ):
        (tmp_path / name).write_bytes(raw)
        assert [d.text for d in read_documents(dataset(tmp_path / name))] == expected
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert len(read_documents(dataset(tmp_path))) == 2, "an empty file is no document"
    (tmp_path / "s.txt").write_text("--a--b----c--")
    separated = read_documents(dataset(tmp_path / "s.txt", document_separator="--"))
    assert [d.text for d in separated] == ["a", "b", "c"]


@pytest.mark.parametrize("raw", [b"", b"\xef\xbb\xbf", b"\n\n", b'{"text": ""}\n'])
def test_files_without_text_are_refused(tmp_path: Path, raw: bytes):
    (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(DataError, match="hold no document"):
        read_documents(dataset(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_bad_byte_is_named_by_its_place_in_the_file(tmp_path: Path, bom: bytes):
    (tmp_path / "a.txt").write_bytes(bom + b"ab\xffcd")
    with pytest.raises(DataError, match=rf"a\.txt: byte {len(bom) + 2} \(0xff\)"):
        read_documents(dataset(tmp_path / "a.txt"))
    (tmp_path / "a.jsonl").write_bytes(bom + b'{"text": "a"}\n{"text": "\xfe"}')
    with pytest.raises(DataError, match=rf"row 2: byte {len(bom) + 14 + 10} \(0xfe\)"):
        read_documents(dataset(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut sho', r"row 2 \(byte 15\): not a JSON object: Unterminated string.* at column 10"),
        ("[1]", "row 2: holds a list"),
        ('"x"', "row 2: holds a str"),
        ('{"n": ' + "9" * 5000 + "}", r"row 2 \(byte 15\): not a JSON object"),
        ("[" * 100_000, r"row 2 \(byte 15\): not a JSON object"),
        ('{"text": "a\\ud83d"}', r"row 2: character 1 is a lone surrogate \(U\+D83D\)"),
        ('{"body": "x", "id": 1}', "neither a text column 'text' nor a list 'messages'; it has: 'body', 'id'"),
        ('{"text": null}', "neither a text column"),
        ("{}", "it has: nothing"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": null}]}', "message 2 needs"),
        ('{"messages": ["hello"]}', "message 1 needs"),
        ('{"messages": [{"role": "us\\udc00er", "content": "a"}]}', "lone surrogate"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + line.encode() + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        read_documents(dataset(tmp_path / "a.jsonl"))
    str(caught.value).encode()


def test_missing_files_and_wildcards(tmp_path: Path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    assert [d.text for d in read_documents(dataset(tmp_path / "*.txt"))] == ["a.txt", "b.txt"]
    with pytest.raises(DataError, match=r"eval_dataset\.path: no file at .*c\.txt"):
        read_documents(EvalDatasetConfig(path=str(tmp_path / "c.txt")), "eval_dataset")


# ---- tokens

AWKWARD = [
    "a",
    "\n",
    f"{END} and <unk>, spelled out",
    "a\r\nb\u2028c\u0085d\u00a0\u3000e\r",
    "😀 é e\u0301 日本\u200d\x00\x01\ufeff \U0010ffff",
    "  two  spaces \t\n\n\n  x",
    "▁x Ġy Ċz",
]


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("text", AWKWARD)
def test_decode_undoes_encode(tmp_path: Path, kind: str, text: str):
    tokenizer = made(kind, text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_id not in ids, "text never makes a control token"
    assert ids.max() < tokenizer.vocab_size
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    again = load_tokenizer(tmp_path)
    assert again.encode(text).tolist() == ids.tolist()
    assert (again.vocab_size, again.end_id) == (tokenizer.vocab_size, tokenizer.end_id)


def test_character_ids_are_the_sorted_characters():
    tokenizer = made("char", "cab", "é\n")
    assert tokenizer.vocab_size == 2 + 5
    assert tokenizer.encode("\nabcé").tolist() == [2, 3, 4, 5, 6]
    assert tokenizer.encode("").tolist() == []
    for text in ("abd", "ab\U0010ffff", "\ud83d"):
        with pytest.raises(DataError, match="is not in the tokenizer's vocabulary"):
            tokenizer.encode(text)


def test_an_unknown_character_names_its_document():
    tokenizer = made("char", "abc")
    documents = [Document(((text, True),), f"row {i}") for i, text in enumerate(["a", "b", "aXb", "c"], 1)]
    with pytest.raises(DataError, match=r"^row 3: character 'X'"):
        tokenize(documents, tokenizer)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_an_end_token_may_be_chosen(tmp_path: Path, kind: str):
    tokenizer = made(kind, "a text with </s> in it", end_token="</s>")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    assert load_tokenizer(tmp_path, "</s>").end_id == tokenizer.end_id
    assert tokenizer.decode([tokenizer.end_id]) == "</s>"
    assert tokenizer.end_id not in tokenizer.encode("</s>")


def test_long_text_in_pieces_is_the_text_as_a_whole():
    text = CORPUS.read_text(encoding="utf-8")[:60_000]
    awkward = "".join(AWKWARD) + "end\n\n\nA\n 'tis\n's x\n\t\ty\x1c\nz\n!\n?\u0085\nb\n\u3000c\n\n"
    long = (text + awkward) * 5
    tokenizer = made("bpe", text, vocab_size=400)
    whole = HubTokenizer.from_str(tokenizer.to_json())
    whole.encode_special_tokens = True
    assert len(list(tokenizer._pieces(long))) > 2
    assert tokenizer.encode(long).tolist() == whole.encode(long, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_small_corpora_make_a_tokenizer():
    assert made("bpe", "a").vocab_size == 257, "every byte and the end"
    assert made("bpe", "a", vocab_size=1).vocab_size == 257
    assert made("bpe", "ab ab ab ab", vocab_size=258).encode("ab").size == 1
    assert made("char", "a").vocab_size == 3


def test_tokenizer_files(tmp_path: Path):
    words = HubTokenizer(models.WordLevel({"</s>": 0, "<unk>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    words.save(str(file))
    found = build_tokenizer(TokenizerConfig(path=str(tmp_path)), [])
    assert (found.end_id, found.vocab_size) == (0, 4)
    assert found.encode("hello\nnew world").tolist() == [2, 1, 3], "its own unknown token, and no character"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "world"}}')
    assert load_tokenizer(file).end_id == 3
    assert load_tokenizer(file, "hello").end_id == 2
    for broken in ("{", "[]", '{"eos_token": {}}'):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
            load_tokenizer(file)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    with pytest.raises(ConfigError, match="has no token '<eos>'"):
        load_tokenizer(file, "<eos>")
    HubTokenizer(models.WordLevel({"hello": 0}, unk_token="hello")).save(str(file))
    with pytest.raises(ConfigError, match="cannot tell which token ends a document"):
        load_tokenizer(file)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path / "none")


def test_only_the_assistant_is_a_target(tmp_path: Path):
    chat = [("user", "hi"), ("assistant", "yo"), ("user", ""), ("assistant", ""), ("user", "k")]
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat[:n]]} for n in (2, 4, 5)] + [{"text": "hi"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    documents = read_documents(dataset(tmp_path / "a.jsonl", targets="assistant"))
    tokens = tokenize(documents, build_tokenizer(TokenizerConfig(type="char"), documents))
    # "user: hi\nassistant: " then "yo\n"; "user: \nassistant: " then "\n"; "user: k\n".
    first, second, third = [0] * 20 + [1] * 3, [0] * 18 + [1], [0] * 8
    expected = [*first, 1, *first, *second, 1, *first, *second, *third, 0, 1, 1, 1]
    assert tokens.is_target.astype(int).tolist() == expected, "the end counts where the turn before it does"
    assert np.diff(tokens.ends, prepend=0).tolist() == [24, 43, 51, 3]
    everything = tokenize(
        read_documents(dataset(tmp_path / "a.jsonl")), build_tokenizer(TokenizerConfig(type="char"), documents)
    )
    assert everything.is_target.all()


# ---- rows


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [2, 3, 4, 7, 8, 9, 15])
def test_cut_makes_every_token_but_the_first_a_label_once(total: int, length: int):
    rows = build_rows(store(1, total - 1), dataset(), length)
    pieces = [piece for (piece,) in spans(rows)]
    assert [label for piece in pieces for label in piece[1:]] == list(range(1, total))
    assert [token for piece in pieces for token in piece[:-1]] == list(range(total - 1))
    assert all(len(piece) == length + 1 for piece in pieces[:-1])


def test_documents_by_hand():
    text = store(3, 1, 6, 2)  # 0 1 2 | 3 | 4 5 6 7 8 9 | 10 11
    by_length = {
        "split": [[[0, 1, 2]], [[4, 5, 6]], [[6, 7, 8]], [[8, 9]], [[10, 11]]],
        "truncate": [[[0, 1, 2]], [[4, 5, 6]], [[10, 11]]],
    }
    for long_documents, expected in by_length.items():
        rows = build_rows(text, dataset(rows="documents", long_documents=long_documents), 2)
        assert spans(rows) == expected
    with pytest.raises(DataError, match="document 3 has 6 tokens"):
        build_rows(text, dataset(rows="documents", long_documents="error"), 2)
    assert len(build_rows(text, dataset(rows="documents", long_documents="error"), 5)) == 3
    packed = build_rows(store(3, 1, 4, 2), dataset(rows="pack_documents"), 3)  # inputs 2, 0, 3, 1
    assert spans(packed) == [[[4, 5, 6, 7]], [[0, 1, 2], [8, 9]]]


@pytest.mark.parametrize("seed", range(20))
def test_packing_loses_nothing_and_never_overflows(seed: int):
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 12))
    sizes = random.integers(1, 30, size=int(random.integers(1, 60))).tolist()
    if max(sizes) < 2:
        sizes.append(2)
    rows = build_rows(store(*sizes), dataset(rows="pack_documents"), length)
    packed = [span for row in spans(rows) for span in row]
    ends = np.cumsum(sizes)
    labels = set(range(sum(sizes))) - {0, *ends.tolist()}  # a document's first token is no label
    assert Counter(t for span in packed for t in span[1:]) == Counter(labels)
    assert all(np.searchsorted(ends, span[0], "right") == np.searchsorted(ends, span[-1], "right") for span in packed)
    assert all(sum(len(span) - 1 for span in row) <= length for row in spans(rows))
    filled = [sum(len(span) - 1 for span in row) for row in spans(rows)]
    assert all(a + b > length for a, b in itertools.combinations(filled, 2)), "two rows that fit into one"


def test_lengths_and_targets_are_those_of_the_samples():
    random = np.random.default_rng(0)
    base = store(*random.integers(1, 20, size=40).tolist())
    base = TokenStore(base.tokens, random.random(len(base.tokens)) < 0.3, base.ends)
    for kind in ("cut", "documents", "pack_documents"):
        rows = build_rows(base, dataset(rows=kind), 8)
        assert rows.lengths().tolist() == [len(rows[i].input_ids) for i in range(len(rows))]
        assert rows.targets().tolist() == [int((rows[i].labels != -100).sum()) for i in range(len(rows))]
        assert rows.targets().tolist() == [rows[i].targets for i in range(len(rows))]
        for i in range(len(rows)):
            kept = rows[i].labels != -100
            assert base.is_target[rows[i].labels[kept]].all()


def test_the_fingerprint_sees_tokens_targets_and_borders():
    def of(text: TokenStore, **settings: Any) -> str:
        return build_rows(text, dataset(**settings), 4).fingerprint

    one = store(5, 6)
    flags = one.is_target.copy()
    flags[3] = False
    different = {
        of(one),
        of(one, rows="documents"),
        of(TokenStore(one.tokens + np.uint32(1), one.is_target, one.ends)),
        of(TokenStore(one.tokens, flags, one.ends)),
        build_rows(one, dataset(), 5).fingerprint,
    }
    assert len(different) == 5
    assert of(store(5, 6)) == of(one)


@pytest.mark.parametrize(
    ("fraction", "cut", "head_ends", "tail_ends"),
    [
        (0.4, 6, [4, 6], [4]),  # at a border
        (0.5, 5, [4, 5], [1, 5]),  # inside the second document
        (0.2, 8, [4, 6, 8], [2]),  # inside the last
        (0.01, 10, [4, 6, 10], []),  # nothing
        (0.99, 0, [0], [4, 6, 10]),  # everything
    ],
)
def test_the_tail_may_begin_anywhere(fraction: float, cut: int, head_ends: list[int], tail_ends: list[int]):
    head, tail = split_tail(store(4, 2, 4), fraction)
    assert head.tokens.tolist() == list(range(cut))
    assert tail.tokens.tolist() == list(range(cut, 10))
    assert (head.ends.tolist(), tail.ends.tolist()) == (head_ends, tail_ends)
    assert len(head.is_target) == cut and len(tail.is_target) == 10 - cut
    for part, kind, length in itertools.product((head, tail), ("cut", "documents", "pack_documents"), (1, 3)):
        if len(part.tokens) < 2:
            with pytest.raises(DataError, match="too few"):
                build_rows(part, dataset(rows=kind), length, "validation")
        else:
            assert sum(len(s) - 1 for row in spans(build_rows(part, dataset(rows=kind), length)) for s in row) > 0


def test_whole_documents_are_held_out():
    text = store(3, 2, 4, 1)
    order = np.array([2, 0, 3, 1])
    train, held_out = split_documents(text, 0.5, order)
    assert train.tokens.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert train.ends.tolist() == [3, 7]
    assert held_out.tokens.tolist() == [3, 4, 9]
    assert held_out.ends.tolist() == [2, 3]
    assert len(split_documents(text, 0.001, order)[1].ends) == 1, "at least one is held out"
    assert len(split_documents(text, 0.999, order)[0].ends) == 1, "at least one is kept"
    with pytest.raises(DataError, match="needs two documents or more"):
        split_documents(store(5), 0.5, np.array([0]))


# ---- order

MASK = 2**64 - 1


def splitmix(n: int) -> int:
    """Written out in whole numbers, from the paper."""
    z = (n + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 7])
@pytest.mark.parametrize("epoch", [0, 1, 10**12, 2**63])
def test_the_permutation_is_the_written_one(seed: int, epoch: int):
    key = splitmix(splitmix(seed & MASK) ^ epoch)
    expected = sorted(range(50), key=lambda i: splitmix(i ^ key))
    assert permutation(50, seed, epoch).tolist() == expected


def test_the_permutation_never_changes():
    assert permutation(10, 42, 0).tolist() == [4, 3, 5, 8, 0, 9, 7, 6, 1, 2]
    assert permutation(1, 42, 3).tolist() == [0]


def test_permutations_are_uniform():
    counts = Counter(tuple(permutation(4, 7, epoch).tolist()) for epoch in range(4800))
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom: exceeded once in a thousand
    places = np.stack([permutation(100, seed, 0) for seed in range(400)]).mean(0)
    assert np.abs(places - 49.5).max() < 5 * 28.9 / 20


@pytest.mark.parametrize(("shuffle", "drop_last"), itertools.product((True, False), repeat=2))
@pytest.mark.parametrize(("count", "batch"), [(7, 3), (6, 3), (5, 5), (3, 7), (1, 1), (10, 1), (8, 7)])
def test_cursor_against_brute_force(count: int, batch: int, shuffle: bool, drop_last: bool):
    if drop_last and count < batch:
        with pytest.raises(DataError, match="leaves nothing"):
            GlobalOrder(count, batch, 3, shuffle=shuffle, drop_last=drop_last)
        return
    truth = []
    for epoch in range(4):
        rows = permutation(count, 3, epoch).tolist() if shuffle else list(range(count))
        for start in range(0, count, batch):
            chunk = rows[start : start + batch]
            if len(chunk) == batch or not drop_last:
                truth.append((chunk, [epoch * count + start + i for i in range(len(chunk))]))
    order = GlobalOrder(count, batch, 3, shuffle=shuffle, drop_last=drop_last)
    consumed, cursors = 0, []
    for rows, places in truth:
        step = order.next(consumed)
        assert (step.rows.tolist(), step.places.tolist()) == (rows, places)
        cursors.append(consumed)
        consumed = step.consumed
    assert consumed == 4 * count, "an epoch ends at a multiple of the rows, whether its rest was dropped or not"
    fresh = GlobalOrder(count, batch, 3, shuffle=shuffle, drop_last=drop_last)
    for cursor, (rows, _) in reversed(list(zip(cursors, truth, strict=True))):
        assert fresh.next(cursor).rows.tolist() == rows, "a batch depends on the cursor alone"


def test_another_batch_size_goes_on_with_the_next_unseen_sample():
    order = GlobalOrder(10, 4, 0, shuffle=False)
    cursor = order.next(order.next(0).consumed).consumed
    resumed = GlobalOrder(10, 3, 0, shuffle=False)
    assert resumed.next(cursor).rows.tolist() == [8, 9]
    dropping = GlobalOrder(10, 3, 0, shuffle=False, drop_last=True)
    assert dropping.next(cursor).places.tolist() == [10, 11, 12]


# ---- which samples are trained

SEVEN = "abcdefghijklmn"  # and the end: 15 tokens, 7 samples of two inputs
TRAINED = [
    # remainder, last batch, global, local -> steps of micro-batches of samples; epoch 2 counts on from 7
    ("use", "use", 3, 2, [[[0, 1], [2]], [[3, 4], [5]], [[6]], [[7, 8], [9]], [[10, 11], [12]], [[13]]]),
    ("use", "drop", 3, 2, [[[0, 1], [2]], [[3, 4], [5]], [[7, 8], [9]], [[10, 11], [12]]]),
    ("drop", "use", 3, 2, [[[0, 1]], [[3, 4]], [], [[7, 8]], [[10, 11]], []]),
    ("drop", "drop", 3, 2, [[[0, 1]], [[3, 4]], [[7, 8]], [[10, 11]]]),
    ("drop", "use", 5, 2, [[[0, 1], [2, 3]], [[5, 6]], [[7, 8], [9, 10]], [[12, 13]]]),
    ("error", "drop", 4, 2, [[[0, 1], [2, 3]], [[7, 8], [9, 10]]]),
    ("error", "use", 4, 3, None),
    ("error", "use", 4, 2, None),
    ("error", "use", 4, 1, [[[0], [1], [2], [3]], [[4], [5], [6]], [[7], [8], [9], [10]], [[11], [12], [13]]]),
    ("use", "use", 9, 4, [[[0, 1, 2, 3], [4, 5, 6]], [[7, 8, 9, 10], [11, 12, 13]]]),
    ("drop", "use", 9, 4, [[[0, 1, 2, 3]], [[7, 8, 9, 10]]]),
    ("use", "drop", 9, 4, None),
    ("use", "use", 7, 7, [[[0, 1, 2, 3, 4, 5, 6]], [[7, 8, 9, 10, 11, 12, 13]]]),
]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("remainder", "last", "whole", "local", "truth"), TRAINED)
def test_which_samples_are_trained(
    tmp_path: Path, remainder: str, last: str, whole: int, local: int, truth: Any, shuffle: bool, layout: str
):
    settings = {
        "training.remainder": remainder,
        "training.last_batch": last,
        "training.global_batch_size": whole,
        "training.local_batch_size": local,
        "training.micro_batch": layout,
        "train_dataset.shuffle": str(shuffle).lower(),
    }
    config = config_of(tmp_path, SEVEN, *(f"{name}={value}" for name, value in settings.items()))
    data = load_data(config)
    assert len(data.train) == 7
    if truth is None:
        with pytest.raises(ConfigError):
            make_plan(config, 1, data_facts(config, data))
        return
    plan = make_plan(config, 1, data_facts(config, data))
    assert plan.steps_per_epoch == sum(bool(step) for step in truth) / 2
    assert [m.samples for m in plan.micro_batches] == [len(batch) for batch in truth[0]]
    order, consumed, steps, visits = make_order(config, data), 0, [], Counter()
    for number in range(1, len(truth) + 1):
        samples = order.next(consumed)
        consumed = samples.consumed
        steps.append([])
        for batch in micro_batches(config, data.train, samples, number, Mesh.alone()):
            places = sorted({place for place in batch.sample_ids.flatten().tolist() if place != -1})
            assert batch.samples == len(places)
            steps[-1].append(places)
            firsts = batch.input_ids[(batch.position_ids == 0) & (batch.document_ids == 0)]
            visits.update((place // 7, token) for place, token in zip(places, firsts.tolist(), strict=True))
    assert steps == truth
    assert consumed == 14
    assert all(times == 1 for times in visits.values()), "no sample twice in one epoch"
    if remainder == last == "use":
        every = data.tokenizer.encode(SEVEN[::2]).tolist()
        assert visits == Counter((epoch, token) for epoch in (0, 1) for token in every)
    seen = [token for (_, token) in sorted(visits)]
    assert shuffle or seen == sorted(seen[: len(seen) // 2]) * 2


# ---- micro-batches


def test_collate_by_hand():
    rows = build_rows(store(3, 2, 4), dataset(rows="pack_documents"), 3)
    assert spans(rows) == [[[5, 6, 7, 8]], [[0, 1, 2], [3, 4]]]
    short = build_rows(store(3), dataset(rows="documents"), 3)
    padded = collate([rows[1], short[0]], [17, 5], "padded", 99)
    assert padded.input_ids.tolist() == [[0, 1, 3], [0, 1, 0]]
    assert padded.labels.tolist() == [[1, 2, 4], [1, 2, -100]]
    assert padded.position_ids.tolist() == [[0, 1, 0], [0, 1, 0]]
    assert padded.document_ids.tolist() == [[0, 0, 1], [0, 0, -1]]
    assert padded.sample_ids.tolist() == [[17, 17, 17], [5, 5, -1]]
    assert padded.spans == ((0, 0, 2), (0, 2, 3), (1, 0, 2))
    assert (padded.samples, padded.tokens, padded.targets, padded.dropout_key) == (2, 5, 5, 99)
    packed = collate([rows[1], short[0]], [17, 5], "packed", 99)
    assert packed.input_ids.tolist() == [[0, 1, 3, 0, 1]]
    assert packed.labels.tolist() == [[1, 2, 4, 1, 2]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 0, 1]]
    assert packed.document_ids.tolist() == [[0, 0, 1, 0, 0]]
    assert packed.sample_ids.tolist() == [[17, 17, 17, 5, 5]]
    assert packed.spans == ((0, 0, 2), (0, 2, 3), (0, 3, 5))
    assert collate([rows[0], short[0]], [0, 1], "padded").spans is None
    assert collate([rows[0]], [0], "packed").spans is None


def test_packed_and_padded_hold_the_same():
    random = np.random.default_rng(1)
    base = store(*random.integers(2, 20, size=30).tolist())
    base = TokenStore(base.tokens, random.random(len(base.tokens)) < 0.5, base.ends)
    for kind in ("documents", "pack_documents", "cut"):
        rows = build_rows(base, dataset(rows=kind), 12)
        chosen = random.permutation(len(rows))[:7].tolist()
        contents = []
        for layout in ("padded", "packed"):
            batch = collate([rows[i] for i in chosen], chosen, layout)
            real = batch.document_ids != -1
            fields = (batch.sample_ids, batch.document_ids, batch.position_ids, batch.input_ids, batch.labels)
            contents.append([field[real].tolist() for field in fields])
            assert (batch.labels[~real] == -100).all()
            assert real.sum() == batch.tokens == rows.lengths()[chosen].sum()
            assert batch.targets == rows.targets()[chosen].sum()
            ids = list(zip(batch.sample_ids.flatten().tolist(), batch.document_ids.flatten().tolist(), strict=True))
            width = batch.input_ids.shape[1]
            found = []
            for name, group in itertools.groupby(range(len(ids)), key=lambda at: (at // width, ids[at])):
                where = list(group)
                if name[1][1] != -1:
                    found.append((name[0], where[0] % width, where[-1] % width + 1))
            assert batch.spans is None or list(batch.spans) == found
            if batch.spans is None:
                assert all(start == 0 for _, start, _ in found) and len(found) == len(batch.input_ids)
        assert contents[0] == contents[1]


# ---- the data of a run


def chats(folder: Path, *roles: str) -> None:
    rows = [{"messages": [{"role": role, "content": "x"}]} for role in roles]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_data_without_any_target_is_refused(tmp_path: Path):
    chats(tmp_path, "user", "system")
    overrides = [f"train_dataset.path={tmp_path}/text.jsonl", "train_dataset.targets=assistant"]
    with pytest.raises(DataError, match=r"train_dataset: no token .* is a target"):
        load_data(config_of(tmp_path, "a", *overrides))
    assert load_data(config_of(tmp_path, "a", overrides[0])).train.targets().sum() > 0
    truncated = [*overrides, "train_dataset.rows=documents", "train_dataset.long_documents=truncate"]
    chats(tmp_path, "assistant")
    with pytest.raises(DataError, match="is a target"):
        load_data(config_of(tmp_path, "a", *truncated))
    chats(tmp_path, "user")
    held_out = [f"eval_dataset.path={tmp_path}/text.jsonl", "eval_dataset.targets=assistant"]
    with pytest.raises(DataError, match=r"eval_dataset: no token .* is a target"):
        load_data(config_of(tmp_path, "user: x\n", *held_out))


def test_a_model_with_too_few_embeddings_is_refused_before_tokenizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path, "abcdef", "model.vocab_size=7")
    monkeypatch.setattr("samestep.data.dataset.tokenize", None)
    with pytest.raises(ConfigError, match="7 is smaller than the tokenizer's vocabulary of 8"):
        load_data(config)


def test_facts_are_of_the_first_global_batch(tmp_path: Path):
    config = config_of(
        tmp_path, "a/bb/ccc/dddd/eeeee", "train_dataset.document_separator=/", "train_dataset.rows=documents",
        "model.seq_length=16", "training.global_batch_size=2",
    )  # fmt: skip
    data = load_data(config)
    facts = data_facts(config, data)
    assert (facts.samples, facts.tokens, facts.targets, facts.vocab_size) == (5, 15, 15, 7)
    first = make_order(config, data).next(0).rows.tolist()
    assert facts.step_lengths == facts.step_targets == tuple(n + 1 for n in first)
    larger = config_of(tmp_path, "abcd", "training.global_batch_size=64")
    assert data_facts(larger, load_data(larger)).step_lengths == (2, 2)


def test_validation_data(tmp_path: Path):
    tail = load_data(config_of(tmp_path, "a" * 59, "train_dataset.split=tail", "train_dataset.eval_fraction=0.25"))
    assert (tail.train.lengths().sum(), tail.evaluation.lengths().sum()) == (44, 14)
    documents = [
        "train_dataset.split=documents",
        "train_dataset.document_separator=/",
        "train_dataset.eval_fraction=0.4",
    ]
    parts = load_data(config_of(tmp_path, "aa/bb/cc/dd/ee", *documents))
    held_out = "".join(parts.tokenizer.decode(parts.evaluation[i].input_ids) for i in range(len(parts.evaluation)))
    kept = "".join(parts.tokenizer.decode(parts.train[i].input_ids) for i in range(len(parts.train)))
    assert set(held_out) & set(kept) <= set(END) and len(set("abcde") - set(kept.replace(END, ""))) == 2
    assert load_data(config_of(tmp_path, "abc")).evaluation is None


def test_a_megabyte_is_quick():
    import time

    text = (CORPUS.read_text(encoding="utf-8") * 10)[:1_000_000]
    for kind, limit in (("char", 3), ("bpe", 12)):
        start = time.process_time()
        tokens = tokenize([document(text)], made(kind, text, **({"vocab_size": 512} if kind == "bpe" else {})))
        assert time.process_time() - start < limit
        assert tokens.ends.tolist() == [len(tokens.tokens)]
