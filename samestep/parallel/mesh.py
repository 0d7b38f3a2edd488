"""How this process meets the others. The only file that creates process groups."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from samestep.errors import ConfigError, SamestepError, TrainingError
from samestep.launch import RENDEZVOUS
from samestep.plan import Layout

T = TypeVar("T")

_START_SECONDS = 300
REPLICATE, SHARD = "replicate", "shard"
"""Names of the data-parallel axes: ranks that hold the same weights, and ranks that each hold a part of them."""


@dataclass(frozen=True)
class World:
    """This process among those of the run, as the launcher counted them.

    Attributes:
        local_rank, local_size: among the processes of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def launched() -> World:
    """What the environment says, without meeting anyone.

    Raises:
        ConfigError: variables that are no numbers, or that do not fit together.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    world = World(*(_number(name, int(name.endswith("SIZE"))) for name in names))
    missing = [name for name in ("RANK", "LOCAL_RANK") if name not in os.environ]
    if world.size > 1 and missing:
        raise ConfigError(
            f"WORLD_SIZE is {world.size}, but {missing[0]} does not say which of the processes this is",
            fix="start with torchrun, which sets both, or unset WORLD_SIZE for one process",
        )
    if not 0 <= world.rank < world.size:
        raise ConfigError(
            f"the environment has RANK {world.rank} and WORLD_SIZE {world.size}, but ranks go from 0 to WORLD_SIZE - 1",
            fix="start with torchrun, which sets both, or unset both for one process",
        )
    return world


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {name} is {text!r}, which is no number",
            fix=f"unset {name}, or start with torchrun, which sets it",
        )
    return int(text)


def join(timeout: float | None = None) -> World:
    """Meet the other processes, unless that was done before; one process meets nobody.

    Args:
        timeout: seconds after which a collective fails; None: PyTorch's own.

    Raises:
        ConfigError: the environment does not say where to meet.
    """
    world = launched()
    if world.size == 1 or dist.is_initialized():
        return world
    url = os.environ.get(RENDEZVOUS)
    if url is None and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            f"WORLD_SIZE is {world.size}, but MASTER_ADDR and MASTER_PORT do not say where the ranks meet",
            fix="start with torchrun, which sets them, or unset WORLD_SIZE for one process",
        )
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous(url or "env://", world.rank, world.size))
    store = dist.PrefixStore(_name_of_start(store, world), store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", store),
        rank=world.rank,
        world_size=world.size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    global _board
    _board = dist.PrefixStore("board", store)
    return world


def _name_of_start(store: dist.Store, world: World) -> str:
    """A name that all ranks agree on, and that no earlier start of them had.

    torchrun keeps one store for all its restarts, in which the addresses of ranks that are gone would be found. A count
    of restarts is no name, since the agents of several machines count differently. So the first rank asks a question
    never asked before, every other answers with a word of its own, and goes on once it sees that word confirmed.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + _START_SECONDS
    store.set_timeout(timedelta(seconds=2 * _START_SECONDS))
    if world.is_first:
        store.set("question", word)
    while time.monotonic() < deadline:
        question = store.get("question").decode()
        if not world.is_first:
            store.set(f"answer/{world.rank}", f"{question} {word}")
            if store.check([f"heard/{question}"]) and word in store.get(f"heard/{question}").decode().split():
                return question
        else:
            answers = [store.get(f"answer/{rank}").decode().split() for rank in range(1, world.size)]
            if all(asked == word for asked, _ in answers):
                store.set(f"heard/{word}", " ".join(answer for _, answer in answers))
                return word
        time.sleep(0.05)
    raise TrainingError(f"rank {world.rank}: the other ranks did not start within {_START_SECONDS} s")


_board: dist.Store | None = None
"""Where a rank that fails leaves word for the others."""


def is_first_to_fail(message: str) -> bool:
    """Leave word that this rank ends because of `message`; whether no other rank has done so before."""
    if _board is None:  # not even met
        return True
    word = f"{launched().rank} {message}"
    with suppress(dist.DistError, RuntimeError):  # the process that keeps the board may be gone
        return _board.compare_set("failure", "", word).decode() == word
    return False


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def restarts() -> int:
    """How often torchrun has started this run again. A collective: the agents of several machines count differently."""
    count = _number("TORCHELASTIC_RESTART_COUNT", 0)
    if not dist.is_initialized():
        return count
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return max(counts)


def leave() -> None:
    """Part from the other ranks, once all of them are here."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def choose_device() -> torch.device:
    """The accelerator of this rank, or the CPU.

    Raises:
        ConfigError: the machine has accelerators, but fewer than its ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    world, count = launched(), torch.cuda.device_count()
    if world.local_rank >= count:
        raise ConfigError(
            f"rank {world.rank} is number {world.local_rank + 1} on a machine with {count} GPUs",
            fix=f"start {count} ranks or fewer on this machine (torchrun --nproc-per-node {count}), or hide the GPUs "
            "with CUDA_VISIBLE_DEVICES= to train on its CPU",
        )
    return torch.device("cuda", world.local_rank)


class Mesh:
    """The ranks of a run laid out by their degrees, and the few things they say to each other.

    One process is a mesh as well: it sums alone. Every method but the properties is a collective: all ranks call it, in
    the same order.

    Args:
        device: of this rank's tensors.
    """

    def __init__(self, layout: Layout, world: World, device: torch.device):
        assert layout.world_size == world.size
        self.layout, self.world, self.device = layout, world, device
        self.is_first = world.is_first

    @classmethod
    def alone(cls) -> Mesh:
        """Of one process."""
        return cls(Layout(1, 1, 1, 1, 1, 1, 1), World(), choose_device())

    @property
    def data_rank(self) -> int:
        """Place among the data-parallel ranks: whose part of the global batch this rank takes."""
        return self.world.rank

    @cached_property
    def weights(self) -> DeviceMesh | None:
        """Named axes (replicate, shard) over which the weights are laid; None where every rank holds all of them."""
        return self._device_mesh(self.device.type)

    @cached_property
    def storage(self) -> DeviceMesh | None:
        """The same axes for copies in CPU memory."""
        return self.weights if self.device.type == "cpu" else self._device_mesh("cpu")

    def _device_mesh(self, device_type: str) -> DeviceMesh | None:
        replicate, shard = self.layout.replicate, self.layout.shard
        if shard == 1:
            return None
        if replicate == 1:
            return init_device_mesh(device_type, (shard,), mesh_dim_names=(SHARD,))
        return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))

    @cached_property
    def storage_group(self) -> dist.ProcessGroup | None:
        """All ranks, apart from the training's own traffic, so that another thread may use it."""
        return dist.new_group(backend="gloo") if self.world.size > 1 else None

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.world.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Largest over all ranks, in place."""
        if self.world.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.world.size == 1:
            return flag
        return bool(self.max_(torch.tensor(float(flag), device=self.device)))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; small and picklable."""
        if self.world.size == 1:
            return [value]
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, function: Callable[[], T]) -> T:
        """What `function` returns on the first rank, where alone it runs; small and picklable.

        Raises:
            SamestepError: the function raised it; every rank then raises it.
        """
        if self.world.size == 1:
            return function()
        outcome: list[Any] = [None]
        if self.is_first:
            try:
                outcome = [(True, function())]
            except SamestepError as error:
                outcome = [(False, error)]
        dist.broadcast_object_list(outcome, src=0)
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        return value
