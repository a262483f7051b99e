"""What a communication hook has sent and found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Choice", "HookStats"]


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


@dataclass
class HookStats:
    """What one hook did on this rank since it was made.

    Args:
        exchanges: Buckets or modules whose gradients were exchanged.
        bytes_sent: By wire format, the bytes this rank sent to other hosts, or to other ranks where
            there is one level; without what TCP, IP and Ethernet add.
        bytes_inside: What it sent to ranks of its own host, in two levels.
        bytes_uncompressed: What a ring all-reduce (of shards, a ring reduce-scatter) of the same
            gradients in their own dtype sends in the place of ``bytes_sent``.
        seconds_waiting: Time spent with the network, 0 where a device waits.
        fallbacks: How many buckets went another way than the format's own, by reason.
        choice: What ``register(model, "auto")`` chose and why; None where the format was given.
        levels: How ranks and hosts exchange; with the reason, where it is not as they are.
        arithmetic: What writes and reads wires: ``"torch ops"``, or ``"Triton kernels"``; on a GPU
            without Triton it says so, where every bucket then costs many launches.
    """

    exchanges: int = 0
    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_inside: int = 0
    bytes_uncompressed: int = 0
    seconds_waiting: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)
    choice: Choice | None = None
    levels: str = ""
    arithmetic: str = "torch ops"

    @property
    def total_bytes(self) -> int:
        """Bytes sent in all formats."""
        return sum(self.bytes_sent.values())

    @property
    def saved(self) -> float:
        """The fraction of ``bytes_uncompressed`` that was not sent; 0 before the first exchange."""
        whole = self.bytes_uncompressed
        return 1.0 - self.total_bytes / whole if whole else 0.0

    def __str__(self) -> str:
        parts = [] if self.choice is None else [str(self.choice)]
        if self.exchanges:
            sent = ", ".join(f"{_bytes(n)} as {name}" for name, n in self.bytes_sent.items())
            parts.append(
                f"{self.exchanges} exchanges sent {sent}; {_bytes(self.bytes_uncompressed)} "
                f"uncompressed, {self.saved:.0%} saved"
            )
            if self.seconds_waiting:
                parts.append(f"waited {self.seconds_waiting:.2f} s")
            parts.append(self.levels)
            if "not installed" in self.arithmetic:
                parts.append(f"wires by {self.arithmetic}")
        elif self.fallbacks:
            parts.append("no gradient was sent in a wire format")
        elif self.choice is None or self.choice.compressed:
            parts.append("no gradient was exchanged yet")
        parts.extend(f"{count} x {reason}" for reason, count in self.fallbacks.items())
        return "; ".join(parts)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
