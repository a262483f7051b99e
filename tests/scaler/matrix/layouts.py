"""Every way a model is spread over 4 ranks, and every kind of gradient: one table, at the end.

A new layout is a class that overrides what differs from `Layout`, and one entry of the table.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from tests.place import device_type, here
from tests.ranks import mesh, subgroup
from tests.scaler.matrix.layout import (
    DDP,
    FSDP2,
    HALVES,
    LAYERS,
    WORLD,
    Alone,
    Layout,
    World,
    shard_layers,
)
from tests.scaler.matrix.reference import BATCH, KINDS, Kind, Net, Reference, batch, loss_of

__all__ = ["ALL_LAYOUTS", "LAYOUTS", "WORLD", "Layout"]


class DDPSubgroups(DDP):
    """Ranks 0, 1 and ranks 2, 3 train two models; each has a scaler over its own group."""

    shards = 2

    def process_group(self) -> Any:
        return [subgroup([0, 1]), subgroup([2, 3])][self.domain_of(self.rank)]

    def wrap(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net, process_group=self.process_group())

    def shard_of(self, rank: int) -> int:
        return rank % 2

    def domain_of(self, rank: int) -> int:
        return rank // 2


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


_OFFLOAD = CPUOffloadPolicy(pin_memory=device_type() != "cpu")


class HSDP(FSDP2):
    """The scaler is given the two-dimensional mesh itself."""

    shape = (2, WORLD // 2)
    names = ("replicate", "shard")

    def process_group(self) -> Any:
        return mesh(self.shape, self.names)


def _parallel(net: nn.Module, over: Any, *names: str) -> nn.Module:
    """Tensor parallel layers of these names: by columns and by rows in turn."""
    plan = {name: (ColwiseParallel(), RowwiseParallel())[LAYERS.index(name) % 2] for name in names}
    return parallelize_module(net, over, plan)


class TP(World):
    """Tensor parallel alone: every rank sees the whole batch."""

    widths = (4, 4)
    shards = 1

    def wrap(self, net: nn.Module) -> nn.Module:
        return _parallel(net, mesh((WORLD,), ("tp",)), *LAYERS)


class FSDP2TP(World):
    """FSDP2 over one dimension of a mesh, tensor parallel over the other."""

    widths = (4, 4)
    shards = 2

    def wrap(self, net: nn.Module) -> nn.Module:
        both = self.process_group()
        return shard_layers(_parallel(net, both["tp"], *LAYERS), mesh=both["dp"])

    def process_group(self) -> Any:
        return mesh((2, WORLD // 2), ("dp", "tp"))


class PlainAndDTensor(TP):
    """One optimizer holds DTensors (tensor parallel) and plain tensors (the same on every rank)."""

    def wrap(self, net: nn.Module) -> nn.Module:
        return _parallel(net, mesh((WORLD,), ("tp",)), "first", "second")


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


# -- experts: parameters with ranks of their own ---------------------------------------------------


class _ExpertNet(Net):
    """Net and an expert in the middle, which some ranks send no tokens to."""

    def __init__(self, *widths: int, used: bool) -> None:
        super().__init__(*widths)
        self.expert = nn.Linear(8, 8)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if self.used:
            x = x + self.expert(x)
        return self.tail(torch.tanh(self.head(x)))


class DDPExperts(DDP):
    """DDP that ignores the experts: each rank holds its own, with its own gradients.

    Attributes:
        used: whether each rank sends its expert tokens.
        experts: how many there are; rank r holds a part of, or all of, number r modulo that.
    """

    used: ClassVar[tuple[bool, ...]] = (True,) * 4
    experts: ClassVar[int] = WORLD

    def make_net(self) -> nn.Module:
        return _ExpertNet(*self.widths, used=self.used[self.rank])

    def wrap(self, net: nn.Module) -> nn.Module:
        for name in [name for name in self.initial if name.startswith("expert.")]:
            value = self.initial.pop(name)
            for expert in range(self.experts):
                self.initial[f"{name}@{expert}"] = value + 0.01 * expert
        with torch.no_grad():
            for parameter in net.expert.parameters():
                parameter += 0.01 * (self.rank % self.experts)
        return self.wrap_with_experts(net)

    def wrap_with_experts(self, net: nn.Module) -> nn.Module:
        ignored = [f"expert.{name}" for name, _ in net.expert.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        return super().wrap(net)

    def sharded(self, parameter: Tensor) -> bool:
        return any(parameter is own for own in self.net.expert.parameters())

    def parts(self) -> list[list[nn.Parameter]]:
        expert = list(self.net.expert.parameters())
        return [[p for p in self.net.parameters() if not self.sharded(p)], expert]

    def part_names(self) -> list[list[str]]:
        shared = [name for name in self.initial if "@" not in name]
        return [shared, [name for name in self.initial if "@" in name]]

    def full_parameters(self) -> dict[str, Tensor]:
        own = f"@{self.rank % self.experts}"
        return {
            name + own * name.startswith("expert."): value
            for name, value in super().full_parameters().items()
        }

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        own = f"@{shard % self.experts}"
        mine = {
            name.removesuffix(own): value
            for name, value in parameters.items()
            if "@" not in name or name.endswith(own)
        }
        net = _ExpertNet(*self.widths, used=self.used[shard]).to("meta")
        return functional_call(net, mine, (x,))


class DDPIdleExperts(DDPExperts):
    """Ranks 1 and 3 send no tokens to their expert: its gradients are None there."""

    used = (True, False, True, False)


class _MeanOverHolders(Reference):
    """The gradient of an expert is the mean over the ranks that hold it, as FSDP2 leaves it."""

    def backward(self, iteration: int, micro: int, last: float = 1.0) -> None:
        super().backward(iteration, micro, last)
        for name, parameter in self.parameters.items():
            if "@" in name and parameter.grad is not None:
                parameter.grad *= MeshExperts.experts / WORLD


class MeshExperts(DDPExperts):
    """FSDP2 over all ranks for what is shared; each expert over the ranks that hold it.

    One optimizer holds DTensors of two meshes, and of the smaller one every rank sees a part alone.
    Ranks 0 and 2 hold one expert between them, ranks 1 and 3 another.
    """

    experts = 2
    reference_class = _MeanOverHolders

    def wrap_with_experts(self, net: nn.Module) -> nn.Module:
        over = mesh((WORLD // self.experts, self.experts), ("expert_shard", "expert"))
        fully_shard(net.expert, mesh=over["expert_shard"])
        return shard_layers(net, mesh=mesh((WORLD,), ("shard",)))

    def accumulating(self) -> Any:
        return World.accumulating(self)


# -- stages ----------------------------------------------------------------------------------------

CHUNKS = 2


class Pipeline(World):
    """torch's GPipe schedule: each rank holds one layer and nothing of the others."""

    shards = 1

    def sharded(self, parameter: Tensor) -> bool:
        return True

    def wrap(self, net: nn.Module) -> nn.Module:
        rank = self.rank
        self.layer = getattr(net, LAYERS[rank])
        after = nn.Identity() if rank == WORLD - 1 else nn.Tanh()
        self.stage = PipelineStage(nn.Sequential(self.layer, after), rank, WORLD, here())
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
            given = [self.inputs(batch(iteration, step, 0))] if rank == 0 else []
            target = torch.zeros(BATCH, self.widths[1], device=here())
            schedule.step(*given, target=target if rank == WORLD - 1 else None)
        if rank != WORLD - 1 and type(scaler).__module__.startswith("torch."):
            # torch's scalers assert where scale() was never called; this rank sees no loss.
            scaler.scale(torch.zeros((), device=here()))

    def full_parameters(self) -> dict[str, Tensor]:
        name = LAYERS[self.rank]
        return {f"{name}.{n}": p.detach().cpu().clone() for n, p in self.layer.named_parameters()}


