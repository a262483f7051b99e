"""Training steps of one parameter with a gradient that the test chooses."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distamp import DistGradScaler

INF, NAN = float("inf"), float("nan")


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter of one dimension with these values."""
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def sgd(*values: float, lr: float = 1.0, **settings: Any) -> tuple[nn.Parameter, torch.optim.SGD]:
    """Return a parameter and its SGD. With a rate of 1 a step subtracts the gradient."""
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
    **step_arguments: Any,
) -> Any:
    """Run one iteration with this gradient, and return the result of ``scaler.step``.

    Keyword arguments other than ``unscale`` are arguments of ``scaler.step``.
    """
    optimizer.zero_grad()
    backward(scaler, parameter, gradient)
    if unscale:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer, **step_arguments)
    scaler.update()
    return result


def cpu_scaler(init_scale: float = 1024.0, **settings: Any) -> DistGradScaler:
    """Return our scaler for the CPU."""
    return DistGradScaler("cpu", init_scale=init_scale, **settings)


def through_a_file(state: Any) -> Any:
    """Save a state, and load it with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def torchs_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without our key."""
    return {key: value for key, value in state.items() if key != "distamp"}


def torch_scaler(init_scale: float = 1024.0, **settings: Any) -> torch.amp.GradScaler:
    """Return torch's scaler for the CPU."""
    return torch.amp.GradScaler("cpu", init_scale=init_scale, **settings)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """Call a function, and return the name and the text of its error, or None.

    Errors of any type count, also that of a collective on a rank that lost its peers, so a test
    compares the name or the text.
    """
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None
