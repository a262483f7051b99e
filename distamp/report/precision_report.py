"""precision_report: the ops of a block by module, function and dtypes, with every cast."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from distamp.autocast.module_precision import get_module_precision
from distamp.report.findings import Findings, find_risks
from distamp.report.formatting import JsonResult, collapse_indices, dtype_abbr, text_table
from distamp.report.messages import RecordFunctionStack
from distamp.report.op_row import OpRow
from distamp.report.tensors import (
    ModelTensor,
    flatten_tensors,
    model_tensors,
    shape_of,
    storage_key,
)
from distamp.report.tracing import ModuleFrame, OpCall, OpContext, StepTracer, TraceListener

__all__ = ["PrecisionReport", "ReportRecorder", "precision_report"]

_FORMAT = 2
_HEADINGS = ("phase", "module", "op", "in", "out", "calls", "casts", "cast KiB")
_CAUSES = ("autocast", "explicit", "autograd")
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
# Ops that may change a tensor's dtype. In inference mode aten::to is not decomposed.
_CASTS = frozenset({"_to_copy", "to", "convert_element_type"})
# Ops that copy the second half of their tensors into the first half.
_COPIES = frozenset({"copy_", "copy", "_foreach_copy_", "_foreach_copy"})
_SUMS = frozenset({"sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp", "norm", "mean"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear"})
_Cast = tuple[Tensor, Tensor]
_Rows = Iterable[OpRow] | Callable[[], Iterable[OpRow]]
_Notes = Iterable[str] | Callable[[], Iterable[str]]
_RAN_EAGERLY = (
    "compiled code ran eagerly in this block, which is another run than the compiled one: its "
    "kernels, casts and roundings may differ, and so may the step that follows from them"
)


class PrecisionReport(JsonResult):
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
        rows: _Rows = (),
        model: str = "",
        device: str = "",
        settings: Mapping[str, str] | None = None,
        notes: _Notes = (),
    ) -> None:
        self._rows = rows if callable(rows) else tuple(rows)
        self.model = model
        self.device = device
        self.settings = {} if settings is None else settings
        self._notes = notes if callable(notes) else tuple(notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the limits of the report; inside its block, the sentences so far."""
        return _present_values(self._notes)

    @property
    def rows(self) -> tuple[OpRow, ...]:
        """The rows of all kernels; inside the block of the report, the rows so far."""
        return _present_values(self._rows)

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

    def table(self, *, collapse: bool = True, views: bool = False, internals: bool = False) -> str:
        """Return the report as plain text.

        Args:
            collapse: Show modules as one (``h.*.attn``) if their names differ only by an index.
            views: Show ops that only give a new view, which compute nothing.
            internals: Show the kernels that FSDP runs to lay out what it sends. Its casts and
                collectives are always shown.
        """
        rows = []
        for row in self.rows:
            is_computing = views or not row.view
            is_users = internals or not row.internal
            if row.cause or (is_computing and is_users):
                rows.append(row)
        lines = [self._title()]
        lines += [f"note: {note}" for note in self.notes]
        lines += text_table(_HEADINGS, self._cells(rows, collapse))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _title(self) -> str:
        description = ", ".join(filter(None, (self.model, self.device))) or "no model"
        calls = f"{self.calls:,} kernels"
        casts = f"{self.casts:,} casts"
        by_autocast = f"{self.casts_by_cause['autocast']:,} by autocast"
        mebibytes = self.bytes_written / 2**20
        size = f"{mebibytes:,.1f} MiB written by casts"
        return f"{description}: {calls}, {casts}, {by_autocast}, {size}"

    def _cells(self, rows: list[OpRow], collapse: bool) -> list[tuple[str, ...]]:
        if collapse:
            modules = {(row.module, row.kind) for row in self.rows}
            labels = collapse_indices(modules)
            rows = [replace(row, module=labels[row.module]) for row in rows]
        merged = _merge_rows(rows)
        # The order is by phase, and then by the first run of the module.
        order: dict[str, int] = {}
        for row in merged:
            order.setdefault(row.module, len(order))
        merged.sort(key=lambda row: (row.phase != "forward", row.phase, order[row.module]))
        cells = []
        previous = ("", "")
        for row in merged:
            place = (row.phase, row.module or "(model)")
            # A place that is equal to the place above is left out.
            label = ("", "") if place == previous else place
            previous = place
            cells.append((*label, row.label, *_row_cells(row)))
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
        values["rows"] = [row.to_dict() for row in self.rows]
        return values


