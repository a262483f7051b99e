"""How a model is parallelized over the ranks. A new strategy is one function and one row below."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distamp import DataParallel
from launch.config import Config
from launch.errors import UsageError
from launch.levels import eps_for
from launch.memory import Shares
from launch.parallel import (
    ParallelContext,
    ParallelizedModel,
    data_parallel,
    decayed_names,
    fp32_batchnorms,
    materialize,
    split,
    units,
)
from launch.ranks import Ranks

__all__ = [
    "STRATEGIES",
    "Strategy",
    "adamw_kernel",
    "chosen",
    "data_parallel_size",
    "needs_group",
    "parallelize",
    "shards_of",
    "shares",
]


# -- one process ----------------------------------------------------------------------------------


def none(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """One process and one device."""
    return ParallelizedModel(model, model, _adamw(model, context))


def dp(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """DataParallel: several devices in one process."""
    on_cpu = context.device.type == "cpu"
    count = context.config.replicas or (0 if on_cpu else torch.accelerator.device_count())
    devices = None if on_cpu else list(range(count))
    return ParallelizedModel(DataParallel(model, devices), model, _adamw(model, context))


# -- a whole model on each rank -------------------------------------------------------------------


def ddp(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """DistributedDataParallel: each rank has the whole model and the whole optimizer."""
    return _replicated(model, context, _adamw(model, context))


def zero1(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """DDP, and torch's ZeroRedundancyOptimizer: each rank has a part of the optimizer's state."""
    settings = _adamw_settings(context)
    optimizer = ZeroRedundancyOptimizer(
        _groups(model, model, context), optimizer_class=torch.optim.AdamW, **settings
    )
    return _replicated(model, context, optimizer)


def oss(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """DDP, and fairscale's OSS: as zero1."""
    from fairscale.optim import oss

    settings = _adamw_settings(context)
    optimizer = oss.OSS(_groups(model, model, context), optim=torch.optim.AdamW, **settings)
    return _replicated(model, context, optimizer)


