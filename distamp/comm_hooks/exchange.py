"""One exchange for all wrappers: averages flat tensors, reduce-scatters shards, gathers weights.

With N hosts of G ranks, each host's ranks first divide a bucket between them and add up their parts
in fp32, sent in the gradients' own dtype: nothing is rounded there. Each part goes, encoded, to the
ranks of the other hosts that have the same one; each of these owns 1 / N of it, adds it up in fp32,
and sends the encoded mean back to them. The ranks of a host then send each other what they got, the
same bytes, so that all ranks read the same. What leaves a host is what leaves a host with one rank,
and a gradient is rounded twice however many ranks there are. Shards are kept where they were added
up; weights begin where shards are. Where each rank counts as a host, all exchange with all in one
level. What a plan calls small goes as it is, by the same connections: where one rank fails, they
end, and the others hear of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import formats
from distamp.comm_hooks.formats import CommFormat, Feedback, Source
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.plans import Part, Plan, bucket_plan, shard_plan, weight_plan
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.transport import DeviceTransport, HostTransport, Lane

__all__ = ["Exchange"]


class Exchange:
    """Averages, reduce-scatters and gathers tensors of one device over the ranks of one group.

    Making one is collective.

    Args:
        hosts: Which ranks are on which hosts.
        group: The ranks.
        device: Where the tensors lie.
        stats: Where bytes are counted.
    """

    # What survives a call: connections and buffers; plans, by what they are for.
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
        self._rank, self._size = group.rank(), group.size()
        self.levels = f"{self.wide}x{self.here}"
        # All ranks: the first of each host, then the second of each, and so on.
        self._order = [ranks[local] for local in range(self.here) for ranks in hosts.ranks]
        self._index = torch.tensor(self._order, dtype=torch.int64, device="cpu").to(device)
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        outer = [ranks[self.local] for ranks in hosts.ranks]
        levels = {"inner": hosts.ranks[self.host], "outer": outer, "all": range(self._size)}
        kind = HostTransport if device.type == "cpu" else DeviceTransport
        self.transport = kind(next(hosts.names), group, levels, device, stats)

    def plan(
        self, kind: str, wire: CommFormat, numels: Sequence[int], itemsize: int
    ) -> Plan | None:
        """Return where elements go, or None where they would not get fewer bytes; made once.

        Args:
            kind: ``"buckets"``, ``"shards"`` or ``"weights"``.
            wire: The format.
            numels: Lengths, of which no block has elements of two.
            itemsize: Bytes of an element.
        """
        key = kind, wire.name, itemsize, *numels
        if key not in self._plans:
            if kind == "shards":
                plan = shard_plan(wire, self.wide, self.here, numels, itemsize)
            elif kind == "weights":
                plan = weight_plan(wire, self._order, numels, itemsize)
            else:
                plan = bucket_plan(wire, self.wide, self.here, self.local, numels, itemsize)
            self._plans[key] = plan and replace(plan, small=plan.small.to(self.device))
        return self._plans[key]

    def average(
        self,
        values: Tensor,
        wire: CommFormat,
        plan: Plan,
        divisor: float,
        feedback: Sequence[Feedback] = (),
    ) -> Future[Tensor]:
        """Replace ``values`` by their sum over all ranks, divided, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating; of the same length on all ranks.
            wire: The format.
            plan: That of a bucket.
            divisor: By which the sum is divided.
            feedback: What rounding takes of this rank's part, and of the mean that it owns.
        """
        (part,), inverse, small = plan.parts, 1.0 / divisor, plan.small.numel()
        of_mine, of_mean = feedback or (None, None)
        self._count(wire.name, 2 * part.row_bytes, 2 * values.nbytes, 8 * small)

        def run(lane: Lane) -> Tensor:
            source, received, sent = self._encoded(wire, values, part, inverse, of_mine, lane)
            # What it sends to none: there is the mean that it owns.
            mean = sent[self.host : self.host + 1]
            # All that was added up is read: the means of all owners take its place.
            *_, rows = self._buffers(part, values.dtype, lane)
            with lane.turn():
                self.transport.all_to_all("outer", lane, received, sent)
                formats.sum_encode(wire, source, received, mean, of_mean)
                self.transport.all_gather("outer", lane, rows[self.local], mean)
                if small:
                    total = self._sum_small(values, plan, inverse, lane)
                    values[plan.small] = total.to(values.dtype)
            formats.decode(wire, self._passed_on(lane, rows), part.whole, values)
            return values

        return self.transport.submit(run, [values, *chain(*feedback)])

    def reduce_scatter(
        self,
        out: Tensor,
        values: Tensor,
        wire: CommFormat,
        plan: Plan,
        divisor: float,
        feedback: Sequence[Feedback] = (),
    ) -> None:
        """Write to ``out`` this rank's part of the sum of ``values`` over all ranks, divided.

        Args:
            out: 1-D, contiguous, floating.
            values: 1-D, contiguous, floating; a part of ``out``'s length for each rank.
            wire: The format.
            plan: That of shards.
            divisor: By which the sum is divided.
            feedback: What rounding takes, of one part of the plan after another.
        """
        shards, inverse, small = values.view(self._size, -1), 1.0 / divisor, plan.small.numel()
        row = sum(part.row_bytes for part in plan.parts)
        self._count(wire.name, row, values.nbytes, 8 * small * self._size)

        def scatter(part: Part, lane: Lane) -> Tensor:
            fed = feedback[0].part(part.begin, part.mine.numel) if feedback else None
            given = values[part.start :]
            if self.here > 1:
                # To each rank of this host, of every host's part what belongs to it there.
                length = part.lengths[0] // self.wide
                packed = lane.memory("packed", self._size * length * values.itemsize)
                given = packed.view(values.dtype)
                some = shards[:, part.start : part.start + length]
                torch.index_select(some, 0, self._index, out=given.view(-1, length))
            source, received, sent = self._encoded(wire, given, part, inverse, fed, lane)
            with lane.turn():
                self.transport.all_to_all("outer", lane, received, sent)
                if small and part is plan.parts[0]:
                    total = self._sum_small(shards, plan, inverse, lane)[self._rank]
                    out[plan.small] = total.to(out.dtype)
            formats.sum_rows(wire, source, received, out[part.start :])
            return out

        jobs = [partial(scatter, part) for part in plan.parts]
        for done in [self.transport.submit(job, [*chain(*feedback)]) for job in jobs]:
            done.wait()

    def gather(self, out: Tensor, values: Tensor, wire: CommFormat, plan: Plan) -> None:
        """Write what each rank gives to ``out``, one after another; the same on all ranks.

        Args:
            out: 1-D, contiguous, floating: a part of ``values``' length for each rank.
            values: 1-D, contiguous, floating; may be this rank's part of ``out``.
            wire: The format.
            plan: That of weights.
        """
        (part,), small = plan.parts, plan.small.numel()
        self._count(f"{wire.name} weights", part.row_bytes, out.nbytes, 4 * small * self._size)

        def run(lane: Lane) -> Tensor:
            *_, rows = self._buffers(part, values.dtype, lane)
            mine = rows[self.local, self.host : self.host + 1]
            source = Source(values, values.view(1, -1)[:0], part.mine, 1, 1.0)
            formats.encode(wire, source, mine)
            exact = values.new_empty(self._size, small)
            own = values[plan.small].view(torch.uint8).view(1, -1)
            with lane.turn():
                self.transport.all_gather("outer", lane, rows[self.local], mine)
                if small:
                    self.transport.all_gather("all", lane, exact.view(torch.uint8), own)
            formats.decode(wire, self._passed_on(lane, rows), part.whole, out)
            out.view(self._size, -1)[:, plan.small] = exact
            return out

        self.transport.submit(run, [out, values]).wait()

    def _sum_small(self, rows: Tensor, plan: Plan, inverse: float, lane: Lane) -> Tensor:
        """Add up what is not encoded of rows over all ranks, in fp32."""
        total = rows[..., plan.small].float().mul_(inverse)
        self.transport.all_reduce(lane, total)
        return total

    def _encoded(
        self,
        wire: CommFormat,
        values: Tensor,
        part: Part,
        inverse: float,
        feedback: Feedback | None,
        lane: Lane,
    ) -> tuple[Source, Tensor, Tensor]:
        """Divide values between the ranks of this host, and encode rows of the sum for the hosts.

        Returns:
            What this host has; and uint8 (hosts, bytes) to receive in, and to send.
        """
        others, given, received, sent, _ = self._buffers(part, values.dtype, lane)
        if self.here > 1:
            parts = [*values.split_with_sizes(part.lengths)]
            values, parts[self.local] = parts[self.local], given[self.local]
            self.transport.all_to_all_parts("inner", lane, given, parts)
        source = Source(values, others, part.mine, self.host, inverse)
        formats.encode(wire, source, sent, feedback)
        return source, received, sent

    def _buffers(self, part: Part, dtype: torch.dtype, lane: Lane) -> tuple[Any, ...]:
        """Return a lane's memory as a part of a plan uses it; made once.

        Returns:
            (ranks of this host - 1, elements): their values of this rank's part. The same by rank,
            of which its own is empty. Of uint8, (hosts, bytes): what other hosts sent of it, and
            what it sends to them. (ranks of this host, hosts, bytes), in the place of the first:
            what all of them get.
        """
        key = part, dtype
        if key not in lane.views:
            numel = part.lengths[self.local] if part.lengths else 0
            nbytes, of_rows = numel * dtype.itemsize, self.wide * part.row_bytes
            beside = (self.here - 1) * -(-max(nbytes, of_rows) // 16) * 16
            memory = lane.memory("received", beside + of_rows)
            # Weights are written where they are gathered.
            sent = lane.memory("sent", of_rows if part.lengths else 0)
            others = memory[: (self.here - 1) * nbytes].view(dtype).view(self.here - 1, numel)
            given = [*others]
            given.insert(self.local, others.view(-1)[:0])
            received, sent = memory[beside:].view(self.wide, -1), sent.view(-1, part.row_bytes)
            rows = memory[: self.here * of_rows].view(self.here, self.wide, -1)
            lane.views[key] = others, given, received, sent, rows
        return lane.views[key]

    def _passed_on(self, lane: Lane, rows: Tensor) -> Tensor:
        """Send the ranks of this host what other hosts sent; return a row for each of all ranks."""
        if self.here > 1:
            flat = rows.flatten(1)
            self.transport.all_gather("inner", lane, flat, flat[self.local : self.local + 1])
        return rows.flatten(0, 1)

    def _count(self, what: str, row_bytes: int, nbytes: int, small: int) -> None:
        """Count what leaves a host, beside its ranks' share of what a ring of all ranks sends."""
        self._stats.exchanges += 1
        self._stats.bytes_sent[what] += (self.wide - 1) * row_bytes + self._in_a_ring(small)
        self._stats.bytes_uncompressed += self._in_a_ring(nbytes)

    def _in_a_ring(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes // self._size // self.here
