"""A step whose optimizer evaluates the loss itself, once or many times (LBFGS)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from distamp.optimizers import parameters_of

__all__ = ["step_or_restore"]


class _Overflow(Exception):
    """Unwinds ``optimizer.step`` when an evaluation overflowed."""


def step_or_restore(
    given: Any,
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any],
    overflowed: Callable[[Exception | None], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``optimizer.step`` with a closure whose every evaluation is unscaled and checked.

    An overflow or an error in any evaluation ends the step, and parameters and optimizer state are
    put back to what they were before it, which takes one copy of both while the step runs.

    Args:
        given: What is stepped: the optimizer, or a framework's wrapper of it.
        optimizer: The optimizer, whose parameters and state are put back.
        closure: The user's: zeroes gradients, computes the loss, runs the scaled backward pass.
        overflowed: Unscales the gradients of one evaluation and returns whether a rank overflowed;
            raises, on every rank, the error that the closure raised on one.
        args: Positional arguments of ``step``, the closure among them or not.
        kwargs: Keyword arguments of ``step``, the closure among them or not.

    Returns:
        What ``optimizer.step`` returned, or None where it was put back.
    """

    def evaluate() -> Any:
        loss, error = None, None
        try:
            with torch.enable_grad():
                loss = closure()
        except Exception as raised:
            error = raised
        if overflowed(error):
            raise _Overflow
        return loss

    args = tuple(evaluate if argument is closure else argument for argument in args)
    kwargs = {k: evaluate if value is closure else value for k, value in kwargs.items()}
    parameters = parameters_of(optimizer)
    values = [parameter.detach().clone() for parameter in parameters]
    state = {parameter: copy.deepcopy(kept) for parameter, kept in optimizer.state.items()}
    try:
        return given.step(*args, **kwargs)
    except Exception as error:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        if isinstance(error, _Overflow):
            return None
        raise
