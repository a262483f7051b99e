"""Look at the gradients of one optimizer on this rank: a value comes back, nothing is raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distamp import host
from distamp.gradients import check_finite, flag_of, largest_magnitude, local_gradients
from distamp.sources import GradientSource

__all__ = ["Local", "checked", "inverse", "looked_at", "nothing_found", "unscaled"]


@dataclass(slots=True)
class Local:
    """What one rank found in the gradients of one optimizer.

    Args:
        flags: 0-d float32, one for each device that holds gradients; 1 where there is inf or NaN.
        largest: 0-d float32, the largest magnitude while still scaled, where it is asked for.
        error: Why they could not be looked at.
    """

    flags: Sequence[Tensor] = field(default_factory=list)
    largest: Tensor | None = None
    error: Exception | None = None


def looked_at(look: Callable[..., Local], *args: Any) -> Local:
    """Return what ``look`` finds.

    The one place that catches what can go wrong on one rank before a message: the error travels
    in it, so that every rank raises and none is left waiting.
    """
    try:
        return look(*args)
    except Exception as error:
        return nothing_found(error)


def nothing_found(error: Exception | None = None) -> Local:
    """Return what a rank has to say that could not look."""
    return Local(flags=[flag_of(False, "cpu")], error=error)


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale as torch computes it: in float64, as float32 can be off by one bit."""
    if host.is_host(scale.device) and (value := scale.item()):
        return torch.full((), 1.0 / value, dtype=torch.float32, device=scale.device)
    return scale.double().reciprocal().float()


@torch.no_grad()
def checked(optimizer: Any, source: GradientSource, device: torch.device, watch: bool) -> Local:
    """Look for inf and NaN and change nothing.

    Args:
        optimizer: Names the parameters in errors.
        source: Of its gradients.
        device: Where the flag of no gradients lies.
        watch: Whether the largest magnitude is asked for.
    """
    gradients = local_gradients(source.watched(), optimizer)
    if watch:  # one pass tells both
        largest = largest_magnitude(gradients, device)
        return Local([largest.isinf().float()], largest)
    return Local(check_finite(gradients, flag_of(False, device)))


def unscaled(
    optimizer: Any,
    source: GradientSource,
    scale: Tensor,
    unscale: Callable[[Tensor, Tensor, bool], Sequence[Tensor]],
    watch: bool,
    allow_fp16: bool,
) -> Local:
    """Divide the gradients by ``scale`` and look for inf and NaN.

    Args:
        optimizer: Names the parameters in errors.
        source: Of its gradients.
        scale: 0-d float32, what they were made with.
        unscale: Takes 1 / scale, a flag to set and whether float16 gradients may be unscaled in
            place, and returns a flag for each device.
        watch: Whether the largest magnitude is asked for.
        allow_fp16: Whether float16 gradients may be read for it.
    """
    largest = None
    if watch:
        with torch.no_grad():
            largest = largest_magnitude(local_gradients(source.filled(), optimizer), scale.device)
    found = flag_of(False, scale.device)
    flags = unscale(inverse(scale), found, allow_fp16)
    return Local(flags or [found], largest)
