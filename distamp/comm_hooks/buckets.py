"""Which gradients came through a hook in this iteration, and what was found in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distamp.comm_hooks.error_feedback_state import Residuals
from distamp.comm_hooks.exchange import Outcome

__all__ = ["Bucket", "Buckets", "Watch"]


class Bucket:
    """The gradients of some parameters, which are exchanged together.

    Args:
        parameters: Those whose gradients lie in it, in its order.
        book: The hook's buckets.
    """

    def __init__(self, parameters: Sequence[Tensor], book: Buckets) -> None:
        self.parameters = len(parameters)
        self.places = {id(p): index for index, p in enumerate(parameters)}
        self.residuals: Residuals | None = None
        self._book = book
        self.iteration = -1
        self.exchanges = 0
        self.flag: Tensor | None = None
        self.owed: dict[int, Tensor] = {}

    def begin(self, iteration: int) -> None:
        """Count an exchange of this iteration."""
        if self.iteration != iteration:
            self.iteration, self.exchanges, self.flag = iteration, 0, None
        self.exchanges += 1

    def note(self, outcome: Outcome) -> None:
        """Add what an exchange found."""
        flag = outcome.nonfinite
        self.flag = flag if self.flag is None else self.flag | flag
        self._book.apart.append(outcome.apart)
        if self.residuals is not None:
            self.residuals.end(outcome.nonfinite)


class Buckets:
    """All buckets of one hook."""

    def __init__(self) -> None:
        self.iteration = 0
        self.apart: list[Tensor] = []
        self._arriving: _Arriving | None = None
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._known: dict[tuple[int, ...], Bucket] = {}

    def begin(self, parameters: Sequence[Tensor]) -> Bucket:
        """Return the bucket of these parameters, whose exchange begins."""
        key = tuple(map(id, parameters))
        bucket = self._known.get(key)
        # An id may come back for another tensor once the first is gone.
        if bucket is None or any(self._of.get(p) is not bucket for p in parameters):
            bucket = self._known[key] = Bucket(parameters, self)
            self._take_over(bucket, parameters)
            living = set(map(id, self._of.values()))
            self._known = {k: b for k, b in self._known.items() if id(b) in living}
        bucket.begin(self.iteration)
        return bucket

    def _take_over(self, bucket: Bucket, parameters: Sequence[Tensor]) -> None:
        """Let the parameters' errors move to the bucket they are in from now on."""
        for index, parameter in enumerate(parameters):
            before: Bucket | None = self._of.get(parameter)
            if before is not None and before.residuals is not None:
                owed = before.residuals.of(before.places[id(parameter)])
                if owed is not None:
                    bucket.owed[index] = owed
            self._of[parameter] = bucket

    def owed(self, parameter: Tensor) -> Tensor | None:
        """Return what rounding took from a parameter's gradients, as `Residuals.of` does."""
        bucket: Bucket | None = self._of.get(parameter)
        if bucket is None or bucket.residuals is None:
            return None
        return bucket.residuals.of(bucket.places[id(parameter)])

    def step_ended(self, parameters: Sequence[Tensor], found_inf: Tensor) -> None:
        """Keep or put back the errors of these parameters."""
        touched: dict[int, tuple[Residuals, list[int]]] = {}
        for parameter in parameters:
            bucket: Bucket | None = self._of.get(parameter)
            if bucket is not None and bucket.residuals is not None:
                _, places = touched.setdefault(id(bucket), (bucket.residuals, []))
                places.append(bucket.places[id(parameter)])
        for residuals, places in touched.values():
            residuals.step_ended(places, found_inf)

    def leave_out(self, parameters: Sequence[Tensor]) -> None:
        """Forget parameters whose gradients went another way."""
        for parameter in parameters:
            self._of.pop(parameter, None)

    def iteration_ended(self) -> None:
        """Begin the next iteration."""
        self.iteration += 1

    def watch(self, parameters: Sequence[Tensor]) -> Watch | None:
        """Return the watch over ``parameters``; None if one never came through."""
        trained = [p for p in parameters if p.requires_grad]
        buckets = {id(bucket): bucket for p in trained if (bucket := self._of.get(p)) is not None}
        if not trained or any(p not in self._of for p in trained):
            return None
        return Watch(self, trained, list(buckets.values()))

    def ranks_mismatched(self) -> bool:
        """See `distamp.protocols.CommHook.ranks_mismatched`."""
        flags, self.apart = self.apart, []
        if flags and flags[0].device.type != "cpu":
            arrived = self._arriving
            self._arriving = _Arriving(torch.stack(flags).any())
            return arrived is not None and arrived.value()
        return any(map(bool, flags))


class _Arriving:
    """A flag on its way from a device to the host."""

    def __init__(self, flag: Tensor) -> None:
        self._host = torch.empty((), dtype=flag.dtype, pin_memory=True)
        self._host.copy_(flag, non_blocking=True)
        self._event = torch.Event(flag.device)
        self._event.record()

    def value(self) -> bool:
        self._event.synchronize()
        return bool(self._host)


class Watch:
    """See `distamp.protocols.GradientWatch`."""

    replicated = True

    def __init__(self, book: Buckets, parameters: list[Tensor], buckets: list[Bucket]) -> None:
        self._book = book
        self._parameters = parameters
        self._buckets = buckets
        # Nobody else's gradients travel with these.
        self._alone = sum(bucket.parameters for bucket in buckets) == len(parameters)

    def exchanged(self) -> bool:
        """See `distamp.protocols.GradientWatch.exchanged`."""
        now = self._book.iteration
        return all(bucket.iteration == now for bucket in self._buckets)

    def found_inf(self) -> Tensor:
        """See `distamp.protocols.GradientWatch.found_inf`."""
        flags = [flag for bucket in self._buckets if (flag := bucket.flag) is not None]
        device = flags[0].device
        if device.type == "cpu":
            if not any(map(bool, flags)):
                return torch.zeros(())
        elif self._alone and all(bucket.exchanges == 1 for bucket in self._buckets):
            return torch.stack(flags).any().float()
        # Some gradient of these buckets was not finite: whether it is one of these parameters', and
        # still there, all ranks find alike, for they hold the same gradients.
        gradients = [p.grad for p in self._parameters if p.grad is not None and p.grad.numel()]
        if not gradients:
            return torch.zeros((), device=device)
        norms = torch.stack(torch._foreach_norm(gradients, float("inf")))
        return (~norms.isfinite()).any().float()
