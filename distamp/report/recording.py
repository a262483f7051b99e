"""Recording a precision report: which module, which function, which kernel, which dtypes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distamp.autocast.module_precision import get_module_precision
from distamp.report.following import (
    Follower,
    Kernel,
    Owner,
    held_by,
    shape_of,
    storage_of,
    tensors_in,
)
from distamp.report.op_row import OpRow
from distamp.report.rows import PrecisionReport, short

__all__ = ["precision_report"]

_DEVICES = ("cpu", "cuda", "xpu", "mps")
# Kernels that may give a tensor another dtype; aten::to is whole in inference mode.
_CASTS = frozenset({"_to_copy", "to", "convert_element_type"})
# Those that write into half of what they are given.
_COPIES = frozenset({"copy_", "copy", "_foreach_copy_", "_foreach_copy"})
_SUMS = frozenset({"sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp", "norm", "mean"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear"})


_RAN_EAGERLY = (
    "compiled code ran eagerly in this block, which is another run than the compiled one: its "
    "kernels, casts and roundings may differ, and so may the step that follows from them"
)


class _Recorder(Follower):
    """Counts what a model runs, from entry to exit; any thread that runs it is followed."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__(*models)
        # Of a wrapper and the module in it, which share a name, the module's class.
        self._kinds = {name: type(module).__name__ for module, name in self.names.items()}
        #: Of each module that ran, in which region or under whose pin.
        self.settings: dict[str, str] = {}
        # The parameters as they are outside of a pass: FSDP2's shards, with their modules' names.
        self._parameters = [
            (parameter, self.names[module])
            for kind, _, module, parameter in held_by(self.names)
            if kind == "parameter"
        ]
        self._counts: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def entered(self, module: nn.Module) -> None:
        """Note what decides about the precision of the module that begins."""
        frames = self.frames()
        pins = [
            (each.name, pin)
            for each in frames
            if (pin := get_module_precision(each.module)) is not None
        ]
        how = "outside of a region"
        if pins:
            name, pin = pins[-1]
            how = f"pinned to {short(pin.dtype)} by {name or '(model)'}"
        elif frames[-1].autocast:
            on = [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]
            how = "autocast " + " and ".join(short(torch.get_autocast_dtype(each)) for each in on)
        self.settings[frames[-1].name] = how

    def record(self, kernel: Kernel, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Count one kernel call."""
        # One of ``prim::`` asks a tensor subclass about itself.
        if self.closed or kernel.namespace == "prim":
            return
        name = kernel.name
        if kernel.namespace not in ("aten", ""):
            name = f"{kernel.namespace}::{name}"
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        casts = _casts_of(name, inputs, outputs)
        owner, phase, _ = self.running()
        if name == "add_" and phase == "backward" and owner.function != "accumulate_grad":
            # FSDP2 adds reduced shards up itself, in a hook, where autograd does not.
            module = self._module_of_gradient(args[0])
            if module is not None:
                owner = Owner(module, "accumulate_grad", owner.cause)
        cause = "explicit" if casts else ""
        if casts and name in _CASTS:
            cause = owner.cause
        about = owner.module, self._kinds.get(owner.module, ""), phase, owner.function, name
        key = (*about, _dtypes(inputs), _dtypes(outputs), cause, kernel.view)
        read = sum(source.numel() * source.element_size() for source, _ in casts)
        written = sum(result.numel() * result.element_size() for _, result in casts)
        length = _length(name, inputs, outputs)
        with self._lock:
            calls, *sums, longest = self._counts.get(key, (0, 0, 0, 0, 0))
            sums = [a + b for a, b in zip(sums, (len(casts), read, written), strict=True)]
            self._counts[key] = (calls + 1, *sums, max(length, longest))

    def _module_of_gradient(self, tensor: Tensor) -> str | None:
        """Return the name of the module whose parameter has this gradient; None if none has."""
        storage = storage_of(tensor)
        for parameter, module in self._parameters:
            if parameter.grad is not None and storage_of(parameter.grad) == storage:
                return module
        return None

    def notes(self) -> tuple[str, ...]:
        """Return what the report cannot promise, a sentence each."""
        return (_RAN_EAGERLY,) if self.ran_compiled else ()

    def rows(self) -> tuple[OpRow, ...]:
        """What was counted so far."""
        with self._lock:
            return tuple([OpRow(*key, *counts) for key, counts in self._counts.items()])


def _dtypes(tensors: list[Tensor]) -> tuple[str, ...]:
    names = [str(dtype) for dtype in dict.fromkeys(each.dtype for each in tensors)]
    return tuple([name.removeprefix("torch.") for name in names])


def _casts_of(
    name: str, inputs: list[Tensor], outputs: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The (source, result) pairs of a kernel call that differ in dtype."""
    half = len(inputs) // 2
    pairs: Iterable[tuple[Tensor, Tensor]] = ()
    if name in _CASTS:
        pairs = zip(inputs[:1], outputs[:1], strict=True)
    elif name in _COPIES:
        pairs = zip(inputs[half:], inputs[:half], strict=True)
    return [(source, result) for source, result in pairs if source.dtype != result.dtype]


def _length(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """How many numbers are added up for one number of the result."""
    if name in _SUMS and outputs:
        shape = shape_of(inputs[0])
        if shape and shape == shape_of(outputs[0]):
            return shape[-1]
        return inputs[0].numel() // max(outputs[0].numel(), 1)
    if name in _PRODUCTS and len(inputs) > 1:
        # Of addmm's three tensors the product's are the last two.
        return shape_of(inputs[1 if name.startswith("add") else 0])[-1]
    return 0


@contextmanager
def precision_report(model: nn.Module | None = None) -> Iterator[PrecisionReport]:
    """Record which module ran which op in which dtype, and every cast, while the block runs.

    torch.autocast itself shows none of this; ``torch.utils.flop_counter`` is the nearest in form.
    Use it around any number of steps: forward, backward, optimizer. It works with
    ``torch.autocast`` and :class:`distamp.autocast`, with models wrapped for DDP, FSDP or
    DataParallel, with modules run from other threads, and with activation checkpointing. Hooks are
    set on the modules of ``model`` and are gone after the block, however it ends. Gradients of
    gradients are nobody's.

    Of a step without compiled code it changes no number. Compiled code runs eagerly while it
    records, which is another run than the compiled one: results are rounded otherwise, and a loss
    that overflows only eagerly skips the step. The report says so if it happened.

    ::

        with precision_report(model) as report:
            with autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            loss.backward()
        print(report)

    Args:
        model: The model whose module names the rows carry. None records without names.

    Yields:
        The report, a :class:`PrecisionReport`; inside the block, of what has run so far.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"precision_report takes the model, a torch.nn.Module, got {type(model).__name__}"
        )
    recorder = _Recorder(*() if model is None else (model,))
    inside = [type(module).__name__ for module, name in recorder.names.items() if not name]
    with recorder.following():
        yield PrecisionReport(
            recorder.rows,
            "".join(inside[-1:]),
            settings=recorder.settings,
            notes=recorder.notes,
        )
