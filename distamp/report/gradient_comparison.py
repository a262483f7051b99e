"""The result of compare_gradients: a row for each parameter, as text and as JSON types."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from distamp.error_text import count_text, ranks_text
from distamp.report.formatting import JsonResult, shorten
from distamp.report.gradient_causes import FROZEN, MISSING, NOT_FINITE, NOT_REDUCED

__all__ = ["GradientComparison", "GradientRow"]

# A factor explains a difference if it leaves less than this, and the residual is not printed.
_SMALL_RESIDUAL = 1e-4
# Parameters with the same line are listed by name up to this number.
_LISTED = 2


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter, compared with the gradient of the reference.

    Attributes:
        name: The name of the parameter in the reference.
        factor: The factor of the reference's gradient that fits best, or None if the reference's
            gradient is zero.
        residual: The norm of the difference after the factor, relative to the reference's gradient.
        error: The norm of the difference, relative to the reference's gradient.
        cause: The likely cause of the difference, or "" for a gradient that matches.
        axis: The axis of the layout to which the cause belongs, or "".
        other_axes: Further axes of the same size, which fit the numbers as well.
        ranks: The ranks that differ; all ranks that hold the parameter if empty.
        detail: Further words, such as the dtype of a reduction.
    """

    name: str
    factor: float | None
    residual: float
    error: float
    cause: str = ""
    axis: str = ""
    other_axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    detail: str = ""

    def with_details(
        self, other_axes: tuple[str, ...], ranks: tuple[int, ...], detail: str
    ) -> GradientRow:
        """Return the row with further axes, ranks and words."""
        return dataclasses.replace(self, other_axes=other_axes, ranks=ranks, detail=detail)

    def __str__(self) -> str:
        return f"{self.name}: {self.describe()}"

    def describe(self) -> str:
        """Return the line about the parameter without its name."""
        if not self.cause:
            return f"matches the reference ({self.error:.1e} apart)"
        text = self._amount_text()
        if self.axis:
            text += f" on {self.axis}"
        if self.ranks:
            text += f" on {ranks_text(self.ranks)}"
        text += f": {self.cause}"
        if self.axis and self.cause not in (MISSING, FROZEN):
            axes = " or ".join([self.axis, *self.other_axes])
            text += f" over {axes}"
        if self.detail:
            text += f" ({self.detail})"
        return text

    def _amount_text(self) -> str:
        if self.cause == NOT_FINITE:
            return "inf or NaN"
        if self.cause in (MISSING, FROZEN) or self.factor == 0:
            return "no gradient"
        if self.factor is None:
            return "no gradient in the reference"
        text = f"{self.factor:.2f} of the reference"
        # The difference between ranks is the residual of a gradient that was not reduced.
        is_explained = self.cause == NOT_REDUCED and not self.detail
        if self.residual > _SMALL_RESIDUAL and not is_explained:
            text += f", {self.residual:.2g} left"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; numbers that are not finite are None."""
        values: dict[str, Any] = {}
        for key, value in dataclasses.asdict(self).items():
            if isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, float) and not math.isfinite(value):
                value = None
            values[key] = value
        return values


@dataclass(frozen=True)
class GradientComparison(JsonResult):
    """The gradients of a sharded model against the reference, equal on every rank.

    Attributes:
        rows: A row for each parameter that the reference trains, in the reference's order.
        tolerance: The largest relative difference of a gradient that matches.
        dtype: The lowest dtype in which the models computed.
    """

    rows: tuple[GradientRow, ...]
    tolerance: float
    dtype: str

    @property
    def differences(self) -> tuple[GradientRow, ...]:
        """The rows of gradients that differ."""
        return tuple(row for row in self.rows if row.cause)

    @property
    def matches(self) -> bool:
        """True if all gradients match the reference."""
        return not self.differences

    def __str__(self) -> str:
        settings = f"(tolerance {self.tolerance:.1e}, computed in {self.dtype})"
        total = count_text(len(self.rows), "gradient")
        if self.matches:
            largest = max((row.error for row in self.rows), default=0.0)
            return f"{total} of the reference matched, at most {largest:.1e} apart {settings}"
        lines = [f"{len(self.differences)} of {total} differ from the reference {settings}"]
        names_by_text: dict[str, list[str]] = {}
        for row in self.differences:
            names_by_text.setdefault(row.describe(), []).append(row.name)
        for text, names in names_by_text.items():
            label = ", ".join(names)
            if len(names) > _LISTED:
                count = count_text(len(names), "parameter")
                label = f"{count} ({shorten(names)})"
            lines.append(f"{label}: {text}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        return {
            "matches": self.matches,
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "rows": [row.to_dict() for row in self.rows],
        }
