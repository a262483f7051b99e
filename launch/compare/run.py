"""One run, as its folder tells it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.compare.records import METRICS, Record, read_records

__all__ = ["Run", "read_run", "read_runs"]

_CONFIG = "config.json"


@dataclass(frozen=True)
class Run:
    """The records of a run and what it was asked to do.

    Attributes:
        name: What it is called beside others.
        records: Of steps and validations, in the order they were written.
        settings: The launcher's flags; empty where they are not known.
        cut: Whether its last line was half written, and passed over.
    """

    name: str
    records: Sequence[Record]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cut: bool = False

    @property
    def steps(self) -> list[Record]:
        """Records of training steps."""
        return [r for r in self.records if "loss" in r]

    @property
    def validations(self) -> list[Record]:
        """Records of validations."""
        return [r for r in self.records if "validation_loss" in r]

    @property
    def scaled(self) -> bool:
        """Whether a scaler ran: it scaled by something else than 1, or skipped a step."""
        return any(
            number(r, "loss_scale") not in (None, 1.0) or not r.get("stepped", True)
            for r in self.steps
        )

    @property
    def in_bytes(self) -> bool:
        """Whether its losses are also given in bits per byte."""
        return any("bits_per_byte" in r for r in self.records)


def number(record: Record, name: str) -> float | None:
    """Return a value of a record; None where there is none, or no finite one."""
    value = record.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_run(folder: str | Path) -> Run:
    """Read a run's folder, or its metrics file.

    A last line that a killed run had half written is passed over.

    Args:
        folder: A folder that holds metrics.jsonl, or that file.

    Raises:
        ValueError: There are no metrics, no step in them, or a line before the last is no record.
    """
    given = Path(folder)
    path = given if given.is_file() else given / METRICS
    if not path.is_file():
        what = f"no {METRICS} in it" if given.is_dir() else "no such folder"
        raise ValueError(f"{given}: {what}; give the folder of a run")
    try:
        records = read_records(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot read it ({error.strerror})") from error
    if records.broken and not records.cut:
        raise ValueError(
            f"{path}: line {records.broken[0]} is no record of a step; remove it, or the lines"
            " from there on"
        )
    if not any("loss" in r for r in records.rows):
        raise ValueError(f"{path}: no step in it yet")
    return Run(str(folder), records.rows, _settings(path.parent / _CONFIG), records.cut)


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read several runs; each is called what tells it from the others.

    Raises:
        ValueError: As :func:`read_run`, or the same folder was given twice.
    """
    paths = [Path(folder).absolute() for folder in folders]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ValueError(f"{folders[index]}: given twice; there is nothing to compare")
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    runs = [read_run(folder) for folder in folders]
    return [
        Run(name, run.records, run.settings, run.cut) for name, run in zip(names, runs, strict=True)
    ]


def _settings(path: Path) -> dict[str, Any]:
    """Return the flags, those of the model's shape among the others; none if they are not there."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict):
        return {}
    shape = settings.pop("shape", None)
    return {**settings, **(shape if isinstance(shape, dict) else {})}
