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
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.formats import WireFormat, wire_format
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.state import CommHookState
from distamp.comm_hooks.stats import Choice
from distamp.comm_hooks.wrapped import Sample, Wrapped

__all__ = ["AUTO", "Tables", "as_it_is", "auto", "choose", "connect", "timed_choice"]

# What `register` takes in the place of a format's name, and those it stands for.
AUTO, FORMATS = "auto", ("fp16", "int8")
FLAT = " in one level"
# A way that is more exact wins unless another takes this much less: what is chosen is never 5 %
# slower than the fastest, and no run changes its numbers for less than it can feel.
MARGIN = 1.04
# The first round opens connections, the second says how long the others will take.
WARMUP, FEW = 2, 1 << 16
ROUNDS, SECONDS = 9, 10.0

Tables = Mapping[ProcessGroup, Hosts]

_log = logging.getLogger("distamp.comm_hooks")


def auto(wrapped: Wrapped, tables: Tables) -> tuple[Choice, WireFormat, Tables]:
    """Choose between no hook and formats, in two levels where there are and in one. Collective.

    Args:
        wrapped: The model.
        tables: Which ranks are on which hosts, for each of its groups.

    Returns:
        The choice, its format, and the hosts as the ranks are to see them.
    """
    sample, over = wrapped.sample, wrapped.over
    flat = {group: hosts.flat() for group, hosts in tables.items()}
    ways: dict[str, tuple[str, Tables]] = {}
    for name in FORMATS if any(group.size() > 1 for group in over) else ():
        if name in wrapped.formats() and wire_format(name).payload.itemsize < sample.dtype.itemsize:
            ways[name] = name, tables
            if any(len(tables[group].ranks) < group.size() for group in over):
                ways[name + FLAT] = name, flat
    anchor = [torch.empty(0, dtype=sample.dtype, device=sample.device)]
    plain = as_it_is(sample.dtype)
    trials: dict[str, Callable[[Tensor], object]] = {
        plain.name: partial(_send, wrapped, None, anchor)
    }
    for way, (name, hosts) in ways.items():
        state = CommHookState(name, over[0])
        apart = {g: replace(each, name=f"{each.name}/{way}") for g, each in hosts.items()}
        connect(state, wrapped, apart)
        trials[way] = partial(_send, wrapped, state, anchor)
    choice = timed_choice(trials, sample, wrapped.groups)
    if not choice.compressed:
        return choice, plain, tables
    name, hosts = ways[choice.wire]
    return choice, wire_format(name), hosts


def connect(state: CommHookState, wrapped: Wrapped, tables: Tables) -> None:
    """Make all exchanges of a model. Collective."""
    for group in wrapped.over:
        for device in wrapped.devices:
            state.connect(group, device, tables[group])


def as_it_is(dtype: torch.dtype) -> WireFormat:
    """Return what stands for gradients that are sent as they are: a format that nobody encodes."""
    return WireFormat("fp32" if dtype is torch.float32 else str(dtype)[6:], dtype)


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
    return Choice(wire, wire != first, medians, nbytes, reason)


def timed_choice(
    trials: Mapping[str, Callable[[Tensor], object]],
    sample: Sample,
    groups: Sequence[ProcessGroup],
) -> Choice:
    """Time every trial in turn with the others on all ranks, and choose. Collective.

    Args:
        trials: What sends the tensor that it is given, by name, the most exact first; the same on
            all ranks.
        sample: What is sent.
        groups: The ranks that must choose alike; the first are those that begin together.

    Returns:
        The choice, the same on all ranks.
    """
    numel, dtype, device = sample.numel, sample.dtype, sample.device
    nbytes = numel * dtype.itemsize
    alone = all(group.size() == 1 for group in groups)
    if len(trials) == 1 or alone:
        reason = "there is one rank" if alone else "no format is narrower than the gradients"
        choice = Choice(next(iter(trials)), False, {}, nbytes, reason)
    else:
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
        values = drawn.to(device=device, dtype=dtype)
        some = values[: _some(trials, values, groups)]
        rounds = [_round(trials, some, groups, number) for number in range(ROUNDS)]
        seconds = dict(zip(trials, zip(*rounds, strict=True), strict=True))
        choice = choose(seconds, some.numel() * some.element_size())
    if all(group.rank() == 0 for group in groups):
        _log.info("%s", choice)
    return choice


def _send(
    wrapped: Wrapped, state: CommHookState | None, anchor: Sequence[Tensor], sent: Tensor
) -> None:
    """Send gradients as a hook of this state does, or as torch without one."""
    if not wrapped.shards:
        (group,) = wrapped.over
        if state is None:
            dist.all_reduce(sent, group=group)
        else:
            state.average(sent, anchor).wait()
        return
    shards = wrapped.shards[0]
    part = sent.new_empty(sent.numel() // shards.size())
    if state is None:
        torch_compat.reduce_scatter(part, sent, shards)
    else:
        state.reduce(sent, shards, 1.0, part)
    if wrapped.replicas is not None:
        if state is None:
            dist.all_reduce(part, group=wrapped.replicas)
        else:
            state.reduce(part, wrapped.replicas, 1.0)


def _some(
    trials: Mapping[str, Callable[[Tensor], object]],
    values: Tensor,
    groups: Sequence[ProcessGroup],
) -> int:
    """Return how many values the rounds have time for: fewer than there are on a slow link.

    There the time is that of the link, of which a part says as much as the whole.
    """
    unit = groups[0].size()
    few = min(values.numel(), FEW // unit * unit)
    for number in range(WARMUP):
        spent = sum(_round(trials, values[:few], groups, number))
    # All ranks hold the same times, and so come to the same number.
    return min(values.numel(), max(1, int(SECONDS / ROUNDS / spent)) * few)


def _round(
    trials: Mapping[str, Callable[[Tensor], object]],
    values: Tensor,
    groups: Sequence[ProcessGroup],
    number: int,
) -> list[float]:
    """Time each trial once; return the times of the slowest rank."""
    sent = torch.empty_like(values)
    mine = {}
    # Each has each place in turn, so that none always follows the same.
    turned = list(trials)[number % len(trials) :] + list(trials)[: number % len(trials)]
    for name in turned:
        sent.copy_(values)
        mine[name] = _timed(trials[name], sent, groups[0])
    seconds = [mine[name] for name in trials]
    for group in groups:
        slowest = torch.tensor(seconds, dtype=torch.float64, device=torch_compat.device_of(group))
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        seconds = slowest.tolist()
    return seconds


def _timed(trial: Callable[[Tensor], object], sent: Tensor, group: ProcessGroup) -> float:
    together = torch.zeros(1, dtype=torch.float32, device=torch_compat.device_of(group))
    dist.all_reduce(together, group=group)
    _synchronize(sent.device)
    start = time.perf_counter()
    trial(sent)
    _synchronize(sent.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
