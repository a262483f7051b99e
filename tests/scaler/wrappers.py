"""Optimizers as frameworks wrap or write them, for tests of what the scaler makes of them."""

from typing import Any

import torch

__all__ = ["Accelerated", "Bare", "Fabric", "Lightning"]


class Lightning:
    """As lightning.pytorch.core.optimizer.LightningOptimizer: no Optimizer, passes on by name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Fabric:
    """As lightning.fabric.wrappers._FabricOptimizer: takes the state of the one inside over."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {
            k: v for k, v in optimizer.__dict__.items() if k not in ("state_dict", "step")
        }
        self.__class__ = type("Fabric" + type(optimizer).__name__, (Fabric, type(optimizer)), {})
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class Accelerated(torch.optim.Optimizer):
    """As accelerate.optimizer.AcceleratedOptimizer: an Optimizer that has no groups of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Bare:
    """Only ``.optimizer`` and what a loop calls."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.step(*args, **kwargs)