def _present_values(source: Any) -> tuple[Any, ...]:
    """Return values, or the values that a function returns now."""
    if callable(source):
        source = source()
    return tuple(source)


@dataclass(slots=True)
class _Counts:
    """Counts of the equal calls in one row; see `OpRow`."""

    calls: int = 0
    casts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    length: int = 0

    def add(self, counts: _Counts | OpRow) -> None:
        """Add other counts."""
        self.calls += counts.calls
        self.casts += counts.casts
        self.bytes_read += counts.bytes_read
        self.bytes_written += counts.bytes_written
        self.length = max(self.length, counts.length)


def _merge_rows(rows: Iterable[OpRow]) -> list[OpRow]:
    """Add up the counts of rows that are otherwise equal, in order of appearance."""
    merged: dict[OpRow, _Counts] = {}
    for row in rows:
        key = replace(row, **asdict(_Counts()))
        merged.setdefault(key, _Counts()).add(row)
    return [replace(row, **asdict(counts)) for row, counts in merged.items()]


def _row_cells(row: OpRow) -> tuple[str, ...]:
    """Return the cells of a row from its dtypes on."""
    inputs = ", ".join(map(dtype_abbr, row.inputs))
    outputs = ", ".join(map(dtype_abbr, row.outputs))
    calls = f"{row.calls:,}"
    casts = ""
    size = ""
    if row.casts:
        kibibytes = row.bytes_written / 1024
        casts = f"{row.casts:,}"
        size = f"{kibibytes:,.1f}"
    return inputs, outputs, calls, casts, size


class ReportRecorder(TraceListener):
    """Listener that counts the ops of each module for a precision report.

    Attributes:
        settings: The autocast region or the pin that each module ran under, by module name.
    """

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self._counts: dict[tuple[Any, ...], _Counts] = {}
        self._class_names: dict[str, str] = {}
        self._params: list[ModelTensor] = []
        self._blocks = RecordFunctionStack()
        self._lock = threading.Lock()

    def on_start(self) -> None:
        """Read the names of classes and parameters, while FSDP2's parameters are sharded."""
        names = self.tracer.names
        for module, name in names.items():
            # A wrapper and its module have one name, and the module's class counts.
            self._class_names[name] = type(module).__name__
        for row in model_tensors(names):
            if row.kind == "parameter":
                self._params.append(row)

    def on_module(self, frame: ModuleFrame) -> None:
        """Record the setting that decides about the precision of a module."""
        setting = "outside of a region"
        if frame.autocast_enabled:
            dtypes = []
            for device_type in _DEVICE_TYPES:
                if torch.is_autocast_enabled(device_type):
                    dtypes.append(dtype_abbr(torch.get_autocast_dtype(device_type)))
            setting = f"autocast {' and '.join(dtypes)}"
        for outer in self.tracer.frames:
            pin = get_module_precision(outer.module)
            if pin is not None:
                setting = f"pinned to {dtype_abbr(pin.dtype)} by {outer.name or '(model)'}"
        self.settings[frame.name] = setting

    def after_op(self, call: OpCall) -> None:
        """Count an op."""
        op = call.op
        # An op of prim:: only reads properties of a tensor subclass.
        if op.namespace == "prim":
            return
        name = op.name
        if op.namespace not in ("aten", ""):
            name = f"{op.namespace}::{name}"
        inputs = flatten_tensors((call.args, call.kwargs))
        outputs = flatten_tensors(call.output)
        casts = _changes_of_dtype(name, inputs, outputs)
        context = self._context(call)
        if op.namespace == "profiler":
            self._blocks.on_op(call)
        is_internal = not call.collectives and self._blocks.is_inside_fsdp
        cause = ""
        if casts:
            cause = context.cast_origin if name in _CASTS else "explicit"
        # The first fields of `OpRow`. A tuple has a faster hash.
        key = (
            context.module,
            self._class_names.get(context.module, ""),
            context.phase,
            context.function,
            name,
            _dtype_names(inputs),
            _dtype_names(outputs),
            cause,
            op.is_view,
            is_internal,
        )
        length = _reduction_size(name, inputs, outputs)
        with self._lock:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = _Counts()
            counts.calls += 1
            counts.casts += len(casts)
            counts.length = max(counts.length, length)
            for source, result in casts:
                counts.bytes_read += source.numel() * source.element_size()
                counts.bytes_written += result.numel() * result.element_size()

    def rows(self) -> tuple[OpRow, ...]:
        """Return the rows so far."""
        with self._lock:
            rows = []
            for key, counts in self._counts.items():
                rows.append(OpRow(*key, **asdict(counts)))
            return tuple(rows)

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the limits of the report."""
        return (_RAN_EAGERLY,) if self.tracer.ran_compiled else ()

    def _context(self, call: OpCall) -> OpContext:
        """Return an op's context, in which FSDP2's sums of gradients belong to the parameter."""
        context = call.context
        is_addition = call.op.name == "add_" and context.phase == "backward"
        if is_addition and context.function != "accumulate_grad":
            # FSDP2 adds reduced shards in a hook, and not by autograd.
            module = self._module_of_gradient(call.args[0])
            if module is not None:
                return context.moved_to(module, "accumulate_grad")
        return context

    def _module_of_gradient(self, tensor: Tensor) -> str | None:
        """Return the name of the module of the parameter with this gradient, if there is one."""
        key = storage_key(tensor)
        for row in self._params:
            grad = row.tensor.grad
            if grad is not None and storage_key(grad) == key:
                return row.module
        return None


def _dtype_names(tensors: list[Tensor]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for tensor in tensors:
        name = str(tensor.dtype)
        names[name.removeprefix("torch.")] = None
    return tuple(names)


def _changes_of_dtype(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[_Cast]:
    """Return the (source, result) pairs of an op that differ in dtype."""
    sources: list[Tensor] = []
    results: list[Tensor] = []
    if name in _CASTS:
        sources, results = inputs[:1], outputs[:1]
    elif name in _COPIES:
        half = len(inputs) // 2
        sources, results = inputs[half:], inputs[:half]
    casts = []
    for source, result in zip(sources, results, strict=True):
        if source.dtype != result.dtype:
            casts.append((source, result))
    return casts


def _reduction_size(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return how many numbers an op adds up for one number of its result."""
    if name in _SUMS and outputs:
        return _sum_size(inputs[0], outputs[0])
    if name in _PRODUCTS and len(inputs) > 1:
        first_factor = inputs[0]
        if name.startswith("add"):
            # The first of three tensors is added to the product of the last two.
            first_factor = inputs[1]
        return shape_of(first_factor)[-1]
    return 0


