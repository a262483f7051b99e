"""Twelve more violations of a declared precision: bytes, norms in Python, compiled code, groups.

A plant declares a dtype that its step does not use, and names the key, dtype and place of the right
answer. With ``clean`` instead of the declaration, the same step keeps its contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import mesh
from tests.report.setups import BF16, FP16, FP32, Net, trained

__all__ = ["PLANTS", "Plant"]

ROWS = torch.linspace(-1.0, 1.0, 4 * 16).view(4, 16)


@dataclass(frozen=True)
class Plant:
    """One planted violation.

    Args:
        declared: The contract that the step breaks.
        clean: The contract that the step keeps.
        key: The key of the right answer.
        dtype: Its dtype.
        build: Makes the arguments of `PrecisionContract.check`.
        where: A part of its place.
    """

    name: str
    ranks: int
    declared: dict[str, Any]
    clean: dict[str, Any]
    key: str
    dtype: str
    build: Callable[[], Any]
    where: str = ""


PLANTS: list[Plant] = []
NORMS_FP32 = {"norms": "fp32"}
ACTIVATIONS_FP32 = {"activations": "fp32"}
ACTIVATIONS_BF16 = {"activations": "bf16"}


def plant(name: str, ranks: int, **fields: Any) -> Callable[[Callable[[], Any]], Any]:
    """Add a function to the plants."""

    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        PLANTS.append(Plant(name, ranks, build=build, **fields))
        return build

    return add


def rows_step(model: nn.Module, region: torch.dtype | None = None, dtype: Any = FP32) -> Any:
    """Train a model on rows of 16 numbers."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params)
    return trained(model, optimizer, region=region, inputs=ROWS.to(dtype))


# -- bytes -----------------------------------------------------------------------------------------


@plant(
    "an adapter gathered in fp32 beside its bf16 base",
    ranks=2,
    declared={"param_all_gather": "bf16"},
    clean={"param_all_gather": ("bf16", "fp32")},
    key="param_all_gather",
    dtype="fp32",
)
def adapter_beside_a_frozen_base() -> Any:
    """FSDP2 packs a frozen bf16 base and its fp32 adapter into the bytes of one gather."""
    base = nn.Linear(16, 16).to(BF16).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(16, 16))
    fully_shard(model)
    return rows_step(model, region=BF16)


# -- norms in Python -------------------------------------------------------------------------------


class Scale(nn.Module):
    """Llama's norm without a cast to float32, by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return self.weight.to(x.dtype) * x * (mean_square + 1e-5).rsqrt()


class Whiten(nn.Module):
    """A layer norm in Python, with its variance as a mean of squares."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3)
        return centred / deviation


class UnitQueries(nn.Module):
    """The norm of queries and keys in recent transformers, by torch's own function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def between_layers(norm: nn.Module, dtype: torch.dtype) -> Any:
    model = nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 4)).to(dtype)
    return rows_step(model, dtype=dtype)


@plant(
    "an RMS norm in Python in bf16",
    ranks=1,
    declared=NORMS_FP32,
    clean={"norms": "bf16"},
    key="norms",
    dtype="bf16",
    where="1",
)
def rms_norm_in_bf16() -> Any:
    return between_layers(Scale(), BF16)


@plant(
    "a layer norm in Python in fp16",
    ranks=1,
    declared=NORMS_FP32,
    clean={"norms": "fp16"},
    key="norms",
    dtype="fp16",
    where="1",
)
def layer_norm_in_fp16() -> Any:
    return between_layers(Whiten(), FP16)


@plant(
    "queries normalized in bf16",
    ranks=1,
    declared=NORMS_FP32,
    clean={"norms": "bf16"},
    key="norms",
    dtype="bf16",
    where="1",
)
def normalized_queries_in_bf16() -> Any:
    return between_layers(UnitQueries(), BF16)


# -- compiled code ---------------------------------------------------------------------------------


@plant(
    "norms of compiled blocks in bf16",
    ranks=1,
    declared=NORMS_FP32,
    # torch's RMS norm takes its mean of squares in float32.
    clean={"norms": ("bf16", "fp32"), "compute": "bf16", "parameters": "bf16"},
    key="norms",
    dtype="bf16",
    where="norm",
)
def compiled_model_of_half_norms() -> Any:
    step, model, optimizer = trained(Net().to(BF16))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return step, model, optimizer


class Upcast(nn.Module):
    """A module that leaves the region inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


