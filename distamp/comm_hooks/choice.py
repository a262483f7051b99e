"""Which way gradients are sent, chosen from how long each took; values alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["AUTO", "Choice", "choose"]

# What `register` takes in the place of a format's name.
AUTO = "auto"
# A way that is more exact wins unless another takes this much less: what is chosen is never 5 %
# slower than the fastest, and no run changes its numbers for less than it can feel.
MARGIN = 1.04


@dataclass(frozen=True)
class Choice:
    """What ``register(model, "auto")`` chose, and the times it chose by; the same on all ranks.

    Args:
        wire: The format that gradients travel in; or their own dtype, such as ``"fp32"``.
        compressed: Whether it is a format; the others need no hook.
        seconds: How long each way took on the slowest rank, the median of several times; nothing
            where there was nothing to choose from.
        nbytes: Bytes of the gradients that were sent.
        reason: Why, in a few words.
    """

    wire: str
    compressed: bool
    seconds: Mapping[str, float]
    nbytes: int
    reason: str

    def __str__(self) -> str:
        line = f"auto chose {self.wire}{'' if self.compressed else ' (no hook)'}: {self.reason}"
        if not self.seconds:
            return line
        times = ", ".join(f"{name} {_time(each)}" for name, each in self.seconds.items())
        return f"{line} ({self.nbytes / 1e6:.3g} MB in {times})"


def choose(seconds: Mapping[str, Sequence[float]], nbytes: int) -> Choice:
    """Choose the first way that takes at most 1.04 times as long as the fastest.

    Args:
        seconds: By way, its times on the slowest rank, the most exact way first: gradients as they
            are, then formats.
        nbytes: Bytes of the gradients that were sent each time.

    Returns:
        The same choice from the same times.

    Raises:
        ValueError: Fewer than two ways, a way without times, or a time that is no positive number.
    """
    if len(seconds) < 2:
        raise ValueError(f"{len(seconds)} ways to send gradients were timed: give two or more")
    for name, times in seconds.items():
        if not times or not all(0 < each < math.inf for each in times):
            raise ValueError(f"the times of {name} are {list(times)}: give positive seconds")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = min(medians.values())
    first = next(iter(medians))
    wire = next(name for name, each in medians.items() if each <= MARGIN * fastest)
    reason = "the link is the bottleneck"
    if wire == first:
        reason = "the processor is the bottleneck, and no format is 4 % faster"
    return Choice(wire, wire != first, medians, nbytes, reason)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
