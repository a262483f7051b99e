"""Every way a model is spread over 4 ranks, and every kind of gradient: one table, at the end.

A new layout is a class that overrides parts of `Layout`, and one entry of the table.
"""

import contextlib
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
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from tests.place import device_type, rank_device
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
    """Ranks 0, 1 and ranks 2, 3 train two models. Each pair has a group, which its scaler gets."""

    shards = 2

    def process_group(self) -> Any:
        # Every rank makes both groups, because torch requires it.
        groups = [subgroup([0, 1]), subgroup([2, 3])]
        return groups[self.domain_of(self.rank)]

    def wrap(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net, process_group=self.process_group())

    def shard_of(self, rank: int) -> int:
        return rank % 2

    def domain_of(self, rank: int) -> int:
        return rank // 2


class FSDP1(World):
    settings: ClassVar[dict[str, Any]] = {}

    def wrap(self, net: nn.Module) -> nn.Module:
        settings = {"device_id": rank_device(), **self.settings}
        for name in LAYERS:
            setattr(net, name, FullyShardedDataParallel(getattr(net, name), **settings))
        return FullyShardedDataParallel(net, **settings)

    def full_parameters(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            values: dict[str, Tensor] = {}
            for wrapped_name, param in self.model.named_parameters():
                name = wrapped_name.replace("_fsdp_wrapped_module.", "")
                values[name] = param.detach().cpu().clone()
            return values


class FSDP1OrigParams(FSDP1):
    settings: ClassVar[dict[str, Any]] = {"use_orig_params": True}


class FSDP2Offload(FSDP2):
    """The parameters and their gradients are on the host between steps."""

    policy: ClassVar[dict[str, Any]] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=device_type() != "cpu")
    }


