"""The fp32-master loop that everybody writes by hand, and half-precision models to train by it."""

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
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def half_away(value: Tensor) -> Tensor:
    """The bfloat16 nearest to each value, of two as near the larger in magnitude: in float64."""
    exact = value.double().abs()
    _, exponent = torch.frexp(exact)  # bfloat16 has 8 bits, or a multiple of 2^-133
    unit = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-125) - 8)
    rounded = torch.floor(exact / unit + 0.5) * unit
    return torch.copysign(rounded, value.double()).to(BF16)


class ByHand:
    """float32 copies of what a rank holds: gradients cast and unscaled by hand, values put back.

    Args:
        parameters: The model's, of any dtype.
        make: Makes the optimizer over the copies.
        split: Whether values are rounded as those of split masters are.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        split: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.copies = [local(p.detach()).clone().float() for p in self.parameters]
        self.optimizer = make(self.copies)
        self.rounded: Callable[[Tensor], Tensor] = half_away if split else torch.clone

    def unscale(self, scale: float) -> bool:
        """Set the copies' gradients; returns whether all of them are finite."""
        finite = True
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None
            if parameter.grad is not None:
                wide = local(parameter.grad).float()
                wide = wide.coalesce() if wide.is_sparse else wide
                copy.grad = wide * (1.0 / scale)
                values = copy.grad._values() if copy.grad.is_sparse else copy.grad
                finite = finite and bool(values.isfinite().all())
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
    """A small model of this dtype, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)).to(dtype)


def spread(model: Any, layout: str) -> Any:
    """The model over two ranks, or four in layouts of two dimensions; ``""`` for none."""
    if layout.startswith("bucket"):  # of DDP
        return DistributedDataParallel(model, gradient_as_bucket_view=layout == "bucket views")
    if "TP" in layout:
        over = mesh((2, 2), ("shard", "tensor"))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, over["tensor"], plan)
        return model if layout == "TP" else fully_shard(model, mesh=over["shard"])
    if layout == "HSDP":
        return fully_shard(model, mesh=mesh((2, 2), ("copies", "shard")))
    return fully_shard(model, mesh=mesh((2,), ("shard",))) if layout == "FSDP2" else model


def one_master(*values: float, dtype: torch.dtype = F16, split: bool = False) -> Any:
    """One parameter of low precision whose master an SGD steps by the gradient."""
    parameter = leaf(*(values or (0.0,)), dtype=BF16 if split else dtype)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return parameter, optimizer, MasterParameters(optimizer, split=split)


master_scaler = functools.partial(cpu_scaler, fp16_grads="master")


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def loss_of(model: nn.Module, batch: int, factor: float = 1.0) -> Tensor:
    """The loss of one seeded batch."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - 1.0).square().mean() * factor


class Job:
    """A model, an optimizer, masters and a scaler, made anew as after a restart."""

    def __init__(self, seed: int = 0, *, split: bool = False, layout: str = "") -> None:
        self.model = spread(half_mlp(seed, BF16 if split else F16), layout)
        self.optimizer = adamw(self.model.parameters())
        self.masters = MasterParameters(self.optimizer, split=split)
        self.scaler = master_scaler()
        self.parts = {"model": self.model, "optimizer": self.optimizer, "masters": self.masters}
        self.rank = dist.get_rank() if layout else 0

    def train(self, *steps: int) -> Job:
        for step in steps:
            self.optimizer.zero_grad()
            self.scaler.scale(loss_of(self.model, 10 * step + self.rank)).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, state: dict[str, Any], order: Iterable[str]) -> Job:
        for name in order:
            self.parts[name].load_state_dict(state[name])
        return self

    def saved(self) -> dict[str, Any]:
        return through_a_file(self.state())

    def values(self) -> list[Tensor]:
        """Of the model, the masters and the optimizer's state, as they are from now on."""
        masters = [*self.masters.state_dict()["masters"].values()]
        state = self.optimizer.state_dict()["state"].values()
        kept = [v for each in state for v in each.values() if isinstance(v, Tensor)]
        return [local(v.detach()) for v in (*self.model.parameters(), *masters, *kept)]
