"""One row of a precision report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from distamp.report.formatting import dtype_abbr

__all__ = ["OpRow"]


@dataclass(frozen=True, slots=True)
class OpRow:
    """All calls of one kernel that one module made with one set of dtypes in one phase.

    Attributes:
        module: Name in ``model.named_modules()`` without the names of wrappers such as
            DistributedDataParallel; ``""`` is the model itself, ``"(outside)"`` no module of it.
        kind: The module's class name.
        phase: ``"forward"``, ``"backward"``, or ``"recompute"`` (a module's forward run again by
            activation checkpointing).
        function: The torch function that was called, such as ``"linear"``. A backward kernel has
            the function of the forward pass; in most of backward the name is empty.
        op: The kernel that ran, such as ``"addmm"``.
        inputs: The distinct dtypes of the input tensors.
        outputs: The distinct dtypes of the results.
        cause: ``"autocast"``, ``"explicit"`` (a cast in the user's code) or ``"autograd"`` if the
            kernel is a cast.
        view: True if the kernel computes nothing and only gives its input another shape.
        internal: True if FSDP runs the kernel to lay out the parameters or gradients that it sends.
        calls: The number of calls.
        casts: The number of casts in these calls.
        bytes_read: The bytes that the casts read.
        bytes_written: The bytes that the casts wrote.
        length: The most numbers that one call added up for one number of its result.
    """

    module: str
    kind: str
    phase: str
    function: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cause: str = ""
    view: bool = False
    internal: bool = False
    calls: int = 0
    casts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    length: int = 0

    @property
    def label(self) -> str:
        """The name of the function, and of the kernel if it differs."""
        plain = self.op.strip("_")
        if not self.function or self.function == plain:
            return plain
        return f"{self.function} ({plain.removeprefix(self.function).strip('_')})"

    def __str__(self) -> str:
        inputs = ", ".join(map(dtype_abbr, self.inputs))
        outputs = ", ".join(map(dtype_abbr, self.outputs))
        place = f"{self.phase} of {self.module or '(model)'}"
        return f"{self.label} in the {place}: {inputs} -> {outputs}, {self.calls:,} calls"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        return asdict(self)
