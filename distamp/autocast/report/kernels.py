"""One kernel call read: its tensors, the casts it makes, the row it counts for."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator

from distamp.autocast.report.rows import OpRow

__all__ = ["Counts", "Kernel", "Key", "casts_of", "is_view", "kernel_of", "row_of"]

# Kernels that may give a tensor another dtype; aten::to is whole in inference mode.
_CASTS = frozenset({"aten::_to_copy", "aten::to", "prims::convert_element_type"})
_COPIES = frozenset({"aten::copy_", "aten::copy"})
_FOREACH_COPIES = frozenset({"aten::_foreach_copy_", "aten::_foreach_copy"})

# (module, phase, function, kernel, inputs, outputs, cause, weight)
Key = tuple[str, str, str, Any, tuple[Any, ...], tuple[Any, ...], str, bool]
# calls, elements, casts, bytes read, bytes written, hits, bytes saved
Counts = list[int]


def is_view(func: Any) -> bool:
    """Whether the kernel computes nothing, but gives its input another shape."""
    return bool(func.is_view) or func._schema.name == "aten::_unsafe_view"


class Kernel(NamedTuple):
    """What is to be known of a kernel, asked of its schema once."""

    name: str
    view: bool
    # prim:: asks a tensor subclass about itself; nothing runs.
    runs: bool
    casts: bool
    copies: bool
    foreach_copies: bool


@cache
def kernel_of(func: Any) -> Kernel:
    """The facts about an operator overload, or a higher order operator."""
    if isinstance(func, HigherOrderOperator):
        return Kernel(func.name(), False, True, False, False, False)
    name = func._schema.name
    return Kernel(
        name.removeprefix("aten::"),
        is_view(func),
        func.namespace != "prim",
        name in _CASTS,
        name in _COPIES,
        name in _FOREACH_COPIES,
    )


def casts_of(
    kernel: Kernel, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The (source, result) pairs of this call that differ in dtype."""
    if kernel.casts:
        pairs = list(zip(inputs[:1], outputs[:1], strict=True))
    elif kernel.copies:
        pairs = [(inputs[1], inputs[0])]
    elif kernel.foreach_copies:
        half = len(inputs) // 2
        pairs = list(zip(inputs[half:], inputs[:half], strict=True))
    else:
        return []
    return [(source, result) for source, result in pairs if source.dtype != result.dtype]


def row_of(key: Key, kind: str, counts: Counts) -> OpRow:
    """The row of a key, a module class and counts."""
    module, phase, function, func, inputs, outputs, cause, weight = key
    calls, elements, casts, read, written, hits, saved = counts
    return OpRow(
        module=module,
        kind=kind,
        phase=phase,
        function=function,
        op=kernel_of(func).name,
        inputs=tuple(str(dtype).removeprefix("torch.") for dtype in inputs),
        outputs=tuple(str(dtype).removeprefix("torch.") for dtype in outputs),
        calls=calls,
        elements=elements,
        view=kernel_of(func).view,
        cause=cause,
        weight=weight,
        casts=casts,
        bytes_read=read,
        bytes_written=written,
        hits=hits,
        bytes_saved=saved,
    )
