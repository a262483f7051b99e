"""The fp32-master loop that everybody writes by hand, and float16 models to train by it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.scaler import MasterParameters, master_params

__all__ = ["ByHand", "Job", "adamw", "half_mlp", "loss_of", "master_scaler"]


class ByHand:
    """float32 copies, gradients cast and unscaled by hand, values copied back.

    Args:
        parameters: The model's, of any dtype.
        make: Makes the optimizer over the copies.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = list(parameters)
        self.copies = [p.detach().clone().float() for p in self.parameters]
        self.optimizer = make(self.copies)

    def unscale(self, scale: float) -> bool:
        """Set the copies' gradients; returns whether all of them are finite."""
        finite = True
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None
            if (gradient := parameter.grad) is not None:
                wide = gradient.float().coalesce() if gradient.is_sparse else gradient.float()
                copy.grad = wide * (1.0 / scale)
                values = copy.grad._values() if copy.grad.is_sparse else copy.grad
                finite = finite and bool(values.isfinite().all())
        return finite

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies and round them into the parameters."""
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.copies)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def half_mlp(seed: int = 0, dtype: torch.dtype = torch.float16) -> nn.Module:
    """A small model of this dtype, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)).to(dtype)


def master_scaler(init_scale: float = 1024.0, **settings: object) -> DistGradScaler:
    """The scaler under test."""
    return DistGradScaler("cpu", init_scale=init_scale, fp16_grads="master", **settings)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def loss_of(model: nn.Module, batch: int, factor: float = 1.0) -> Tensor:
    """The loss of one seeded batch."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - 1.0).square().mean() * factor


class Job:
    """A model, an optimizer, masters and a scaler, made anew as after a restart."""

    def __init__(self, seed: int = 0) -> None:
        self.model = half_mlp(seed)
        self.optimizer = adamw(self.model.parameters())
        self.masters = MasterParameters(self.optimizer)
        self.scaler = master_scaler()
        self.parts = {"model": self.model, "optimizer": self.optimizer, "masters": self.masters}

    def train(self, *steps: int) -> Job:
        for step in steps:
            self.optimizer.zero_grad()
            self.scaler.scale(loss_of(self.model, step)).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self

    def saved(self) -> dict[str, Any]:
        """What a file holds, read back without unpickling anything but tensors."""
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def values(self) -> list[Tensor]:
        """Of the model, the masters and the optimizer's state, as they are from now on."""
        state = self.optimizer.state_dict()["state"].values()
        kept = [v for each in state for v in each.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *master_params(self.optimizer), *kept]
