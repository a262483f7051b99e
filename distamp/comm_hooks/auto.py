"""``"auto"``: time the real ways to send gradients, in turn, on the job's own ranks, and choose.

What is timed is the exchange alone, of a bucket as long as the model's own, with nothing computed
beside it. A bucket that takes less then takes less, or as much, beside a backward pass: what the
link does not need, the backward pass hides, and what the processor does adds to it in both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.buckets import Bucket
from distamp.comm_hooks.choice import Choice, choose
from distamp.comm_hooks.exchange import Exchange
from distamp.comm_hooks.formats import WireFormat

__all__ = ["FLAT", "Trial", "as_it_is", "averaging", "timed_choice"]

# Sends the tensor that it is given; what it leaves in it is not looked at.
Trial = Callable[[Tensor], object]

FLAT = " in one level"
# The first round opens connections, the second says how long the others will take.
WARMUP, FEW = 2, 1 << 16
ROUNDS, SECONDS = 9, 10.0

_log = logging.getLogger("distamp.comm_hooks")


def as_it_is(dtype: torch.dtype) -> WireFormat:
    """Return what stands for gradients that are sent as they are: a format that nobody encodes."""
    return WireFormat("fp32" if dtype is torch.float32 else str(dtype)[6:], dtype)


def averaging(wire: WireFormat, exchange: Exchange) -> Trial:
    """Return what averages through a format, with error feedback where it needs that."""
    buckets: dict[int, Bucket] = {}
    one = torch.ones(2, dtype=torch.float32, device=exchange.device)

    def trial(sent: Tensor) -> None:
        if len(sent) not in buckets:
            buckets[len(sent)] = Bucket([sent], len(sent), wire, exchange)
        bucket = buckets[len(sent)]
        exchange.average(sent, wire, bucket.plan, feedback=bucket.feedback(one)).wait()

    return trial


def timed_choice(
    trials: Mapping[str, Trial],
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[ProcessGroup],
) -> Choice:
    """Time every trial in turn with the others on all ranks, and choose. Collective.

    Args:
        trials: By name, the most exact first; the same on all ranks.
        numel: How many gradients are sent together.
        dtype: Theirs.
        device: Where they lie.
        groups: The ranks that must choose alike; the first are those that begin together.

    Returns:
        The choice, the same on all ranks.
    """
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


def _some(trials: Mapping[str, Trial], values: Tensor, groups: Sequence[ProcessGroup]) -> int:
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
    trials: Mapping[str, Trial], values: Tensor, groups: Sequence[ProcessGroup], number: int
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


def _timed(trial: Trial, sent: Tensor, group: ProcessGroup) -> float:
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
