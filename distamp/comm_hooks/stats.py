"""What a communication hook has sent and found, as a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from distamp.comm_hooks.choice import Choice

__all__ = ["Account", "HookStats"]


@dataclass(frozen=True)
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
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    bytes_inside: int = 0
    bytes_uncompressed: int = 0
    seconds_waiting: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
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
            if self.arithmetic not in ("torch ops", "Triton kernels"):
                parts.append(f"wires by {self.arithmetic}")
        elif self.fallbacks:
            parts.append("no gradient was sent in a wire format")
        elif self.choice is None or self.choice.compressed:
            parts.append("no gradient was exchanged yet")
        parts.extend(f"{count} x {reason}" for reason, count in self.fallbacks.items())
        return "; ".join(parts)


@dataclass
class Account:
    """The running sums behind `HookStats`."""

    choice: Choice | None = None
    exchanges: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    uncompressed: int = 0
    waiting: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)
    levels: str = ""
    arithmetic: str = "torch ops"

    def add(self, name: str, sent: int, inside: int, uncompressed: int) -> None:
        """Count one exchange in the format of that name."""
        self.exchanges += 1
        self.sent[name] += sent
        self.inside += inside
        self.uncompressed += uncompressed

    def stats(self) -> HookStats:
        """Return the sums as they are now."""
        return HookStats(
            self.exchanges,
            dict(self.sent),
            self.inside,
            self.uncompressed,
            self.waiting,
            dict(self.fallbacks),
            self.choice,
            self.levels,
            self.arithmetic,
        )


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
