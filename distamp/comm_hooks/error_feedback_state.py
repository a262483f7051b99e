"""What rounding took from a bucket, kept until the next exchange gives it back.

Kept in unscaled units, so a change of the loss scale does not touch it, and put back to where it
was when the step that an exchange was made for is skipped, or when the exchange met inf or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distamp.comm_hooks.wire_feedback import compensate, new_residual

__all__ = ["Residuals"]

# Where something is rounded: this rank's own gradients, and the means that it owns.
_STAGES = ("mine", "owned")
# (stage, first element in the bucket) -> what is owed to the elements from there on, fp32.
Segments = dict[tuple[str, int], Tensor]


class Residuals:
    """The error feedback of one bucket on one rank; `distamp.comm_hooks.exchange.Feedback`.

    Two roundings are made up for: of this rank's own gradients (``"mine"``), and of the means that
    it owns (``"owned"``).

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
        self._kept: Segments = {}
        self._current: Segments = {}
        self._coming: Segments = {}
        self._scale: Tensor | float = 1.0

    # -- during an exchange ------------------------------------------------------------------------

    def begin(self, scale: Tensor | None) -> None:
        """Begin an exchange of gradients that are multiplied by ``scale``, 0-d float32."""
        self._scale = 1.0 if scale is None else scale
        self._coming = {}

    def compensated(self, stage: str, start: int, values: Tensor) -> Tensor:
        """Return ``values`` and what is owed to them as a new fp32 tensor."""
        owed = self._current.get((stage, start))
        if owed is None:
            return values.to(torch.float32, copy=True)
        given = compensate(values[: owed.numel()], owed[: values.numel()], self._scale)
        # The last rank's part may be longer than what is left for it.
        filled = values[owed.numel() :].to(torch.float32)
        return torch.cat([given, filled]) if filled.numel() else given

    def keep(self, stage: str, start: int, owed: Tensor, arrived: Tensor) -> None:
        """Remember what of ``owed``, the values at ``start``, has not arrived."""
        self._coming[stage, start] = new_residual(owed, arrived, self._scale)

    def end(self, nonfinite: Tensor) -> None:
        """Take over what was kept, unless a gradient of some rank was inf or NaN."""
        if nonfinite.device.type == "cpu":
            if not nonfinite:
                self._current = self._coming
        else:
            self._current = _chosen(nonfinite, self._current, self._coming)
        self._coming = {}

    # -- after a step ------------------------------------------------------------------------------

    def step_ended(self, indices: Sequence[int], found_inf: Tensor) -> None:
        """Keep, or put back, what is owed to some parameters.

        Args:
            indices: Their places in the bucket.
            found_inf: 0-d; 0 if their optimizer stepped, 1 if it skipped.
        """
        skipped = found_inf > 0
        settled = _chosen(skipped, self._kept, self._current)
        if len(indices) == len(self._places):
            self._kept = self._current = settled
            return
        wheres = [self._places[index] for index in indices]
        self._kept = _patched(self._kept, settled, wheres)
        self._current = _patched(self._current, settled, wheres)

    # -- from one layout of buckets to the next -----------------------------------------------

    def of(self, index: int) -> Tensor | None:
        """Return all that is owed to one parameter; None if nothing is.

        Returns:
            fp32 of shape (2, numel): what is owed to this rank's own gradient, and to the part of
            the mean that this rank owns (0 elsewhere).
        """
        where = self._places[index]
        if not self._current:
            return None
        device = next(iter(self._current.values())).device
        owed = torch.zeros(2, where.stop - where.start, device=device)
        for (stage, start), segment in self._current.items():
            first, last = max(start, where.start), min(start + segment.numel(), where.stop)
            if first < last:
                row = owed[_STAGES.index(stage)]
                row[first - where.start : last - where.start] += segment[
                    first - start : last - start
                ]
        return owed

    def adopt(
        self,
        owed: Mapping[int, Tensor],
        device: torch.device,
        segments: Sequence[tuple[str, int, int]],
    ) -> None:
        """Owe what another layout of buckets, or a checkpoint, owed to parameters.

        What was owed to a part of the mean that another rank owns now is owed ``size`` times to
        this rank's own gradient, which comes to the same.

        Args:
            owed: For the places of some parameters, what `of` returned.
            device: Where the bucket lies.
            segments: Stage, first element and length of each ``compensated`` of an exchange.
        """
        mine, owned = torch.zeros(2, self._numel, device=device)
        for index, (to_mine, to_owned) in owed.items():
            mine[self._places[index]] = to_mine.to(device)
            owned[self._places[index]] = to_owned.to(device)
        self._current = {}
        for stage, start, numel in segments:
            if stage == "owned":
                where = slice(start, start + numel)
                self._current[stage, start] = owned[where].clone()
                owned[where] = 0.0
        mine += self._size * owned
        for stage, start, numel in segments:
            if stage == "mine":
                self._current[stage, start] = mine[start : start + numel]
        self._kept = self._current


def _chosen(first: Tensor, a: Segments, b: Segments) -> Segments:
    """Return ``a`` where ``first`` is true, else ``b``; without waiting for a device."""
    if first.device.type == "cpu":
        return a if first else b
    nothing = {key: torch.zeros_like(segment) for key, segment in (a | b).items()}
    a, b = nothing | a, nothing | b
    return {key: torch.where(first, a[key], b[key]) for key in nothing}


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
        new = torch.zeros(length, device=model.device) if old is None else old.clone()
        for where in wheres:
            first, last = max(start, where.start), min(start + length, where.stop)
            if first < last:
                cut = slice(first - start, last - start)
                new[cut] = 0.0 if given is None else given[cut]
        result[key] = new
    return result
