"""Every way a model is spread over 4 ranks, made of torch's and fairscale's own wrappers."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.place import device_type, here
from tests.ranks import mesh
from tests.scaler.layouts_base import (
    DDP,
    HALVES,
    LAYERS,
    WORLD,
    Alone,
    DDPExperts,
    DDPIdleExperts,
    DDPSubgroups,
    Layout,
    World,
)
from tests.scaler.reference import BATCH, Kind, batch, loss_of

__all__ = ["LAYOUTS", "WORLD", "Layout"]


class FSDP1(World):
    settings: ClassVar[dict[str, Any]] = {}

    def wrap(self, net: nn.Module) -> nn.Module:
        settings = {"device_id": here(), **self.settings}
        for name in LAYERS:
            setattr(net, name, FullyShardedDataParallel(getattr(net, name), **settings))
        return FullyShardedDataParallel(net, **settings)

    def full_parameters(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {
                re.sub(r"_fsdp_wrapped_module\.", "", name): p.detach().cpu().clone()
                for name, p in self.model.named_parameters()
            }


class FSDP1OrigParams(FSDP1):
    settings: ClassVar[dict[str, Any]] = {"use_orig_params": True}


def shard_layers(net: nn.Module, **settings: Any) -> nn.Module:
    for name in LAYERS:
        fully_shard(getattr(net, name), **settings)
    return fully_shard(net, **settings)


class FSDP2(World):
    shape: ClassVar[tuple[int, ...]] = (WORLD,)
    names: ClassVar[tuple[str, ...]] = ("shard",)
    policy: ClassVar[dict[str, Any]] = {}

    def wrap(self, net: nn.Module) -> nn.Module:
        return shard_layers(net, mesh=mesh(self.shape, self.names), **self.policy)


class FSDP2Offload(FSDP2):
    policy: ClassVar[dict[str, Any]] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=device_type() != "cpu")
    }


class HSDP(FSDP2):
    """The scaler is given the two-dimensional mesh itself."""

    shape = (2, WORLD // 2)
    names = ("replicate", "shard")

    def process_group(self) -> Any:
        return mesh(self.shape, self.names)


_PLAN = {
    "first": ColwiseParallel,
    "second": RowwiseParallel,
    "head": ColwiseParallel,
    "tail": RowwiseParallel,
}


class TP(World):
    """Tensor parallel alone: every rank sees the whole batch."""

    widths = (4, 4)
    shards = 1

    def wrap(self, net: nn.Module) -> nn.Module:
        return parallelize_module(
            net, mesh((WORLD,), ("tp",)), {name: style() for name, style in _PLAN.items()}
        )

    def shard_of(self, rank: int) -> int:
        return 0


class FSDP2TP(World):
    """FSDP2 over one dimension of a mesh, tensor parallel over the other."""

    widths = (4, 4)
    shards = 2

    def wrap(self, net: nn.Module) -> nn.Module:
        both = mesh((2, WORLD // 2), ("dp", "tp"))
        parallelize_module(net, both["tp"], {name: style() for name, style in _PLAN.items()})
        return shard_layers(net, mesh=both["dp"])

    def shard_of(self, rank: int) -> int:
        return rank // (WORLD // 2)

    def process_group(self) -> Any:
        return mesh((2, WORLD // 2), ("dp", "tp"))


class PlainAndDTensor(TP):
    """One optimizer holds DTensors (tensor parallel) and plain tensors (the same on every rank)."""

    def wrap(self, net: nn.Module) -> nn.Module:
        plan = {name: style() for name, style in _PLAN.items() if name in ("first", "second")}
        return parallelize_module(net, mesh((WORLD,), ("tp",)), plan)


class TwoMeshes(World):
    """One optimizer holds DTensors of a one- and of a two-dimensional mesh."""

    def wrap(self, net: nn.Module) -> nn.Module:
        meshes = mesh((WORLD,), ("shard",)), mesh((2, WORLD // 2), ("replicate", "shard"))
        for name in LAYERS:
            fully_shard(getattr(net, name), mesh=meshes[name in HALVES[1]])
        return net


class ZeRO(DDP):
    def optimizer(self, kind: Kind, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            parameters, optimizer_class=kind.cls, **kind.settings, **kind.implementation
        )


class OSS(World):
    """fairscale's OSS and ShardedDataParallel: gradients are reduced to the rank that owns them."""

    clips = False

    def optimizer(self, kind: Kind, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        from fairscale.optim import oss

        return oss.OSS(parameters, optim=kind.cls, **kind.settings, **kind.implementation)

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel

        self.model = ShardedDataParallel(self.net, list(optimizers))

    def zero_grad(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Its gradients are views of buckets, which None would detach for good.
        self.model.zero_grad(set_to_none=False)

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()

    def owned(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.optim.param_groups for p in group["params"]]


CHUNKS = 2


class _Stage(nn.Module):
    def __init__(self, layer: nn.Module, last: bool) -> None:
        super().__init__()
        self.layer = layer
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x if self.last else torch.tanh(x)


class Pipeline(World):
    """torch's GPipe schedule: each rank holds one layer and nothing of the others."""

    shards = 1
    clips = False

    def shard_of(self, rank: int) -> int:
        return 0

    def sharded(self, parameter: Tensor) -> bool:
        return True

    def wrap(self, net: nn.Module) -> nn.Module:
        rank = self.rank
        self.layer = getattr(net, LAYERS[rank])
        self.stage = PipelineStage(_Stage(self.layer, rank == WORLD - 1), rank, WORLD, here())
        return net

    def parts(self) -> list[list[nn.Parameter]]:
        return [[self.layer.weight], [self.layer.bias]]

    def part_names(self) -> list[list[str]]:
        return [[n for n in self.initial if n.endswith(s)] for s in (".weight", ".bias")]

    def backward(self, scaler: Any, iteration: int, micro: int, factors: Sequence[float]) -> None:
        rank = self.rank
        for step in range(micro):

            def loss(output: Tensor, target: Tensor, factor: float = factors[step]) -> Tensor:
                return scaler.scale(loss_of(output) * (factor / CHUNKS))

            # The schedule's own scaling would divide what earlier passes accumulated once more.
            schedule = ScheduleGPipe(self.stage, CHUNKS, loss_fn=loss, scale_grads=False)
            x = batch(iteration, step, 0).to(here(), torch.float32)
            if rank == 0:
                schedule.step(x)
            elif rank == WORLD - 1:
                schedule.step(target=torch.zeros(BATCH, self.widths[1], device=here()))
            else:
                schedule.step()
        if rank != WORLD - 1 and type(scaler).__module__.startswith("torch."):
            # torch's scalers assert where scale() was never called; this rank sees no loss.
            scaler.scale(torch.zeros((), device=here()))

    def full_parameters(self) -> dict[str, Tensor]:
        name = LAYERS[self.rank]
        return {f"{name}.{n}": p.detach().cpu().clone() for n, p in self.layer.named_parameters()}


LAYOUTS: dict[str, type[Layout]] = {
    "alone": Alone,
    "DDP": DDP,
    "DDP, two groups": DDPSubgroups,
    "DDP, experts": DDPExperts,
    "DDP, idle experts": DDPIdleExperts,
    "FSDP1": FSDP1,
    "FSDP1 orig params": FSDP1OrigParams,
    "FSDP2": FSDP2,
    "FSDP2 offload": FSDP2Offload,
    "HSDP": HSDP,
    "FSDP2 x TP": FSDP2TP,
    "TP": TP,
    "plain and DTensor": PlainAndDTensor,
    "two meshes": TwoMeshes,
    "ZeRO": ZeRO,
    "OSS": OSS,
    "pipeline": Pipeline,
}
