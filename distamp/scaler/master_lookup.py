"""From an optimizer or a parameter to the masters that stand in its place, and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distamp.scaler.gradients import inner_optimizer, parameters_of

if TYPE_CHECKING:
    from distamp.scaler.master import MasterParameters

__all__ = [
    "all_masters",
    "carriers",
    "master_params",
    "masters_of",
    "model_parameter",
    "register",
    "stepped_in_place_of",
    "with_their_masters",
]

# A scaler is given optimizers and finds their masters here; they live as long as their optimizer.
_MASTERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, MasterParameters] = (
    weakref.WeakKeyDictionary()
)


def register(optimizer: torch.optim.Optimizer, masters: MasterParameters) -> None:
    """Let `masters_of` find ``masters``."""
    _MASTERS[optimizer] = masters


def masters_of(optimizer: torch.optim.Optimizer) -> MasterParameters | None:
    """Return the master parameters of an optimizer, or of the one it wraps; None without any."""
    if not _MASTERS:  # asked several times in each step
        return None
    found = _MASTERS.get(optimizer)
    if found is None and (inner := inner_optimizer(optimizer)) is not None:
        found = _MASTERS.get(inner)
    return found


def all_masters() -> list[MasterParameters]:
    """Return the master parameters of every optimizer alive."""
    return list(dict.fromkeys(_MASTERS.values()))


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what the optimizer steps on this rank: masters, and parameters that have none.

    As ``apex.amp.master_params``: what to clip by hand, after ``scaler.unscale_(optimizer)``.
    """
    masters = masters_of(optimizer)
    yield from parameters_of(optimizer) if masters is None else masters.stepped()


def carriers(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor whose ``.grad`` may be a gradient of this optimizer.

    Its parameters; masters, and the parameters that backward fills in their place.
    """
    parameters = parameters_of(optimizer)
    masters = masters_of(optimizer)
    if masters is None:
        return parameters
    everyone = [*parameters, *masters.sources(), *masters.stepped()]
    return list({id(tensor): tensor for tensor in everyone}.values())


def stepped_in_place_of(
    parameters: Sequence[Tensor], owners: Sequence[torch.optim.Optimizer]
) -> list[Tensor]:
    """Return what is stepped on this rank for ``parameters``: masters where there are any.

    Leaves out what another rank steps (under ZeroRedundancyOptimizer and OSS).
    """
    steps: dict[int, Tensor | None] = {}
    for masters in filter(None, map(masters_of, owners)):
        steps.update((id(parameter), None) for parameter in masters.elsewhere())
        steps.update((id(parameter), master) for parameter, master in masters.pairs())
    found = (steps.get(id(parameter), parameter) for parameter in parameters)
    return [parameter for parameter in found if parameter is not None]


def model_parameter(tensor: Tensor) -> Tensor:
    """Return the model's own parameter behind a master; anything else as it is."""
    found = (masters.parameter_of(tensor) for masters in all_masters())
    return next((parameter for parameter in found if parameter is not None), tensor)


def with_their_masters(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each named parameter, and under the same name its master or what it is master of."""
    sets = all_masters()
    for name, tensor in named:
        yield name, tensor
        for masters in sets:
            other = masters.master_of(tensor)
            other = masters.parameter_of(tensor) if other is None else other
            if other is not None:
                yield name, other
