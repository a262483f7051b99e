"""A precision report as a table: plain text with torch alone, or through rich."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distamp.autocast.report.rows import PHASES, OpRow, Totals, collapse, merge, total

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["DTYPE_NAMES", "as_rich", "as_text", "human_bytes", "text_table"]

# The short names that the field uses in tables.
DTYPE_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
}
_HEADINGS = ("module", "op", "in", "out", "calls", "casts", "cast bytes", "hits")
_RIGHT = (4, 5, 6, 7)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the table: an op of a module, or of several modules alike."""

    module: str
    op: str
    inputs: str
    outputs: str
    calls: int
    casts: int
    bytes_cast: int
    hits: int

    def cells(self, first: bool) -> tuple[str, ...]:
        return (
            self.module if first else "",
            self.op,
            self.inputs,
            self.outputs,
            f"{self.calls:,}",
            f"{self.casts:,}" if self.casts else "",
            human_bytes(self.bytes_cast) if self.casts else "",
            f"{self.hits:,}" if self.hits else "",
        )


def human_bytes(count: float) -> str:
    """A number of bytes with a binary unit: 512 B, 1.5 KiB, 22.1 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Lines of a table, columns aligned, with a rule under its headings."""
    widths = [max(map(_width, column)) for column in zip(headings, *rows, strict=True)]
    lines = [_line(headings, widths, right), "  ".join("-" * width for width in widths)]
    return lines + [_line(row, widths, right) for row in rows]


def as_text(
    rows: Iterable[OpRow], model: str, device: str, *, collapse: bool = True, views: bool = False
) -> str:
    """The report as plain text: totals first, then a section for each phase."""
    rows = tuple(rows)
    out = [_title(model, device), *_summary(rows)]
    for phase in PHASES:
        lines = _lines(rows, phase, together=collapse, views=views)
        if lines:
            cells = [line.cells(first) for line, first in _firsts(lines)]
            out += ["", phase, *text_table(_HEADINGS, cells, _RIGHT)]
    return "\n".join(out)


def as_rich(rows: Iterable[OpRow], model: str, device: str) -> Group:
    """The report for a rich console, half precision and casts in colour."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = tuple(rows)
    parts: list[Table | Text] = [Text(_title(model, device), style="bold")]
    parts += [Text(line) for line in _summary(rows)]
    for phase in PHASES:
        lines = _lines(rows, phase)
        if not lines:
            continue
        table = Table(title=phase, title_justify="left", title_style="bold", box=None)
        for i, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="right" if i in _RIGHT else "left")
        for line, first in _firsts(lines):
            cells = [Text(cell) for cell in line.cells(first)]
            for i in (2, 3):
                cells[i].stylize(_style(cells[i].plain))
            cells[5].stylize("yellow")
            cells[6].stylize("yellow")
            cells[7].stylize("green")
            table.add_row(*cells)
        parts.append(table)
    return Group(*parts)


def _style(dtypes: str) -> str:
    names = set(dtypes.replace(",", "").split())
    if {"fp16", "bf16"} & names and "fp32" in names:
        return "yellow"
    if "fp16" in names:
        return "cyan"
    return "blue" if "bf16" in names else ""


def _title(model: str, device: str) -> str:
    about = ", ".join(part for part in (model, device) if part)
    return f"Precision report{': ' + about if about else ''}"


def _summary(rows: tuple[OpRow, ...]) -> list[str]:
    cells = []
    for phase in (*PHASES, "all"):
        sums = total(row for row in rows if phase in ("all", row.phase))
        if sums.calls:
            cells.append((phase, *_summary_cells(sums)))
    if len(cells) == 2:
        del cells[1]
    headings = ("", "kernels", "casts", "by autocast", "read", "written", "cache hits", "saved")
    return text_table(headings, cells, range(1, 8)) if cells else ["nothing ran"]


def _summary_cells(sums: Totals) -> tuple[str, ...]:
    return (
        f"{sums.calls:,}",
        f"{sums.casts:,}",
        f"{sums.autocast_casts:,}",
        human_bytes(sums.bytes_read),
        human_bytes(sums.bytes_written),
        f"{sums.hits:,}",
        human_bytes(sums.bytes_saved),
    )


def _lines(
    rows: tuple[OpRow, ...], phase: str, *, together: bool = True, views: bool = False
) -> list[_Line]:
    """The table of one phase, modules in the order in which they first ran."""
    chosen = [row for row in rows if row.phase == phase]
    shown = collapse(rows) if together else {row.module: row.module for row in chosen}
    members = {new: sum(1 for each in shown.values() if each == new) for new in shown.values()}
    merged = merge(chosen, lambda row: replace(row, module=shown[row.module], weight=False))
    lines = []
    for module in dict.fromkeys(row.module for row in merged):
        mine = [row for row in merged if row.module == module]
        lines += _module_lines(_module_label(module, members[module]), mine, views)
    return lines


def _module_label(module: str, members: int) -> str:
    name = module or "(model)"
    return f"{name}  x{members}" if members > 1 else name


def _module_lines(label: str, rows: list[OpRow], views: bool) -> list[_Line]:
    """One line for each kernel; casts stand with the first kernel of the function they serve."""
    lines: list[_Line] = []
    functions = dict.fromkeys(row.function for row in rows)
    for function in functions:
        group = [row for row in rows if row.function == function]
        kernels = [row for row in group if not row.cause and (views or not row.view)]
        casts = [row for row in group if row.cause]
        # A hit is where the weight was taken up, which may be a view such as linear's transpose.
        spare = sum(row.hits for row in group if row not in kernels)
        if not kernels:
            lines += [_line_of(label, row, row.casts, row.bytes_written, row.hits) for row in casts]
            continue
        made, written = sum(r.casts for r in casts), sum(r.bytes_written for r in casts)
        main = max(kernels, key=lambda row: row.elements)
        for row in kernels:
            hits = row.hits
            if row is main:
                lines.append(_line_of(label, row, made, written, hits + spare))
            else:
                lines.append(_line_of(label, row, 0, 0, hits))
    return lines


def _line_of(module: str, row: OpRow, casts: int, written: int, hits: int) -> _Line:
    return _Line(
        module,
        row.label,
        _dtypes(row.inputs),
        _dtypes(row.outputs),
        row.calls,
        casts,
        written,
        hits,
    )


def _firsts(lines: list[_Line]) -> Iterable[tuple[_Line, bool]]:
    """Each line and whether it is the first of its module."""
    for _, group in itertools.groupby(lines, key=lambda line: line.module):
        for i, line in enumerate(group):
            yield line, i == 0


def _dtypes(names: tuple[str, ...]) -> str:
    return ", ".join(DTYPE_NAMES.get(name, name) for name in names) or "-"


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    padded = []
    for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - _width(cell))
        padded.append(space + cell if i in right else cell + space)
    return "  ".join(padded).rstrip()


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
