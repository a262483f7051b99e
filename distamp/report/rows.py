"""The precision report as a value: rows of what ran, their sums, one table, JSON, a difference."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = [
    "OUTSIDE",
    "OpRow",
    "PrecisionReport",
    "Totals",
    "Written",
    "collapsed",
    "short",
    "text_table",
]

# The module column of what ran inside the block but outside every module of the model.
OUTSIDE = "(outside)"
_FORMAT = 2
# The short names that the field uses in tables.
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_HEADINGS = ("phase", "module", "op", "in", "out", "calls", "casts", "cast KiB")
_COUNTS = ("calls", "casts", "bytes_read", "bytes_written")


class Written:
    """What is written as JSON: a report, a preflight, the breaches of a contract."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        raise NotImplementedError

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write it to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class OpRow:
    """All calls of one kernel that one module made with one set of dtypes in one phase.

    Attributes:
        module: Name in ``model.named_modules()`` without the names of wrappers such as
            DistributedDataParallel; ``""`` is the model itself, ``"(outside)"`` no module of it.
        kind: The module's class name.
        phase: ``"forward"``, ``"backward"``, or ``"recompute"`` (a module's forward run again by
            activation checkpointing).
        function: The torch function that was called, such as ``"linear"``; empty in most of
            backward. Of a backward kernel, the one whose gradient it computes.
        op: The kernel that ran, such as ``"addmm"``.
        inputs: The dtypes of its tensors, each once.
        outputs: Those of its results.
        cause: Of a cast, ``"autocast"``, ``"explicit"`` (asked for in code) or ``"autograd"``.
        view: Whether it computes nothing, but gives its input another shape.
        calls: How often it ran.
        casts: How many casts these calls made.
        bytes_read: What those casts read.
        bytes_written: What they wrote.
        length: The most numbers that one call added up for one number of its result.
    """

    module: str
    kind: str
    phase: str
    function: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cause: str = ""
    view: bool = False
    calls: int = 0
    casts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    length: int = 0

    @property
    def label(self) -> str:
        """The function's name, and the kernel's where that says more."""
        plain = self.op.strip("_")
        if not self.function or self.function == plain:
            return plain
        return f"{self.function} ({plain.removeprefix(self.function).strip('_')})"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over rows; bytes are those that casts read and wrote."""

    calls: int = 0
    casts: int = 0
    autocast_casts: int = 0
    explicit_casts: int = 0
    autograd_casts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @classmethod
    def of(cls, rows: Iterable[OpRow]) -> Totals:
        """Add rows up."""
        sums: Counter[str] = Counter()
        for row in rows:
            counts = {"calls": row.calls, "casts": row.casts, f"{row.cause}_casts": row.casts}
            sums.update(counts, bytes_read=row.bytes_read, bytes_written=row.bytes_written)
        del sums["_casts"]
        return cls(**sums)


class PrecisionReport(Written):
    """What ran where, in which dtype, with its casts; forward, backward, recomputed.

    ``print(report)`` shows a table. :attr:`settings` contains the autocast region or the pin that
    each module ran under.

    What is counted: every kernel below autograd and autocast, as a
    ``torch.utils._python_dispatch.TorchDispatchMode`` around the same block sees it. A cast is a
    ``_to_copy``, ``to``, ``copy_`` or ``_foreach_copy_`` that changes a tensor's dtype. Of a cast
    that runs while a torch function runs with autocast on, autocast is the cause, unless the
    function is a conversion (``Tensor.to``, ``float``, ``half``, ...) or was given ``dtype=``:
    then, as with autocast off, the user asked. The gradient of a cast has the cause of that
    cast; casts that a backward kernel makes of itself are autograd's.

    Args:
        rows: The rows, or a function that returns them as they are then.
        model: The model's class name.
        device: What the caller says it ran on, such as ``"cuda, float16, simulated"``.
        settings: The autocast region or the pin that each module ran under, by module name.
        notes: Sentences about what the report cannot promise, such as that compiled code ran
            eagerly.
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
        """Sentences about what the report cannot promise; inside its block, so far."""
        return tuple(self._notes() if callable(self._notes) else self._notes)

    @property
    def rows(self) -> tuple[OpRow, ...]:
        """Every module, op and dtypes; inside the block of a report, what ran so far."""
        return tuple(self._rows() if callable(self._rows) else self._rows)

    @property
    def totals(self) -> Totals:
        """Sums over all rows."""
        return Totals.of(self.rows)

    def table(self, *, collapse: bool = True, views: bool = False) -> str:
        """The report as plain text.

        Args:
            collapse: Show modules whose names differ by an index alone as one (``h.*.attn``).
            views: Show ops that only give a new view, which compute nothing.
        """
        notes = [f"note: {note}" for note in self.notes]
        table = text_table(_HEADINGS, self._cells(collapse, views))
        return "\n".join([self._title(), *notes, *table])

    def __str__(self) -> str:
        return self.table()

    def _title(self) -> str:
        about = ", ".join(part for part in (self.model, self.device) if part) or "no model"
        t = self.totals
        return (
            f"{about}: {t.calls:,} kernels, {t.casts:,} casts, {t.autocast_casts:,} by autocast, "
            f"{t.bytes_written / 2**20:,.1f} MiB written by casts"
        )

    def _cells(self, collapse: bool, views: bool) -> list[tuple[str, ...]]:
        shown = collapsed({(row.module, row.kind) for row in self.rows}) if collapse else {}
        merged = _merged(
            replace(row, module=shown.get(row.module, row.module))
            for row in self.rows
            if views or row.cause or not row.view
        )
        # Each phase together, modules in the order in which they first ran.
        order = {row.module: i for i, row in reversed(list(enumerate(merged)))}
        merged.sort(key=lambda row: (len(row.phase) != 7, row.phase, order[row.module]))
        cells = []
        for place, rows in itertools.groupby(merged, key=lambda row: (row.phase, row.module)):
            first = (place[0], place[1] or "(model)")
            for row in rows:
                cells.append((*first, row.label, *_numbers(row)))
                first = ("", "")
        return cells

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        about: dict[str, Any] = {"format": _FORMAT, "model": self.model, "device": self.device}
        about["settings"] = dict(self.settings)
        about["notes"] = list(self.notes)
        return {**about, "totals": asdict(self.totals), "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> PrecisionReport:
        """Read a report that :meth:`to_json` wrote.

        Raises:
            ValueError: The file is something else, or of another format.
        """
        values: Any = {}
        with contextlib.suppress(json.JSONDecodeError):
            values = json.loads(Path(path).read_text())
        found = values.get("format") if isinstance(values, dict) else None
        if found != _FORMAT:
            raise ValueError(
                f"{path} is no precision report of format {_FORMAT}, which this version reads: "
                f"its format is {found!r}"
            )
        rows: list[dict[str, Any]] = values["rows"]
        for row in rows:
            row |= {"inputs": tuple(row["inputs"]), "outputs": tuple(row["outputs"])}
        about = (
            values["model"],
            values["device"],
            values.get("settings"),
            values.get("notes", ()),
        )
        return cls((OpRow(**row) for row in rows), *about)


def short(dtype: object) -> str:
    """The name of a dtype in tables: ``"bf16"`` for ``torch.bfloat16``."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def collapsed(modules: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map each name to one for all modules of a class alike but for an index: ``h.*.attn``.

    Args:
        modules: Names and classes.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for name, kind in modules:
        groups.setdefault((_INDEX.sub("*", name), kind), set()).add(name)
    shown: dict[str, str] = {}
    for group in groups.values():
        columns = zip(*(name.split(".") for name in group), strict=True)
        same = [column[0] if len(set(column)) == 1 else "*" for column in columns]
        shown |= dict.fromkeys(group, ".".join(same))
    return shown


def _merged(rows: Iterable[OpRow]) -> list[OpRow]:
    """Add up rows that are alike but for their counts, in order of appearance."""
    merged: dict[OpRow, OpRow] = {}
    for row in rows:
        bare = replace(row, calls=0, casts=0, bytes_read=0, bytes_written=0, length=0)
        found = merged.get(bare, bare)
        sums = {name: getattr(found, name) + getattr(row, name) for name in _COUNTS}
        merged[bare] = replace(row, **sums | {"length": max(found.length, row.length)})
    return list(merged.values())


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 3
) -> list[str]:
    """Lines of a table, its columns aligned; the last ``numbers`` of them to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    sides = ["<"] * (len(widths) - numbers) + [">"] * numbers
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [line.format(*cells).rstrip() for cells in (headings, *rows)]


def _numbers(row: OpRow) -> tuple[str, ...]:
    """The cells of a row from its dtypes on."""
    return (
        ", ".join(map(short, row.inputs)),
        ", ".join(map(short, row.outputs)),
        f"{row.calls:,}",
        f"{row.casts:,}" if row.casts else "",
        f"{row.bytes_written / 1024:,.1f}" if row.casts else "",
    )
