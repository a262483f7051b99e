"""What a communication hook has sent and found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["HookStats"]


@dataclass
class HookStats:
    """What one hook did on this rank since it was made.

    Args:
        exchanges: Buckets or modules whose gradients, or weights, were exchanged.
        bytes_sent: By wire format (and ``"int8 weights"``, of what is gathered), the bytes this
            rank sent to other hosts, or to other ranks where there is one level; without what TCP,
            IP and Ethernet add.
        bytes_uncompressed: What leaves this host in the place of ``bytes_sent``, for each of its
            ranks, where a ring of all ranks all-reduces (of shards, reduce-scatters) the same
            gradients in their own dtype, and visits each host once.
        seconds_waiting: Time spent with the network, 0 where a device waits.
        fallbacks: How many buckets, or modules' weights, went another way than the format's own, by
            reason.
        left_off: Why `register` left the hook off, so that gradients are sent uncompressed; ``""``
            if it did not.
        levels: How ranks and hosts exchange; with the reason, where it is not as they are.
    """

    exchanges: int = 0
    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_uncompressed: int = 0
    seconds_waiting: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)
    left_off: str = ""
    levels: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes sent in all formats."""
        return sum(self.bytes_sent.values())

    @property
    def saved(self) -> float:
        """The fraction of ``bytes_uncompressed`` that was not sent; 0 before the first exchange."""
        return 1.0 - self.total_bytes / max(1, self.bytes_uncompressed) if self.exchanges else 0.0

    def __str__(self) -> str:
        parts = [f"the hook was left off: {self.left_off}"] if self.left_off else []
        if self.exchanges:
            sent = ", ".join(
                f"{each / 1e6:.4g} MB as {wire}" for wire, each in self.bytes_sent.items()
            )
            whole = f"{self.bytes_uncompressed / 1e6:.4g} MB uncompressed"
            parts.append(f"{self.exchanges} exchanges sent {sent}; {whole}, {self.saved:.0%} saved")
            parts.append(f"waited {self.seconds_waiting:.2f} s; {self.levels}")
        elif not self.left_off:
            parts.append("no gradient was sent in a wire format")
        parts.extend(f"{count} x {reason}" for reason, count in self.fallbacks.items())
        return "; ".join(parts)
