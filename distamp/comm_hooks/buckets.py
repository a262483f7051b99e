"""Which gradients came through a hook in this iteration, and what was found in them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distamp.comm_hooks.arriving import Flags, any_of
from distamp.comm_hooks.headers import ReduceResult
from distamp.comm_hooks.layout import Layout
from distamp.comm_hooks.residuals import Residuals
from distamp.protocols import is_stepped

__all__ = ["Bucket", "Buckets", "Watch", "reals_in"]


def reals_in(parameter: Tensor) -> int:
    """Return how many numbers the gradient of a parameter takes in a bucket: two for a complex."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class Bucket:
    """The gradients of some parameters, which are exchanged together.

    Args:
        parameters: Those whose gradients lie in it, in its order.
        buckets: The hook's buckets.
    """

    def __init__(self, parameters: Sequence[Tensor], buckets: Buckets) -> None:
        self.ids = tuple(map(id, parameters))
        self.numels = [reals_in(parameter) for parameter in parameters]
        self.places = {each: index for index, each in enumerate(self.ids)}
        self.residuals: Residuals | None = None
        self.adopted: dict[int, Tensor] = {}
        self.layout: Layout | None = None
        self.engine: object = None
        self.iteration = -1
        self.exchanges = 0
        self.step = 0
        self.flag: Tensor | None = None
        self.alive = True
        self._buckets = buckets
        bucket = weakref.ref(self)

        def gone(_: object) -> None:
            living = bucket()
            if living is not None:
                living.alive = False

        # An id may come back for another tensor once the first is gone.
        self._parameters = [weakref.ref(parameter, gone) for parameter in parameters]

    def boundaries(self, numel: int) -> list[int]:
        """Return where parameters begin in the bucket, if they fill it."""
        if sum(self.numels) != numel:
            return []
        begun, first = [], 0
        for each in self.numels[:-1]:
            first += each
            begun.append(first)
        return begun

    def moves_to(self, engine: object) -> None:
        """Let another engine exchange it: of other ranks, or another dtype or device."""
        if self.residuals is not None:
            found = ((index, self.residuals.of(index)) for index in self.places.values())
            self.adopted = {index: each for index, each in found if each is not None}
        self.residuals, self.engine = None, engine

    def begin(self, iteration: int, step: int) -> None:
        """Count an exchange of this iteration; the ``step``-th of a bucket of this number."""
        if self.iteration != iteration:
            self.iteration, self.exchanges, self.flag = iteration, 0, None
        self.exchanges += 1
        self.step = step

    def note(self, result: ReduceResult) -> None:
        """Add what an exchange found."""
        flag = result.nonfinite
        self.flag = flag if self.flag is None else self.flag | flag
        self._buckets.mismatched.add(result.mismatched)
        if self.residuals is not None:
            self.residuals.end(result.nonfinite)


class Buckets:
    """All buckets of one hook.

    Attributes:
        scaled: Whether residuals are in unscaled units, by an attached scaler (True), or in units
            of the gradients as they were exchanged; None where that is not known.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.scaled: bool | None = None
        self.mismatched = Flags()
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._known: dict[int, list[Bucket]] = {}
        self._steps: Counter[int] = Counter()

    def begin(self, index: int, parameters: Sequence[Tensor]) -> Bucket:
        """Return the bucket of these parameters, whose exchange begins.

        Args:
            index: Its number.
            parameters: Those whose gradients lie in it, in its order.
        """
        ids = tuple(map(id, parameters))
        for bucket in self._known.get(index, ()):
            if bucket.ids == ids and bucket.alive:
                break
        else:
            bucket = Bucket(parameters, self)
            self._take_over(bucket, parameters)
            self._forget_unused()
            self._known.setdefault(index, []).append(bucket)
        self._steps[index] += 1
        bucket.begin(self.iteration, self._steps[index])
        return bucket

    def _take_over(self, bucket: Bucket, parameters: Sequence[Tensor]) -> None:
        """Let the parameters' residuals move to the bucket they are in from now on."""
        for index, parameter in enumerate(parameters):
            residual = self.residual_of(parameter)
            if residual is not None:
                bucket.adopted[index] = residual
            self._of[parameter] = bucket

    def _forget_unused(self) -> None:
        living = set(map(id, self._of.values()))
        for index, buckets in self._known.items():
            self._known[index] = [each for each in buckets if id(each) in living]

    def all(self) -> list[Bucket]:
        """Return every bucket that parameters are in now."""
        return [bucket for buckets in self._known.values() for bucket in buckets]

    def residual_of(self, parameter: Tensor) -> Tensor | None:
        """Return what rounding took from a parameter's gradients, as `Residuals.of` does."""
        bucket: Bucket | None = self._of.get(parameter)
        if bucket is None or bucket.residuals is None:
            return None
        return bucket.residuals.of(bucket.places[id(parameter)])

    def forget_residuals(self) -> None:
        """Begin anew: what rounding took before is not given back."""
        for bucket in self.all():
            bucket.residuals, bucket.adopted = None, {}

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """Keep or put back the residuals of these parameters; None: of all."""
        if parameters is None:
            parameters = list(self._of)
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
        for bucket in self.all():
            if bucket.residuals is not None:
                bucket.residuals.iteration_ended()

    def watch(self, parameters: Sequence[Tensor]) -> Watch | None:
        """Return the watch over ``parameters``; None if one never came through."""
        trained = [p for p in parameters if is_stepped(p)]
        buckets = {id(bucket): bucket for p in trained if (bucket := self._of.get(p)) is not None}
        if not trained or any(p not in self._of for p in trained):
            return None
        return Watch(self, trained, list(buckets.values()))


class Watch:
    """See `distamp.protocols.GradientWatch`."""

    replicated = True

    def __init__(
        self, all_buckets: Buckets, parameters: list[Tensor], buckets: list[Bucket]
    ) -> None:
        self._all = all_buckets
        self._parameters = parameters
        self._buckets = buckets
        # Nobody else's gradients travel with these.
        self._alone = sum(len(bucket.ids) for bucket in buckets) == len(parameters)

    def exchanged(self) -> bool:
        """See `distamp.protocols.GradientWatch.exchanged`."""
        now = self._all.iteration
        return all(bucket.iteration == now for bucket in self._buckets)

    def found_inf(self) -> Tensor:
        """See `distamp.protocols.GradientWatch.found_inf`."""
        flags = [flag for bucket in self._buckets if (flag := bucket.flag) is not None]
        device = flags[0].device
        if all(flag.device.type == "cpu" for flag in flags):
            if not any(map(bool, flags)):
                return torch.zeros((), dtype=torch.float32, device="cpu")
        elif self._alone and all(bucket.exchanges == 1 for bucket in self._buckets):
            return any_of(flags).float()
        # Some gradient of these buckets was not finite: whether it is one of these parameters', and
        # still there, all ranks find alike, for they have the same gradients.
        gradients = [p.grad for p in self._parameters if p.grad is not None and p.grad.numel()]
        if not gradients:
            return torch.zeros((), dtype=torch.float32, device=device)
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        norms = [torch.stack(torch._foreach_norm(g, float("inf"))) for g in by_device.values()]
        return any_of([(~each.isfinite()).any() for each in norms]).float()
