"""The real launcher: two agents as if they were two machines, and a worker that is killed and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_parallel import relative, rows_of, run

from samestep.config.load import dump

TIMES = ("step_seconds", "tokens_per_second", "targets_per_second", "peak_memory_bytes", "eval_seconds", "ranks")


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "samestep.cli", "train"]


def start(command: list[str], log: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def written(config, path: Path) -> Path:
    path.write_text(dump(config), encoding="utf-8")
    return path


def workers(agent: int) -> list[int]:
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children]


def steps_done(config) -> int:
    metrics = Path(config.output_dir) / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(condition, agent: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert agent.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.002)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_is_started_again_and_nothing_is_lost(tiny, tmp_path):
    """SIGKILL to one of two: in a step before the first checkpoint, and while a checkpoint is being written."""
    settings = (
        "training.steps=16",
        "training.local_batch_size=1",
        "checkpoint.save_interleaved_steps=4",
        "checkpoint.async_save=true",
    )
    undisturbed = tiny(*settings, f"output_dir={tmp_path / 'undisturbed'}")
    run(undisturbed, 2)
    config, log = tiny(*settings), tmp_path / "log"
    file = written(config, tmp_path / "config.yaml")
    agent = start([*torchrun("--nproc-per-node=2", "--max-restarts=3", "--standalone"), str(file)], log)
    try:
        wait_for(lambda: steps_done(config) >= 2, agent, log)
        os.kill(workers(agent.pid)[1], signal.SIGKILL)
        folder = Path(config.output_dir) / "checkpoints"
        events = Path(config.output_dir) / "events.jsonl"
        wait_for(lambda: steps_done(config) >= 9 and any(folder.glob(".writing-*")), agent, log)
        os.kill(workers(agent.pid)[0], signal.SIGKILL)
        assert agent.wait(timeout=200) == 0, log.read_text()[-3000:]
    finally:
        agent.kill()
    resumes = [json.loads(line) for line in events.read_text().splitlines() if '"resume"' in line]
    assert resumes, "the second start went on from a checkpoint"
    found, wanted = (
        [json.loads(line) for line in (Path(c.output_dir) / "metrics.jsonl").open()] for c in (config, undisturbed)
    )
    for row in found + wanted:
        for name in TIMES:
            row.pop(name, None)
    assert found == wanted


def test_two_agents_of_two_ranks_are_one_run_of_four(tiny, tmp_path):
    settings = (
        "training.steps=6",
        "training.local_batch_size=1",
        "checkpoint.enable_save=false",
        "parallelism.data_parallel_shard=2",
    )
    one = tiny(*settings, f"output_dir={tmp_path / 'one'}")
    run(one, 4)
    config = tiny(*settings)
    file = written(config, tmp_path / "config.yaml")
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=two", endpoint)
    logs = [tmp_path / f"log{number}" for number in (0, 1)]
    agents = [start([*torchrun(*options), str(file)], log) for log in logs]
    try:
        assert [agent.wait(timeout=200) for agent in agents] == [0, 0], [log.read_text()[-2000:] for log in logs]
    finally:
        for agent in agents:
            agent.kill()
    assert relative(rows_of(config), rows_of(one)) <= 1e-6
    assert relative(rows_of(config, "grad_norm"), rows_of(one, "grad_norm")) <= 1e-6
    told = [log.read_text().count("step 6/6  loss") for log in logs]
    assert sorted(told) == [0, 1], "one rank of all tells"


def test_a_mistake_is_told_once_and_ends_all(tiny, tmp_path):
    """Every rank finds it; one speaks."""
    config = tiny()
    file = written(config, tmp_path / "config.yaml")
    url = f"file://{tmp_path / 'ranks'}"
    command = [sys.executable, "-m", "samestep.cli", "train", str(file), "parallelism.data_parallel_shard=3"]
    started = []
    for rank in (0, 1):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": 2,
            "SAMESTEP_RENDEZVOUS": url,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True))
    texts = [process.communicate(timeout=100)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert "".join(texts).count("3 does not divide the data-parallel degree 2") == 1, texts
