"""What every strategy is made of: a model parallelized over the ranks, and how it is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from distamp.precision import Precision
from launch.config import Config
from launch.ranks import Ranks

__all__ = [
    "ParallelContext",
    "ParallelizedModel",
    "data_parallel",
    "decayed_names",
    "fp32_batchnorms",
    "plain_name",
    "split",
    "units",
]


@dataclass(frozen=True)
class ParallelContext:
    """What a strategy is given beside the model.

    Attributes:
        sample: An input of the model, with a batch dimension of 1.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    sample: Tensor


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
