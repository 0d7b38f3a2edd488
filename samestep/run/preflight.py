"""What can be known to fail before anything slow starts: folders, disk, memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from samestep.errors import ConfigError
from samestep.parallel.mesh import launched
from samestep.plan import Plan

_GIB = 2**30


def check_folder(folder: Path, field: str, needed_bytes: int = 0) -> None:
    """The folder can be made and written, and its disk has room.

    Raises:
        ConfigError: it cannot, or the disk has fewer than `needed_bytes` free.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"{folder} cannot be made: {place} is a file", field=field, fix="write another folder")
    if not os.access(place, os.W_OK | os.X_OK) or _is_kernel_folder(place):
        reason = f"{folder} cannot be made: no right to write in {place}"
        raise ConfigError(reason, field=field, fix="write another folder")
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise ConfigError(
            f"a checkpoint takes {needed_bytes / _GIB:.3g} GiB, but the disk of {place} has {free / _GIB:.3g} GiB free",
            field=field,
            fix="free disk space, write a folder on another disk, or checkpoint.enable_save: false",
        )


def _is_kernel_folder(place: Path) -> bool:
    """Root may write anywhere by its rights, but these file systems take no files."""
    return any(place.is_relative_to(root) for root in ("/proc", "/sys"))


def checkpoint_bytes(plan: Plan) -> int:
    """Size of one checkpoint, which all ranks that split the weights write together."""
    layout = plan.layout
    ranks = layout.shard * layout.tensor * layout.pipeline
    return ranks * held_bytes(plan)


def held_bytes(plan: Plan) -> int:
    """What this rank has of weights and optimizer state."""
    return plan.memory.parameters + plan.memory.optimizer + plan.memory.masters


def device_memory(device: torch.device) -> int:
    """Bytes of memory that this rank has: of its GPU, or its part of the machine's among the ranks that run there."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // launched().local_size


def check_memory(plan: Plan, device: torch.device) -> None:
    """What must be held throughout the run fits into the device.

    Raises:
        ConfigError: weights, gradients and optimizer state are larger than its memory.
    """
    memory = plan.memory
    held = memory.parameters + memory.optimizer + memory.masters + memory.gradients + memory.buffers - memory.host
    total = device_memory(device)
    if held > total:
        raise ConfigError(
            f"{plan.parameters:,} parameters need {held / _GIB:.3g} GiB of memory for weights, tables, gradients "
            f"and optimizer, but {device.type} has {total / _GIB:.3g} GiB for a rank",
            field="model.hidden_size",
            fix="lower model.hidden_size, num_hidden_layers, vocab_size or max_position_embeddings",
        )
