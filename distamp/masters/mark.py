"""A mark on a parameter that has a master, so that it gets no second one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from distamp.masters.masters import MasterParameters

__all__ = ["mark", "refuse_second_master"]


class _Mark:
    """Stands on a parameter that has a master; a copy of the parameter has none."""

    def __init__(self, masters: MasterParameters | None = None) -> None:
        self._masters = None if masters is None else weakref.ref(masters)

    @property
    def is_live(self) -> bool:
        """Whether the master and its optimizer are still there."""
        masters = None if self._masters is None else self._masters()
        return masters is not None and masters.optimizer is not None

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


def mark(parameter: Tensor, masters: MasterParameters) -> None:
    """Note that a parameter has a master among these."""
    parameter._distamp_master = _Mark(masters)  # type: ignore[attr-defined]


def refuse_second_master(parameter: Tensor, before: Sequence[Tensor]) -> None:
    """Refuse a parameter that has a master, or stands among those ``before`` it.

    Raises:
        ValueError: It does.
    """
    its = getattr(parameter, "_distamp_master", None)
    if any(parameter is other for other in before) or (its is not None and its.is_live):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has a master already, in this or "
            "another optimizer; two masters would differ, so give it to one optimizer, once"
        )