# -- gradients and parameters of other kinds than dense float32 ------------------------------------

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def _policy(param: torch.dtype, reduce: torch.dtype) -> dict[str, MixedPrecisionPolicy]:
    return {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduce, output_dtype=torch.float32
        )
    }


def _with(*bases: type[Layout], **settings: Any) -> type[Layout]:
    return type(bases[0].__name__, bases, settings)


# Computed and reduced in these dtypes. A sum of finite gradients can overflow in float16.
_FLOAT16 = {"init_scale": 2.0**10, "on_average": True, "tolerance": 2e-4, "norm_tolerance": 5e-3}
_BFLOAT16 = {"on_average": True, "tolerance": 1e-3, "norm_tolerance": 5e-2}
# torch's fused SGD on CPU leaves most elements of half-precision parameters as they were.
_HALF_SGD = ("SGD for-loop", "SGD foreach")


class Parameters(Layout):
    """Parameters, gradients and optimizer state in ``dtype``."""

    dtype: ClassVar[torch.dtype] = F16
    on_average = True

    def make_net(self) -> nn.Module:
        return super().make_net().to(self.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        return x.to(here(), self.dtype)


_FLOAT16_PARAMETERS: dict[str, Any] = {
    "fp16_grads": "inplace",
    "init_scale": 2.0**8,
    "tolerance": 5e-4,
    "norm_tolerance": 1e-2,
    # Adam's and Adagrad's squares of small gradients are zero in float16, scaler or none.
    "kinds": _HALF_SGD,
}
_BFLOAT16_PARAMETERS: dict[str, Any] = {
    "dtype": BF16,
    "tolerance": 3e-3,
    "norm_tolerance": 8e-2,
    "kinds": (*_HALF_SGD, *(name for name in KINDS if not name.startswith("SGD"))),
}


class _TokenNet(Net):
    """The first layer is an embedding of 8 tokens; several inputs of a batch are the same one."""

    def __init__(self, *widths: int, sparse: bool) -> None:
        super().__init__(*widths)
        self.first = nn.Embedding(2**3, 16, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        tokens = ((x[:, :3] > 0).long() * torch.tensor([1, 2, 4], device=x.device)).sum(1)
        return super().forward(tokens)


class _Sparse(Layout):
    def make_net(self) -> nn.Module:
        return _TokenNet(*self.widths, sparse=True)

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        return functional_call(_TokenNet(*self.widths, sparse=False), dict(parameters), (x,))


# -- the table ---------------------------------------------------------------------------------

# What random programs are drawn from: full precision, dense, on one device.
LAYOUTS: dict[str, type[Layout]] = {
    "alone": Alone,
    "DDP": DDP,
    "DDP, two groups": DDPSubgroups,
    "DDP, experts": DDPExperts,
    "DDP, idle experts": DDPIdleExperts,
    "FSDP1": FSDP1,
    "FSDP1 orig params": _with(FSDP1, settings={"use_orig_params": True}),
    "FSDP2": FSDP2,
    "FSDP2 offload": _with(FSDP2, policy={"offload_policy": _OFFLOAD}),
    "HSDP": HSDP,
    "FSDP2 x TP": FSDP2TP,
    "TP": TP,
    "plain and DTensor": PlainAndDTensor,
    "two meshes": TwoMeshes,
    "ZeRO": ZeRO,
    "OSS": OSS,
    "pipeline": Pipeline,
}
# What the cells are made of. Those without a group come first: another group is new processes.
ALL_LAYOUTS: dict[str, type[Layout]] = {
    "alone, sparse": _with(_Sparse, Alone),
    **LAYOUTS,
    "FSDP2, experts on their own mesh": MeshExperts,
    "FSDP2 in fp16": _with(FSDP2, **_FLOAT16, policy=_policy(F16, F16), overflows_in_sum=True),
    "FSDP2 in fp16, reduced in fp32": _with(FSDP2, **_FLOAT16, policy=_policy(F16, F32)),
    "FSDP2 in bf16, reduced in fp32": _with(FSDP2, **_BFLOAT16, policy=_policy(BF16, F32)),
    "FSDP2 in bf16, reduced in fp16": _with(
        FSDP2, **_BFLOAT16, policy=_policy(BF16, F16), init_scale=2.0**10, overflows_in_sum=True
    ),
    "DDP, fp16 parameters": _with(Parameters, DDP, **_FLOAT16_PARAMETERS),
    "FSDP2, fp16 parameters": _with(Parameters, FSDP2, **_FLOAT16_PARAMETERS),
    "DDP, bf16 parameters": _with(Parameters, DDP, **_BFLOAT16_PARAMETERS),
    "FSDP2, bf16 parameters": _with(Parameters, FSDP2, **_BFLOAT16_PARAMETERS),
    "DDP, sparse": _with(_Sparse, DDP),
}
