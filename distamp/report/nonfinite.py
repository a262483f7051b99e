"""Where a non-finite number was born, as a value: one sentence, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distamp.report.rows import OUTSIDE

__all__ = ["NonFiniteOrigin", "TensorRange"]

_HELD = ("parameter", "buffer", "input")


@dataclass(frozen=True, slots=True)
class TensorRange:
    """What was in a tensor.

    Attributes:
        name: What the kernel calls it.
        shape: Its shape on this rank.
        dtype: Its dtype.
        low: The smallest element; NaN where any is.
        high: The largest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float

    @property
    def finite(self) -> bool:
        """Whether all elements are."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def is_nan(self) -> bool:
        """Whether any element is NaN."""
        return math.isnan(self.low)

    def __str__(self) -> str:
        found = "NaN" if self.is_nan else f"{self.low:.4g} to {self.high:.4g}"
        return f"{self.name:16} {self.dtype} {list(self.shape)}: {found}"


@dataclass(frozen=True, slots=True)
class NonFiniteOrigin:
    """Where the first non-finite number of a step was born; ``print`` gives a sentence and a table.

    Attributes:
        kind: ``"op"``; ``"parameter"`` or ``"buffer"``, which held it before the step; ``"input"``,
            as ``"parameter"``, of a tensor of the step, or of what code outside of torch made;
            ``"collective"``, to which no rank gave one; ``"unseen"``: the step as it ran was not
            finite, and its replay is.
        op: The function that was called, such as ``"linear"``; in backward, the one whose backward
            this is.
        kernel: The kernel that ran in it, such as ``"addmm"``.
        module: The module's name; ``""`` is the model itself, ``"(outside)"`` what is not in it,
            such as the loss.
        parameter: The parameter or buffer that held it, or whose gradient it is first in.
        direction: ``"forward"`` or ``"backward"``.
        ranks: Where it was born.
        micro_batch: At which call of the model, from 0.
        line: ``file:line: code``, the innermost outside of torch; of the forward pass where a
            backward kernel is C++.
        inputs: What the kernel was given; for a collective, by rank.
        output: What it gave; of what held it, that.
        reached: What it spoilt: ``"loss"``, and names of parameters whose gradients it is in.
        carried_by: The collectives by which it came to other ranks.
        notes: What the replay could not show, and whether a second one gave the same numbers.
    """

    kind: str
    op: str = ""
    kernel: str = ""
    module: str = OUTSIDE
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
        """What happened, in one sentence."""
        if self.kind == "unseen":
            return "The step gave numbers that are not finite, and its replay gave none."
        op = self.op if self.kernel in ("", self.op) else f"{self.op} ({self.kernel})"
        where = f"{op} in {self.module or 'the model'}"
        ranks = ("rank " if len(self.ranks) == 1 else "ranks ") + ", ".join(map(str, self.ranks))
        when = f"{ranks}, {self.direction} pass, micro-batch {self.micro_batch}"
        made = "NaN" if self.output and self.output.is_nan else "inf"
        if self.kind == "input":
            return f"An input held {made} that no operation had made, and {where} read it: {when}."
        if self.kind in _HELD:
            held = f"{self.kind} {self.parameter}"
            return f"The {held} held {made} before the step, and {where} read it: {when}."
        largest = max((max(abs(it.low), abs(it.high)) for it in self.inputs), default=0.0)
        cause = f"of finite inputs up to {largest:.3g}"
        if self.kind == "collective":
            cause = f"though every rank fed it finite numbers, up to {largest:.3g}"
        elif not all(each.finite for each in self.inputs):
            cause = "of the infinities of a mask"
        return f"{where} made {made} {cause}: {when}."

    def __str__(self) -> str:
        rows = [("line", self.line), ("parameter", self.parameter)]
        rows += [("input", str(each)) for each in self.inputs]
        rows += [("output", str(self.output or ""))] if self.kind not in _HELD else []
        rows += [("reached", _some(self.reached))]
        rows += [("carried by", each) for each in self.carried_by]
        rows += [("note", each) for each in self.notes]
        return "\n".join([self.sentence(), *(f"  {k:10} {v}" for k, v in rows if v)])

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {"sentence": self.sentence(), **asdict(self)}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
