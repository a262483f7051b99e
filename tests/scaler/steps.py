"""Small training steps for the scaler's tests: a parameter whose gradient is what the test says."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distamp import DistGradScaler

INF, NAN = float("inf"), float("nan")


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of these values, one dimension."""
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def sgd(*values: float, lr: float = 1.0, **settings: Any) -> tuple[nn.Parameter, torch.optim.SGD]:
    """One parameter and an SGD over it: with lr 1, a step subtracts the gradient."""
    parameter = leaf(*(values or (1.0,)))
    return parameter, torch.optim.SGD([parameter], lr=lr, **settings)


def backward(scaler: Any, parameter: Tensor, gradient: float | Sequence[float]) -> None:
    """Add ``gradient``, times the loss scale, to ``parameter.grad`` through a scaled loss."""
    weights = torch.as_tensor(gradient, dtype=torch.float32)
    scaler.scale((parameter.float() * weights).sum()).backward()


def iteration(
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    gradient: float | Sequence[float],
    *,
    unscale: bool = False,
    **step: Any,
) -> Any:
    """One whole iteration with this gradient; returns what ``step`` returned, given the rest."""
    optimizer.zero_grad()
    backward(scaler, parameter, gradient)
    if unscale:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer, **step)
    scaler.update()
    return result


def cpu_scaler(init_scale: float = 1024.0, **settings: Any) -> DistGradScaler:
    """The scaler under test."""
    return DistGradScaler("cpu", init_scale=init_scale, **settings)


def through_a_file(state: Any) -> Any:
    """What is read back of a state without unpickling anything but tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def torchs_keys(state: dict[str, Any]) -> dict[str, Any]:
    """A state without our key."""
    return {key: value for key, value in state.items() if key != "distamp"}


def torch_scaler(init_scale: float = 1024.0, **settings: Any) -> torch.amp.GradScaler:
    """The reference, and the peer whose faults are shown beside ours."""
    return torch.amp.GradScaler("cpu", init_scale=init_scale, **settings)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """The name and the text of what ``function`` raised, to be sent to the test; None if nothing.

    Every error counts, that of a collective that nobody answered as well: a test that wants an
    error says which.
    """
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None
