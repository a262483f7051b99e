"""The precision report as a value: rows of the kernels that ran, their sums, a table and JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

from distamp.report.findings import Findings, find_risks
from distamp.report.op_row import OpRow, collapsed

__all__ = [
    "OUTSIDE",
    "PrecisionReport",
    "Written",
    "short",
    "text_table",
]

# The module column of kernels that ran in the block but in no module of the model.
OUTSIDE = "(outside)"
_FORMAT = 2
# The short names that the field uses in tables.
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_HEADINGS = ("phase", "module", "op", "in", "out", "calls", "casts", "cast KiB")
_CAUSES = ("autocast", "explicit", "autograd")


class Written:
    """Base class of results that are written as JSON: reports, preflights, violations."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        raise NotImplementedError

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write the result to a file as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


class PrecisionReport(Written):
    """The kernels that a model ran, with their modules, phases, dtypes and casts.

    ``print(report)`` shows a table. :attr:`settings` contains the autocast region or the pin that
    each module ran under.

    The report counts every kernel below autograd and autocast, as a
    ``torch.utils._python_dispatch.TorchDispatchMode`` around the same block does. A cast is a
    ``_to_copy``, ``to``, ``copy_`` or ``_foreach_copy_`` that changes a tensor's dtype. Its cause
    is autocast if the cast runs inside a torch function with autocast on. The cause is the user's
    code if autocast is off, if the function is a conversion (``Tensor.to``, ``float``, ``half``,
    ...), or if the function received ``dtype=``. The gradient of a cast has the cause of that
    cast. The cause of a cast inside a backward kernel is autograd.

    Args:
        rows: The rows, or a function that returns the present rows.
        model: The model's class name.
        device: The caller's description of the device, such as ``"cuda, float16, simulated"``.
        settings: The autocast region or the pin that each module ran under, by module name.
        notes: Sentences about the limits of the report, such as that compiled code ran eagerly.
    """

    def __init__(
        self,
        rows: Iterable[OpRow] | Callable[[], Iterable[OpRow]] = (),
        model: str = "",
        device: str = "",
        settings: Mapping[str, str] | None = None,
        notes: Iterable[str] | Callable[[], Iterable[str]] = (),
    ) -> None:
        self._rows = rows if callable(rows) else tuple(rows)
        self.model = model
        self.device = device
        self.settings = {} if settings is None else settings
        self._notes = notes if callable(notes) else tuple(notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the limits of the report; inside its block, the sentences so far."""
        return tuple(self._notes() if callable(self._notes) else self._notes)

    @property
    def rows(self) -> tuple[OpRow, ...]:
        """The rows of all kernels; inside the block of the report, the rows so far."""
        return tuple(self._rows() if callable(self._rows) else self._rows)

    @property
    def calls(self) -> int:
        """The number of kernel calls in all rows."""
        return sum(row.calls for row in self.rows)

    @property
    def casts(self) -> int:
        """The number of casts in all rows."""
        return sum(row.casts for row in self.rows)

    @property
    def casts_by_cause(self) -> dict[str, int]:
        """The number of casts for each cause: autocast, explicit and autograd."""
        casts = dict.fromkeys(_CAUSES, 0)
        for row in self.rows:
            if row.cause:
                casts[row.cause] += row.casts
        return casts

    @property
    def bytes_read(self) -> int:
        """The bytes that casts read."""
        return sum(row.bytes_read for row in self.rows)

    @property
    def bytes_written(self) -> int:
        """The bytes that casts wrote."""
        return sum(row.bytes_written for row in self.rows)

    def findings(self) -> Findings:
        """Return the places that half precision may spoil; ``print`` shows a line for each.

        The rules look at the dtypes of kernels and at the number of terms in a sum, and not at
        values. They cover losses, softmax, norms, long sums, and sums of gradients.

        Returns:
            A tuple of :class:`distamp.report.Finding`, ordered by rule and module.
        """
        return find_risks(self.rows)

    def table(self, *, collapse: bool = True, views: bool = False) -> str:
        """Return the report as plain text.

        Args:
            collapse: Show modules as one (``h.*.attn``) if their names differ only by an index.
            views: Show ops that only give a new view, which compute nothing.
        """
        notes = [f"note: {note}" for note in self.notes]
        table = text_table(_HEADINGS, self._cells(collapse, views))
        return "\n".join([self._title(), *notes, *table])

    def __str__(self) -> str:
        return self.table()

    def _title(self) -> str:
        about = ", ".join(part for part in (self.model, self.device) if part) or "no model"
        by_autocast = self.casts_by_cause["autocast"]
        return (
            f"{about}: {self.calls:,} kernels, {self.casts:,} casts, {by_autocast:,} by autocast, "
            f"{self.bytes_written / 2**20:,.1f} MiB written by casts"
        )

    def _cells(self, collapse: bool, views: bool) -> list[tuple[str, ...]]:
        shown = collapsed({(row.module, row.kind) for row in self.rows}) if collapse else {}
        visible = []
        for row in self.rows:
            if views or row.cause or not row.view:
                visible.append(replace(row, module=shown.get(row.module, row.module)))
        merged = _merged(visible)
        # Each phase together, modules in the order in which they first ran.
        order: dict[str, int] = {}
        for row in merged:
            order.setdefault(row.module, len(order))
        merged.sort(key=lambda row: (len(row.phase) != 7, row.phase, order[row.module]))
        cells = []
        for place, rows in itertools.groupby(merged, key=lambda row: (row.phase, row.module)):
            first = (place[0], place[1] or "(model)")
            for row in rows:
                cells.append((*first, row.label, *_numbers(row)))
                first = ("", "")
        return cells

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        totals = {"calls": self.calls, "casts": self.casts}
        for cause, casts in self.casts_by_cause.items():
            totals[f"{cause}_casts"] = casts
        totals["bytes_read"] = self.bytes_read
        totals["bytes_written"] = self.bytes_written
        values: dict[str, Any] = {"format": _FORMAT}
        values["model"] = self.model
        values["device"] = self.device
        values["settings"] = dict(self.settings)
        values["notes"] = list(self.notes)
        values["totals"] = totals
        values["rows"] = [asdict(row) for row in self.rows]
        return values


def short(dtype: object) -> str:
    """Return the name of a dtype in tables: ``"bf16"`` for ``torch.bfloat16``."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def _merged(rows: Iterable[OpRow]) -> list[OpRow]:
    """Add up the counts of rows that are otherwise equal, in order of appearance."""
    merged: dict[OpRow, OpRow] = {}
    for row in rows:
        key = replace(row, calls=0, casts=0, bytes_read=0, bytes_written=0, length=0)
        total = merged.get(key, key)
        calls = total.calls + row.calls
        casts = total.casts + row.casts
        bytes_read = total.bytes_read + row.bytes_read
        bytes_written = total.bytes_written + row.bytes_written
        length = max(total.length, row.length)
        merged[key] = replace(
            row,
            calls=calls,
            casts=casts,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            length=length,
        )
    return list(merged.values())


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 3
) -> list[str]:
    """Return the lines of a table; the last ``numbers`` columns are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    sides = ["<"] * (len(widths) - numbers) + [">"] * numbers
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [line.format(*cells).rstrip() for cells in (headings, *rows)]


def _numbers(row: OpRow) -> tuple[str, ...]:
    """Return the cells of a row from its dtypes on."""
    return (
        ", ".join(map(short, row.inputs)),
        ", ".join(map(short, row.outputs)),
        f"{row.calls:,}",
        f"{row.casts:,}" if row.casts else "",
        f"{row.bytes_written / 1024:,.1f}" if row.casts else "",
    )
