"""The fp32-master loop that everybody writes by hand, and float16 models to train by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distamp import DistGradScaler
from tests.place import device_type

__all__ = ["ByHand", "half_mlp", "local", "master_scaler"]


class ByHand:
    """float32 copies, gradients cast and unscaled by hand, values copied back.

    Args:
        parameters: The model's, of any dtype. Under a wrapper this rank's own part of them.
        make: Makes the optimizer over the copies.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = list(parameters)
        self.copies = [local(p).detach().clone().float() for p in self.parameters]
        self.optimizer = make(self.copies)

    def unscale(self, scale: float) -> bool:
        """Set the copies' gradients; returns whether all of them are finite."""
        finite = True
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                if gradient.is_sparse:
                    gradient = gradient.float().coalesce()
                copy.grad = gradient.float() * (1.0 / scale)
                values = copy.grad._values() if copy.grad.is_sparse else copy.grad
                finite = finite and bool(values.isfinite().all())
        return finite

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies and round them into the parameters."""
        self.optimizer.step()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            local(parameter).copy_(copy)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, to be written to."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def half_mlp(seed: int = 0, dtype: torch.dtype = torch.float16) -> nn.Module:
    """A small model of this dtype, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)).to(dtype)


def master_scaler(init_scale: float = 1024.0, **settings: object) -> DistGradScaler:
    """The scaler under test."""
    return DistGradScaler(device_type(), init_scale=init_scale, fp16_grads="master", **settings)
