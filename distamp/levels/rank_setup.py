"""RankSetup: the arguments of `initialize` on one rank, which all ranks compare in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distamp.error_text import lines_by_rank, ranks_text
from distamp.errors import RankMismatchError
from distamp.levels.kept import unmatched_everywhere
from distamp.optim_utils import unwrap_optimizer

__all__ = ["RankSetup", "compare_setups", "idle_optimizers", "setup_of", "unmatched_on_some"]


@dataclass(frozen=True)
class RankSetup:
    """What one rank gives to `initialize`.

    Args:
        pins: The patterns of ``module_precision=``, each with its precision.
        unmatched: The patterns that match no module of this rank, each with the nearest names.
        optimizers: The class names of the optimizers.
        error: Type and text of the error with which this rank refuses its arguments.
    """

    pins: tuple[tuple[str, str], ...]
    unmatched: Mapping[str, Sequence[str]]
    optimizers: tuple[str, ...]
    error: tuple[type[Exception], str] | None = None


def setup_of(
    pins: tuple[tuple[str, str], ...],
    unmatched: Mapping[str, Sequence[str]],
    optimizers: Sequence[torch.optim.Optimizer],
    error: Exception | None,
) -> RankSetup:
    """Return the setup of this rank."""
    names = tuple(type(unwrap_optimizer(optimizer)).__name__ for optimizer in optimizers)
    portable = None if error is None else (type(error), str(error))
    return RankSetup(pins, unmatched, names, portable)


def compare_setups(
    mine: RankSetup, error: Exception | None, group: ProcessGroup | None, trains: bool
) -> dict[int, RankSetup]:
    """Return the setup of every rank, by its number in the default group.

    Collective: every rank of the group must call this, if it trains. A model that is only run
    sends nothing, so that one rank may have it alone.

    Args:
        mine: Of this rank.
        error: The error of ``mine``, which this rank raises as it is.
        group: The ranks that have a part of the models; None for a process alone.
        trains: Whether the rank was given optimizers, also if these are none.

    Raises:
        RankMismatchError: Ranks have different patterns, or a rank does not come.
        ConfigError: A pattern matches no module on any rank.
        Exception: The error of some rank, on every rank.
    """
    if group is not None and not trains:
        if error is not None:
            raise error
        return {dist.get_rank(): mine}
    setups = {0: mine} if group is None else _gather(mine, group)
    patterns = {rank: dict(setup.pins) for rank, setup in setups.items()}
    if any(setup.pins != mine.pins for setup in setups.values()):
        fix = (
            "Pass the same patterns in the same order on every rank, also on a pipeline stage that "
            "has none of their modules. A pattern needs a matching module on one rank only."
        )
        lines = lines_by_rank(_differing_patterns(patterns))
        raise RankMismatchError("\n".join(["The ranks differ in module_precision=.", *lines, fix]))
    for rank, setup in setups.items():
        if setup.error is not None:
            kind, text = setup.error
            raise error or kind(f"{text} (raised on rank {rank}; every rank stops here)")
    unmatched_everywhere([setup.unmatched for setup in setups.values()])
    return setups


def _differing_patterns(patterns: Mapping[int, dict[str, str]]) -> list[tuple[int, str]]:
    """Return pairs of a rank and the text of its patterns that some rank lacks."""
    common: set[tuple[str, str]] | None = None
    for pins in patterns.values():
        items = set(pins.items())
        common = items if common is None else common & items
    assert common is not None
    texts = []
    for rank, pins in patterns.items():
        text = "no such pattern"
        differing = {pattern: pins[pattern] for pattern in pins}
        for pattern, _ in common:
            del differing[pattern]
        if differing:
            text = f"module_precision={differing}"
        texts.append((rank, text))
    if all(len(pins) == len(common) for pins in patterns.values()):  # Only their order differs.
        return [(rank, f"module_precision={pins}") for rank, pins in patterns.items()]
    return texts


def _gather(mine: RankSetup, group: ProcessGroup) -> dict[int, RankSetup]:
    ranks = dist.get_process_group_ranks(group)
    gathered: list[RankSetup] = [mine] * len(ranks)
    try:
        dist.all_gather_object(gathered, mine, group=group)
    except RuntimeError as error:
        raise RankMismatchError(
            f"Rank {dist.get_rank()} waited in initialize() for the other ranks, and one of them "
            "did not call it within the group's timeout. Every rank of process_group must call "
            "initialize() with its optimizers. A rank that trains nothing passes optimizers=[]. If "
            f"only some ranks train, make a group of those ranks and pass it as process_group=. "
            f"({error})"
        ) from error
    return dict(zip(ranks, gathered, strict=True))


def idle_optimizers(
    setups: Mapping[int, RankSetup], device: str
) -> tuple[torch.optim.Optimizer, ...]:
    """Return optimizers for a rank that trains nothing, so that it takes part in every message.

    Ranks compare the class names of the optimizers in a call, so these have the names of the
    optimizers of a rank that trains. Each has one parameter that never gets a gradient.
    """
    names = next((setup.optimizers for setup in setups.values() if setup.optimizers), ())
    return tuple(
        type(name, (torch.optim.SGD,), {})([nn.Parameter(torch.zeros(1, device=device))], lr=0.0)
        for name in names
    )


def unmatched_on_some(setups: Mapping[int, RankSetup]) -> tuple[str, ...]:
    """Return a line for each pattern that matches no module on some of the ranks."""
    lines = []
    for pattern, _ in next(iter(setups.values())).pins:
        ranks = [rank for rank, setup in setups.items() if pattern in setup.unmatched]
        if ranks:
            lines.append(
                f"The pattern {pattern!r} of module_precision= matches no module on "
                f"{ranks_text(ranks)}."
            )
    return tuple(lines)
