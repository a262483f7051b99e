"""One exchange for all wrappers: averages a flat tensor over all ranks, or reduce-scatters it.

With N hosts of G ranks, each host's ranks first divide a bucket between them and add up their parts
in fp32, sent in the gradients' own dtype: nothing is rounded there. Each part goes, encoded, to the
ranks of the other hosts that have the same one; each of these owns 1 / N of it, adds it up in fp32,
and sends the encoded mean back to them. The ranks of a host then send each other what they got, the
same bytes, so that all ranks read the same. What leaves a host is what leaves a host with one rank,
and a gradient is rounded twice however many ranks there are. Shards are kept where they were added
up. Where each rank counts as a host, all exchange with all in one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import formats
from distamp.comm_hooks.formats import BLOCK, Feedback, Places, Source, WireFormat
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.transport import DeviceTransport, HostTransport, Lane, Transport

__all__ = ["Exchange", "Plan"]

# Shards are reduced in so many parts, of which two are on their way at once, that buffers take at
# most a quarter of the gradients in fp32; but not in parts of fewer elements.
CHUNKS, CHUNKS_OF_TWO_LEVELS = 9, 18
LEAST_CHUNK = 1 << 17


@dataclass(frozen=True)
class Plan:
    """Where the elements of a bucket go.

    Args:
        whole: Where the rows of all owners lie in the bucket.
        mine: The rows that this rank sends to other hosts, in its host's part of the bucket.
        lengths: Elements of each local rank's part of the bucket.
    """

    whole: Places
    mine: Places
    lengths: list[int]


class Exchange:
    """Averages and reduce-scatters flat tensors of one device over the ranks of one group.

    Making one is collective.

    Args:
        hosts: Which ranks are on which hosts.
        group: The ranks.
        device: Where the gradients lie.
        stats: Where bytes are counted.
    """

    def __init__(
        self, hosts: Hosts, group: ProcessGroup, device: torch.device, stats: HookStats
    ) -> None:
        self.device, self._stats = device, stats
        self.wide, self.here = len(hosts.ranks), len(hosts.ranks[0])
        self.host, self.local = next(
            (host, ranks.index(group.rank()))
            for host, ranks in enumerate(hosts.ranks)
            if group.rank() in ranks
        )
        # Of all ranks, those of each host's first rank first, then those of each second.
        order = [ranks[local] for local in range(self.here) for ranks in hosts.ranks]
        self._order = torch.tensor(order, dtype=torch.int64, device="cpu").to(device)
        self.transport: Transport
        self._math: Any = formats
        outer = [ranks[self.local] for ranks in hosts.ranks]
        levels = {"inner": hosts.ranks[self.host], "outer": outer}
        if device.type == "cpu":
            self.transport = HostTransport(hosts.name, group, levels, stats)
        else:
            self.transport = DeviceTransport(hosts.name, group, levels, device)
        if device.type == "cuda":
            from distamp.comm_hooks import kernels

            self._math = kernels

    def plan(self, *numels: int) -> Plan:
        """Return where the elements of a bucket go; no block has elements of two of the lengths."""
        return _plan(self.wide, self.here, self.local, numels)

    def average(
        self,
        values: Tensor,
        wire: WireFormat,
        plan: Plan,
        *,
        divisor: float | None = None,
        feedback: tuple[Feedback, Feedback] | None = None,
    ) -> Future[Tensor]:
        """Replace ``values`` by their mean over all ranks, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating; of the same length on all ranks.
            wire: The format.
            plan: That of ``values``.
            divisor: By which the sum is divided; None for the number of ranks.
            feedback: What rounding takes of this rank's part, and of the mean that it owns.
        """
        row = wire.row_bytes(plan.mine.numel)
        self._count(wire, 2 * row, 2 * values.nbytes)
        inverse = 1.0 / (divisor or self.wide * self.here)
        of_mine, of_mean = feedback or (None, None)

        def run(lane: Lane) -> Tensor:
            source, received, sent = self._encoded(
                wire, values, plan.lengths, plan.mine, inverse, of_mine, lane
            )
            # When all that was added up is read, the means of all owners take its place.
            means = lane.memory("received", self.here * sent.numel()).view(self.here, -1, row)
            mean = sent[self.host]
            with lane.turn():
                self.transport.all_to_all("outer", lane, received, sent)
                self._math.sum_encode(wire, source, received, mean, of_mean)
                self.transport.all_gather("outer", lane, means[self.local], mean)
            if self.here > 1:
                flat = means.flatten(1)
                self.transport.all_gather("inner", lane, flat, flat[self.local])
            self._math.decode(wire, means.flatten(0, 1), plan.whole, values)
            return values

        return self.transport.submit(run, [values, *(of_mine or ()), *(of_mean or ())])

    def reduce_scatter(
        self, out: Tensor, values: Tensor, wire: WireFormat, *, divisor: float
    ) -> None:
        """Write to ``out`` this rank's part of the sum of ``values`` over all ranks, divided.

        Args:
            out: 1-D, contiguous, floating.
            values: 1-D, contiguous, floating; a part of ``out``'s length for each rank.
            wire: The format.
            divisor: By which the sum is divided.
        """
        most = CHUNKS if self.here == 1 else CHUNKS_OF_TWO_LEVELS
        chunks = max(1, min(most, values.numel() // LEAST_CHUNK))
        step = max(1, -(-out.numel() // chunks // BLOCK)) * BLOCK
        done, sent = [], 0
        for start in range(0, out.numel(), step):
            part = out[start : start + step]
            job = partial(self._scatter, part, values, start, wire, 1.0 / divisor)
            done.append(self.transport.submit(job))
            sent += wire.row_bytes(_blocks(part.numel()))
        self._count(wire, sent, values.nbytes)
        for each in done:
            each.wait()

    def _count(self, wire: WireFormat, outer: int, nbytes: int) -> None:
        """Count what goes to each other host, and this rank's share of what a ring sends there."""
        size = self.wide * self.here
        self._stats.exchanges += 1
        self._stats.bytes_sent[wire.name] += (self.wide - 1) * outer
        self._stats.bytes_uncompressed += (size - 1) * nbytes // size // self.here

    def _scatter(
        self,
        out: Tensor,
        values: Tensor,
        start: int,
        wire: WireFormat,
        inverse: float,
        lane: Lane,
    ) -> Tensor:
        length, stride = out.numel(), values.numel() // self.wide // self.here
        part = values[start:]
        lengths = [part.numel()]
        if self.here > 1:
            # To each rank of this host, of every host's part what belongs to it there.
            packed = lane.memory("packed", self.here * self.wide * length * values.itemsize)
            part = packed.view(values.dtype)
            whole = values.view(-1, stride)[:, start : start + length]
            torch.index_select(whole, 0, self._order, out=part.view(-1, length))
            lengths, stride = [self.wide * length] * self.here, length
        places = _every(self.wide, length, stride)
        source, received, sent = self._encoded(wire, part, lengths, places, inverse, None, lane)
        with lane.turn():
            self.transport.all_to_all("outer", lane, received, sent)
        self._math.sum_rows(wire, source, received, out)
        return out

    def _encoded(
        self,
        wire: WireFormat,
        values: Tensor,
        lengths: Sequence[int],
        places: Places,
        inverse: float,
        feedback: Feedback | None,
        lane: Lane,
    ) -> tuple[Source, Tensor, Tensor]:
        """Divide values between the ranks of this host, and encode rows of the sum for the hosts.

        Returns:
            What this host has, memory for what others send of it, and what is to be sent to each.
        """
        parts, shape = values.split([*lengths]), (self.wide, wire.row_bytes(places.numel))
        own, row_bytes = parts[self.local], shape[0] * shape[1]
        beside = (self.here - 1) * -(-max(own.nbytes, row_bytes) // 16) * 16
        memory = lane.memory("received", beside + row_bytes)
        others = (
            memory[: (self.here - 1) * own.nbytes].view(own.dtype).view(self.here - 1, own.numel())
        )
        if self.here > 1:
            given = [*others.view(torch.uint8)]
            given.insert(self.local, memory[:0])
            flat = [part.view(torch.uint8) for part in parts]
            flat[self.local] = memory[:0]
            self.transport.all_to_all_parts("inner", lane, given, flat)
        source = Source(own, others, places, self.host, inverse)
        sent = lane.memory("sent", row_bytes).view(shape)
        self._math.encode(wire, source, sent, feedback)
        return source, memory[beside:].view(shape), sent


def _blocks(numel: int) -> int:
    """Return the elements of so many blocks as are needed."""
    return -(-numel // BLOCK) * BLOCK


# Tables of them lie on devices, and are not made anew for every bucket.
@lru_cache(256)
def _plan(wide: int, here: int, local: int, numels: tuple[int, ...]) -> Plan:
    runs, padded, flat = [], 0, 0
    for length in numels:
        runs.append((padded, flat, length))
        padded += _blocks(length)
        flat += length
    part = -(-padded // BLOCK // (wide * here)) * BLOCK
    whole = Places(wide * here, part, runs)
    of_each = [
        [*whole.inside(each * wide * part, (each + 1) * wide * part)] for each in range(here)
    ]
    lengths = [sum(length for _, _, length in each) for each in of_each]
    first, before = local * wide * part, sum(lengths[:local])
    mine = [(begin - first, at - before, length) for begin, at, length in of_each[local]]
    return Plan(whole, Places(wide, part, mine), lengths)


@lru_cache(64)
def _every(rows: int, length: int, stride: int) -> Places:
    """Return the places of rows that begin every ``stride`` elements."""
    part = _blocks(length)
    return Places(rows, part, [(row * part, row * stride, length) for row in range(rows)])
