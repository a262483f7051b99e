"""Optimizer state and checkpoints of master parameters: what is moved, read and refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from distamp.gradients import is_dtensor
from distamp.masters.lookup import masters_of
from distamp.optimizers import inner_optimizer, parameters_of

__all__ = ["move_state", "read_masters", "refuse_without_masters"]


def refuse_without_masters(
    optimizer: torch.optim.Optimizer, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse an optimizer that can have no masters.

    Raises:
        TypeError: Not an optimizer.
        ValueError: It has some, holds nothing in ``dtypes``, or steps where nothing can stand
            around it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}; make one "
            "MasterParameters for each optimizer"
        )
    name = type(optimizer).__name__
    if masters_of(optimizer) is not None:
        raise ValueError(
            f"this {name} has master parameters already: masters_of(optimizer) returns them"
        )
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise ValueError(
            f"{name} with overlap_with_ddp=True steps inside the backward pass, before any "
            "gradient could be unscaled into a master; set overlap_with_ddp=False"
        )
    inner = inner_optimizer(optimizer)
    if isinstance(inner, torch.optim.LBFGS):
        raise ValueError(
            f"LBFGS inside {name} evaluates the loss a different number of times on each rank; "
            "use LBFGS itself, or another optimizer inside"
        )
    parameters = parameters_of(optimizer)
    if not any(parameter.dtype in dtypes for parameter in parameters):
        raise ValueError(
            f"{name} holds no float16 or bfloat16 parameter, so there is nothing to make masters "
            "of. The order is: cast the model (model.half()), wrap it (DDP, FSDP), make the "
            "optimizer over the wrapped model's parameters, then MasterParameters(optimizer)"
        )
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError(
            f"{name} holds parameters on the meta device, which have no values to copy: "
            "materialise the model (model.to_empty(device=...), then load or initialise it) first"
        )


def move_state(optimizer: torch.optim.Optimizer, parameter: Tensor, master: Tensor) -> None:
    """Give the state that ``parameter`` has to ``master``, in float32."""
    if parameter in optimizer.state:
        optimizer.state[master] = _widened(optimizer.state.pop(parameter), parameter.dtype)


def _widened(state: Any, low: torch.dtype) -> Any:
    """Return ``state`` with every tensor of dtype ``low`` in it as float32."""
    if isinstance(state, Tensor):
        return state.float() if state.dtype is low else state
    if isinstance(state, dict):
        return {key: _widened(value, low) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_widened(value, low) for value in state)
    return state


def read_masters(
    state: Mapping[str, Any], own: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return each master of ``own`` with its saved value, once all of them are known to fit.

    Raises:
        TypeError: ``state`` is not a dict.
        ValueError: The saved masters are not those of ``own``.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            "a state of master parameters is the dict that masters.state_dict() returned, not "
            f"{state!r:.80}"
        )
    version, saved = state.get("version"), state.get("masters")
    if not isinstance(version, int) or version != 1 or not isinstance(saved, Mapping):
        raise ValueError(
            "this is not a state of master parameters (a dict with 'version': 1 and 'masters'); it "
            f"has the keys {sorted(map(str, state))}"
        )
    if saved.keys() != own.keys():
        raise ValueError(
            f"the state holds masters of parameters {_listed(saved)} of the optimizer, here there "
            f"are masters of {_listed(own)}: load it into the same model and optimizer, frozen in "
            "the same places"
        )
    for number, master in own.items():
        value = saved[number]
        if not isinstance(value, Tensor) or value.is_complex():
            raise ValueError(
                f"the saved master of parameter {number} must be a tensor of real numbers, not "
                f"{value!r:.80}"
            )
        if value.shape != master.shape or is_dtensor(value) != is_dtensor(master):
            raise ValueError(
                f"the saved master of parameter {number} is {_described(value)}, the one here is "
                f"{_described(master)}"
            )
    return ((master, saved[number]) for number, master in own.items())


def _listed(masters: Mapping[int, Tensor]) -> str:
    numbers = sorted(masters, key=str)
    if len(numbers) > 8:
        return f"{numbers[:4]} ... {numbers[-2:]} ({len(numbers)} in all)"
    return str(numbers)


def _described(tensor: Tensor) -> str:
    placed = f" placed {tensor.placements}" if is_dtensor(tensor) else ""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{placed}"
