"""How ranks share the weights of a foreign model: replicated, sharded (FSDP2), or sharded in groups (HSDP)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from samestep.errors import ConfigError
from samestep.hf.arguments import fsdp_settings, setting
from samestep.hf.native import NativeModel
from samestep.ops.gradient_sink import ExactSink, GradientSink
from samestep.ops.precision import is_narrow
from samestep.parallel.data import GradientReduction, add_up, is_distributed, whole
from samestep.parallel.mesh import Mesh, World, choose_device, join
from samestep.plan import Layout


def make_mesh(args: transformers.TrainingArguments) -> Mesh:
    """The ranks of a run, as its launcher counted them, on the device of the arguments."""
    world = join()
    shard = (setting(args, "data_parallel_shard") % (world.size + 1)) if args.fsdp else 1
    layout = Layout(world.size, world.size, world.size // shard, shard, 1, 1, 1)
    return Mesh(layout, world, _device(args, world))


def _device(args: transformers.TrainingArguments, world: World) -> torch.device:
    return choose_device() if world.size > 1 and args.device.type == "cuda" else args.device


class Weights:
    """The weights of a model, laid over the ranks once.

    All ranks begin with those of the first. With `fsdp`, each layer (`_no_split_modules`) and the rest of the model are
    units whose weights are split over the ranks and gathered when they are used. Weights of 16 bits have float32
    shards, by which they are updated, and are rounded when they are gathered.

    Args:
        native: runs the passes in place of the model; then its units are sharded.

    Attributes:
        stored: name -> dtype that a sharded weight was loaded in.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, args: transformers.TrainingArguments, native: NativeModel | None = None
    ):
        self.model, self._mesh = model, mesh
        self.stored = {name: p.dtype for name, p in model.named_parameters()}
        _take_from_first(model, mesh)
        config = fsdp_settings(args)
        if mesh.weights is not None and native is not None:
            native.shard(mesh, bool(config.get("reshard_after_forward", True)))
        elif mesh.weights is not None:
            self._shard(config)

    def _shard(self, config: dict[str, Any]) -> None:
        model = self.model
        wanted = config.get("transformer_layer_cls_to_wrap") or ()
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        kinds = {type(module).__name__ for module in model.modules()}
        unknown = [name for name in names if name not in kinds]
        if unknown:
            raise ConfigError(
                f"{type(model).__name__} has no layer of class {unknown[0]}",
                field="fsdp_config.transformer_layer_cls_to_wrap",
                fix="leave it out, or write a class of its layers, such as "
                + ", ".join(sorted(getattr(model, "_no_split_modules", None) or kinds)[:3]),
            )
        names = names or list(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        for unit in [*layers, model]:
            dtype = _common_dtype(unit)
            for parameter in unit.parameters():
                if is_narrow(parameter.dtype):
                    parameter.data = parameter.data.float()
            fully_shard(
                unit,
                mesh=self._mesh.weights,
                reshard_after_forward=bool(config.get("reshard_after_forward", True)),
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=dtype if is_narrow(dtype) else None,
                    reduce_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
                    cast_forward_inputs=False,
                ),
            )
        add_up(model)
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """All weights of a sharded model, on the CPU of the first rank (elsewhere an empty dict). A collective. None
        where the model holds all weights itself."""
        if self._mesh.weights is None:
            return None
        found = {}
        for name, tensor in self.model.state_dict().items():
            value = whole(tensor)
            if self._mesh.is_first:
                found[name] = value.to("cpu", self.stored.get(name, value.dtype))
        return found


def _common_dtype(unit: nn.Module) -> torch.dtype:
    """Of the weights of a unit that are not sharded yet."""
    dtypes = {p.dtype for p in unit.parameters() if p.is_floating_point() and not is_distributed(p)}
    if len(dtypes) > 1:
        raise ConfigError(
            f"{type(unit).__name__} has weights of several dtypes ({', '.join(sorted(map(str, dtypes)))}), which "
            "FSDP cannot gather at once",
            field="fsdp",
            fix="load the model in one dtype, such as float32, and write bf16=True",
        )
    return dtypes.pop() if dtypes else torch.float32


@torch.no_grad()
def _take_from_first(model: nn.Module, mesh: Mesh) -> None:
    if mesh.world.size == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        common = tensor.detach().to(mesh.device, copy=True)
        dist.broadcast(common, src=0)
        tensor.copy_(common)


class Reduction(GradientReduction):
    """Adds up gradients over ranks on which different parameters took part in a step."""

    def __init__(self, model: nn.Module, mesh: Mesh, dtype: torch.dtype):
        super().__init__(model, mesh, "once_per_step", dtype)

    def finish(self, sink: GradientSink | ExactSink) -> bool:
        if self._mesh.world.size > 1 and self._mesh.weights is None:
            assert isinstance(sink, GradientSink)
            own = sink.gradients()
            part = torch.tensor([float(name in own) for name in sink.parameters], device=self._mesh.device)
            anywhere = self._mesh.max_(part).tolist()
            sink.begin(name for name, is_there in zip(sink.parameters, anywhere, strict=True) if is_there)
        return super().finish(sink)
