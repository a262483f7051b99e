"""What a communication hook has sent, waited for and found, as a value."""

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
        exchanges: Buckets exchanged.
        bytes_sent: By wire format, the bytes this rank gave to the network: payload, block headers
            and words of the exchange, without what TCP, IP and Ethernet add.
        bytes_uncompressed: What torch's own collective sends for the same gradients in their own
            dtype: a ring all-reduce, or a reduce-scatter of shards. gloo makes the latter of an
            all-reduce.
        seconds_waiting: Time spent waiting for other ranks and the network, 0 where a device waits.
        largest_exponent: floor(log2) of the largest magnitude in a block that reached every rank:
            of a mean, or, where ranks exchange whole wires or shards, of a rank's share in one. Of
            gradients that are still scaled; None before the first exchange.
        nonfinite: Exchanges in which some gradient was inf or NaN.
        fallbacks: How many buckets went another way than the format's own, by reason.
        arithmetic: What writes and reads wires: ``"torch ops"``, or ``"Triton kernels"``; on a GPU
            without Triton it says so, where every bucket then costs many launches.
        choice: What ``register(model, "auto")`` chose and why; None where the format was given.
    """

    exchanges: int = 0
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    bytes_uncompressed: int = 0
    seconds_waiting: float = 0.0
    largest_exponent: int | None = None
    nonfinite: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    choice: Choice | None = None
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
            parts += self._exchanged()
        elif self.fallbacks:
            parts.append("no gradient was sent in a wire format")
        elif self.choice is None or self.choice.compressed:
            parts.append("no gradient was exchanged yet")
        parts.extend(f"{count} x {reason}" for reason, count in self.fallbacks.items())
        return "; ".join(parts)

    def _exchanged(self) -> list[str]:
        sent = ", ".join(f"{_bytes(n)} as {name}" for name, n in self.bytes_sent.items())
        parts = [
            f"{self.exchanges} exchanges sent {sent}; "
            f"{_bytes(self.bytes_uncompressed)} uncompressed, {self.saved:.0%} saved",
            f"waited {self.seconds_waiting:.2f} s",
        ]
        if self.largest_exponent is not None:
            parts.append(f"largest block below 2^{self.largest_exponent + 1}")
        if self.arithmetic not in ("torch ops", "Triton kernels"):
            parts.append(f"wires by {self.arithmetic}")
        if self.nonfinite:
            parts.append(f"{self.nonfinite} with inf or NaN")
        return parts


@dataclass
class Account:
    """The running sums behind `HookStats`; only the thread that exchanges adds to them."""

    exchanges: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    uncompressed: int = 0
    waiting: float = 0.0
    largest_exponent: int | None = None
    nonfinite: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    choice: Choice | None = None
    arithmetic: str = "torch ops"

    def saw(self, exponent: int) -> None:
        """Note the largest exponent of one exchange."""
        before = self.largest_exponent
        self.largest_exponent = exponent if before is None else max(exponent, before)

    def all_reduced(self, name: str, nbytes: int, uncompressed: int, size: int) -> None:
        """Count a ring all-reduce of ``nbytes`` over ``size`` ranks."""
        self.exchanges += 1
        self.sent[name] += 2 * (size - 1) * nbytes // size
        self.uncompressed += 2 * (size - 1) * uncompressed // size

    def stats(self) -> HookStats:
        """Return the sums as they are now."""
        return HookStats(
            self.exchanges,
            dict(self.sent),
            self.uncompressed,
            self.waiting,
            self.largest_exponent,
            self.nonfinite,
            dict(self.fallbacks),
            self.choice,
            self.arithmetic,
        )


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
