"""Freed memory is kept on request, counted in page faults by the operating system."""

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


def test_a_run_asks_for_it_only_if_told_and_says_so(tiny, tmp_path, monkeypatch, capfd):
    asked = []
    monkeypatch.setattr(trainer, "keep_freed_memory", lambda: asked.append(True) or True)
    Trainer(tiny("training.steps=2", f"output_dir={tmp_path}/first")).train()
    assert not asked and "freed memory" not in "".join(capfd.readouterr())
    Trainer(tiny("training.steps=2", f"output_dir={tmp_path}/second", "cpu.keep_freed_memory=true")).train()
    assert asked == [True] and "freed memory is kept (cpu.keep_freed_memory)" in "".join(capfd.readouterr())
