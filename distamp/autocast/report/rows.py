"""What a precision report holds: one frozen row per kind of kernel call, and sums over rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["OUTSIDE", "PHASES", "OpRow", "Totals", "collapse", "merge", "total"]

# The module column of what ran inside the block but outside every module of the model.
OUTSIDE = "(outside)"
PHASES = ("forward", "backward", "recompute")

_COUNTS = ("calls", "elements", "casts", "bytes_read", "bytes_written", "hits", "bytes_saved")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class OpRow:
    """All calls of one kernel that one module made with one set of dtypes in one phase.

    Attributes:
        module: Name in ``model.named_modules()`` without the names of wrappers such as
            DistributedDataParallel; ``""`` is the model itself, ``"(outside)"`` no module of it.
        kind: The module's class name.
        phase: ``"forward"``, ``"backward"``, or ``"recompute"`` (a module's forward run again by
            activation checkpointing during backward).
        function: The torch function the kernel ran for (``"linear"``), also for its backward;
            ``""`` where no Python call was seen.
        op: The kernel, as the dispatcher names it below autograd and autocast (``"addmm"``).
        inputs: Dtypes of its tensor arguments, each once, in order of first appearance.
        outputs: Dtypes of the tensors it returned, likewise.
        calls: How often it ran.
        elements: Elements it returned, over all calls; 0 for views, which write nothing.
        view: Whether it only gave a new view of its input.
        cause: For a cast, who asked: ``"autocast"``, ``"explicit"`` (the user, through ``.to()``,
            ``.float()``, ``copy_`` and the like) or ``"autograd"``; ``""`` if this is no cast.
        weight: Whether the tensor cast is a leaf that requires grad.
        casts: Tensors whose dtype was changed.
        bytes_read: Bytes of those tensors before the change.
        bytes_written: Bytes of those tensors after it.
        hits: Calls that took a weight from autocast's cache instead of casting it again.
        bytes_saved: Bytes those casts would have written.
    """

    module: str
    kind: str
    phase: str
    function: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int = 0
    elements: int = 0
    view: bool = False
    cause: str = ""
    weight: bool = False
    casts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    hits: int = 0
    bytes_saved: int = 0

    @property
    def compute(self) -> str:
        """The dtype the kernel is known by: its first floating point output, else input."""
        for name in (*self.outputs, *self.inputs):
            if name.startswith(("float", "bfloat", "complex")):
                return name
        return self.outputs[0] if self.outputs else (self.inputs or ("none",))[0]

    @property
    def label(self) -> str:
        """The public function's name, and what the kernel's name adds to it."""
        plain = self.op.split("::")[-1].strip("_")
        if not self.function or plain == self.function:
            return plain
        words, known = plain.split("_"), self.function.split("_")
        same = next((i for i, (a, b) in enumerate(zip(words, known, strict=False)) if a != b), None)
        cut = min(len(words), len(known)) if same is None else same
        return f"{self.function} ({'_'.join(words[cut:]) or plain})"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON types."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> OpRow:
        """The row that :meth:`to_dict` gave."""
        typed: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**typed)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over rows; bytes are those that casts read, wrote, or that the cache saved."""

    calls: int = 0
    casts: int = 0
    autocast_casts: int = 0
    explicit_casts: int = 0
    autograd_casts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    hits: int = 0
    bytes_saved: int = 0

    def to_dict(self) -> dict[str, int]:
        """The sums as JSON types."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def total(rows: Iterable[OpRow]) -> Totals:
    """Add rows up."""
    sums = dict.fromkeys((f.name for f in fields(Totals)), 0)
    for row in rows:
        for name in ("calls", "casts", "bytes_read", "bytes_written", "hits", "bytes_saved"):
            sums[name] += getattr(row, name)
        if row.cause:
            sums[f"{row.cause}_casts"] += row.casts
    return Totals(**sums)


def merge(rows: Iterable[OpRow], rename: Callable[[OpRow], OpRow]) -> list[OpRow]:
    """Add up rows that ``rename`` makes alike but for their counts, in order of appearance."""
    merged: dict[OpRow, list[int]] = {}
    for row in rows:
        sums = merged.setdefault(_recount(rename(row), [0] * len(_COUNTS)), [0] * len(_COUNTS))
        for i, name in enumerate(_COUNTS):
            sums[i] += getattr(row, name)
    return [_recount(row, sums) for row, sums in merged.items()]


def collapse(rows: Iterable[OpRow]) -> dict[str, str]:
    """Map each module name to one that stands for all modules alike but for an index.

    ``h.0.attn`` and ``h.1.attn`` become ``h.*.attn`` if they are of one class; a name with no
    such sibling stays.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        groups.setdefault((_INDEX.sub("*", row.module), row.kind), set()).add(row.module)
    shown: dict[str, str] = {}
    for group in groups.values():
        parts = [name.split(".") for name in group]
        same = [column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True)]
        shown |= dict.fromkeys(group, ".".join(same))
    return shown


def _recount(row: OpRow, counts: list[int]) -> OpRow:
    return replace(row, **dict(zip(_COUNTS, counts, strict=True)))  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
