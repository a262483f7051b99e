"""HookStats: the counts of a communication hook on one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["HookStats"]


@dataclass
class HookStats:
    """The counts of one hook on this rank since it was made.

    Attributes:
        exchanges: Collectives of buckets, or of the gradients or weights of a module.
        bytes_sent: By format (and ``"int8 weights"`` for gathered weights), the bytes that this
            rank sent to other hosts, or to other ranks if there is one level, without the headers
            of TCP, IP and Ethernet.
        bytes_uncompressed: Bytes per rank that would have left this host if an uncompressed ring
            over all ranks had reduced the same gradients, and had visited each host once.
        seconds_waiting: Time spent with the network, or 0 on a GPU, where the device waits.
        fallbacks: By reason, the number of buckets, or of modules' weights, that were sent
            uncompressed.
        left_off: The reason for which `register_comm_hook` left the hook off, or ``""``.
        levels: The numbers of hosts and ranks, or the reason for which they cannot be used.
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
        """The fraction of ``bytes_uncompressed`` that was not sent, 0 before the first message."""
        if not self.exchanges:
            return 0.0
        return 1.0 - self.total_bytes / max(1, self.bytes_uncompressed)

    def __str__(self) -> str:
        parts = []
        if self.left_off:
            parts.append(f"the hook was left off: {self.left_off}")
        if self.exchanges:
            by_format = []
            for name, nbytes in self.bytes_sent.items():
                by_format.append(f"{_megabytes(nbytes)} as {name}")
            sent = ", ".join(by_format)
            uncompressed = _megabytes(self.bytes_uncompressed)
            parts.append(
                f"{self.exchanges} exchanges sent {sent}; {uncompressed} uncompressed, "
                f"{self.saved:.0%} saved"
            )
            parts.append(f"waited {self.seconds_waiting:.2f} s; {self.levels}")
        elif not self.left_off:
            parts.append("no gradient was sent in a compressed format")
        for reason, count in self.fallbacks.items():
            parts.append(f"{count} x {reason}")
        return "; ".join(parts)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.4g} MB"
