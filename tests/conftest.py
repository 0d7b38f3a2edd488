"""A tiny configuration on real text, and worker processes that start in a fraction of a second."""

from __future__ import annotations

import copy
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.config.load import from_dict
from samestep.config.schema import Config
from samestep.ops import dispatch

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
PRELOADED += ["samestep.verify.parity", "samestep.hf.trainer", "pytest"]
SLOWEST = ["test_verify", "test_docs", "test_torchrun", "test_run", "test_parallel", "test_resume", "test_collectives"]
SLOWEST += ["test_monitor", "test_exact", "test_hf_checkpoint", "test_recompute", "test_report", "test_free_split"]
EXAMPLES = Path(__file__).parent.parent / "examples"
CORPUS = EXAMPLES / "data" / "shakespeare_quickstart.txt"
CHATS = EXAMPLES / "data" / "chitchat_120.jsonl"

TINY: dict[str, Any] = {
    "tokenizer": {"type": "char"},
    "training": {"steps": 8, "global_batch_size": 6, "local_batch_size": 2},
    "lr_scheduler": {"type": "cosine", "learning_rate": 1e-2, "warmup_steps": 2},
    "train_dataset": {"split": "tail"},
    "model": {
        "seq_length": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "compute_dtype": "float32",
    },
    "monitor": {"report": False, "tensorboard": {"enable": False}},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files begin first, so that no worker has one of them left while the others have nothing; those that
    start ranks and those of one process in turn, so that two workers do not start ranks at once."""
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=["kernels", "operators"])
def either_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels for CPUs, and with PyTorch's operators as where there is no C compiler."""
    if request.param == "operators":
        monkeypatch.setattr(dispatch, "library", lambda: (None, "none wanted"))
    elif dispatch.library()[0] is None:
        pytest.skip(dispatch.library()[1])


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """`tiny("training.steps=3", ...)` -> a configuration of a 2-layer model on 4,000 characters of Shakespeare."""

    def make(*overrides: str) -> Config:
        text = tmp_path / "text.txt"
        if not text.exists():
            text.write_text(CORPUS.read_text(encoding="utf-8")[:4000], encoding="utf-8")
        data = copy.deepcopy(TINY)
        data["output_dir"] = str(tmp_path / "run")
        data["train_dataset"]["path"] = str(text)
        return from_dict(data, overrides).config

    return make


@pytest.fixture(scope="session")
def workers():
    """Context of processes whose server has imported already what takes a test's ranks longer than their work: the
    heavy modules, and pytest."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return found


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """`cli("train", "x.yaml")` -> (exit code, standard output, standard error) of the real command."""

    def run(*words: str) -> tuple[int, str, str]:
        from samestep.cli import main

        monkeypatch.setattr(sys, "argv", ["samestep", *map(str, words)])
        capsys.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run