@plant(
    "a module that leaves the region in a compiled model",
    ranks=1,
    declared={"compute": "bf16"},
    clean={"compute": "bf16", "modules": {"1.inner": {"compute": "fp32"}}},
    key="compute",
    dtype="fp32",
    where="1.inner",
)
def compiled_model_with_an_upcast_inside() -> Any:
    model = nn.Sequential(nn.Linear(16, 16), Upcast(nn.Linear(16, 16)), nn.Linear(16, 4))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", BF16):
            output = compiled(ROWS)
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


@plant(
    "compiled blocks under FSDP2 that reduce in bf16",
    ranks=2,
    declared={"grad_reduce": "fp32"},
    clean={"grad_reduce": "bf16", "param_all_gather": "bf16", "master_weights": "fp32"},
    key="grad_reduce",
    dtype="bf16",
)
def compiled_blocks_under_fsdp2() -> Any:
    model = Net(attends=False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return trained(model)


# -- collectives -----------------------------------------------------------------------------------


class Redistributed(nn.Module):
    """A module that moves its rows from one dimension's shards to another's."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = mesh((dist.get_world_size(),), ("cp",))
        sharded = DTensor.from_local(x, ranks, [Shard(0)])
        return sharded.redistribute(placements=[Shard(1)]).to_local().reshape(x.shape)


class Dispatch(nn.Module):
    """Tokens that are sent to experts on other ranks, with a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        functional = torch.distributed._functional_collectives
        sent = functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD)
        return sent * 1


class Ring(nn.Module):
    """Keys that each rank passes to the next one, in a batch of sends and receives."""

    def forward(self, x: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        keys = x.detach().contiguous()
        received = torch.empty_like(keys)
        transfers = [
            dist.P2POp(dist.isend, keys, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        return x + received


def behind_a_layer(module: nn.Module, dtype: torch.dtype) -> Any:
    return rows_step(nn.Sequential(nn.Linear(16, 16), module).to(dtype), dtype=dtype)


@plant(
    "a DTensor moved to other shards in fp32",
    ranks=2,
    declared=ACTIVATIONS_BF16,
    clean=ACTIVATIONS_FP32,
    key="activations",
    dtype="fp32",
    where="1",
)
def redistributed_in_fp32() -> Any:
    return behind_a_layer(Redistributed(), FP32)


@plant(
    "tokens sent to experts in bf16",
    ranks=2,
    declared=ACTIVATIONS_FP32,
    clean=ACTIVATIONS_BF16,
    key="activations",
    dtype="bf16",
    where="1",
)
def dispatched_in_bf16() -> Any:
    return behind_a_layer(Dispatch(), BF16)


@plant(
    "keys passed around a ring in fp32",
    ranks=2,
    declared=ACTIVATIONS_BF16,
    clean=ACTIVATIONS_FP32,
    key="activations",
    dtype="fp32",
    where="1",
)
def ring_in_fp32() -> Any:
    return behind_a_layer(Ring(), FP32)


# -- groups ----------------------------------------------------------------------------------------


@plant(
    "gradients summed over a subgroup in bf16",
    ranks=4,
    declared={"grad_reduce": "fp32"},
    clean={"grad_reduce": "bf16", "compute": "fp32"},
    key="grad_reduce",
    dtype="bf16",
)
def sum_over_a_subgroup() -> Any:
    """Gradients of experts, which the training loop sums in bf16 over half of the ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

    def sum_gradients() -> None:
        for param in model.parameters():
            half = param.grad.to(BF16)
            dist.all_reduce(half, group=group)
            param.grad.copy_(half / 2)

    optimizer = torch.optim.AdamW(model.parameters())
    return trained(model, optimizer, inputs=ROWS, after=sum_gradients)


class HalfOutput(nn.Module):
    """A stage that returns half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()).to(BF16)


@plant(
    "a pipeline stage that sends bf16",
    ranks=2,
    declared=ACTIVATIONS_FP32,
    clean=ACTIVATIONS_BF16,
    key="activations",
    dtype="bf16",
)
def pipeline_of_half_outputs() -> Any:
    rank = dist.get_rank()
    module = HalfOutput()
    optimizer = torch.optim.AdamW(module.parameters())
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y.float() - target).mean())

    def step() -> None:
        if rank == 0:
            schedule.step(ROWS)
        else:
            schedule.step(target=ROWS)
        optimizer.step()
        optimizer.zero_grad()

    # The first step finds the shapes by messages of its own.
    step()
    return step, module, optimizer
