"""Two precision reports beside each other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from distamp.autocast.report.rows import OpRow, Totals, total
from distamp.autocast.report.table import text_table

__all__ = ["OpChange", "ReportComparison", "compare_rows"]

# (inputs, outputs) to calls
_Dtypes = dict[str, int]


@dataclass(frozen=True, slots=True)
class OpChange:
    """One op of one module that did not run alike.

    Attributes:
        module: The module's name.
        phase: ``"forward"``, ``"backward"`` or ``"recompute"``.
        op: The op's label.
        before: What it ran in, as ``"float32 -> float32"``, and how often; empty if it did not.
        after: Likewise in the other report.
    """

    module: str
    phase: str
    op: str
    before: dict[str, int]
    after: dict[str, int]

    @property
    def dtypes_differ(self) -> bool:
        """Whether more than the number of calls changed."""
        return self.before.keys() != self.after.keys()


@dataclass(frozen=True, slots=True)
class ReportComparison:
    """What differs between two reports; falsy where nothing does."""

    changes: tuple[OpChange, ...]
    before: Totals
    after: Totals

    def __bool__(self) -> bool:
        return bool(self.changes) or self.before != self.after

    def __str__(self) -> str:
        if not self:
            return "The reports are the same."
        lines = text_table(
            ("", "before", "after", "change"),
            [
                (name.replace("_", " "), f"{a:,}", f"{b:,}", f"{b - a:+,}" if b != a else "")
                for (name, a), b in zip(
                    self.before.to_dict().items(), self.after.to_dict().values(), strict=True
                )
            ],
            right=(1, 2, 3),
        )
        if self.changes:
            rows = [
                (c.module or "(model)", c.phase, c.op, _show(c.before), _show(c.after))
                for c in sorted(self.changes, key=lambda c: not c.dtypes_differ)
            ]
            lines += ["", *text_table(("module", "phase", "op", "before", "after"), rows)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON types."""
        return {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "changes": [asdict(change) for change in self.changes],
        }

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write the comparison to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def compare_rows(before: Iterable[OpRow], after: Iterable[OpRow]) -> ReportComparison:
    """Compare by module, phase and op; views, which compute nothing, are left out."""
    before, after = tuple(before), tuple(after)
    left, right = _by_op(before), _by_op(after)
    changes = [
        OpChange(*key, left.get(key, {}), right.get(key, {}))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]
    return ReportComparison(tuple(changes), total(before), total(after))


def _by_op(rows: Iterable[OpRow]) -> dict[tuple[str, str, str], _Dtypes]:
    ops: dict[tuple[str, str, str], _Dtypes] = {}
    for row in rows:
        if not row.view:
            dtypes = ops.setdefault((row.module, row.phase, row.label), {})
            shown = f"{', '.join(row.inputs)} -> {', '.join(row.outputs)}"
            dtypes[shown] = dtypes.get(shown, 0) + row.calls
    return ops


def _show(dtypes: _Dtypes) -> str:
    return "; ".join(f"{count} x {name}" for name, count in dtypes.items()) or "-"
