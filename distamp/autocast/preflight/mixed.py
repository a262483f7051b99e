"""Ops that take no mixture of dtypes: fake kernels promote where real ones raise, so try them.

Each kind of call with several floating point dtypes is run once more, on small real CPU tensors of
the same dtypes, and once with all of them float32: only where the second works and the first
raises is it the mixture that fails. No table of such ops is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from distamp.autocast.preflight.finding import Finding
from distamp.autocast.report.kernels import is_view
from distamp.autocast.report.recording import Observed

__all__ = ["Mixtures"]

# Sizes are cut to this, the same size to the same, so that shapes still fit each other.
_SIZE = 8


class Mixtures:
    """Collects calls whose tensors have several floating point dtypes, and tries each kind."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._where: dict[tuple[Any, ...], list[tuple[str, str]]] = {}

    def observe(self, call: Observed) -> None:
        """Look at one call; made for ``Recorder(observe=...)``."""
        dtypes = tuple(t.dtype for t in call.inputs if t.is_floating_point() and t.dim())
        if len(set(dtypes)) < 2 or call.phase == "backward" or is_view(call.func):
            return
        kind = (call.func, dtypes)
        place = call.owner.module, call.owner.function or call.func._schema.name
        places = self._where.setdefault(kind, [])
        if place not in places:
            places.append(place)
        if kind not in self._calls:
            args, kwargs = tree_map(_describe, (call.args, call.kwargs))
            self._calls[kind] = call.func, args, kwargs

    def findings(self) -> list[Finding]:
        """Try what was collected; call it with no mode on."""
        found = []
        for kind, (func, args, kwargs) in self._calls.items():
            if _fails(func, args, kwargs, lambda dtype: torch.float32):
                # The small shapes do not fit this op, or it does not run here at all.
                continue
            error = _fails(func, args, kwargs, lambda dtype: dtype)
            if not error:
                continue
            names = ", ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in kind[1]))
            what = f"raises with {names} together (tried on CPU tensors): {error}"
            fix = "cast its inputs to one dtype, for instance the source to the destination's"
            for module, op in self._where[kind]:
                found.append(Finding("error", "mixed-dtypes", module, op, what, fix))
        return found


class _Shape:
    """A tensor that is to be made small."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(min(int(size), _SIZE) for size in tensor.shape)
        self.dtype = tensor.dtype

    def make(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=dtype)


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Shape(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _fails(
    func: Any, args: Any, kwargs: Any, dtype_of: Callable[[torch.dtype], torch.dtype]
) -> str:
    """The first line of the error it raises, if it does."""

    def made(value: Any) -> Any:
        if not isinstance(value, _Shape):
            return value
        return value.make(dtype_of(value.dtype) if value.dtype.is_floating_point else value.dtype)

    try:
        args, kwargs = tree_map(made, (args, kwargs))
        with torch.no_grad():
            func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return ""
