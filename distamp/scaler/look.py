"""Look at the gradients of one optimizer on this rank: a value comes back, nothing is raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from distamp.gradients import flag_of

__all__ = ["Local", "looked_at", "nothing_found"]


@dataclass(slots=True)
class Local:
    """What one rank found in the gradients of one optimizer.

    Args:
        flags: 0-d float32, one for each device that holds gradients; 1 where there is inf or NaN.
        error: Why they could not be looked at.
    """

    flags: Sequence[Tensor] = field(default_factory=list)
    error: Exception | None = None


def looked_at(look: Callable[..., Local], *args: Any) -> Local:
    """Return what ``look`` finds.

    The one place that catches what can go wrong on one rank before a message: the error travels
    in it, so that every rank raises and none is left waiting.
    """
    try:
        return look(*args)
    except Exception as error:
        return nothing_found(error)


def nothing_found(error: Exception | None = None) -> Local:
    """Return what a rank has to say that could not look."""
    return Local(flags=[flag_of(False, "cpu")], error=error)