class HSDP(FSDP2):
    """The scaler is given the two-dimensional mesh itself."""

    shape = (2, WORLD // 2)
    names = ("replicate", "shard")

    def process_group(self) -> Any:
        return mesh(self.shape, self.names)


def _parallel(net: nn.Module, over: Any, *names: str) -> nn.Module:
    """Make the layers of these names tensor parallel, by columns and by rows in turn."""
    plan: dict[str, ParallelStyle] = {}
    for name in names:
        is_even = LAYERS.index(name) % 2 == 0
        plan[name] = ColwiseParallel() if is_even else RowwiseParallel()
    return parallelize_module(net, over, plan)


class TP(World):
    """Tensor parallel alone: every rank sees the whole batch."""

    widths = (4, 4)
    shards = 1

    def wrap(self, net: nn.Module) -> nn.Module:
        return _parallel(net, mesh((WORLD,), ("tp",)), *LAYERS)


class FSDP2TP(World):
    """FSDP2 over the first dimension of a mesh, tensor parallel over the second."""

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
        first_half, second_half = HALVES
        flat_mesh = mesh((WORLD,), ("shard",))
        square_mesh = mesh((2, WORLD // 2), ("replicate", "shard"))
        for name in first_half:
            fully_shard(getattr(net, name), mesh=flat_mesh)
        for name in second_half:
            fully_shard(getattr(net, name), mesh=square_mesh)
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
        # Gradients are views of buckets, and None would detach them for good.
        self.model.zero_grad(set_to_none=False)

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()

    def owned(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.optim.param_groups for p in group["params"]]


# -- experts: parameters of some ranks -------------------------------------------------------------


class _ExpertNet(Net):
    """Net with an expert in the middle; some ranks may send it no tokens."""

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
    """DDP that ignores the experts. Every rank holds another expert, with other gradients.

    Attributes:
        used: For each rank, whether it sends tokens to its expert.
        experts: The number of experts. Rank r holds all or a part of expert r modulo this number.
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
        return any(parameter is param for param in self.net.expert.parameters())

    def parts(self) -> list[list[nn.Parameter]]:
        shared = [param for param in self.net.parameters() if not self.sharded(param)]
        return [shared, list(self.net.expert.parameters())]

    def part_names(self) -> list[list[str]]:
        shared = [name for name in self.initial if "@" not in name]
        of_experts = [name for name in self.initial if "@" in name]
        return [shared, of_experts]

    def full_parameters(self) -> dict[str, Tensor]:
        suffix = f"@{self.rank % self.experts}"
        values: dict[str, Tensor] = {}
        for name, value in super().full_parameters().items():
            if name.startswith("expert."):
                name = name + suffix
            values[name] = value
        return values

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        suffix = f"@{shard % self.experts}"
        values: dict[str, Tensor] = {}
        for name, value in parameters.items():
            if "@" not in name or name.endswith(suffix):
                values[name.removesuffix(suffix)] = value
        net = _ExpertNet(*self.widths, used=self.used[shard]).to("meta")
        return functional_call(net, values, (x,))


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
    """FSDP2 over all ranks for the shared layers, and over two ranks for each expert.

    One optimizer holds DTensors of two meshes, and every rank sees only a part of the smaller mesh.
    Ranks 0 and 2 share the parts of one expert, ranks 1 and 3 the parts of another.
    """

    experts = 2
    reference_class = _MeanOverHolders

    def wrap_with_experts(self, net: nn.Module) -> nn.Module:
        expert_mesh = mesh((WORLD // self.experts, self.experts), ("expert_shard", "expert"))
        fully_shard(net.expert, mesh=expert_mesh["expert_shard"])
        return shard_layers(net, mesh=mesh((WORLD,), ("shard",)))

    def accumulating(self) -> Any:
        return World.accumulating(self)


# -- stages ----------------------------------------------------------------------------------------

CHUNKS = 2


class Pipeline(World):
    """torch's GPipe schedule: every rank holds one layer."""

    shards = 1

    def sharded(self, parameter: Tensor) -> bool:
        return True

    def wrap(self, net: nn.Module) -> nn.Module:
        rank = self.rank
        self.layer = getattr(net, LAYERS[rank])
        activation = nn.Identity() if rank == WORLD - 1 else nn.Tanh()
        module = nn.Sequential(self.layer, activation)
        self.stage = PipelineStage(module, rank, WORLD, rank_device())
        return net

    def parts(self) -> list[list[nn.Parameter]]:
        return [[self.layer.weight], [self.layer.bias]]

    def part_names(self) -> list[list[str]]:
        weights = [name for name in self.initial if name.endswith(".weight")]
        biases = [name for name in self.initial if name.endswith(".bias")]
        return [weights, biases]

    def backward(self, scaler: Any, iteration: int, micro: int, factors: Sequence[float]) -> None:
        rank = self.rank
        for step in range(micro):

            def loss(output: Tensor, target: Tensor, factor: float = factors[step]) -> Tensor:
                return scaler.scale(loss_of(output) * (factor / CHUNKS))

            # With scale_grads the schedule would divide the sums of earlier passes again.
            schedule = ScheduleGPipe(self.stage, CHUNKS, loss_fn=loss, scale_grads=False)
            if rank == 0:
                inputs = self.inputs(batch(iteration, step, 0))
                schedule.step(inputs)
            elif rank == WORLD - 1:
                target = torch.zeros(BATCH, self.widths[1], device=rank_device())
                schedule.step(target=target)
            else:
                schedule.step()
        has_loss = rank == WORLD - 1
        is_torchs = type(scaler).__module__.startswith("torch.")
        if is_torchs and not has_loss:
            # torch's scalers assert if scale() was never called.
            scaler.scale(torch.zeros((), device=rank_device()))

    def full_parameters(self) -> dict[str, Tensor]:
        layer_name = LAYERS[self.rank]
        values: dict[str, Tensor] = {}
        for name, param in self.layer.named_parameters():
            values[f"{layer_name}.{name}"] = param.detach().cpu().clone()
        return values


# -- half precision --------------------------------------------------------------------------------

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class _Float16Gradients(Layout):
    """Gradients that are computed in float16."""

    init_scale = 2.0**10
    on_average = True
    tolerance = 2e-4
    norm_tolerance = 5e-3


class _BFloat16Gradients(Layout):
    """Gradients that are computed in bfloat16."""

    on_average = True
    tolerance = 1e-3
    norm_tolerance = 5e-2


def _policy(param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> dict[str, MixedPrecisionPolicy]:
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype=F32)
    return {"mp_policy": policy}


class FSDP2InFloat16(_Float16Gradients, FSDP2):
    policy = _policy(F16, F16)
    overflows_in_sum = True


class FSDP2InFloat16ReducedInFloat32(_Float16Gradients, FSDP2):
    policy = _policy(F16, F32)


class FSDP2InBFloat16ReducedInFloat32(_BFloat16Gradients, FSDP2):
    policy = _policy(BF16, F32)


class FSDP2InBFloat16ReducedInFloat16(_BFloat16Gradients, FSDP2):
    policy = _policy(BF16, F16)
    init_scale = 2.0**10
    overflows_in_sum = True


class Parameters(Layout):
    """Parameters, gradients and optimizer state in ``dtype``."""

    dtype: ClassVar[torch.dtype] = F16
    on_average = True

    def make_net(self) -> nn.Module:
        return super().make_net().to(self.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        return x.to(rank_device(), self.dtype)


# torch's fused SGD on CPU leaves most elements of half-precision parameters unchanged.
_HALF_SGD = ("SGD for-loop", "SGD foreach")
_ADAPTIVE = tuple(name for name in KINDS if not name.startswith("SGD"))


class _Float16Parameters(Parameters):
    fp16_grads = "inplace"
    init_scale = 2.0**8
    tolerance = 5e-4
    norm_tolerance = 1e-2
    # Adam's and Adagrad's squares of small gradients are zero in float16, with or without a scaler.
    kinds = _HALF_SGD


class _BFloat16Parameters(Parameters):
    dtype = BF16
    tolerance = 3e-3
    norm_tolerance = 8e-2
    kinds = (*_HALF_SGD, *_ADAPTIVE)


class DDPFloat16Parameters(_Float16Parameters, DDP):
    pass


class FSDP2Float16Parameters(_Float16Parameters, FSDP2):
    pass


class DDPBFloat16Parameters(_BFloat16Parameters, DDP):
    pass


class FSDP2BFloat16Parameters(_BFloat16Parameters, FSDP2):
    pass


# -- sparse gradients ------------------------------------------------------------------------------


class _TokenNet(Net):
    """A net that begins with an embedding of 8 tokens, of which a batch repeats some."""

    def __init__(self, *widths: int, sparse: bool) -> None:
        super().__init__(*widths)
        self.first = nn.Embedding(2**3, 16, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        bits = (x[:, :3] > 0).long()
        place_values = torch.tensor([1, 2, 4], device=x.device)
        tokens = (bits * place_values).sum(1)
        return super().forward(tokens)


class _Sparse(Layout):
    def make_net(self) -> nn.Module:
        return _TokenNet(*self.widths, sparse=True)

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        net = _TokenNet(*self.widths, sparse=False)
        return functional_call(net, dict(parameters), (x,))


class SparseAlone(_Sparse, Alone):
    pass


class SparseDDP(_Sparse, DDP):
    pass


# -- the table ---------------------------------------------------------------------------------

# Random programs are drawn from these layouts: full precision, dense, on one device.
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
# The cells are made of these. Layouts without a group come first, because another group is new
# processes.
ALL_LAYOUTS: dict[str, type[Layout]] = {
    "alone, sparse": SparseAlone,
    **LAYOUTS,
    "FSDP2, experts on their own mesh": MeshExperts,
    "FSDP2 in fp16": FSDP2InFloat16,
    "FSDP2 in fp16, reduced in fp32": FSDP2InFloat16ReducedInFloat32,
    "FSDP2 in bf16, reduced in fp32": FSDP2InBFloat16ReducedInFloat32,
    "FSDP2 in bf16, reduced in fp16": FSDP2InBFloat16ReducedInFloat16,
    "DDP, fp16 parameters": DDPFloat16Parameters,
    "FSDP2, fp16 parameters": FSDP2Float16Parameters,
    "DDP, bf16 parameters": DDPBFloat16Parameters,
    "FSDP2, bf16 parameters": FSDP2BFloat16Parameters,
    "DDP, sparse": SparseDDP,
}