def _sum_size(tensor: Tensor, total: Tensor) -> int:
    shape = shape_of(tensor)
    is_cumulative = shape == shape_of(total)
    if shape and is_cumulative:
        return shape[-1]
    return tensor.numel() // max(total.numel(), 1)


@contextmanager
def precision_report(model: nn.Module | None = None) -> Iterator[PrecisionReport]:
    """Record which module ran which op in which dtype, and every cast, while the block runs.

    torch.autocast itself shows none of this; ``torch.utils.flop_counter`` is the nearest in form.
    Use it around any number of steps: forward, backward, optimizer. It works with
    ``torch.autocast`` and :class:`distamp.autocast`, with models wrapped for DDP, FSDP or
    DataParallel, with modules run from other threads, and with activation checkpointing. It sets
    hooks on the modules of ``model`` and removes them after the block, however the block ends.
    Gradients of gradients belong to no module.

    The report changes no number of a step without compiled code. Compiled code runs eagerly while
    it records, and that run may round differently: a loss that overflows only eagerly skips the
    step. The report has a note if this happened.

    ::

        with precision_report(model) as report:
            with autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            loss.backward()
        print(report)

    Args:
        model: The model that gives the rows their module names. Without it, rows have no names.

    Yields:
        The report, a :class:`PrecisionReport`; inside the block, of the ops so far.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"precision_report() takes the model, a torch.nn.Module, not {type(model).__name__}."
        )
    recorder = ReportRecorder()
    tracer = StepTracer(() if model is None else (model,), [recorder])
    class_name = ""
    for module, name in tracer.names.items():
        if name == "":
            class_name = type(module).__name__
    with tracer:
        yield PrecisionReport(
            recorder.rows, class_name, settings=recorder.settings, notes=recorder.notes
        )
