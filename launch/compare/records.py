"""The lines of metrics.jsonl: one JSON object for each step and each validation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "Record", "Records", "read_records"]

METRICS = "metrics.jsonl"
Record = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """What a metrics file holds.

    Attributes:
        rows: The records, in the order of the file.
        broken: The numbers, from 1, of lines that are no record.
        lines: How many lines there are.
    """

    rows: tuple[Record, ...]
    broken: tuple[int, ...] = ()
    lines: int = 0

    @property
    def cut(self) -> bool:
        """Whether the last line alone is no record, as a killed run leaves it."""
        return self.broken == (self.lines,)


def read_records(path: Path) -> Records:
    """Read a metrics file, passing over lines that are no record; a missing file holds none.

    Args:
        path: The file.

    Raises:
        OSError: It is there and cannot be read.
    """
    if not path.is_file():
        return Records(())
    # Bytes, since a power cut can leave anything in the last line.
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    rows, broken = [], []
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            broken.append(number)
        else:
            rows.append(record)
    return Records(tuple(rows), tuple(broken), len(lines))


def _record(line: bytes) -> Record | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(value, dict) and isinstance(value.get("step"), int)
    return value if is_record else None
