"""Which parameter overflowed, on which rank, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from distamp.scaler.gradients import local_gradients

__all__ = ["Overflow", "OverflowReport", "find_overflows"]


@dataclass(frozen=True)
class Overflow:
    """One parameter whose gradient held inf or NaN on one rank.

    Args:
        name: The parameter's name, or the optimizer's group and index where names are not known.
        rank: The rank, numbered as in the default group.
        infs: Elements that are inf or -inf in this rank's part of the gradient.
        nans: Elements that are NaN.
        elements: All elements of this rank's part.
        largest_finite: The largest magnitude among the finite elements, as it lies in ``.grad``:
            unscaled, but still scaled where a fused optimizer had the step. 0.0 if none is finite.
    """

    name: str
    rank: int
    infs: int
    nans: int
    elements: int
    largest_finite: float


@dataclass(frozen=True)
class OverflowReport:
    """Every overflow of one skipped step, the same value on every rank.

    Args:
        scale: The loss scale when the report was taken.
        overflows: By rank and then in the order of the parameters.
    """

    scale: float
    overflows: tuple[Overflow, ...]

    def __str__(self) -> str:
        width = max((len(o.name) for o in self.overflows), default=9)
        head = f"{'parameter':<{width}}  rank        inf        nan   elements  largest finite"
        rows = [
            f"{o.name:<{width}}  {o.rank:>4}  {o.infs:>9}  {o.nans:>9}  {o.elements:>9}  "
            f"{o.largest_finite:>14.4g}"
            for o in self.overflows
        ]
        return "\n".join([f"overflow at loss scale {self.scale:g}", head, *rows])


@torch.no_grad()
def find_overflows(named: Iterable[tuple[str, Tensor]], rank: int) -> list[Overflow]:
    """Return this rank's overflows among the gradients of ``named`` parameters."""
    found = []
    for name, parameter in named:
        for gradient in local_gradients([parameter], allow_fp16=True):
            finite = gradient.isfinite()
            if finite.all():
                continue
            kept = gradient[finite]
            found.append(
                Overflow(
                    name=name,
                    rank=rank,
                    infs=int(gradient.isinf().sum()),
                    nans=int(gradient.isnan().sum()),
                    elements=gradient.numel(),
                    largest_finite=float(kept.abs().max()) if kept.numel() else 0.0,
                )
            )
    return found
