"""Freed memory is kept on request and where it pays, counted in page faults by the operating system."""

import subprocess
import sys

import pytest

from samestep.run import allocator, trainer
from samestep.run.trainer import Trainer

# 64 MiB are written and freed again and again; prints the page faults of a round after the first.
PROBE = """
import resource, sys
from samestep.run.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def round_():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        block = b"x" * (64 << 20)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
round_()
print(round_())
"""


def page_faults(mode: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROBE, mode], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults of Linux")
def test_freed_memory_comes_back_without_page_faults():
    assert page_faults("keep") < 0.1 * page_faults("default")


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(allocator.ctypes, "CDLL", None)
    assert not allocator.keep_freed_memory()


@pytest.mark.parametrize(
    ("rows", "setting", "keeps"),
    [("cut", "null", True), ("cut", "false", False), ("documents", "null", False), ("documents", "true", True)],
)
def test_which_runs_ask_for_it(rows: str, setting: str, keeps: bool, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(trainer, "keep_freed_memory", lambda: asked.append(True) or True)
    Trainer(tiny("training.steps=2", f"train_dataset.rows={rows}", f"cpu.keep_freed_memory={setting}"))
    assert asked == [True] * keeps
