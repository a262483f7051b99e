"""What a communication hook has sent and found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from distamp.comm_hooks.formats import TORCHS, WIRE_FORMATS

__all__ = ["Choice", "HookStats"]


@dataclass(frozen=True)
class Choice:
    """What `register` chose, and the times it chose by; the same on all ranks.

    Args:
        wire: The format that gradients travel in; or their own dtype, such as ``"fp32"``; or
            ``"torch bf16"``, of which torch's own hook casts to bf16 and adds up in it.
        seconds: How long each way took on the slowest rank, the median of several times; nothing
            where there was nothing to choose from.
        nbytes: Bytes of the gradients that were sent.
        reason: Why, in a few words.
    """

    wire: str
    seconds: Mapping[str, float]
    nbytes: int
    reason: str

    @property
    def compressed(self) -> bool:
        """Whether it is a format of `WIRE_FORMATS`, in one level or two."""
        return self.wire.split()[0] in WIRE_FORMATS

    def __str__(self) -> str:
        hook = "" if self.compressed or self.wire == TORCHS.name else " (no hook)"
        line = f"chose {self.wire}{hook}: {self.reason}"
        times = ", ".join(f"{name} {1e3 * each:.4g} ms" for name, each in self.seconds.items())
        return f"{line} ({self.nbytes / 1e6:.3g} MB in {times})" if times else line


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
        choice: What `register` chose and why; None where the format was given, and is used.
        levels: How ranks and hosts exchange; with the reason, where it is not as they are.
    """

    exchanges: int = 0
    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_uncompressed: int = 0
    seconds_waiting: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)
    choice: Choice | None = None
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
        parts = [] if self.choice is None else [str(self.choice)]
        if self.exchanges:
            sent = ", ".join(
                f"{each / 1e6:.4g} MB as {wire}" for wire, each in self.bytes_sent.items()
            )
            whole = f"{self.bytes_uncompressed / 1e6:.4g} MB uncompressed"
            parts.append(f"{self.exchanges} exchanges sent {sent}; {whole}, {self.saved:.0%} saved")
            parts.append(f"waited {self.seconds_waiting:.2f} s; {self.levels}")
        elif self.choice is None or self.choice.compressed:
            parts.append("no gradient was sent in a wire format")
        parts.extend(f"{count} x {reason}" for reason, count in self.fallbacks.items())
        return "; ".join(parts)
