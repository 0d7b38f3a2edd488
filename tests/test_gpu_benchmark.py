"""The GPU script runs from end to end on a CPU, and its arithmetic is right."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_dry_run(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--rounds", "1"])
    gpu.main()
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {7}
    assert [row[0] for row in rows[2:]] == ["4 x 4", "known counts", "1 x 16", "16 x 1"]
    assert "Exact normalisation costs" in text


def test_it_needs_a_gpu(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu, "choose_device", lambda: torch.device("cpu"))
    with pytest.raises(SystemExit):
        gpu.main()
    assert "there is no GPU here" in capsys.readouterr().err


def test_splits_are_of_the_same_rows(gpu):
    for count, rows in gpu.SPLITS:
        batches = gpu.micro_batches(gpu.TINY, count, rows)
        assert [batch.samples for batch in batches] == [rows] * count
        ids = torch.cat([batch.input_ids for batch in batches])
        assert torch.equal(ids, gpu.micro_batches(gpu.TINY, 1, gpu.ROWS)[0].input_ids)


def test_operations_of_a_token(gpu):
    """Of the 1B shape by hand: 6 x 1,235,814,400 weights, and 6 x 16 x 4096 x 2048 of attention."""
    config = gpu.configuration(gpu.BILLION, compiled=True)
    parameters = gpu.parameter_count(gpu.resolve_model(config.model))
    attention, projections, norms = 2 * 2048 * 2048 + 2 * 2048 * 512, 3 * 2048 * 8192, 2 * 2048
    assert parameters == 128_256 * 2048 + 16 * (attention + projections + norms) + 2048 == 1_235_814_400
    assert gpu.flops_per_token(gpu.BILLION, parameters) == 6 * 1_235_814_400 + 805_306_368
    assert config.compile


def test_host_synchronisations_are_counted(gpu, monkeypatch):
    """With PyTorch's own words, said without a device."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def take():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations.", stacklevel=1)

    assert gpu.synchronisations_of(take, torch.device("cuda")) == 3
    assert modes == ["warn", "default"]
    assert gpu.synchronisations_of(take, torch.device("cpu")) is None
