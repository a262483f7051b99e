"""A training loop with float32 copies by hand, and half-precision models for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distamp.scaler import MasterParameters
from tests.ranks import mesh
from tests.scaler.steps import cpu_scaler, leaf, through_a_file

__all__ = [
    "ByHand",
    "Job",
    "adamw",
    "half_away",
    "half_mlp",
    "local",
    "loss_of",
    "master_scaler",
    "one_master",
    "spread",
]

F16, BF16 = torch.float16, torch.bfloat16


def local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, or the whole of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def half_away(value: Tensor) -> Tensor:
    """Round to the nearest bfloat16, and ties away from zero; in float64."""
    exact = value.double().abs()
    _, exponent = torch.frexp(exact)
    # A bfloat16 has 8 significant bits, and subnormal ones are multiples of 2^-133.
    unit = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-125) - 8)
    rounded = torch.floor(exact / unit + 0.5) * unit
    return torch.copysign(rounded, value.double()).to(BF16)


class ByHand:
    """float32 copies of the parameters or shards of a rank, which a loop by hand trains.

    Args:
        parameters: The parameters of a model, of any dtype.
        make_optimizer: Function that returns the optimizer over the copies.
        split: Whether copies are rounded into parameters as split masters are.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        split: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.copies = [local(p.detach()).clone().float() for p in self.parameters]
        self.optimizer = make_optimizer(self.copies)
        self.rounded: Callable[[Tensor], Tensor] = half_away if split else torch.clone

    def unscale(self, scale: float) -> bool:
        """Set the gradients of the copies, and return whether all of them are finite."""
        finite = True
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad).float()
            if gradient.is_sparse:
                gradient = gradient.coalesce()
            copy.grad = gradient * (1.0 / scale)
            values = copy.grad._values() if copy.grad.is_sparse else copy.grad
            if not values.isfinite().all():
                finite = False
        return finite

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies and round them into the parameters."""
        self.optimizer.step()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            local(parameter).copy_(self.rounded(copy))

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def half_mlp(seed: int = 0, dtype: torch.dtype = F16) -> nn.Module:
    """Return a small model of this dtype with seeded weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))
    return model.to(dtype)


def spread(model: Any, layout: str) -> Any:
    """Return the model in a layout over two ranks, or over four for a mesh of two dimensions.

    The layout ``""`` returns the model unchanged, for one process.
    """
    if layout == "buckets":
        return DistributedDataParallel(model)
    if layout == "bucket views":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if layout == "FSDP2":
        return fully_shard(model, mesh=mesh((2,), ("shard",)))
    if layout == "HSDP":
        return fully_shard(model, mesh=mesh((2, 2), ("copies", "shard")))
    if layout in ("TP", "FSDP2 x TP"):
        grid = mesh((2, 2), ("shard", "tensor"))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, grid["tensor"], plan)
        if layout == "FSDP2 x TP":
            fully_shard(model, mesh=grid["shard"])
        return model
    assert layout == ""
    return model


def one_master(*values: float, dtype: torch.dtype = F16, split: bool = False) -> Any:
    """Return a half-precision parameter, its SGD with a rate of 1, and the masters."""
    if split:
        dtype = BF16
    parameter = leaf(*(values or (0.0,)), dtype=dtype)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return parameter, optimizer, MasterParameters(optimizer, split=split)


master_scaler = functools.partial(cpu_scaler, fp16_grads="master")


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def loss_of(model: nn.Module, batch: int, factor: float = 1.0) -> Tensor:
    """Return the loss of one seeded batch."""
    generator = torch.Generator().manual_seed(batch)
    inputs = torch.randn(4, 8, generator=generator)
    dtype = next(model.parameters()).dtype
    outputs = model(inputs.to(dtype)).float()
    return (outputs - 1.0).square().mean() * factor


class Job:
    """A model, an optimizer, masters and a scaler, as in a process after its start."""

    def __init__(self, seed: int = 0, *, split: bool = False, layout: str = "") -> None:
        self.model = spread(half_mlp(seed, BF16 if split else F16), layout)
        self.optimizer = adamw(self.model.parameters())
        self.masters = MasterParameters(self.optimizer, split=split)
        self.scaler = master_scaler()
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "masters": self.masters,
        }
        self.rank = dist.get_rank() if layout else 0

    def train(self, *steps: int) -> Job:
        """Train on the batches of these steps."""
        for step in steps:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, 10 * step + self.rank)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self

    def state(self) -> dict[str, Any]:
        """Return the states of the model, the optimizer and the masters."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, state: dict[str, Any], order: Iterable[str]) -> Job:
        """Load the states of the named parts in this order."""
        for name in order:
            self.parts[name].load_state_dict(state[name])
        return self

    def saved(self) -> dict[str, Any]:
        """Return the states as a file gives them back."""
        return through_a_file(self.state())

    def values(self) -> list[Tensor]:
        """Return the weights, the masters and the state of the optimizer on this rank."""
        values = [parameter.detach() for parameter in self.model.parameters()]
        values.extend(self.masters.state_dict()["masters"].values())
        optimizer_state = self.optimizer.state_dict()["state"]
        for state in optimizer_state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    values.append(value)
        return [local(value.detach()) for value in values]
