"""Which parameter overflowed, on which rank, and by how much."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distamp.gradients import local_gradients
from distamp.host import HostCopy
from distamp.optimizers import describe, parameter_names, parameters_of
from distamp.sources import source_of

if TYPE_CHECKING:
    from distamp.scaler.flow import Subject
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["Overflow", "OverflowReport", "SkipLog", "find_overflows", "report"]

_log = logging.getLogger("distamp.scaler")


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
        for gradient in local_gradients([parameter]):
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


def report(scaler: DistGradScaler, model: torch.nn.Module | None) -> OverflowReport:
    """Return the overflows of all ranks, under the names that are known; collective."""
    named = list(_with_stand_ins(scaler, _named(scaler, model)))
    everyone = scaler._ranks.gather(find_overflows(named, scaler._ranks.rank))
    overflows = tuple(overflow for rank in everyone for overflow in rank)
    return OverflowReport(scaler.get_scale(), overflows)


def _named(scaler: DistGradScaler, model: torch.nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    if model is not None:
        yield from model.named_parameters()
        return
    for optimizer, _ in scaler._states.live():
        source = source_of(optimizer)
        for name, p in zip(parameter_names(optimizer), parameters_of(optimizer), strict=True):
            behind = source.parameter_of(p)
            yield scaler._names.of(p if behind is None else behind, name), p


def _with_stand_ins(
    scaler: DistGradScaler, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each named parameter, and under the same name what is stepped in its place."""
    sources = [source_of(optimizer) for optimizer, _ in scaler._states.live()]
    for name, tensor in named:
        yield name, tensor
        for source in sources:
            other = source.stand_in_of(tensor)
            other = source.parameter_of(tensor) if other is None else other
            if other is not None:
                yield name, other


class SkipLog:
    """Says on rank 0, at INFO, which steps were skipped and why; never waits for a device."""

    def __init__(self) -> None:
        self._arriving: list[tuple[HostCopy, str, int]] = []

    def note(
        self, scaler: DistGradScaler, subject: Subject, flag: Tensor, skipped: bool | None
    ) -> None:
        """Note a step; on a device its outcome is logged an iteration later."""
        if skipped is False or not _log.isEnabledFor(logging.INFO) or scaler._ranks.rank:
            return
        _, optimizer, state, _ = subject
        if skipped is None:
            both = torch.stack((flag, scaler._scale_tensor().to(flag.device)))
            copy = HostCopy(both)
            self._arriving.append((copy, describe(optimizer), state.steps))
            return
        where = _where(scaler, subject)
        scale = scaler._scale_tensor().item()  # and not by an override of get_scale
        _say(describe(optimizer), state.steps, scale, state.overflow_rank(), where)

    def say(self) -> None:
        """Say what has arrived from earlier iterations."""
        if not self._arriving:
            return
        kept = []
        for entry in self._arriving:
            copy, name, step = entry
            if not copy.arrived():
                kept.append(entry)
                continue
            flag, scale = copy.values()
            if flag:
                _say(name, step, scale, None, "")
        self._arriving = kept


def _say(name: str, step: int, scale: float, rank: int | None, where: str) -> None:
    on = "" if rank is None else f" on rank {rank}"
    _log.info(
        "step %d of %s was skipped: inf or NaN in the gradients%s%s, at loss scale %g",
        step,
        name,
        on,
        where,
        scale,
    )


def _where(scaler: DistGradScaler, subject: Subject) -> str:
    """Return which parameter it was, where this rank knows."""
    source, optimizer = subject.source, subject.optimizer
    for name, p in zip(parameter_names(optimizer), parameters_of(optimizer), strict=True):
        if find_overflows([(name, p)], 0):
            behind = source.parameter_of(p)
            return f", first in {scaler._names.of(p if behind is None else behind, name)}"
    return ""
