"""Buckets of DDP, and what rounding took from the gradients in them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from distamp.comm_hooks.exchange import Exchange
from distamp.comm_hooks.formats import Feedback, WireFormat

__all__ = ["Bucket", "reals_in"]


def reals_in(parameter: Tensor) -> int:
    """Return how many numbers the gradient of a parameter takes in a bucket: two for a complex."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class Bucket:
    """Parameters whose gradients are exchanged together.

    With error feedback it has one residual for each rounding: of the part that this rank sends to
    other hosts, and of the mean that it owns. They are in units of the mean, divided by the loss
    scale where an attached scaler says what it is, and always finite.

    Args:
        parameters: Those whose gradients lie in it, in its order.
        numel: Its elements.
        wire: The format on the way.
        exchange: What it is exchanged by.
    """

    def __init__(
        self, parameters: Sequence[Tensor], numel: int, wire: WireFormat, exchange: Exchange
    ) -> None:
        numels = [reals_in(each) for each in parameters] if wire.needs_error_feedback else []
        self.exchange = exchange
        self.plan = exchange.plan(numel, wire, numels if sum(numels) == numel else ())
        self._parameters = [weakref.ref(each) for each in parameters]
        self._residuals: list[tuple[int, Tensor]] = []
        if wire.needs_error_feedback:
            hosts, part = exchange.hosts, self.plan.part
            mine = exchange.local * hosts.count * part
            for first, length in ((mine, hosts.count * part), (mine + exchange.host * part, part)):
                zeros = torch.zeros(length, dtype=torch.float32, device=exchange.device)
                self._residuals.append((first, zeros))

    def serves(self, parameters: Sequence[Tensor], numel: int, exchange: Exchange) -> bool:
        """Return whether it is of these parameters, exchanged in this way."""
        same = len(parameters) == len(self._parameters) and numel == self.plan.numel
        same = same and self.exchange is exchange
        return same and all(a() is b for a, b in zip(self._parameters, parameters, strict=True))

    def feedback(self, scale: Tensor) -> tuple[Feedback, Feedback] | None:
        """Return the residuals as an exchange takes them; ``scale`` as `Feedback` has it."""
        if not self._residuals:
            return None
        (_, mine), (_, owned) = self._residuals
        return Feedback(mine, scale), Feedback(owned, scale)

    def of(self, place: int) -> Tensor | None:
        """Return the residuals of a parameter, fp32 (2, numel): of this rank's part, and the mean.

        What other ranks have is 0. None without error feedback.
        """
        if not self._residuals or len(self.plan.runs) != len(self._parameters):
            return None
        shape, device = (2, self.plan.runs[place][2]), self.exchange.device
        found = torch.zeros(shape, dtype=torch.float32, device=device)
        for row, (of_parameter, of_bucket) in zip(found, self._meet(place), strict=True):
            row[of_parameter] = of_bucket
        return found

    def adopt(self, place: int, residual: Tensor) -> None:
        """Take over, of the residuals of a parameter, what this rank has a use for."""
        (sent, mine), (owned, of_mean) = self._meet(place)
        of_mean.copy_(residual[1, owned])
        # What it took from a mean that another rank owns now comes to the same in what it sends.
        moved = residual[1].clone()
        moved[owned] = 0.0
        mine.copy_((residual[0] + moved)[sent])

    def keep(self, places: Sequence[int] | None, kept: Tensor) -> None:
        """Multiply the residuals of some parameters, None for all, by 1 to keep them, or by 0."""
        if places is None or len(set(places)) == len(self._parameters):
            for _, residual in self._residuals:
                residual.mul_(kept)
        else:
            for place in places:
                for _, of_bucket in self._meet(place):
                    of_bucket.mul_(kept)

    def _meet(self, place: int) -> list[tuple[slice, Tensor]]:
        """Return, for each residual, what of a parameter it has, and that part of it."""
        begin, _, length = self.plan.runs[place]
        found = []
        for first, residual in self._residuals:
            start = min(max(first - begin, 0), length)
            stop = max(start, min(first + residual.numel() - begin, length))
            there = slice(start + begin - first, stop + begin - first)
            found.append((slice(start, stop), residual[there] if stop > start else residual[:0]))
        return found
