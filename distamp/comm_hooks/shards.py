"""What a hook knows of gradients of sharded models, and what it refuses there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from distamp.comm_hooks.arriving import any_of
from distamp.comm_hooks.blocks import EXPONENT_BIAS
from distamp.comm_hooks.buckets import Buckets
from distamp.comm_hooks.headers import ReduceResult
from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat
from distamp.protocols import is_stepped

__all__ = [
    "ShardedGroup",
    "ShardedWatch",
    "alone",
    "check_format",
    "check_width",
    "watch_shards",
]

# Gradients of these dtypes hold whatever an fp32 sum can be.
_WIDE = (torch.float32, torch.float64, torch.bfloat16)


class ShardedGroup(Protocol):
    """Parameters whose gradients are exchanged together, and what is known of them.

    Attributes:
        iteration: The last one, as the state counts them, in which they were.
        nonfinite: 0-d bool, the same on all ranks: whether one of them was inf or NaN on any rank
            in that iteration, or was so large (1e34) that sums may; None where nobody knows.
    """

    iteration: int
    nonfinite: Tensor | None

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters."""

    def agreeing(self) -> list[int]:
        """Return the ranks, of the default group, that know the same of these gradients."""


class ShardedWatch:
    """See `distamp.protocols.GradientWatch`; of whole FSDP2 modules.

    No message is sent while all of an optimizer's gradients came through FSDP2's exchanges and were
    finite everywhere, which all ranks then know. Once one was not, the ranks find out by a message
    whose it was, as without a hook. An FSDP1 hook does not know whose gradient it has, so there the
    message stays.

    Args:
        buckets: Counts iterations.
        groups: Those of the parameters.
    """

    replicated = False

    def __init__(self, buckets: Buckets, groups: Sequence[ShardedGroup]) -> None:
        self._buckets = buckets
        self._groups = groups

    def exchanged(self) -> bool:
        """Return whether all came through in this iteration and, on a host, all were finite."""
        flags = [g.nonfinite for g in self._groups if g.iteration == self._buckets.iteration]
        known = [flag for flag in flags if flag is not None]
        if len(known) < len(self._groups):
            return False
        # Shards differ between ranks: whose gradient it was, no rank knows by itself.
        return not any(flag.device.type == "cpu" and bool(flag) for flag in known)

    def found_inf(self) -> Tensor:
        """See `distamp.protocols.GradientWatch.found_inf`."""
        flags = [group.nonfinite for group in self._groups if group.nonfinite is not None]
        return any_of(flags).float()


def watch_shards(
    buckets: Buckets,
    every: Sequence[ShardedGroup],
    parameters: Sequence[Tensor],
    ranks: Sequence[int],
) -> ShardedWatch | None:
    """Return the watch over ``parameters``; None if some are of no group that all ranks know of."""
    trained = {id(p) for p in parameters if is_stepped(p)}
    groups = [g for g in every if trained & {id(p) for p in g.parameters()}]
    found = {id(p) for group in groups for p in group.parameters() if p.requires_grad}
    on_host = all(p.device.type == "cpu" for p in parameters)
    if not trained or not trained <= found or not (on_host or trained == found):
        return None
    if any(p.dtype not in _WIDE for p in parameters):
        return None
    if not all(set(ranks) <= set(group.agreeing()) for group in groups):
        return None
    return ShardedWatch(buckets, groups)


def alone(
    values: Tensor, out: Tensor | None, divisor: float, before: ReduceResult | None
) -> ReduceResult:
    """Do as `Engine.staged` where there is one rank: nothing is sent, and nothing rounded."""
    target = values if out is None else out
    with torch.no_grad():
        target.copy_(values / divisor)
        nonfinite = ~values.isfinite().all()
        mismatched = torch.zeros_like(nonfinite)
        if before is not None:
            nonfinite, mismatched = nonfinite | before.nonfinite, before.mismatched
        largest = torch.full_like(nonfinite, -EXPONENT_BIAS, dtype=torch.int64)
    return ReduceResult(nonfinite, largest, mismatched, torch.zeros_like(nonfinite))


def check_format(wire: WireFormat) -> None:
    """Refuse formats that need error feedback.

    Raises:
        ValueError: it does; the message names the others.
    """
    if wire.needs_error_feedback:
        allowed = [n for n, each in WIRE_FORMATS.items() if not each.needs_error_feedback]
        raise ValueError(
            f"{wire.name} needs error feedback, which sharded gradients have not: use "
            f"DistributedDataParallel, or one of {', '.join(allowed)}"
        )


def check_width(wire: WireFormat, dtype: torch.dtype, where: str) -> None:
    """Refuse gradients in a dtype that is no wider than the wire.

    Raises:
        ValueError: it is not; the message says to set ``where`` to torch.float32.
    """
    if dtype.itemsize <= wire.payload.itemsize:
        raise ValueError(
            f"the {wire.name} wire is no narrower than gradients reduced in {dtype}: set {where} "
            "to torch.float32, or register no hook"
        )
