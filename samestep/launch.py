"""Local worker processes: a few ranks on this machine, started in a fraction of a second, that fail together.

Workers come from a fork server that has imported the heavy modules already. They find each other by the environment
variables that `torchrun` sets. Imports no torch.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from operator import itemgetter
from pathlib import Path
from typing import Any

from samestep.errors import SamestepError, TrainingError

RENDEZVOUS = "SAMESTEP_RENDEZVOUS"
"""Environment variable with the URL at which the ranks meet, where they were not started by torchrun."""

_PRELOADED = (
    "torch",
    "torch._dynamo",  # optimizers and FSDP import it in their first step
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "samestep.run.trainer",
    "samestep.verify.parity",
)
_GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves once one has failed."""
_RESULT, _TOLD, _DIED, _UNEXPECTED = range(4)
"""How a worker ends. Of several failures the first of the lowest kind is told of first: connections to a rank that is
gone fail unexpectedly."""


def context() -> ForkServerContext:
    """Where worker processes come from. The server starts with the first of them, and lives as long as this process."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(_PRELOADED))
    return found


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float | None = None, threads: int = 1
) -> list[Any]:
    """Call `function(*arguments)` in `world_size` new processes; returns their results by rank.

    Args:
        function: of a module, so that its name can be sent; it joins the others with `parallel.mesh.join`.
        arguments: picklable, as the results.
        timeout: seconds for all of it; None: as long as it takes.
        threads: of PyTorch in each process.

    Raises:
        SamestepError: what the first rank that failed raised.
        TrainingError: a rank failed in another way, died, or the time is over; the others were ended.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        workers: list[tuple[Any, Connection]] = []
        try:
            for rank in range(world_size):
                ours, theirs = context().Pipe(duplex=False)
                call = (theirs, function, arguments, rank, world_size, folder, threads)
                process = context().Process(target=_work, args=call, daemon=True)
                process.start()
                theirs.close()
                workers.append((process, ours))
            return _collect(workers, timeout, folder)
        finally:
            for process, _ in workers:
                process.kill()
                process.join()


def _work(
    results: Connection,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    world_size: int,
    folder: str,
    threads: int,
) -> None:
    """The life of one worker."""
    faulthandler.enable(_trace(folder, rank).open("w"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update({"LOCAL_WORLD_SIZE": str(world_size), RENDEZVOUS: f"file://{folder}/ranks"})
    import torch

    torch.set_num_threads(threads)
    try:
        outcome = (_RESULT, function(*arguments))
    except SamestepError as error:
        outcome = (_TOLD, error)
    except BaseException as error:
        outcome = (_UNEXPECTED, TrainingError(f"rank {rank}: {error!r}\n{traceback.format_exc()}"))
    with suppress(BrokenPipeError):
        results.send_bytes(pickle.dumps(outcome))  # `send` would pass tensors as files that end with this process
    results.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _trace(folder: str, rank: int) -> Path:
    """Where a worker that a signal such as SIGSEGV ends leaves word of what it was at."""
    return Path(folder) / f"trace-{rank}"


def _death(rank: int, code: int, folder: str) -> TrainingError:
    cause = f"with exit code {code}" if code >= 0 else f"of signal {-code} ({signal.strsignal(-code)})"
    trace = ""
    with suppress(OSError):  # it died before it could open the file
        trace = _trace(folder, rank).read_text(errors="replace").partition("Extension modules:")[0]
    return TrainingError(f"rank {rank} died {cause}\n{trace}".rstrip())


def _cause(failures: Sequence[tuple[int, SamestepError]]) -> SamestepError:
    outcome, error = min(failures, key=itemgetter(0))
    if outcome != _DIED:
        return error
    # It may have died in consequence of something that nobody expected.
    return TrainingError("\n".join([str(error), *(str(other) for kind, other in failures if kind != _DIED)]))


def _collect(workers: Sequence[tuple[Any, Connection]], timeout: float | None, folder: str) -> list[Any]:
    waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
    results: list[Any] = [None] * len(workers)
    failures: list[tuple[int, SamestepError]] = []
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), None if math.isinf(left) else left)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                outcome, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                process = workers[rank][0]
                process.join()
                outcome, value = _DIED, _death(rank, process.exitcode, folder)
            if outcome == _RESULT:
                results[rank] = value
                continue
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            failures.append((outcome, value))
    if failures:
        raise _cause(failures)
    if waiting:
        raise TrainingError(f"ranks {sorted(waiting.values())} did not end within {timeout:g} s")
    return results