def sharded_ddp(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """Fairscale's OSS and ShardedDataParallel: a gradient goes only to the rank that needs it."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import oss

    settings = _adamw_settings(context)
    optimizer = oss.OSS(_groups(model, model, context), optim=torch.optim.AdamW, **settings)
    wrapped = ShardedDataParallel(model, optimizer)
    return data_parallel(context, wrapped, model, optimizer)


# -- a part of the model on each rank -------------------------------------------------------------


def fsdp1(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """FullyShardedDataParallel."""
    decayed = decayed_names(model)
    settings: dict[str, Any] = {
        "device_id": context.device,
        "use_orig_params": True,  # else one flat parameter would mix those that decay and not
        "device_mesh": init_device_mesh(context.device.type, (context.ranks.world_size,)),
    }
    for parent, name, unit in [*fp32_batchnorms(model, context.config.level), *units(model)]:
        if not isinstance(parent[name], FullyShardedDataParallel):
            parent[name] = FullyShardedDataParallel(unit, **settings)
    wrapped = FullyShardedDataParallel(model, **settings)
    optimizer = torch.optim.AdamW(
        split(wrapped, decayed, context.config), **_adamw_settings(context)
    )
    return data_parallel(context, wrapped, wrapped, optimizer)


def fsdp2(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """fully_shard over all ranks."""
    mesh = init_device_mesh(
        context.device.type, (context.ranks.world_size,), mesh_dim_names=("shard",)
    )
    return _fully_sharded(model, context, mesh)


def hsdp(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """fully_shard within groups of ranks, and copies of the model over the groups."""
    shards = shards_of(context.config, context.ranks)
    shape = (context.ranks.world_size // shards, shards)
    mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=("replicate", "shard"))
    if context.config.comm_hook is None:
        return _fully_sharded(model, context, mesh)
    # Of a mesh of two dimensions torch averages the copies itself, past every hook.
    parallel = _fully_sharded(model, context, mesh["shard"])
    return replace(parallel, replicas=mesh["replicate"].get_group())


def fsdp2_tp(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """Tensor parallel within groups of ranks, fully_shard over the groups."""
    tp = context.config.tp
    shape = (context.ranks.world_size // tp, tp)
    mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=("dp", "tp"))
    plan = getattr(model, "tensor_parallel_plan", None)
    if plan is None:
        raise UsageError(
            f"--strategy fsdp2+tp: --model {context.config.model} does not say how to divide its"
            " layers (tensor_parallel_plan); take fsdp2, or gpt or digits"
        )
    columns, rows = plan()
    styles: dict[str, Any] = {**dict.fromkeys(columns, ColwiseParallel())}
    styles |= dict.fromkeys(rows, RowwiseParallel())
    decayed = decayed_names(model)
    parallelize_module(model, mesh["tp"], styles)
    parallel = _fully_sharded(model, context, mesh["dp"], decayed)
    parallel.dp_world_size, parallel.dp_rank = shape[0], context.ranks.rank // tp
    return parallel


def fairscale_fsdp(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """Fairscale's FullyShardedDataParallel; CUDA alone."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Fairscale

    decayed = decayed_names(model)
    wrapped = Fairscale(model, flatten_parameters=False)
    optimizer = torch.optim.AdamW(
        split(wrapped, decayed, context.config), **_adamw_settings(context)
    )
    return data_parallel(context, wrapped, wrapped, optimizer)


# -- what they are made of ------------------------------------------------------------------------


def _replicated(
    model: nn.Module, context: ParallelContext, optimizer: torch.optim.Optimizer
) -> ParallelizedModel:
    """Wrap a model in DDP.

    DDP lays its buckets out anew after its first backward pass, and the order in which ranks'
    gradients are added depends on the layout. One pass over the sample is therefore thrown away
    here, so that the first step of a resumed run adds in the same order as the step it repeats.
    """
    ids = None if context.device.type == "cpu" else [context.device.index]
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    on_device = [] if context.device.type == "cpu" else [context.device]
    with torch.random.fork_rng(on_device, device_type=context.device.type):
        # Twice: a batch norm has no statistics of one example.
        wrapped(torch.cat([context.sample] * 2).to(context.device)).sum().backward()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise UsageError(
            f"--model {context.config.model}: {unused[0]} takes no part in what it returns, and DDP"
            " waits for its gradient; freeze it (requires_grad_(False)), or take --strategy fsdp2"
        )
    wrapped.zero_grad(set_to_none=True)
    return data_parallel(context, wrapped, model, optimizer)


def _fully_sharded(
    model: nn.Module,
    context: ParallelContext,
    mesh: DeviceMesh,
    decayed: frozenset[str] | None = None,
) -> ParallelizedModel:
    decayed = decayed_names(model) if decayed is None else decayed
    level = context.config.level
    for _, _, norm in fp32_batchnorms(model, level):
        fully_shard(norm, mesh=mesh)
    policy = gather_policy(model, context.config, context.device)
    for _, _, unit in units(model):
        if not isinstance(unit, FSDPModule):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    if context.sketch is not None:
        materialize(model, context.sketch, context.device)
    optimizer = torch.optim.AdamW(split(model, decayed, context.config), **_adamw_settings(context))
    return data_parallel(context, model, model, optimizer)


def gather_policy(model: nn.Module, config: Config, device: torch.device) -> MixedPrecisionPolicy:
    """Return in which dtype ``fully_shard`` gathers the weights of a block.

    In what the autocast region computes in, where it would cast them to that anyway: the products
    see the same numbers, and half the bytes travel. Gradients are reduced in fp32. What is left is
    norms, whose weights are rounded too; on the CPU torch's take only those of their input's dtype,
    so that there a model must say that its own take others.
    """
    level = config.level
    takes_half = device.type != "cpu" or getattr(model, "norms_take_half_weights", False)
    if not level.autocasts or config.gather_fp32 or not takes_half:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=level.compute, reduce_dtype=level.reduce, cast_forward_inputs=False
    )


def _groups(model: nn.Module, named: nn.Module, context: ParallelContext) -> list[dict[str, Any]]:
    return split(model, decayed_names(named), context.config)


def _adamw(model: nn.Module, context: ParallelContext) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(model, model, context), **_adamw_settings(context))


def _adamw_settings(context: ParallelContext) -> dict[str, Any]:
    how = adamw_kernel(context.config, context.ranks)
    kernels = {"fused": how == "fused", "foreach": how == "foreach"}
    eps = eps_for(context.config)
    return {"lr": context.config.lr, "betas": (0.9, 0.95), "eps": eps, **kernels}


