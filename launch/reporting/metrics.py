"""metrics.jsonl: every step and every validation, one JSON object per line, as they come."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any, TextIO

from launch.compare import METRICS, Record, read_records

__all__ = ["MetricsFile", "read_metrics"]


class MetricsFile:
    """A run's records, in memory and in a file that a full disk or a kill leaves readable.

    Args:
        folder: Where the file is.
        history: Records of the run so far, with which the file begins anew.

    Attributes:
        records: All of them, the history included.
    """

    def __init__(self, folder: Path, history: list[Record]) -> None:
        self.path = folder / METRICS
        self.records = history
        self._file = _begin(self.path, history)
        self._behind = False

    def write(self, record: Record) -> OSError | None:
        """Append a record; return why it could not be written, the first time it could not.

        Records that could not be written are, together with the next one that can.
        """
        record = {k: _finite(v) for k, v in record.items()}
        self.records.append(record)
        try:
            if self._behind:  # a line may be half written: begin anew with all of them
                self._file.close()
                self._file = _begin(self.path, self.records)
            else:
                # A line is handed to the system at once: killing the process loses none.
                self._file.write(json.dumps(record) + "\n")
                self._file.flush()
            self._behind = False
        except OSError as error:
            first, self._behind = not self._behind, True
            return error if first else None
        return None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(path: Path, until: int | None = None) -> list[Record]:
    """Read a run's records, up to a step; a last line cut off by a kill is no record."""
    return [r for r in read_records(path).rows if until is None or r["step"] <= until]


def _begin(path: Path, history: list[Record]) -> TextIO:
    """Open the file to append to what happened before, and nothing after."""
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_text("".join(json.dumps(r) + "\n" for r in history), encoding="utf-8")
    fresh.replace(path)
    return path.open("a", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no inf and no nan."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
