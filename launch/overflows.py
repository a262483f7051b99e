"""Which parameters' gradients overflowed in the steps that were skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distamp.scaler.overflow import OverflowReport
from launch.parallel import plain_name

__all__ = ["Overflows"]


@dataclass
class Overflows:
    """How often each parameter has overflowed, over a run and what it was resumed from.

    One whose gradient holds NaN alone did not overflow: what it was multiplied by did. It counts
    only where no gradient holds inf.

    Attributes:
        counts: By name, the steps in which it overflowed on some rank, and the elements that were
            inf in them, summed over ranks.
    """

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Mapping[str, Sequence[int]]) -> Overflows:
        """Return what ``counts`` was before JSON made lists of its pairs."""
        return cls({name: (steps, infs) for name, (steps, infs) in counts.items()})

    def add(self, report: OverflowReport) -> None:
        """Count a skipped step."""
        seen: dict[str, int] = {}
        any_inf = any(overflow.infs for overflow in report.overflows)
        for overflow in report.overflows:
            if overflow.infs or not any_inf:
                name = plain_name(overflow.name)
                seen[name] = seen.get(name, 0) + overflow.infs
        for name, infs in seen.items():
            steps, before = self.counts.get(name, (0, 0))
            self.counts[name] = (steps + 1, before + infs)

    @property
    def worst(self) -> list[tuple[str, int]]:
        """Names and numbers of steps, the most first; of equals, the one with more infs."""
        ordered = sorted(self.counts, key=lambda name: self.counts[name], reverse=True)
        return [(name, self.counts[name][0]) for name in ordered]

    def __str__(self) -> str:
        if not self.counts:
            return ""
        (name, steps), *others = self.worst
        text = f"most often {name}, in {steps} steps"
        if others:
            text += f"; then {others[0][0]}, in {others[0][1]}"
        return text + (f"; and {len(others) - 1} more" if len(others) > 1 else "")
