"""``"auto"``: time the real ways to send gradients, in turn, on the job's own ranks, and choose.

What is timed is the exchange alone, of a bucket as long as the model's own, with nothing computed
beside it. A bucket that takes less then takes less, or as much, beside a backward pass: what the
link does not need, the backward pass hides, and what the processor does adds to it in both.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.comm_hooks.formats import TORCHS, WIRE_FORMATS, WireFormat, as_it_is
from distamp.comm_hooks.state import CommHookState
from distamp.comm_hooks.stats import Choice
from distamp.comm_hooks.wrapped import Tables, Wrapped

__all__ = ["AUTO", "auto", "choose", "connect", "timed_choice"]

# What `register` takes in the place of a format's name, and those it stands for.
AUTO, FORMATS = "auto", ("fp16", "int8")
# A way that is more exact wins unless another takes this much less: what is chosen is never 5 %
# slower than the fastest, and no run changes its numbers for less than it can feel.
MARGIN = 1.04
# The first round opens connections, the second says how long the others will take.
WARMUP, FEW = 2, 1 << 16
ROUNDS, SECONDS = 9, 10.0

Trial: TypeAlias = Callable[[Tensor], object]

_log = logging.getLogger("distamp.comm_hooks")


def auto(wrapped: Wrapped, tables: Tables) -> tuple[Choice, WireFormat, Tables]:
    """Choose between no hook and formats, in two levels where there are and in one. Collective.

    Args:
        wrapped: The model.
        tables: Which ranks are on which hosts, for each of its groups.

    Returns:
        The choice, its format, and the hosts as the ranks are to see them.
    """
    plain, fitting = as_it_is(wrapped.dtype), wrapped.fitting()
    ways = {plain.name: (plain, tables)}
    if any(group.size() > 1 for group in wrapped.over):
        levels = {"": tables}
        if any(len(tables[group].ranks) < group.size() for group in wrapped.over):
            levels[" in one level"] = {group: hosts.flat() for group, hosts in tables.items()}
        for name in FORMATS:
            if name == "int8" and wrapped.torchs:
                ways[TORCHS.name] = TORCHS, tables
            for level, hosts in levels.items() if name in fitting else ():
                ways[name + level] = WIRE_FORMATS[name], hosts
    values = torch.empty(wrapped.numel, device=wrapped.devices[0], dtype=wrapped.dtype)
    drawn = torch.Generator("cpu").manual_seed(0)
    values.copy_(torch.randn(wrapped.numel, generator=drawn, device="cpu"))
    trials: dict[str, Trial] = {}
    with ExitStack() as stack:
        for way, (wire, hosts) in ways.items():
            state = stack.enter_context(CommHookState(wire, wrapped.over[0]))
            if wire.encodes:
                connect(state, wrapped, hosts)
            trials[way] = partial(_send, wrapped, state, values[:0])
        choice = timed_choice(trials, values, wrapped.over)
    return choice, *ways[choice.wire]


def connect(state: CommHookState, wrapped: Wrapped, tables: Tables) -> None:
    """Make all exchanges of a model. Collective."""
    for group in wrapped.over:
        for device in wrapped.devices:
            state.exchange(group, device, tables[group])


def choose(seconds: Mapping[str, Sequence[float]], nbytes: int) -> Choice:
    """Choose the first way that takes at most 1.04 times as long as the fastest.

    Args:
        seconds: By way, its times on the slowest rank, the most exact way first: gradients as they
            are, then formats.
        nbytes: Bytes of the gradients that were sent each time.

    Returns:
        The same choice from the same times.
    """
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest, first = min(medians.values()), next(iter(medians))
    wire = next(name for name, each in medians.items() if each <= MARGIN * fastest)
    reason = "the link is the bottleneck"
    if wire == first:
        reason = "the processor is the bottleneck, and no format is 4 % faster"
    return Choice(wire, medians, nbytes, reason)


def timed_choice(
    trials: Mapping[str, Trial], values: Tensor, groups: Sequence[ProcessGroup]
) -> Choice:
    """Time every trial in turn with the others on all ranks, and choose. Collective.

    Args:
        trials: What sends the tensor that it is given, by name, the most exact first; the same on
            all ranks.
        values: What is sent; on a slow link, of which a part says as much as the whole, its
            beginning.
        groups: The ranks that must choose alike; the first are those that begin together.

    Returns:
        The choice, the same on all ranks.
    """
    if len(trials) == 1:
        alone = all(group.size() == 1 for group in groups)
        reason = "there is one rank" if alone else "no format is narrower than the gradients"
        choice = Choice(next(iter(trials)), {}, values.nbytes, reason)
    else:
        size = groups[0].size()
        few = values[: FEW // size * size]
        # All ranks hold the same times, and so come to the same number.
        spent = sum(times[-1] for times in _times(trials, few, groups, WARMUP).values())
        some = values[: max(1, int(SECONDS / ROUNDS / spent)) * few.numel()]
        choice = choose(_times(trials, some, groups, ROUNDS), some.nbytes)
    if all(group.rank() == 0 for group in groups):
        _log.info("%s", choice)
    return choice


def _times(
    trials: Mapping[str, Trial], values: Tensor, groups: Sequence[ProcessGroup], rounds: int
) -> dict[str, list[float]]:
    """Time each trial once a round; return the times of the slowest rank."""
    sent, names = torch.empty_like(values), list(trials)
    times = torch.empty(len(names), rounds, dtype=torch.float64, device="cpu")
    for number in range(rounds):
        # Each has each place in turn, so that none always follows the same.
        for place in range(number, number + len(names)):
            index = place % len(names)
            sent.copy_(values)
            ready = torch.zeros_like(values[:1])
            dist.all_reduce(ready, group=groups[0])
            # Reading waits for what a device was given.
            ready.tolist()
            start = time.perf_counter()
            trials[names[index]](sent)
            sent[:1].tolist()
            times[index, number] = time.perf_counter() - start
    slowest = times.to(values.device)
    for group in groups:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return dict(zip(names, slowest.tolist(), strict=True))


def _send(wrapped: Wrapped, state: CommHookState, anchor: Tensor, sent: Tensor) -> None:
    """Send gradients as a hook of this state does, or as torch in the dtype that it stands for."""
    dtype = sent.dtype
    for group in wrapped.over:
        out = sent.new_empty(sent.numel() // group.size()) if group in wrapped.shards else None
        given = sent if state.wire.encodes else sent.to(state.wire.payload)
        state.reduce(given, group, 1.0, out, parameters=[anchor]).wait()
        sent = (given if out is None else out).to(dtype)
