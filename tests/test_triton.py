"""The Triton kernels: their numbers through the interpreter, their code through the compiler, and the GPU benchmark."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or sys.platform != "linux", reason="Triton is not installed (extra `dev`, Linux)"
)
EPS = torch.finfo(torch.float32).eps


def run(script: Path, **variables: str) -> str:
    # Where pytest itself was started with the interpreter on, the compiler needs it off.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module", params=["interpreter", "gpu"])
def outcome(request) -> dict:
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return json.loads(run(HERE / "triton_cases.py", TRITON_INTERPRET=str(int(request.param == "interpreter"))))


@needs_triton
def test_kernels_err_no_more_than_pytorch_in_float32(outcome):
    for case in outcome["cases"]:
        for ours, eager, size in zip(case.get("fused", ()), case.get("eager", ()), case.get("sizes", ()), strict=True):
            # The error of a single number is luck: it counts as that of a rounding at least.
            assert ours <= 1.5 * (eager if size > 1 else max(eager, EPS)) + 1e-7, case
    assert sum("fused" in case for case in outcome["cases"]) > 20


@needs_triton
def test_every_kernel_was_reached_through_the_public_operators(outcome):
    kernels = {"rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rope", "token_losses_"}
    assert outcome["calls"].keys() == kernels


@needs_triton
def test_kernels_round_where_pytorch_rounds(outcome):
    cases = [case for case in outcome["cases"] if "rounded" in case]
    assert len(cases) == 2
    for case in cases:
        assert max(case["rounded"]) < 1e-5, case  # one rounding more or less: 2e-4


@needs_triton
def test_a_position_beyond_the_tables_becomes_nan(outcome):
    (case,) = (case for case in outcome["cases"] if "nan" in case)
    assert case["nan"] == [False, True, True]


@needs_triton
def test_kernels_compile_for_a_gpu(tmp_path):
    run(HERE / "triton_compile.py", TRITON_CACHE_DIR=str(tmp_path))


def test_the_gpu_benchmark_of_operators_runs_dry(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_operators.py", "--dry-run"])
    runpy.run_path(str(HERE.parent / "benchmarks" / "gpu_operators.py"), run_name="__main__")
    table = capsys.readouterr().out
    for name in ("RMSNorm", "SwiGLU", "RoPE", "AdamW", "linear cross-entropy", "attention"):
        assert f"| {name}" in table
