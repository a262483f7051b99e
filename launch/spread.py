"""What every strategy is made of: a model spread over the ranks, and how it is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from distamp.comm_hooks import CommHookState, ShardedHookState, register
from launch.config import Config
from launch.errors import UsageError
from launch.ranks import Ranks

__all__ = ["Place", "Spread", "all_read", "decayed_names", "hooked", "plain_name", "split", "units"]


@dataclass(frozen=True)
class Place:
    """Where a model is to be spread.

    Attributes:
        sample: An input of the model, with a batch dimension of 1.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    sample: Tensor


@dataclass
class Spread:
    """A model spread over the ranks, and what updates it.

    Attributes:
        model: As it is called.
        inner: The module whose names its parameters have in a checkpoint.
        optimizer: The optimizer to step.
        readers: How many different parts a batch is divided into.
        reader: Which of them this rank computes.
        accumulating: Entered for every microbatch of a step but the last.
        keeps_gradients: Whether gradients must be zeroed in place.
        hook: What sends the gradients, where ``--comm-hook`` says how.
    """

    model: nn.Module
    inner: nn.Module
    optimizer: torch.optim.Optimizer
    readers: int = 1
    reader: int = 0
    accumulating: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    keeps_gradients: bool = False
    hook: CommHookState | ShardedHookState | None = None

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients over the ranks in a step's last microbatch alone."""
        return nullcontext() if last else self.accumulating()

    def zero_grad(self) -> None:
        """Forget this step's gradients."""
        if self.keeps_gradients:
            self.model.zero_grad(set_to_none=False)
        else:
            self.optimizer.zero_grad()


def all_read(
    place: Place,
    model: nn.Module,
    inner: nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulating: Callable[[], AbstractContextManager[None]],
    *,
    keeps_gradients: bool = False,
) -> Spread:
    """Return a spread of which each rank computes its own part of the batch."""
    ranks = place.ranks
    return Spread(
        model, inner, optimizer, ranks.world_size, ranks.rank, accumulating, keeps_gradients
    )


def hooked(wrapped: nn.Module, place: Place) -> CommHookState | ShardedHookState | None:
    """Have gradients sent as ``--comm-hook`` says."""
    wire = place.config.comm_hook
    if wire is None:
        return None
    try:
        return register(wrapped, wire)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--comm-hook {wire}: {error}") from None


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
