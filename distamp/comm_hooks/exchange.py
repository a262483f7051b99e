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
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import formats
from distamp.comm_hooks.formats import BLOCK, Feedback, Places, Source, WireFormat
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.transport import DeviceTransport, HostTransport, Lane, Transport

__all__ = [
    "Chunks",
    "Exchange",
    "Plan",
    "bucket_plan",
    "shard_chunks",
]

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


# Of shards, the parts that are reduced one after another: first element of each row, how many, and
# where the rows lie in what its host has of it.
Chunks: TypeAlias = list[tuple[int, int, Places]]


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
        self.levels = f"{self.wide}x{self.here}"
        # All ranks: the first of each host, then the second of each, and so on.
        order = [ranks[local] for local in range(self.here) for ranks in hosts.ranks]
        self._ranks = order
        self._order = torch.tensor(order, dtype=torch.int64, device="cpu").to(device)
        self.transport: Transport
        self._math: Any = formats
        if device.type == "cuda":
            from distamp.comm_hooks import kernels

            self._math = kernels
        self.on_one_host = hosts.on_one
        outer = [ranks[self.local] for ranks in hosts.ranks]
        levels = {"inner": hosts.ranks[self.host], "outer": outer}
        if device.type == "cpu":
            self.transport = HostTransport(hosts.name, group, levels, stats)
        else:
            self.transport = DeviceTransport(hosts.name, group, levels, device)

    def plan(self, wire: WireFormat, numels: Sequence[int], itemsize: int) -> Plan | None:
        """Return where the elements of a bucket go, or None where they would not get fewer bytes.

        Args:
            wire: The format.
            numels: Lengths, of which no block has elements of two.
            itemsize: Bytes of an element.
        """
        return bucket_plan(wire, self.wide, self.here, self.local, numels, itemsize)

    def chunks(self, wire: WireFormat, numels: Sequence[int], itemsize: int) -> Chunks | None:
        """Return how shards are reduced, or None where they would not get fewer bytes.

        Args:
            wire: The format.
            numels: Lengths of what a shard has of each parameter, as `plan`.
            itemsize: Bytes of an element.
        """
        return shard_chunks(wire, self.wide, self.here, numels, itemsize)

    def gathered(
        self, wire: WireFormat, numels: Sequence[int], itemsize: int
    ) -> tuple[Places, Places] | None:
        """Return the places of what each rank gives to `gather`, in its own and in all of it.

        None where they would not get fewer bytes.

        Args:
            wire: The format.
            numels: Lengths of what a rank gives of each parameter, as `plan`.
            itemsize: Bytes of an element.
        """
        numel = sum(numels)
        mine, whole = (_pieces(wire, of, numel, numels, 0, numel) for of in ([0], self._ranks))
        return (mine, whole) if mine.row_bytes(wire) < numel * itemsize else None

    def gather(
        self, out: Tensor, values: Tensor, wire: WireFormat, places: tuple[Places, Places]
    ) -> None:
        """Write what each rank gives to ``out``, one after another; the same on all ranks.

        Args:
            out: 1-D, contiguous, floating: a part of ``values``' length for each rank.
            values: 1-D, contiguous, floating; may be this rank's part of ``out``.
            wire: The format.
            places: Those of ``values``.
        """
        mine, whole = places
        row = mine.row_bytes(wire)
        self._count(f"{wire.name} weights", row, out.nbytes)

        def run(lane: Lane) -> Tensor:
            rows = lane.memory("received", whole.rows * row).view(self.here, self.wide, row)
            own = rows[self.local, self.host].view(1, row)
            source = Source(values, values.view(1, -1)[:0], mine, 1, 1.0)
            self._math.encode(wire, source, own)
            formats.write_tails(source, own)
            with lane.turn():
                self.transport.all_gather("outer", lane, rows[self.local], own[0])
            if self.here > 1:
                flat = rows.flatten(1)
                self.transport.all_gather("inner", lane, flat, flat[self.local])
            self._math.decode(wire, rows.flatten(0, 1), whole, out)
            formats.read_tails(whole, rows.flatten(0, 1), out)
            return out

        self.transport.submit(run, [out, values]).wait()

    def average(
        self,
        values: Tensor,
        wire: WireFormat,
        plan: Plan,
        *,
        divisor: float | None = None,
        feedback: tuple[Feedback, ...] = (),
    ) -> Future[Tensor]:
        """Replace ``values`` by their mean over all ranks, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating; of the same length on all ranks.
            wire: The format.
            plan: That of ``values``.
            divisor: By which the sum is divided; None for the number of ranks.
            feedback: What rounding takes of this rank's part, and of the mean that it owns.
        """
        row = plan.mine.row_bytes(wire)
        self._count(wire.name, 2 * row, 2 * values.nbytes)
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
                if plan.mine.tail:
                    formats.put_tail(mean, plan.mine, formats.sum_tails(source, received))
                self.transport.all_gather("outer", lane, means[self.local], mean)
            if self.here > 1:
                flat = means.flatten(1)
                self.transport.all_gather("inner", lane, flat, flat[self.local])
            rows = means.flatten(0, 1)
            self._math.decode(wire, rows, plan.whole, values)
            formats.read_tails(plan.whole, rows, values)
            return values

        return self.transport.submit(run, [values, *(of_mine or ()), *(of_mean or ())])

    def reduce_scatter(
        self,
        out: Tensor,
        values: Tensor,
        wire: WireFormat,
        chunks: Chunks,
        *,
        divisor: float,
        feedback: Feedback | None = None,
    ) -> None:
        """Write to ``out`` this rank's part of the sum of ``values`` over all ranks, divided.

        Args:
            out: 1-D, contiguous, floating.
            values: 1-D, contiguous, floating; a part of ``out``'s length for each rank.
            wire: The format.
            chunks: Those of ``out``.
            divisor: By which the sum is divided.
            feedback: What rounding takes of this rank's part, of one chunk after another.
        """
        done, sent, before = [], 0, 0
        for start, length, places in chunks:
            fed, taken = None, places.rows * places.numel
            if feedback is not None:
                fed = Feedback(feedback.residual[before : before + taken], feedback.units)
            part = out[start : start + length]
            job = partial(self._scatter, part, values, start, wire, places, 1.0 / divisor, fed)
            done.append(self.transport.submit(job, () if feedback is None else feedback))
            sent, before = sent + places.row_bytes(wire), before + taken
        self._count(wire.name, sent, values.nbytes)
        for each in done:
            each.wait()

    def _count(self, what: str, outer: int, nbytes: int) -> None:
        """Count what goes to each other host, and this rank's share of what a ring sends there."""
        size = self.wide * self.here
        self._stats.exchanges += 1
        self._stats.bytes_sent[what] += (self.wide - 1) * outer
        self._stats.bytes_uncompressed += (size - 1) * nbytes // size // self.here

    def _scatter(
        self,
        out: Tensor,
        values: Tensor,
        start: int,
        wire: WireFormat,
        places: Places,
        inverse: float,
        feedback: Feedback | None,
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
        source, received, sent = self._encoded(wire, part, lengths, places, inverse, feedback, lane)
        with lane.turn():
            self.transport.all_to_all("outer", lane, received, sent)
        self._math.sum_rows(wire, source, received, out, self.host * stride)
        if places.tail:
            # All rows have as many.
            at, _ = places.behind(out.device)
            total = formats.sum_tails(source, received).to(out.dtype)
            out[at[self.host] - self.host * stride] = total
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
        shape = (self.wide, places.row_bytes(wire))
        parts = [*values.view(torch.uint8).split([each * values.itemsize for each in lengths])]
        own, row_bytes = parts[self.local].view(values.dtype), shape[0] * shape[1]
        beside = (self.here - 1) * -(-max(own.nbytes, row_bytes) // 16) * 16
        memory = lane.memory("received", beside + row_bytes)
        given = memory[: (self.here - 1) * own.nbytes]
        others = given.view(own.dtype).view(self.here - 1, own.numel())
        if self.here > 1:
            received = [*given.view(self.here - 1, own.nbytes)]
            received.insert(self.local, memory[:0])
            parts[self.local] = memory[:0]
            self.transport.all_to_all_parts("inner", lane, received, parts)
        source = Source(own, others, places, self.host, inverse)
        sent = lane.memory("sent", row_bytes).view(shape)
        self._math.encode(wire, source, sent, feedback)
        formats.write_tails(source, sent)
        return source, memory[beside:].view(shape), sent


def _blocks(numel: int) -> int:
    """Return the elements of so many blocks as are needed."""
    return -(-numel // BLOCK) * BLOCK


# -- plans -------------------------------------------------------------------------------------


def _is_small(wire: WireFormat, numel: int) -> bool:
    """Return whether whole blocks have more bytes than the elements as fp32."""
    return _blocks(numel) // BLOCK * wire.block_bytes > 4 * numel


def bucket_plan(
    wire: WireFormat, wide: int, here: int, local: int, numels: Sequence[int], itemsize: int
) -> Plan | None:
    """Return what `Exchange.plan` does, on rank ``local`` of ``here`` on each of ``wide`` hosts."""
    total, owners = sum(numels), wide * here
    if len(numels) == 1:
        part = -(-total // BLOCK // owners) * BLOCK
        whole = Places.evenly(owners, part, part, part, total)
        lengths = [max(0, min(wide * part, total - each * wide * part)) for each in range(here)]
        mine = Places.evenly(wide, part, part, part, lengths[local])
    else:
        runs, padded, flat = [], 0, 0
        small: list[int] = []
        for length in numels:
            if _is_small(wire, length):
                small.extend(range(flat, flat + length))
            else:
                runs.append((padded, flat, length))
                padded += _blocks(length)
            flat += length
        part = -(-padded // BLOCK // owners) * BLOCK
        # A local rank's part begins where its first block does, and has what is small up to the
        # next one's.
        of_each = [
            [*Places(1, 0, runs).inside(each * wide * part, (each + 1) * wide * part)]
            for each in range(here)
        ]
        begins = [0, *(some[0][1] if some else total for some in of_each[1:]), total]
        lengths = [stop - start for start, stop in pairwise(begins)]
        tails = [[at for at in small if start <= at < stop] for start, stop in pairwise(begins)]
        most = max(-(-len(each) // wide) for each in tails)
        rows = [
            [each[most * row : most * (row + 1)] for row in range(wide)] if most else []
            for each in tails
        ]
        whole = Places(owners, part, runs, [row for each in rows for row in each])
        first, before = local * wide * part, begins[local]
        own = [(begin - first, at - before, length) for begin, at, length in of_each[local]]
        mine = Places(wide, part, own, [[at - before for at in row] for row in rows[local]])
        mine.tail = whole.tail
        if not runs:
            return None
    fewer = owners * whole.row_bytes(wire) < total * itemsize
    return Plan(whole, mine, lengths) if fewer else None


def shard_chunks(
    wire: WireFormat, wide: int, here: int, numels: Sequence[int], itemsize: int
) -> Chunks | None:
    """Return what `Exchange.chunks` does, for ``here`` ranks on each of ``wide`` hosts."""
    numel = sum(numels)
    most = CHUNKS if here == 1 else CHUNKS_OF_TWO_LEVELS
    chunks = max(1, min(most, numel * wide * here // LEAST_CHUNK))
    step = max(1, -(-numel // chunks // BLOCK)) * BLOCK
    found: Chunks = []
    for start in range(0, numel, step):
        length = min(step, numel - start)
        # Of two levels, rows are packed.
        stride = numel if here == 1 else length
        if len(numels) == 1:
            rows = wide * stride
            places = Places.evenly(wide, _blocks(length), stride, length, rows)
        else:
            places = _pieces(wire, range(wide), stride, numels, start, length)
        found.append((start, length, places))
    sent = sum(places.row_bytes(wire) for _, _, places in found)
    return found if sent < numel * itemsize else None


def _pieces(
    wire: WireFormat,
    rows: Sequence[int],
    stride: int,
    numels: Sequence[int],
    start: int,
    length: int,
) -> Places:
    """Return the places of rows that have elements ``start`` to ``start + length`` of lengths.

    The first of ``rows`` begins after so many strides.
    """
    runs, padded, flat = [], 0, -start
    small: list[int] = []
    for each in numels:
        begin, stop = max(0, flat), min(length, flat + each)
        flat += each
        if stop > begin and _is_small(wire, stop - begin):
            small.extend(range(begin, stop))
        elif stop > begin:
            runs.append((padded, begin, stop - begin))
            padded += _blocks(stop - begin)
    of_rows = [
        (index * padded + at, row * stride + begin, taken)
        for index, row in enumerate(rows)
        for at, begin, taken in runs
    ]
    tails = [[row * stride + at for at in small] for row in rows]
    return Places(len(rows), padded, of_rows, tails)
