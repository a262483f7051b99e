"""``"auto"``: time the real ways to send gradients, in turn, on the job's own group, and choose.

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
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.buckets import reals_in
from distamp.comm_hooks.channel import Channel
from distamp.comm_hooks.choice import Choice, choose
from distamp.comm_hooks.engine import Engine
from distamp.comm_hooks.headers import lockstep_words
from distamp.comm_hooks.layout import Layout
from distamp.comm_hooks.residuals import Residuals
from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import WireFormat, wire_format

__all__ = [
    "Trial",
    "as_it_is",
    "choose_for_copies",
    "choose_for_ddp",
    "choose_for_shards",
    "fits",
    "timed_choice",
]

# Sends the tensor that it is given; what it leaves in it is not looked at.
Trial = Callable[[Tensor], object]

FORMATS = ("fp16", "int8")
# The first round opens connections, the second says how long the others will take.
WARMUP, FEW = 2, 1 << 16
ROUNDS, SECONDS = 9, 10.0

_log = logging.getLogger("distamp.comm_hooks")


def as_it_is(dtype: torch.dtype) -> WireFormat:
    """Return what stands for gradients that are sent as they are: a format that nobody encodes."""
    return WireFormat("fp32" if dtype is torch.float32 else str(dtype)[6:], dtype)


def fits(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Return whether the wire of these gradients is not wider than they are."""
    return wire.block_bytes <= wire.block * dtype.to_real().itemsize


def timed_choice(
    trials: Mapping[str, Trial], values: Tensor, groups: Sequence[ProcessGroup]
) -> Choice:
    """Time every trial in turn with the others on all ranks, and choose.

    Collective. A rank that dies meanwhile ends it on the others as it ends any collective of the
    group: by an error, after the group's timeout at the latest.

    Args:
        trials: By name, the most exact first; the same on all ranks.
        values: What to send.
        groups: The ranks that must choose alike; the first are those that begin together.

    Returns:
        The choice, the same on all ranks.
    """
    nbytes = values.numel() * values.element_size()
    if len(trials) == 1 or all(group.size() == 1 for group in groups):
        alone = all(group.size() == 1 for group in groups)
        reason = "there is one rank" if alone else "no format is narrower than the gradients"
        as_they_are = next(iter(trials))
        return _logged(Choice(as_they_are, False, {}, nbytes, reason), groups)
    some = values[: _some(trials, values, groups)]
    rounds = [_round(trials, some, groups, number) for number in range(ROUNDS)]
    seconds = dict(zip(trials, zip(*rounds, strict=True), strict=True))
    return _logged(choose(seconds, some.numel() * some.element_size()), groups)


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


def _logged(choice: Choice, groups: Sequence[ProcessGroup]) -> Choice:
    if all(group.rank() == 0 for group in groups):
        _log.info("%s", choice)
    return choice


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _like_gradients(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(device=device, dtype=dtype)


# -- for each wrapper --------------------------------------------------------------------------


def choose_for_ddp(model: DistributedDataParallel, group: ProcessGroup) -> Choice:
    """Choose between an all-reduce, fp16 and int8 with error feedback.

    Args:
        model: Its largest bucket is what is sent, of the dtype and device that most of it has.
        group: The ranks to average over.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds: dict[tuple[torch.dtype, torch.device], int] = {}
    for each in trained:
        kind = (each.dtype.to_real(), each.device)
        kinds[kind] = kinds.get(kind, 0) + reals_in(each)
    dtype, device = max(kinds, key=lambda kind: kinds[kind])
    numel = min(kinds[dtype, device], max(1, model.bucket_bytes_cap // dtype.itemsize))
    trials: dict[str, Trial] = {
        as_it_is(dtype).name: lambda sent: dist.all_reduce(sent, group=group)
    }
    formats = [wire_format(name) for name in FORMATS]
    formats = [wire for wire in formats if all(fits(wire, p.dtype) for p in trained)]
    if formats and group.size() > 1:
        channel = Channel(group, device)
        for wire in formats:
            trials[wire.name] = _averaging(Engine(wire, channel, Account()))
    return timed_choice(trials, _like_gradients(numel, dtype, device), [group])


def _averaging(engine: Engine) -> Trial:
    words = lockstep_words(0, None, engine.channel.device)
    residuals: dict[int, Residuals] = {}
    layouts: dict[int, Layout] = {}

    def trial(sent: Tensor) -> None:
        numel = sent.numel()
        if numel not in layouts:
            layouts[numel] = engine.layout("a trial", 0, numel, sent.dtype)
        layout = layouts[numel]
        if not engine.wire.needs_error_feedback:
            engine.exchange(sent, layout, words)
            return
        kept = residuals.setdefault(numel, Residuals([numel], engine.channel.size))
        kept.begin(None)
        kept.end(engine.exchange(sent, layout, words, feedback=kept).nonfinite)

    return trial


def choose_for_shards(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    shards: ProcessGroup,
    replicas: ProcessGroup | None = None,
    agreeing: Sequence[ProcessGroup] = (),
) -> Choice:
    """Choose between the collectives of a sharded model and fp16.

    Args:
        numel: How many gradients are sent together.
        dtype: The dtype in which they are reduced.
        device: Where they lie.
        shards: The ranks to reduce-scatter over.
        replicas: The ranks to all-reduce the shards over, by the same way.
        agreeing: More groups whose ranks must choose alike.
    """
    size = shards.size()
    values = _like_gradients(-(-numel // size) * size, dtype, device)
    shard = values.new_empty(values.numel() // size)

    def by_torch(sent: Tensor) -> None:
        part = sent
        if size > 1:
            part = shard[: sent.numel() // size]
            torch_compat.reduce_scatter(part, sent, shards)
        if replicas is not None:
            dist.all_reduce(part, group=replicas)

    trials: dict[str, Trial] = {as_it_is(dtype).name: by_torch}
    wire = wire_format("fp16")
    if fits(wire, dtype):
        of_shards = _engine(wire, shards, device)
        of_replicas = None if replicas is None else _engine(wire, replicas, device)

        def by_wire(sent: Tensor) -> None:
            part = sent
            if of_shards is not None:
                part = shard[: sent.numel() // size]
                _send(of_shards, sent, part)
            if of_replicas is not None:
                _send(of_replicas, part, None)

        trials[wire.name] = by_wire
    groups = [shards, *([replicas] if replicas is not None else []), *agreeing]
    return timed_choice(trials, values, groups)


def choose_for_copies(
    numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup
) -> Choice:
    """Choose between an all-reduce and fp16, for FSDP1 that shards nothing.

    Args:
        numel: How many gradients are sent together.
        dtype: The dtype in which they are reduced.
        device: Where they lie.
        group: The ranks to average over.
    """
    trials: dict[str, Trial] = {
        as_it_is(dtype).name: lambda sent: dist.all_reduce(sent, group=group)
    }
    wire = wire_format("fp16")
    engine = _engine(wire, group, device) if fits(wire, dtype) else None
    if engine is not None:
        trials[wire.name] = lambda sent: _send(engine, sent, None)
    return timed_choice(trials, _like_gradients(numel, dtype, device), [group])


def _engine(wire: WireFormat, group: ProcessGroup, device: torch.device) -> Engine | None:
    return Engine(wire, Channel(group, device), Account()) if group.size() > 1 else None


def _send(engine: Engine, sent: Tensor, part: Tensor | None) -> None:
    layout = engine.layout("a trial", 0, sent.numel(), sent.dtype, shards=part is not None)
    engine.exchange(sent, layout, lockstep_words(0, None, sent.device), out=part)
