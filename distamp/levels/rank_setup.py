"""RankSetup: the arguments of `initialize` on one rank, compared between ranks in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distamp.error_text import lines_by_rank, ranks_text
from distamp.errors import RankMismatchError
from distamp.levels.fp32_modules import refuse_unmatched_patterns
from distamp.optim_utils import unwrap_optimizer
from distamp.precision_level import PrecisionLevel

__all__ = [
    "RankSetup",
    "compare_rank_setups",
    "idle_optimizers",
    "make_rank_setup",
    "raise_in_initialize",
    "unmatched_patterns_text",
]


@dataclass(frozen=True)
class RankSetup:
    """The arguments of one rank to `initialize`.

    Args:
        level: The name of the level.
        comm_hook: The format of gradients between the ranks, or None.
        pins: The patterns of ``module_precision=``, each with its precision.
        unmatched: The patterns that match no module of this rank, each with the most similar names.
        optimizers: The class names of the optimizers.
        error: Class and text of the error that refuses the arguments of this rank. Such a setup has
            no other value.
    """

    level: str = ""
    comm_hook: str | None = None
    pins: tuple[tuple[str, str], ...] = ()
    unmatched: Mapping[str, Sequence[str]] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    error: tuple[type[Exception], str] | None = None


def make_rank_setup(
    level: PrecisionLevel,
    comm_hook: str | None,
    unmatched: Mapping[str, Sequence[str]],
    optimizers: Sequence[torch.optim.Optimizer],
) -> RankSetup:
    """Return the setup of this rank."""
    names = tuple(type(unwrap_optimizer(optimizer)).__name__ for optimizer in optimizers)
    return RankSetup(level.name, comm_hook, level.pins, unmatched, names)


def raise_in_initialize(error: Exception, group: ProcessGroup | None, trains: bool) -> NoReturn:
    """Raise an error of this rank's arguments, and raise its text on the ranks that wait.

    Collective: the ranks without such an error call `compare_rank_setups`.

    Args:
        error: The error of this rank, which it raises unchanged.
        group: As in `compare_rank_setups`.
        trains: As in `compare_rank_setups`.
    """
    if group is not None and trains:
        _gather(RankSetup(error=(type(error), str(error))), group)
    raise error


def compare_rank_setups(
    setup: RankSetup, group: ProcessGroup | None, trains: bool
) -> dict[int, RankSetup]:
    """Return the setup of every rank, by its number in the default group.

    Collective: every rank of the group must call this, or `raise_in_initialize`, if it trains. A
    model that is only run sends nothing, so that a single rank may have it.

    Args:
        setup: The setup of this rank.
        group: The ranks that have a part of the models; None for a single process.
        trains: Whether the rank was given optimizers, or an empty list of them.

    Raises:
        RankMismatchError: Ranks have different levels, hooks or patterns, or a rank does not call
            this.
        ConfigError: A pattern matches no module on any rank.
        Exception: The error of some rank.
    """
    if group is None:
        setups = {0: setup}
    elif trains:
        setups = _gather(setup, group)
    else:
        return {dist.get_rank(): setup}
    for rank, rank_setup in setups.items():
        if rank_setup.error is not None:
            error_class, text = rank_setup.error
            raise error_class(f"{text} (raised on rank {rank}; every rank stops here)")
    _refuse_different_levels_and_hooks(setups)
    _refuse_different_patterns(setups)
    refuse_unmatched_patterns([rank_setup.unmatched for rank_setup in setups.values()])
    return setups


def _refuse_different_levels_and_hooks(setups: Mapping[int, RankSetup]) -> None:
    """Refuse different levels, which no later message compares, and a hook on some ranks only.

    The ranks with a hook would wait in its registration for the others. A rank that trains nothing
    reduces no gradients, so it may have no hook.
    """
    levels = {}
    hooks = {}
    for rank, setup in setups.items():
        levels[rank] = setup.level
        if setup.optimizers:
            hooks[rank] = setup.comm_hook
    _refuse_different_values("level", levels)
    _refuse_different_values("comm_hook", hooks)


def _refuse_different_values(argument: str, values: Mapping[int, str | None]) -> None:
    if len(set(values.values())) <= 1:
        return
    texts = []
    for rank, value in values.items():
        texts.append((rank, f"{argument}={value!r}"))
    lines = lines_by_rank(texts)
    header = f"The ranks differ in {argument}= of initialize()."
    raise RankMismatchError("\n".join([header, *lines, "Pass the same value on every rank."]))


def _refuse_different_patterns(setups: Mapping[int, RankSetup]) -> None:
    if len({setup.pins for setup in setups.values()}) == 1:
        return
    patterns = {rank: dict(setup.pins) for rank, setup in setups.items()}
    lines = lines_by_rank(_differing_patterns(patterns))
    fix = (
        "Pass the same patterns in the same order on every rank, also on a pipeline stage that "
        "has none of their modules. A pattern needs a matching module on one rank only."
    )
    raise RankMismatchError("\n".join(["The ranks differ in module_precision=.", *lines, fix]))


def _differing_patterns(patterns: Mapping[int, dict[str, str]]) -> list[tuple[int, str]]:
    """Return pairs of a rank and the text of its patterns that some rank lacks."""
    common = set.intersection(*(set(pins.items()) for pins in patterns.values()))
    if all(len(pins) == len(common) for pins in patterns.values()):  # Only their order differs.
        return [(rank, f"module_precision={pins}") for rank, pins in patterns.items()]
    texts = []
    for rank, pins in patterns.items():
        text = "no such pattern"
        differing = {
            pattern: precision
            for pattern, precision in pins.items()
            if (pattern, precision) not in common
        }
        if differing:
            text = f"module_precision={differing}"
        texts.append((rank, text))
    return texts


def _gather(setup: RankSetup, group: ProcessGroup) -> dict[int, RankSetup]:
    ranks = dist.get_process_group_ranks(group)
    gathered: list[RankSetup] = [setup] * len(ranks)
    try:
        dist.all_gather_object(gathered, setup, group=group)
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

    Ranks compare the class names of the optimizers in a call, so these optimizers have the class
    names of a rank that trains. Each has one parameter that never gets a gradient.
    """
    names: tuple[str, ...] = ()
    for setup in setups.values():
        if setup.optimizers:
            names = setup.optimizers
            break
    optimizers: list[torch.optim.Optimizer] = []
    for name in names:
        idle_class = type(name, (torch.optim.SGD,), {})
        param = nn.Parameter(torch.zeros(1, device=device))
        optimizers.append(idle_class([param], lr=0.0))
    return tuple(optimizers)


def unmatched_patterns_text(setups: Mapping[int, RankSetup]) -> tuple[str, ...]:
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
