"""What rounding took from a bucket's gradients, kept until the next exchange gives it back.

With an attached scaler it is kept in unscaled units, so a change of the loss scale does not touch
it, and is restored for the parameters of an optimizer that skips its step. Without a scaler it is
in units of the gradients as they were exchanged. Nobody then reports which steps were skipped, so
it is restored for the whole bucket when the exchange found inf or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distamp.comm_hooks.arriving import used_here
from distamp.comm_hooks.error_feedback import Feedback
from distamp.host import moved

__all__ = ["Residuals", "check_residual"]

# Where something is rounded: this rank's own gradients, and the means that it owns.
_STAGES = ("mine", "owned")
# (stage, first element in the bucket) -> what rounding took from the elements from there on, fp32.
Segments = dict[tuple[str, int], Tensor]


class Residuals:
    """The error feedback of one bucket on one rank; `distamp.comm_hooks.engine.FeedbackStore`.

    Two roundings are made up for: of this rank's own gradients (``"mine"``), and of the means that
    it owns (``"owned"``): four bytes for each element, and four for each that it owns. Between an
    exchange and the step it is made for, there are those of before as well, if a scaler says
    whether that step was skipped.

    Args:
        numels: The elements of each parameter in the bucket, in its order.
        size: The ranks of the exchange.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error
    feedback fixes SignSGD", 2019.
    """

    def __init__(self, numels: Sequence[int], size: int) -> None:
        self._size = size
        self._places: list[slice] = []
        first = 0
        for numel in numels:
            self._places.append(slice(first, first + numel))
            first += numel
        self._numel = first
        self._now: Segments = {}
        self._at_last_step: Segments | None = None
        self._coming: Segments = {}
        self._scale: Tensor | float = 1.0
        self._joined = False

    # -- during an exchange ------------------------------------------------------------------------

    def begin(self, scale: Tensor | None) -> None:
        """Begin an exchange of gradients that are multiplied by ``scale``, 0-d float32.

        None says that no scaler is there: residuals are in units of these gradients then, and
        nobody will say that a step was skipped. What was kept must be of the same kind.
        """
        self._scale = 1.0 if scale is None else scale
        self._joined = scale is not None
        self._coming = {}

    def before(self, stage: str, start: int, numel: int) -> Feedback:
        """Return what rounding took from the elements of a stage before."""
        residual = self._now.get((stage, start))
        assert residual is None or residual.numel() == numel
        # The stream of the optimizer or of a checkpoint made it, and it may be let go here.
        return Feedback(None if residual is None else used_here(residual), self._scale)

    def keep(self, stage: str, start: int, residual: Tensor) -> None:
        """Remember what rounding took from the elements of a stage now."""
        self._coming[stage, start] = residual

    def end(self, nonfinite: Tensor) -> None:
        """Take over what was kept.

        Args:
            nonfinite: Whether a gradient of some rank was inf or NaN. It is about the bucket, in
                which another optimizer may have parameters that it steps. So it decides only where
                no scaler reports, by `step_ended`, whose step was skipped.
        """
        if self._joined:
            if self._at_last_step is None:
                self._at_last_step = self._now
            self._now = self._coming
        else:
            self._now = _chosen(nonfinite, self._now, self._coming)
        self._coming = {}

    # -- after a step ------------------------------------------------------------------------------

    def step_ended(self, indices: Sequence[int], found_inf: Tensor) -> None:
        """Keep, or put back, the residuals of some parameters.

        Args:
            indices: Their places in the bucket.
            found_inf: 0-d; 0 if their optimizer stepped, 1 if it skipped.
        """
        before = self._at_last_step
        if before is None:
            return
        decided = _chosen(found_inf > 0, before, self._now)
        if len(indices) == len(self._places):
            self._now, self._at_last_step = decided, None
            return
        wheres = [self._places[index] for index in indices]
        self._at_last_step = _patched(before, decided, wheres)
        self._now = _patched(self._now, decided, wheres)

    def iteration_ended(self) -> None:
        """Go on from what there is now, for parameters that nobody steps too."""
        self._at_last_step = None

    # -- from one layout of buckets to the next -----------------------------------------------

    def of(self, index: int) -> Tensor | None:
        """Return the residuals of one parameter; None if there are none.

        Returns:
            fp32 of shape (2, numel): of this rank's own gradient, and of the part of the mean that
            this rank owns (0 elsewhere).
        """
        where = self._places[index]
        if not self._now:
            return None
        device = next(iter(self._now.values())).device
        found = torch.zeros(2, where.stop - where.start, dtype=torch.float32, device=device)
        for (stage, start), segment in self._now.items():
            first, last = max(start, where.start), min(start + segment.numel(), where.stop)
            if first < last:
                row = found[_STAGES.index(stage)]
                row[first - where.start : last - where.start] += segment[
                    first - start : last - start
                ]
        return found

    def adopt(
        self,
        residuals: Mapping[int, Tensor],
        device: torch.device,
        segments: Sequence[tuple[str, int, int]],
    ) -> None:
        """Take over residuals from another layout of buckets, or from a checkpoint.

        What rounding took from a part of the mean that another rank owns now becomes ``size`` times
        as much of this rank's own gradient, which comes to the same.

        Args:
            residuals: For the places of some parameters, what `of` returned.
            device: Where the bucket lies.
            segments: Stage, first element and length of each `before` of an exchange.
        """
        whole = (self._numel,)
        mine, owned = (torch.zeros(whole, dtype=torch.float32, device=device) for _ in _STAGES)
        for index, (of_mine, of_owned) in residuals.items():
            mine[self._places[index]] = of_mine.to(device)
            owned[self._places[index]] = of_owned.to(device)
        self._now, self._at_last_step = {}, None
        for stage, start, numel in segments:
            if stage == "owned":
                where = slice(start, start + numel)
                self._now[stage, start] = owned[where].clone()
                owned[where] = 0.0
        mine += self._size * owned
        for stage, start, numel in segments:
            if stage == "mine":
                self._now[stage, start] = mine[start : start + numel].clone()


def check_residual(name: str, residual: object, numel: int | None) -> None:
    """Refuse what `Residuals.of` does not return: all but fp32 of shape (2, numel), finite.

    Args:
        name: The parameter's.
        residual: What was given for it.
        numel: The numbers in its gradient; None where that is not known.
    """
    if not isinstance(residual, Tensor) or residual.dtype is not torch.float32:
        raise ValueError(f"the residuals of {name!r} must be fp32, not {residual!r:.80}")
    if residual.ndim != 2 or len(residual) != 2 or numel not in (None, residual.shape[1]):
        raise ValueError(
            f"the residuals of {name!r} must be of shape (2, {'numel' if numel is None else numel})"
            f", not {tuple(residual.shape)}"
        )
    if not residual.isfinite().all():
        raise ValueError(f"the residuals of {name!r} hold inf or NaN")


def _chosen(first: Tensor, a: Segments, b: Segments) -> Segments:
    """Return ``a`` where ``first`` is true, else ``b``; without waiting for a device."""
    if first.device.type == "cpu":
        return a if first else b
    first = _beside(first, a, b)
    nothing = {key: torch.zeros_like(segment) for key, segment in (a | b).items()}
    a, b = nothing | a, nothing | b
    return {key: torch.where(first, a[key], b[key]) for key in nothing}


def _beside(flag: Tensor, *segments: Segments) -> Tensor:
    """Return a flag on the device where the segments lie, which may be another than the scale's."""
    lie = next((each.device for some in segments for each in some.values()), flag.device)
    return moved(flag, lie)


def _patched(into: Segments, source: Segments, wheres: Sequence[slice]) -> Segments:
    """Return ``into`` with the elements of ``source`` at some places of the bucket."""
    result: Segments = {}
    for key in {**into, **source}:
        start = key[1]
        given = source.get(key)
        old = into.get(key)
        length = max(each.numel() for each in (given, old) if each is not None)
        model = given if given is not None else old
        assert model is not None
        new = model.new_zeros(length) if old is None else old.clone()
        for where in wheres:
            first, last = max(start, where.start), min(start + length, where.stop)
            if first < last:
                cut = slice(first - start, last - start)
                new[cut] = 0.0 if given is None else given[cut]
        result[key] = new
    return result
