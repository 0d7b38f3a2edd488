"""Every kind of data set and tokenizer: the same text comes out of each, and every mistake is named by its place."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from samestep.config.load import from_dict, load
from samestep.config.schema import EvalDatasetConfig, TokenizerConfig, TrainDatasetConfig
from samestep.data.dataset import load_data, make_order
from samestep.data.rows import tokenize
from samestep.data.segments import ROLES
from samestep.data.sources import Document, read_documents
from samestep.data.tokenize import build_tokenizer, load_tokenizer
from samestep.errors import ConfigError, DataError
from samestep.parallel.mesh import Mesh
from samestep.run.setup import micro_batches

TEXTS = [
    "plain",
    "😀 \U0010ffff astral \U0001d11e",
    "line\u2028paragraph\u2029next\u0085 form\x0c vertical\x0b",
    "zero\u200b\u200d\ufeffwidth",
    "carriage\r\nreturn\r",
    "e\u0301 é 日本 \u202eright to left",
    'quote " backslash \\ slash / tab\t nul\x00',
]


def dataset(path: Any, **settings: Any) -> TrainDatasetConfig:
    paths = [str(p) for p in path] if isinstance(path, list) else str(path)
    return TrainDatasetConfig(path=paths, **settings)


def texts(path: Any, **settings: Any) -> list[str]:
    return [document.text for document in read_documents(dataset(path, **settings))]


# ---- writers of each kind, by other libraries


def gzip_members(raw: bytes) -> bytes:
    third = len(raw) // 3
    return b"".join(gzip.compress(part) for part in (raw[:third], raw[third : 2 * third], b"", raw[2 * third :]))


def zstd_frames(raw: bytes) -> bytes:
    size = max(1, len(raw) // 7)
    return b"".join(zstandard.compress(raw[at : at + size]) for at in range(0, len(raw), size))


def lines(rows: list[dict], end: str = "\n", ascii_only: bool = False) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows).encode()


def as_jsonl(folder: Path, rows: list[dict]) -> Path:
    (folder / "a.jsonl").write_bytes(lines(rows))
    return folder / "a.jsonl"


def as_escaped_jsonl_with_crlf_and_bom(folder: Path, rows: list[dict]) -> Path:
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(rows, "\r\n", ascii_only=True))
    return folder / "a.jsonl"


def as_gzip(folder: Path, rows: list[dict]) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip_members(lines(rows)))
    return folder / "a.jsonl.gz"


def as_zstd(folder: Path, rows: list[dict]) -> Path:
    (folder / "a.jsonl.zst").write_bytes(zstd_frames(lines(rows)))
    return folder / "a.jsonl.zst"


def as_json(folder: Path, rows: list[dict]) -> Path:
    (folder / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    return folder / "a.json"


def as_compressed_json(folder: Path, rows: list[dict]) -> Path:
    (folder / "a.json.zst").write_bytes(zstd_frames(b"\xef\xbb\xbf" + json.dumps(rows).encode()))
    return folder / "a.json.zst"


def as_parquet(folder: Path, rows: list[dict]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def as_dataset(folder: Path, rows: list[dict]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_dataset_dict(folder: Path, rows: list[dict]) -> Path:
    part = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(test=part.select([0]), train=part).save_to_disk(str(folder / "saved"))
    return folder / "saved"


Writer = Callable[[Path, list[dict]], Path]
WRITERS: list[Writer] = [
    as_jsonl,
    as_escaped_jsonl_with_crlf_and_bom,
    as_gzip,
    as_zstd,
    as_json,
    as_compressed_json,
    as_parquet,
    as_dataset,
    as_dataset_dict,
]
every_kind = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)


@pytest.fixture(autouse=True)
def _quiet_datasets():
    datasets.disable_progress_bars()


@every_kind
def test_awkward_text_survives(tmp_path: Path, write: Writer):
    path = write(tmp_path, [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
    found = read_documents(dataset(path))
    assert [document.text for document in found] == TEXTS
    assert [document.where for document in found] == [f"{path}: row {n}" for n in range(1, len(TEXTS) + 1)]
    tokenizer = build_tokenizer(TokenizerConfig(type="bpe", vocab_size=300), found)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS


@every_kind
def test_chats_of_every_kind(tmp_path: Path, write: Writer):
    chat = [{"role": "user", "content": "hi 😀"}, {"role": "assistant", "content": "yo\u2028"}]
    path = write(tmp_path, [{"messages": chat, "n": 1}, {"messages": chat[:1], "n": 2}])
    found = read_documents(dataset(path, targets="assistant"))
    assert found[0].segments == (("user: ", False), ("hi 😀\n", False), ("assistant: ", False), ("yo\u2028\n", True))
    assert found[1].text == "user: hi 😀\n"


@every_kind
def test_another_column_and_a_missing_one(tmp_path: Path, write: Writer):
    path = write(tmp_path, [{"body": "one", "id": 1}, {"body": "two", "id": 2}])
    assert texts(path, text_column="body") == ["one", "two"]
    with pytest.raises(DataError, match=r"neither a text column 'text' .*; it has: 'body', 'id'"):
        read_documents(dataset(path))


@every_kind
def test_every_sample_once_an_epoch(tmp_path: Path, write: Writer):
    path = write(tmp_path, [{"text": letter * 3} for letter in "abcdefghijk"])
    data = {
        "tokenizer": {"type": "char"},
        "training": {"global_batch_size": 4, "local_batch_size": 3},
        "train_dataset": {"path": str(path), "rows": "documents"},
        "model": {"seq_length": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    config = from_dict(data).config
    loaded = load_data(config)
    order, consumed, visits = make_order(config, loaded), 0, Counter()
    for step in range(1, 7):
        samples = order.next(consumed)
        consumed = samples.consumed
        for batch in micro_batches(config, loaded.train, samples, step, Mesh.alone()):
            real = batch.document_ids != -1
            visits.update(batch.input_ids[real].tolist())
        assert step % 3 or set(visits.values()) == {step}
    expected = loaded.tokenizer.encode("abcdefghijk").tolist()
    assert visits == dict.fromkeys(expected, 6), "three characters, two epochs"


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst", ".md.gz"])
def test_text_files(tmp_path: Path, suffix: str):
    text = "--".join(TEXTS)
    raw = b"\xef\xbb\xbf" + text.encode()
    pack = gzip_members if suffix.endswith(".gz") else zstd_frames if suffix.endswith(".zst") else bytes
    (tmp_path / f"a{suffix}").write_bytes(pack(raw))
    assert texts(tmp_path / f"a{suffix}") == [text]
    assert texts(tmp_path, document_separator="--") == TEXTS


def test_folders_take_all_kinds_or_one(tmp_path: Path):
    as_jsonl(tmp_path, [{"text": "lines"}])
    as_gzip(tmp_path, [{"text": "packed"}])
    as_json(tmp_path, [{"text": "array"}])
    as_parquet(tmp_path, [{"text": "table"}])
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    (tmp_path / "d.gz").write_bytes(b"\xff")
    assert sorted(texts(tmp_path)) == ["array", "lines", "packed", "table", "text"]
    assert sorted(texts(tmp_path, type="jsonl")) == ["lines", "packed"]
    assert texts(tmp_path, type="parquet") == ["table"]
    with pytest.raises(DataError, match="cannot be opened as a Hugging Face data set"):
        read_documents(dataset(tmp_path, type="huggingface"))


def test_a_file_named_twice_is_refused(tmp_path: Path):
    file = as_jsonl(tmp_path, [{"text": "a"}])
    (tmp_path / "link.jsonl").symlink_to(file)
    for paths in ([file, file], [tmp_path, file], [file, tmp_path / "*.jsonl"], [tmp_path / "link.jsonl", file]):
        with pytest.raises(
            DataError, match=r"train_dataset\.path: .*a\.jsonl is named twice|link\.jsonl is named twice"
        ):
            read_documents(dataset(paths))
    shutil.copy(file, tmp_path / "copy.jsonl")
    assert texts([file, tmp_path / "copy.jsonl"]) == ["a", "a"], "another file of the same content is the user's choice"


def test_a_separator_that_never_occurs_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three")
    with pytest.raises(DataError, match=r"document_separator: '\\\\n\\\\n' occurs in no text file"):
        read_documents(dataset(tmp_path, document_separator=r"\n\n"))
    assert texts(tmp_path, document_separator="\n\n") == ["one", "two", "three"]
    assert texts(as_jsonl(tmp_path, [{"text": "x"}]), document_separator="@") == ["x"]


# ---- mistakes, by place


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_truncated_and_damaged_files(tmp_path: Path, pack: Callable[[bytes], bytes]):
    random = np.random.default_rng(0)
    rows = [{"text": random.bytes(1000).hex()} for _ in range(300)]
    raw = lines(rows)
    file = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl.zst")
    whole = pack(raw[:200_000]) + pack(raw[200_000:])
    file.write_bytes(whole)
    assert len(texts(file)) == 300
    for cut in (len(whole) - 1, len(whole) - 40_000, 5):
        file.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"ends too early, at byte (\d+) of its content") as caught:
            read_documents(dataset(file))
        byte = int(str(caught.value).partition("at byte ")[2].split()[0])
        assert byte <= len(raw) and byte >= (200_000 if cut > len(whole) // 2 + 10_000 else 0)
    damaged = bytearray(whole)
    damaged[-30_000] ^= 0xFF
    damaged[-29_999] ^= 0xFF
    file.write_bytes(damaged)
    with pytest.raises(DataError):  # by the checksum, or by a row that is no JSON
        read_documents(dataset(file))
    file.write_bytes(b"no compressed data at all")
    with pytest.raises(DataError, match="damaged after byte 0 of its content"):
        read_documents(dataset(file))


def test_unusual_streams(tmp_path: Path):
    raw = lines([{"text": "a" * 100}])
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(raw) + b"\0" * 512)
    assert texts(file) == ["a" * 100], "padding after the last member"
    buffer = io.BytesIO()
    with zstandard.ZstdCompressor(write_content_size=False).stream_writer(buffer, closefd=False) as writer:
        writer.write(raw)
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(skippable + buffer.getvalue() + skippable + zstandard.compress(raw))
    assert texts(file) == ["a" * 100] * 2
    file.write_bytes(b"")
    with pytest.raises(DataError, match="hold no document"):
        read_documents(dataset(file))


@pytest.mark.parametrize("pack", [bytes, gzip_members, zstd_frames])
def test_mistakes_are_placed_in_the_decompressed_content(tmp_path: Path, pack: Callable[[bytes], bytes]):
    suffix = {bytes: "", gzip_members: ".gz", zstd_frames: ".zst"}[pack]
    first = '{"text": "日本\u2028"}\n'.encode()
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(pack(first + b'{"text": "a\xff"}\n'))
    with pytest.raises(DataError, match=rf"row 2: byte {len(first) + 11} \(0xff\) is not UTF-8"):
        read_documents(dataset(file))
    file.write_bytes(pack(first + b'{"text": "cut'))
    with pytest.raises(DataError, match=rf"row 2 \(byte {len(first)}\): not a JSON object: Unterminated string"):
        read_documents(dataset(file))
    file.write_bytes(pack(first + b'{"text": "\\ud800"}'))
    with pytest.raises(DataError, match="row 2: character 0 is a lone surrogate"):
        read_documents(dataset(file))
    file = tmp_path / f"b.txt{suffix}"
    file.write_bytes(pack("é\n".encode() + b"\xfe"))
    with pytest.raises(DataError, match=r"byte 3 \(0xfe\) is not UTF-8"):
        read_documents(dataset(file))


GOOD = '[{"text": "日本"}, '


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}', r"a\.json \(byte 0\): must hold one JSON array .*\n.*type: jsonl"),
        (
            GOOD + '{"text": "cut',
            rf"row 2 \(byte {len(GOOD.encode())}\): not a JSON object: Unterminated .* at byte 30",
        ),
        (GOOD.strip().rstrip(","), "row 1: is followed by 'the end of the file' at byte 19"),
        (GOOD, rf"row 2 \(byte {len(GOOD.encode())}\): not a JSON object"),
        (GOOD + "]", rf"row 2 \(byte {len(GOOD.encode())}\): not a JSON object"),
        (GOOD + "3]", "row 2 .*: holds a int"),
        (GOOD + '{"text": "b"} {}]', "row 2: is followed by '{' at byte 35"),
        (GOOD + '{"text": "b"}] []', "there is more after the end of the array, at byte 36"),
        (GOOD + '{"text": "\\udfff"}]', "row 2: character 0 is a lone surrogate"),
        (GOOD + "[" * 100_000, "row 2 .*: not a JSON object"),
        ("[]", "hold no document"),
        (" \n", "hold no document"),
    ],
)
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_mistakes_in_an_array(tmp_path: Path, content: str, message: str, bom: str):
    (tmp_path / "a.json").write_text(bom + content, encoding="utf-8")
    if bom:
        with pytest.raises(DataError):
            read_documents(dataset(tmp_path / "a.json"))
    else:
        with pytest.raises(DataError, match=message):
            read_documents(dataset(tmp_path / "a.json"))


def test_an_array_in_a_file_of_lines_says_so(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('[{"text": "a"}]')
    with pytest.raises(DataError, match=r"row 1: holds a list.*\n  fix: .*type: json"):
        read_documents(dataset(tmp_path / "a.jsonl"))
    assert texts(tmp_path / "a.jsonl", type="json") == ["a"]


def test_mistakes_in_parquet(tmp_path: Path):
    file = as_parquet(tmp_path, [{"text": "a"}, {"text": None}])
    with pytest.raises(DataError, match="row 2: has neither a text column"):
        read_documents(dataset(file))
    raw = file.read_bytes()
    for broken in (raw[:-3], raw[: len(raw) // 2], b"PAR1", b"", b"x" * 100):
        file.write_bytes(broken)
        with pytest.raises(DataError, match="cannot be read as Parquet after row 0"):
            read_documents(dataset(file))
    bad = pyarrow.StringArray.from_buffers(
        2, pyarrow.py_buffer(np.array([0, 2, 4], dtype=np.int32)), pyarrow.py_buffer(b"ok\xffx")
    )
    parquet.write_table(pyarrow.table({"text": bad}), file)
    with pytest.raises(DataError, match="row 2: byte 0 of a text is not UTF-8"):
        read_documents(dataset(file))


def test_splits(tmp_path: Path):
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("dev", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "two"))
    assert texts(tmp_path / "two", dataset_split="dev") == ["dev"]
    with pytest.raises(DataError, match="has no split 'train'; it has: 'dev', 'test'"):
        read_documents(dataset(tmp_path / "two"))
    datasets.DatasetDict(dev=parts["dev"]).save_to_disk(str(tmp_path / "one"))
    assert texts(tmp_path / "one") == ["dev"], "the only one"
    parts["dev"].save_to_disk(str(tmp_path / "plain"))
    with pytest.raises(DataError, match="is one data set without splits"):
        read_documents(dataset(tmp_path / "plain", dataset_split="dev"))
    with pytest.raises(DataError, match="dataset_split and dataset_subset choose from a Hugging Face data set"):
        read_documents(dataset(as_jsonl(tmp_path, [{"text": "a"}]), dataset_split="dev"))


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(*names: Any, **settings: Any) -> Any:
        asked.append((names, settings))
        if names[0] == "none/none":
            raise FileNotFoundError("no such data set")
        return datasets.Dataset.from_list([{"text": "from the hub"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    name = "hf://datasets/owner/name"
    assert texts(name, dataset_split="test", dataset_subset="en") == ["from the hub"]
    assert asked == [(("owner/name", "en"), {"split": "test"})]
    with pytest.raises(DataError, match=r"hf://datasets/none/none: cannot be opened .*: no such data set"):
        read_documents(EvalDatasetConfig(path="hf://datasets/none/none"), "eval_dataset")
    with pytest.raises(DataError, match="is named twice"):
        read_documents(dataset([name, name]))
    file = tmp_path / "run.yaml"
    file.write_text(
        f"train_dataset: {{path: [{name}, a.txt]}}\n"
        "model: {seq_length: 8, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}\n"
    )
    assert load(file).config.train_dataset.path == [name, f"{tmp_path}/a.txt"], "a name is no relative path"


# ---- forms of a row


def segments(tmp_path: Path, row: dict, **settings: Any) -> list[tuple[str, bool]]:
    (document,) = read_documents(dataset(as_jsonl(tmp_path, [row]), **settings))
    return list(document.segments)


def test_sharegpt(tmp_path: Path):
    speakers = ["system", "human", "gpt", "function_call", "observation", "gpt"]
    row = {"id": "x", "conversations": [{"from": name, "value": f"{n}"} for n, name in enumerate(speakers)]}
    found = segments(tmp_path, row, targets="assistant")
    assert "".join(text for text, _ in found) == (
        "system: 0\nuser: 1\nassistant: 2\nassistant: 3\ntool: 4\nassistant: 5\n"
    )
    assert [text for text, is_target in found if is_target] == ["2\n", "3\n", "5\n"]
    assert all(is_target for _, is_target in segments(tmp_path, row))


def test_alpaca(tmp_path: Path):
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
    found = segments(tmp_path, row, targets="assistant")
    assert found == [("user: ", False), ("Add.\n1 + 1\n", False), ("assistant: ", False), ("2\n", True)]
    for empty in ({"input": ""}, {"input": None}, {}):
        assert segments(tmp_path, {"instruction": "Add.", "output": "2", **empty})[1] == ("Add.\n", True)
    with_system = segments(tmp_path, {**row, "system": "Be brief."}, targets="assistant")
    assert with_system[:2] == [("system: ", False), ("Be brief.\n", False)] and with_system[2:] == found
    with pytest.raises(DataError, match="row 1: 'input' must be text, but is a int"):
        segments(tmp_path, {**row, "input": 3})


def test_prompt_and_completion(tmp_path: Path):
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    assert segments(tmp_path, row, targets="assistant") == [("2 + 2 =", False), (" 4", True)]
    assert segments(tmp_path, row) == [("2 + 2 =", True), (" 4", True)]
    chat = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    assert [text for text, is_target in segments(tmp_path, chat, targets="assistant") if is_target] == ["b\n"]


def test_targets_of_tokens(tmp_path: Path):
    file = as_jsonl(tmp_path, [{"prompt": "abc", "completion": "de"}])
    documents = read_documents(dataset(file, targets="assistant"))
    store = tokenize(documents, build_tokenizer(TokenizerConfig(type="char"), documents))
    assert store.is_target.tolist() == [False, False, False, True, True, True]


def test_turns_by_column(tmp_path: Path):
    """As Arrow tables of older files hold lists of structures."""
    row = {"conversations": {"from": ["human", "gpt"], "value": ["a", "b"]}}
    assert [text for text, _ in segments(tmp_path, row)] == ["user: ", "a\n", "assistant: ", "b\n"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "alien", "value": "b"}]},
            "turn 2 is from 'alien'",
        ),
        ({"conversations": [{"from": "human"}]}, "turn 1 needs a text 'from' and a text 'value'"),
        ({"conversations": ["hello"]}, "turn 1 needs"),
        ({"conversations": "hello"}, "neither a text column"),
        ({"prompt": "a"}, "it has: 'prompt'"),
        ({"instruction": "a", "output": None}, "it has: 'instruction', 'output'"),
        ({"conversations": [{"from": "gpt", "value": "\ud800"}]}, "lone surrogate"),
    ],
)
def test_malformed_rows(tmp_path: Path, row: dict, message: str):
    with pytest.raises(DataError, match=f"row 2: .*{message}"):
        read_documents(dataset(as_jsonl_pair(tmp_path, row)))


def as_jsonl_pair(folder: Path, row: dict) -> Path:
    (folder / "a.jsonl").write_bytes(lines([{"text": "fine"}, row], ascii_only=True))
    return folder / "a.jsonl"


def test_rows_without_text_are_passed_over(tmp_path: Path):
    rows = [{"conversations": []}, {"messages": []}, {"prompt": "", "completion": ""}, {"text": ""}, {"text": "x"}]
    found = read_documents(dataset(as_jsonl(tmp_path, rows)))
    assert [(d.text, d.where.rpartition(" ")[2]) for d in found] == [("x", "5")]


def test_an_unknown_role_lists_the_known(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        segments(tmp_path, {"conversations": [{"from": "alien", "value": "b"}]})
    assert all(role in str(caught.value) for role in ROLES)


# ---- tokenizers of Hugging Face


@pytest.fixture
def byte_pairs(tmp_path: Path) -> tuple[Path, HubTokenizer]:
    """A folder of `vocab.json` and `merges.txt`, and the tokenizer that they were made from."""
    hub = HubTokenizer(models.BPE())
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hub.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    hub.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    hub.model.save(str(folder))
    return folder, hub


def test_vocab_and_merges(byte_pairs: tuple[Path, HubTokenizer], tmp_path: Path):
    folder, hub = byte_pairs
    found = load_tokenizer(folder)
    for text in [*TEXTS, "the quick brown fox"]:
        assert found.encode(text).tolist() == hub.encode(text).ids
        assert found.decode(found.encode(text)) == text
    assert found.end_id == 0
    literal = found.encode("a<|endoftext|>b")
    assert found.end_id not in literal and found.decode(literal) == "a<|endoftext|>b"
    again = tmp_path / "tokenizer.json"
    again.write_text(found.to_json(), encoding="utf-8")
    assert load_tokenizer(again).encode("the quick").tolist() == found.encode("the quick").tolist()
    (folder / "merges.txt").write_text("nonsense of many words\n")
    with pytest.raises(ConfigError, match=r"vocab\.json and merges\.txt cannot be read"):
        load_tokenizer(folder)


def test_the_end_token_of_a_folder(byte_pairs: tuple[Path, HubTokenizer]):
    folder, hub = byte_pairs
    wanted = hub.token_to_id("the")
    assert wanted
    (folder / "special_tokens_map.json").write_text('{"eos_token": "the"}')
    assert load_tokenizer(folder).end_id == wanted
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(folder).end_id == 0, "tokenizer_config.json comes first"
    hub.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).end_id == 0
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load_tokenizer(folder).end_id == wanted


def test_a_folder_saved_by_transformers(byte_pairs: tuple[Path, HubTokenizer], tmp_path: Path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _, hub = byte_pairs
    saved = PreTrainedTokenizerFast(tokenizer_object=hub, eos_token="<|endoftext|>")
    saved.save_pretrained(tmp_path / "saved")
    ours, theirs = load_tokenizer(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
    assert (ours.end_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))


def test_other_classes_are_converted_by_transformers(byte_pairs: tuple[Path, HubTokenizer]):
    """Qwen2 splits digits one by one, unlike GPT-2."""
    from transformers import AutoTokenizer

    folder, _ = byte_pairs
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}')
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("the 12345 quick", "e\u0301", *TEXTS[:2]):
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)


def test_folders_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="holds no tokenizer; it holds nothing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="transformers cannot read the tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "sentencepiece" in (caught.value.fix or "")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, and only transformers can make one") as caught:
        load_tokenizer(tmp_path)
    assert "pip install" in (caught.value.fix or "")


def test_documents_keep_their_place():
    assert Document((("a", True), ("b", False)), "x").text == "ab"
