"""What ran where, in which dtype: the precision report of a block of real training code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distamp.autocast.report.attribution import module_names
from distamp.autocast.report.compare import ReportComparison, compare_rows
from distamp.autocast.report.plot import plot_rows
from distamp.autocast.report.recording import Recorder
from distamp.autocast.report.rows import OpRow, Totals, total
from distamp.autocast.report.table import as_rich, as_text

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["PrecisionReport", "compare_reports", "precision_report"]

_FORMAT = 1


class PrecisionReport:
    """Modules by ops by dtypes, with casts, bytes and cache hits; forward, backward, recompute.

    Inside its ``with`` block it shows what has been counted so far; after it, everything.
    ``print(report)`` needs torch alone; ``rich.print(report)`` gives a coloured table.

    What is counted: every kernel below autograd and autocast, as a
    ``torch.utils._python_dispatch.TorchDispatchMode`` around the same block sees it. A cast is a
    ``_to_copy``, ``to``, ``copy_`` or ``_foreach_copy_`` that changes a tensor's dtype. Of a cast
    that runs while a torch function runs with autocast on, autocast is the cause, unless the
    function is a conversion (``Tensor.to``, ``float``, ``half``, ...) or was given ``dtype=``:
    then, as with autocast off, the user asked. The gradient of a cast has the cause of that
    cast; casts that a backward kernel makes of itself are autograd's. A cache hit is an op that
    took a weight's cast from autocast's cache; one op that reads a cached weight twice counts
    once for each read.

    Args:
        rows: The rows, or a recorder that has them.
        model: The model's class name.
        device: What the caller says it ran on, such as ``"cuda, float16, simulated"``.
    """

    def __init__(self, rows: Recorder | Iterable[OpRow], model: str = "", device: str = "") -> None:
        self._source = rows if isinstance(rows, Recorder) else tuple(rows)
        self.model = model
        self.device = device

    @property
    def rows(self) -> tuple[OpRow, ...]:
        """Every (module, phase, function, kernel, dtypes), in order of first appearance."""
        return self._source.rows() if isinstance(self._source, Recorder) else self._source

    @property
    def totals(self) -> Totals:
        """Sums over all rows."""
        return total(self.rows)

    def totals_of(self, phase: str) -> Totals:
        """Sums over ``"forward"``, ``"backward"`` or ``"recompute"``."""
        return total(row for row in self.rows if row.phase == phase)

    def table(self, *, collapse: bool = True, views: bool = False) -> str:
        """The report as plain text.

        Args:
            collapse: Show modules whose names differ by an index alone as one (``h.*.attn``).
            views: Show ops that only give a new view, which compute nothing.
        """
        return as_text(self.rows, self.model, self.device, collapse=collapse, views=views)

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> Group:
        return as_rich(self.rows, self.model, self.device)

    def __repr__(self) -> str:
        t = self.totals
        return (
            f"<PrecisionReport of {self.model or 'no model'}: {t.calls} kernel calls, "
            f"{t.casts} casts, {t.hits} cache hits>"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "format": _FORMAT,
            "model": self.model,
            "device": self.device,
            "torch": str(torch.__version__),
            "totals": self.totals.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write the report to a file that :meth:`from_json` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> PrecisionReport:
        """Read a report that :meth:`to_json` wrote.

        Raises:
            ValueError: The file is something else, or of a later format.
        """
        try:
            values = json.loads(Path(path).read_text())
            found = values["format"] if isinstance(values, dict) else None
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path} is not a precision report: {error}") from error
        if found != _FORMAT:
            raise ValueError(f"{path} has report format {found!r}; this version reads {_FORMAT}")
        rows = [OpRow.from_dict(row) for row in values["rows"]]
        return cls(rows, values["model"], values["device"])

    def plot(self, path: str | PathLike[str], *, title: str = "", modules: int = 24) -> None:
        """Draw modules by dtype, and the bytes each module casts, as PNG, SVG or PDF.

        Args:
            path: Where to write; the suffix chooses the format.
            title: A heading; by default the model's name and what it ran on.
            modules: At most so many modules are drawn, those that compute most; the rest as one.

        Raises:
            ModuleNotFoundError: matplotlib is missing; it comes with ``distamp[report]``.
        """
        plot_rows(self.rows, Path(path), title or self._title(), modules=modules)

    def compare(self, other: PrecisionReport) -> ReportComparison:
        """What changes from this report to the other."""
        return compare_reports(self, other)

    def _title(self) -> str:
        return ", ".join(part for part in (self.model, self.device) if part)


def compare_reports(before: PrecisionReport, after: PrecisionReport) -> ReportComparison:
    """What changes from one report to another: dtypes by module and op, casts, bytes, hits.

    Raises:
        TypeError: One of them is not a :class:`PrecisionReport`.
    """
    for each in (before, after):
        if not isinstance(each, PrecisionReport):
            raise TypeError(f"expected a PrecisionReport, got {type(each).__name__}")
    return compare_rows(before.rows, after.rows)


@contextmanager
def precision_report(model: nn.Module | None = None) -> Iterator[PrecisionReport]:
    """Record which module ran which op in which dtype, and every cast, while the block runs.

    torch.autocast itself shows none of this; ``torch.utils.flop_counter`` is the nearest in form.
    Use it around any number of steps: forward, backward, optimizer. It works with
    ``torch.autocast`` and :class:`distamp.autocast`, with models wrapped for DDP, FSDP or
    DataParallel, with modules run from other threads, and with activation checkpointing. Hooks are
    set on the modules of ``model`` and are gone after the block, however it ends. While it
    records, a compiled module runs as torch runs compiled code under a dispatch mode.

    ::

        with precision_report(model) as report:
            with autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            loss.backward()
        print(report)

    Args:
        model: The model whose module names the rows carry. None records without names.

    Yields:
        The report, a :class:`PrecisionReport`.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"precision_report takes the model, a torch.nn.Module, got {type(model).__name__}"
        )
    with Recorder(model) as recorder:
        yield PrecisionReport(recorder, _model_name(model))


def _model_name(model: nn.Module | None) -> str:
    """The class name of the model inside its wrappers."""
    if model is None:
        return ""
    return type([m for m, name in module_names(model).items() if not name][-1]).__name__