# -- which there are ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strategy:
    """One way to parallelize a model, and what it needs.

    Attributes:
        build: Spreads a model.
        several: Whether it needs several ranks; else it needs one.
        from_meta: Whether the model is sharded before it has memory; else it is built whole first.
        one_too: Whether one rank can do it as well, for those who debug.
        says: What it is, for people.
        adamw: The implementations of AdamW that it works with, the fastest first.
        package: What must be installed.
        device: The only type of device it runs on.
        hooked: Whether its gradients can be sent by a communication hook.
        sharded: Whether each rank has a part of the gradients alone.
    """

    build: Callable[[nn.Module, ParallelContext], ParallelizedModel]
    several: bool
    says: str
    adamw: tuple[str, ...] = ("fused", "foreach", "loop")
    package: str | None = None
    device: str | None = None
    hooked: bool = False
    sharded: bool = False
    from_meta: bool = False
    one_too: bool = False


STRATEGIES: dict[str, Strategy] = {
    "none": Strategy(none, False, "one device"),
    "dp": Strategy(dp, False, "DataParallel"),
    "ddp": Strategy(ddp, True, "DDP", hooked=True, one_too=True),
    "fsdp1": Strategy(fsdp1, True, "FSDP1", hooked=True, sharded=True),
    "fsdp2": Strategy(
        fsdp2, True, "FSDP2", hooked=True, sharded=True, from_meta=True, one_too=True
    ),
    "hsdp": Strategy(hsdp, True, "HSDP", hooked=True, sharded=True, from_meta=True),
    # Its parameters are DTensors of two meshes, which no one kernel takes together.
    "fsdp2+tp": Strategy(
        fsdp2_tp, True, "FSDP2 with tensor parallel", adamw=("loop",), from_meta=True
    ),
    "zero1": Strategy(zero1, True, "DDP with ZeroRedundancyOptimizer", hooked=True),
    "oss": Strategy(oss, True, "DDP with OSS", package="fairscale"),
    "sharded_ddp": Strategy(sharded_ddp, True, "ShardedDataParallel", package="fairscale"),
    "fairscale_fsdp": Strategy(
        fairscale_fsdp, True, "fairscale's FSDP", package="fairscale", device="cuda"
    ),
}


def chosen(config: Config, ranks: Ranks) -> tuple[str, Strategy]:
    """Return the strategy's name and the strategy."""
    default = "ddp" if ranks.world_size > 1 else "none"
    name = default if config.strategy is None else config.strategy
    if name not in STRATEGIES:
        raise UsageError(f"--strategy {name}: it must be one of {', '.join(STRATEGIES)}")
    return name, STRATEGIES[name]


def needs_group(config: Config) -> bool:
    """Return whether a process that is alone needs a process group too."""
    return config.strategy in STRATEGIES and STRATEGIES[config.strategy].one_too


def adamw_kernel(config: Config, ranks: Ranks) -> str:
    """Return torch's implementation of AdamW that is used: fused, foreach or loop."""
    return config.adamw or chosen(config, ranks)[1].adamw[0]


def data_parallel_size(config: Config, ranks: Ranks) -> int:
    """Return how many different parts a batch is divided into."""
    if chosen(config, ranks)[0] == "fsdp2+tp":
        return ranks.world_size // config.tp
    return ranks.world_size


def shares(config: Config, ranks: Ranks, *, sketched: bool) -> Shares:
    """Return over how many ranks the strategy divides what a parameter takes.

    Args:
        config: The run's settings.
        ranks: Those that train.
        sketched: Whether the model can be built without its memory.
    """
    name, strategy = chosen(config, ranks)
    whole, world = not (strategy.from_meta and sketched), ranks.world_size
    if name in ("zero1", "oss", "sharded_ddp"):
        return Shares(1, world)
    if name == "hsdp":
        shards = shards_of(config, ranks)
        return Shares(shards, shards, whole)
    if strategy.sharded or name in ("fsdp2+tp", "fairscale_fsdp"):
        return Shares(world, world, whole)
    return Shares()


def shards_of(config: Config, ranks: Ranks) -> int:
    """Return how many ranks share one copy of the model under hsdp."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    return config.shards or (here if 1 < here < ranks.world_size else 2)


def parallelize(model: nn.Module, context: ParallelContext) -> ParallelizedModel:
    """Parallelize the model as ``--strategy`` says."""
    return chosen(context.config, context.ranks)[1].build(model, context)
