"""What every strategy is made of: a model parallelized over the ranks, and how it is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from distamp.precision import Precision
from launch.config import Config
from launch.ranks import Ranks
from launch.sketch import Sketch

__all__ = [
    "ParallelContext",
    "ParallelizedModel",
    "data_parallel",
    "decayed_names",
    "fp32_batchnorms",
    "materialize",
    "plain_name",
    "split",
    "units",
]


@dataclass(frozen=True)
class ParallelContext:
    """What a strategy is given beside the model.

    Attributes:
        sample: An input of the model, with a batch dimension of 1.
        sketch: Draws the weights of a model that was built without memory; None where it was not.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    sample: Tensor
    sketch: Sketch | None = None


@dataclass
class ParallelizedModel:
    """A model parallelized over the ranks, and what updates it.

    Attributes:
        model: As it is called.
        inner: The module whose names its parameters have in a checkpoint.
        optimizer: The optimizer to step.
        dp_world_size: How many different parts a batch is divided into.
        dp_rank: Which of them this rank computes.
        replicas: The ranks that hold the same shard, where the communication hook alone averages
            between them.
    """

    model: nn.Module
    inner: nn.Module
    optimizer: torch.optim.Optimizer
    dp_world_size: int = 1
    dp_rank: int = 0
    replicas: ProcessGroup | None = None


def data_parallel(
    context: ParallelContext, model: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer
) -> ParallelizedModel:
    """Return a model of which each rank computes its own part of the batch."""
    return ParallelizedModel(model, inner, optimizer, context.ranks.world_size, context.ranks.rank)


@torch.no_grad()
def materialize(model: nn.Module, sketch: Sketch, device: torch.device) -> None:
    """Give a sharded model on the meta device its weights, one parameter at a time.

    Each rank draws every parameter whole, and keeps its shard. Takes the memory of the shards and
    of the largest parameter.
    """
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in both:
            for name, meta in tensors.items():
                if meta is not None:
                    made[meta] = made[meta] if meta in made else _empty(meta, device)
                    tensors[name] = made[meta]
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    for name, whole in sketch.draw():
        tensor = named[name]
        whole = whole.to(device, tensor.dtype)
        if isinstance(tensor, DTensor):
            # No message: every rank has drawn the same.
            where = (tensor.device_mesh, tensor.placements)
            shard = distribute_tensor(whole, *where, src_data_rank=None)
            tensor.to_local().copy_(shard.to_local())
        else:
            tensor.copy_(whole)


def _empty(meta: Tensor, device: torch.device) -> Tensor:
    made: Tensor
    if isinstance(meta, DTensor):
        local = torch.empty_like(meta.to_local(), device=device)
        where = (meta.device_mesh, meta.placements)
        made = DTensor.from_local(
            local, *where, run_check=False, shape=meta.size(), stride=meta.stride()
        )
    else:
        made = torch.empty_like(meta, device=device)
    return nn.Parameter(made, meta.requires_grad) if isinstance(meta, nn.Parameter) else made


def units(model: nn.Module) -> list[tuple[Any, str, nn.Module]]:
    """Return what is gathered and freed as one: each member of each outermost ModuleList."""
    found: list[tuple[Any, str, nn.Module]] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend((child._modules, name, unit) for name, unit in child.named_children())
            else:
                walk(child)

    walk(model)
    return found


def fp32_batchnorms(model: nn.Module, level: Precision) -> list[tuple[Any, str, nn.Module]]:
    """Return what a sharding wrapper must hold by itself, as it takes one dtype for each group.

    In a cast model these are the batch norms that stay in fp32.
    """
    if not (level.casts_model and level.keep_batchnorm_fp32):
        return []
    return [
        (parent._modules, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, _BatchNorm) and child.affine
    ]


def decayed_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that decay: matrices, but not biases and norms."""
    return frozenset(name for name, p in model.named_parameters() if p.dim() >= 2)


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


def split(model: nn.Module, decayed: frozenset[str], config: Config) -> list[dict[str, Any]]:
    """Split parameters for AdamW by the names of those that decay."""
    trained = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        ([p for name, p in trained if name in decayed], config.weight_decay),
        ([p for name, p in trained if name not in decayed], 0.0),
    ]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
