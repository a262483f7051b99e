"""The fp32-master loop that everybody writes by hand, and float16 models to train by it."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from distamp import DistGradScaler

__all__ = ["ByHand", "half_mlp", "master_scaler"]


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
