"""Data parallelism: which rank holds which part of the weights, and when the gradients of a step meet.

Weights are replicated (every rank holds all), sharded over the ranks (FSDP2, Zhao et al. 2023), or sharded inside
groups that are replicas of each other (HSDP). Gradients are summed, never averaged: every loss is already divided by
the count of the global batch.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from samestep.config.schema import ParallelismConfig
from samestep.model.decoder import Decoder
from samestep.ops import Precision
from samestep.ops.gradient_sink import ExactSink, GradientSink
from samestep.ops.precision import is_narrow
from samestep.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_BUCKET_BYTES = 32 << 20
"""Gradients that every rank holds are summed in pieces of about this size."""


def shard(model: Decoder, mesh: Mesh, parallelism: ParallelismConfig, precision: Precision) -> None:
    """Lay the weights of a decoder over the shard axis of the mesh, each layer and the rest as one unit.

    A unit's weights are gathered when it is used. Does nothing where the mesh shards nothing. Call it before the
    weights have memory (on the `meta` device), so that no rank ever holds all of them.

    Weights to be stored in 16 bits have their float32 masters as shards, and are rounded when they are gathered: FSDP
    would round the sum of the gradients to the dtype of the shards. A unit is gathered in one dtype, so where the
    embedding is stored in another one, last norm and head are units of their own.
    """
    if mesh.weights is None:
        return
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    # The rest (embedding, last norm, head) stays gathered between forward and backward unless told otherwise: the head
    # is the first thing that the backward needs.
    free = {"default": (True, False), "always": (True, True), "never": (False, False)}
    free_layer, free_rest = free[parallelism.reshard_after_forward_policy]
    for name, parameter in model.named_parameters():
        if is_narrow(model.stored_dtype(name)):
            parameter.data = parameter.data.float()
    pin = mesh.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin) if parallelism.cpu_offload else OffloadPolicy()
    units = [(layer, free_layer, precision.params) for layer in model.layers.values()]
    if precision.embedding != precision.params:
        ends = [model.norm] if model.spec.tied else [model.norm, model.loss_head]
        units += [(end, free_rest, precision.params) for end in ends]
    units += [(model, free_rest, precision.embedding)]
    for unit, free_after_forward, stored in units:
        fully_shard(
            unit,
            mesh=mesh.weights,
            reshard_after_forward=free_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=stored if is_narrow(stored) else None,
                reduce_dtype=precision.reduce,
                cast_forward_inputs=False,
            ),
            offload_policy=offload,
        )
    for method in ("losses", "logits"):
        register_fsdp_forward_method(model, method)
    add_up(model)


def add_up(model: nn.Module) -> None:
    """Make the units of a sharded model sum gradients over the ranks; they would take the mean."""
    for unit in model.modules():
        if _is_sharded(unit):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot divide on the way


@torch.no_grad()
def place(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter. No rank hears of it."""
    if is_distributed(target):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(target.device)
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(whole)


def free(model: nn.Module) -> None:
    """Give back weights that are still gathered after a forward pass without a backward one."""
    for unit in model.modules():
        if _is_sharded(unit):
            unit.reshard()


def is_distributed(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return _is_a("torch.distributed.tensor", "DTensor", tensor)


def _is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    return _is_a("torch.distributed.fsdp", "FSDPModule", module)


def _is_a(module: str, name: str, value: Any) -> bool:
    """Whether a value is of a class that takes a second to import, which a run on one process is spared: as long as it
    is not imported, nothing can be of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def first_element(tensor: torch.Tensor) -> int:
    """Place of the first element that this rank holds in the whole tensor, row by row; rows are split evenly, in the
    order of the ranks, the last ones shorter."""
    if not is_distributed(tensor):
        return 0
    first, rows = 0, tensor.shape[0]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            assert placement.is_shard(0)
            part = -(-rows // tensor.device_mesh.size(axis))
            start = min(rows, part * coordinate[axis])
            first, rows = first + start, min(part, rows - start)
    return first * math.prod(tensor.shape[1:])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank that holds a part of it. A collective where it is split."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def like(part: torch.Tensor, model: torch.Tensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """This rank's part of a tensor that is laid out as `model` is, over the same ranks.

    Args:
        device_mesh: of the part, where it is in other memory than the model.
    """
    if not is_distributed(model):
        return part
    from torch.distributed.tensor import DTensor

    mesh = device_mesh or model.device_mesh
    return DTensor.from_local(part, mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride())


def owned(gradient: torch.Tensor, turn: int, mesh: Mesh) -> torch.Tensor | None:
    """What this rank answers for of a gradient, so that over all ranks every element is there exactly once; or None.

    Ranks that hold the same numbers take turns. A gradient that is still to be added up over ranks is added up first.
    """
    if not is_distributed(gradient):
        return gradient if turn % mesh.world.size == mesh.world.rank else None
    if any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        summed = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=summed)
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(gradient.placements):
        if placement.is_replicate() and turn % gradient.device_mesh.size(axis) != coordinate[axis]:
            return None
    return gradient.to_local()


class GradientReduction:
    """Adds up the gradients of a step over the ranks.

    Args:
        when: `once_per_step`, after the last micro-batch, or `every_micro_batch`, which keeps no whole gradient between
            two micro-batches. It matters only where weights are sharded.
        dtype: that gradients of replicated weights are summed in.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, when: Literal["once_per_step", "every_micro_batch"], dtype: torch.dtype
    ):
        self._sharded = model if _is_sharded(model) else None
        self._mesh, self._when, self._dtype = mesh, when, dtype

    def before(self, index: int, count: int) -> None:
        """Before micro-batch `index` of `count`."""
        if self._sharded is not None:
            last = index == count - 1
            self._sharded.set_requires_gradient_sync(last or self._when == "every_micro_batch")
            # Else the reduction of the rest of the model is waited for, and its buffer freed, after the next forward.
            self._sharded.set_is_last_backward(last or self._when == "every_micro_batch")

    def finish(self, sink: GradientSink | ExactSink) -> bool:
        """After the last micro-batch: what no rank has summed yet is summed, in place. Always True: it is done."""
        if self._mesh.world.size == 1 or self._sharded is not None:
            return True
        pending = []
        for bucket in _buckets(list(sink.gradients().values())):
            flat = torch.cat([gradient.to(self._dtype).flatten() for gradient in bucket])
            pending.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in pending:
            work.wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return True

    def losses(self, parts: torch.Tensor) -> torch.Tensor:
        """Losses [micro-batches, terms] of this rank -> [terms] whose sum over ranks is the step's."""
        return parts.sum(0)

    def owned(self, gradient: torch.Tensor, turn: int) -> torch.Tensor | None:
        """What this rank answers for of a gradient; None if another rank does."""
        return owned(gradient, turn, self._mesh)


def _buckets(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= size
    return buckets
