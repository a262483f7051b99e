"""NonFiniteOrigin: the op or tensor that the first NaN or inf of a step comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from distamp.report.formatting import NO_MODULE, shorten

__all__ = ["NonFiniteOrigin", "TensorRange"]

# Kinds in which the number was in a tensor before an op read it.
_STORED_KINDS = ("parameter", "buffer", "input")


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The range of a tensor's elements.

    Attributes:
        name: The name of the tensor among the op's arguments.
        shape: Its shape on this rank.
        dtype: Its dtype.
        low: The smallest element; NaN if any element is NaN.
        high: The largest element; NaN if any element is NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float

    @property
    def finite(self) -> bool:
        """True if all elements are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def is_nan(self) -> bool:
        """True if any element is NaN."""
        return math.isnan(self.low)

    @property
    def is_mask(self) -> bool:
        """True if all elements except -inf are finite, as in an attention mask."""
        return self.low == -math.inf and math.isfinite(self.high)

    @property
    def magnitude(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        values = f"{self.low:.4g} to {self.high:.4g}"
        if self.is_nan:
            values = "NaN"
        shape = list(self.shape)
        return f"{self.name:16} {self.dtype} {shape}: {values}"

    def to_dict(self) -> dict[str, Any]:
        """Return the range as JSON types."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NonFiniteOrigin:
    """The origin of the first NaN or inf of a step; ``print`` gives a sentence and a table.

    Attributes:
        kind: ``"op"``: an op computed the number. ``"parameter"`` or ``"buffer"``: a tensor of the
            model held it before the step. ``"input"``: an input of the step held it, or code
            outside torch wrote it. ``"collective"``: a collective of finite inputs returned it.
            ``"unseen"``: the step as it ran was not finite, and its replay is.
        op: The function that was called, such as ``"linear"``; in backward, the function of the
            forward pass.
        kernel: The kernel that ran in it, such as ``"addmm"``.
        module: The module's name; ``""`` is the model itself, ``"(outside)"`` code outside the
            model, such as the loss.
        parameter: The parameter or buffer that held the number, or the parameter of its gradient.
        direction: ``"forward"`` or ``"backward"``.
        ranks: The ranks on which the number appeared.
        micro_batch: The number of the model's call, from 0.
        line: ``file:line: code``, the innermost line outside torch. For a backward kernel in C++
            it is the line of the forward pass.
        inputs: The inputs of the kernel; for a collective, one for each rank.
        output: The output of the kernel, or the tensor that held the number.
        reached: The results that are not finite because of it: ``"loss"``, and the parameters of
            gradients.
        carried_by: The collectives that brought it to other ranks.
        notes: Limits of the replay, and whether a second replay gave the same numbers.
    """

    kind: str
    op: str = ""
    kernel: str = ""
    module: str = NO_MODULE
    parameter: str = ""
    direction: str = "forward"
    ranks: tuple[int, ...] = ()
    micro_batch: int = 0
    line: str = ""
    inputs: tuple[TensorRange, ...] = ()
    output: TensorRange | None = None
    reached: tuple[str, ...] = ()
    carried_by: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Return the event as one sentence."""
        if self.kind == "unseen":
            return "The step gave numbers that are not finite, and its replay gave none."
        value = "NaN" if self.output and self.output.is_nan else "inf"
        place, time = self._place(), self._time()
        if self.kind == "input":
            return f"An input held {value} that no operation had made, and {place} read it: {time}."
        if self.kind in _STORED_KINDS:
            tensor = f"{self.kind} {self.parameter}"
            return f"The {tensor} held {value} before the step, and {place} read it: {time}."
        largest = max((tensor.magnitude for tensor in self.inputs), default=0.0)
        cause = f"of finite inputs up to {largest:.3g}"
        if self.kind == "collective":
            cause = f"though every rank fed it finite numbers, up to {largest:.3g}"
        elif not all(tensor.finite for tensor in self.inputs):
            cause = "of the infinities of a mask"
        return f"{place} made {value} {cause}: {time}."

    def _place(self) -> str:
        op = self.op
        if self.kernel not in ("", self.op):
            op = f"{self.op} ({self.kernel})"
        return f"{op} in {self.module or 'the model'}"

    def _time(self) -> str:
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        ranks = ", ".join(map(str, self.ranks))
        return f"{noun} {ranks}, {self.direction} pass, micro-batch {self.micro_batch}"

    def __str__(self) -> str:
        outputs = [self.output]
        if self.kind in _STORED_KINDS:
            outputs = []
        lines = [self.sentence()]
        lines += _lines("line", [self.line])
        lines += _lines("parameter", [self.parameter])
        lines += _lines("input", self.inputs)
        lines += _lines("output", outputs)
        lines += _lines("reached", [shorten(self.reached)])
        lines += _lines("carried by", self.carried_by)
        lines += _lines("note", self.notes)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the origin as JSON types."""
        return {"sentence": self.sentence(), **asdict(self)}


def _lines(heading: str, values: Iterable[object]) -> list[str]:
    """Return a line for each value that is not empty."""
    return [f"  {heading:10} {value}" for value in values if value]
