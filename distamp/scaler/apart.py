"""What every rank raises where the ranks are apart, or where one of them failed."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, NoReturn

from distamp.errors import GradientError, LockstepError, StageError
from distamp.scaler import found_inf
from distamp.scaler.process_group import Group

__all__ = ["Call", "Held", "first_error", "raise_apart", "swapped"]


class Call(NamedTuple):
    """What must be the same on every rank, readable for people."""

    call: str
    iteration: int
    optimizers: int
    enabled: bool
    settings: str

    def digest(self, identities: Sequence[tuple[int, int]]) -> int:
        """Return this and the optimizers' identities as one number."""
        call, iteration, optimizers, enabled, settings = self
        words = (_checksum(call), iteration, optimizers, enabled, _checksum(settings))
        return hash((words, tuple(identities)))


@functools.lru_cache(maxsize=64)
def _checksum(text: str) -> int:
    # Unlike hash(), which differs between processes for text.
    return zlib.crc32(text.encode())


@dataclass(frozen=True)
class Held:
    """What one rank holds, for all ranks to compare when they are not in lockstep."""

    said: Call
    scale: float
    over: list[str]
    identities: list[int]
    living: set[int]
    fresh: bool

    @property
    def shown(self) -> dict[str, Any]:
        """What is shown to people."""
        return {**self.said._asdict(), "scale": self.scale, "over": self.over}


def swapped(everyone: list[Held]) -> bool:
    """Return whether two ranks use two optimizers, that both of them have, in another order."""
    return any(
        named_a != named_b and named_a in b.living and named_b in a.living
        for a, b in combinations(everyone, 2)
        for named_a, named_b in zip(a.identities, b.identities, strict=True)
    )


def raise_apart(group: Group, everyone: list[Held]) -> NoReturn:
    """Raise LockstepError, saying which rank holds what."""
    shown = [held.shown for held in everyone]
    differing = [key for key in shown[0] if any(held[key] != shown[0][key] for held in shown)]
    lines = [
        f"  rank {rank}: " + ", ".join(f"{key}={held[key]!r}" for key in differing or held)
        for rank, held in zip(group.global_ranks(), shown, strict=True)
    ]
    raise LockstepError(
        "the ranks are not in lockstep; nothing was stepped by this call. They hold\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same scaler calls, with the same optimizers in the same "
        "order and the same settings."
    )


_TOLD: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    GradientError,
    StageError,
)


def first_error(group: Group, mine: Exception | None) -> Exception:
    """Return the error that every rank raises: its own, else the lowest rank's."""
    # A type that another rank may not have, or that takes more than a text, is told as its name.
    said = None
    if mine is not None:
        kind = type(mine)
        said = (kind, str(mine)) if kind in _TOLD else (RuntimeError, f"{kind.__name__}: {mine}")
    told: list[tuple[type[Exception], str] | None] = found_inf.gather(group, said)
    if mine is not None:
        return mine
    for rank, held in zip(group.global_ranks(), told, strict=True):
        if held is not None:
            kind, text = held
            return kind(f"{text} (raised on rank {rank}; every rank stops here)")
    return LockstepError("a rank reported an error and then did not say which")
