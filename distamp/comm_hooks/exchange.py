"""One exchange for all wrappers: averages flat tensors, reduce-scatters shards, gathers weights.

With N hosts of G ranks, each host's ranks first divide a bucket between them and add up their parts
in fp32, sent in the gradients' own dtype: nothing is rounded there. Each part goes, encoded, to the
ranks of the other hosts that have the same one; each of these owns 1 / N of it, adds it up in fp32,
and sends the encoded mean back to them. The ranks of a host then send each other what they got, the
same bytes, so that all ranks read the same. What leaves a host is what leaves a host with one rank,
and a gradient is rounded twice however many ranks there are. Shards are kept where they were added
up; weights begin where shards are. Where each rank counts as a host, all exchange with all in one
level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import formats
from distamp.comm_hooks.formats import Feedback, Source, WireFormat
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.plans import Part, Plan, bucket_plan, shard_plan, weight_plan
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.transport import DeviceTransport, HostTransport, Lane, Transport

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
        self._math: Any = formats
        if device.type == "cuda":
            from distamp.comm_hooks import kernels

            self._math = kernels
        outer = [ranks[self.local] for ranks in hosts.ranks]
        levels = {"inner": hosts.ranks[self.host], "outer": outer, "all": range(self._size)}
        self.transport: Transport
        if device.type == "cpu":
            self.transport = HostTransport(hosts.name, group, levels, stats)
        else:
            self.transport = DeviceTransport(hosts.name, group, levels, device)

    def plan(
        self, kind: str, wire: WireFormat, numels: Sequence[int], itemsize: int
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
        wire: WireFormat,
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
        (part,), inverse = plan.parts, 1.0 / divisor
        row, small = part.row_bytes, len(plan.small)
        of_mine, of_mean = feedback or (None, None)
        self._count(wire.name, 2 * row, 2 * values.nbytes, 8 * small)

        def run(lane: Lane) -> Tensor:
            source, received, sent = self._encoded(wire, values, part, inverse, of_mine, lane)
            # When all that was added up is read, the means of all owners take its place.
            means = lane.memory("received", self.here * sent.numel()).view(self.here, -1, row)
            mean = sent[self.host]
            with lane.turn():
                self.transport.all_to_all("outer", lane, received, sent)
                self._math.sum_encode(wire, source, received, mean, of_mean)
                self.transport.all_gather("outer", lane, means[self.local], mean)
                if small:
                    total = values[plan.small].float().mul_(inverse)
                    self.transport.all_reduce(lane, total)
                    values[plan.small] = total.to(values.dtype)
            self._math.decode(wire, self._passed_on(lane, means), part.whole, values)
            return values

        uses = [values, *(each for fed in feedback for each in fed)]
        return self.transport.submit(run, uses)

    def reduce_scatter(
        self,
        out: Tensor,
        values: Tensor,
        wire: WireFormat,
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
        shards, small = values.view(self._size, -1), len(plan.small)
        row = sum(part.row_bytes for part in plan.parts)
        self._count(wire.name, row, values.nbytes, 8 * small * self._size)
        uses, before, done = [each for fed in feedback for each in fed], 0, []
        for part in plan.parts:
            fed = feedback[0].part(before, part.mine.numel) if feedback else None
            job = partial(self._scatter, out, shards, wire, part, 1.0 / divisor, fed)
            done.append(self.transport.submit(job, uses))
            before += part.mine.numel

        def add_small(lane: Lane) -> Tensor:
            with lane.turn():
                total = shards[:, plan.small].float().mul_(1.0 / divisor)
                self.transport.all_reduce(lane, total)
                out[plan.small] = total[self._rank].to(out.dtype)
            return out

        if small:
            done.append(self.transport.submit(add_small))
        for each in done:
            each.wait()

    def gather(self, out: Tensor, values: Tensor, wire: WireFormat, plan: Plan) -> None:
        """Write what each rank gives to ``out``, one after another; the same on all ranks.

        Args:
            out: 1-D, contiguous, floating: a part of ``values``' length for each rank.
            values: 1-D, contiguous, floating; may be this rank's part of ``out``.
            wire: The format.
            plan: That of weights.
        """
        (part,), small = plan.parts, len(plan.small)
        self._count(f"{wire.name} weights", part.row_bytes, out.nbytes, 4 * small * self._size)

        def run(lane: Lane) -> Tensor:
            shape = self.here, self.wide, part.row_bytes
            rows = lane.memory("received", self._size * part.row_bytes).view(shape)
            own, whole = rows[self.local, self.host], out.view(self._size, -1)
            exact = values.new_empty(self._size, small)
            exact[self._rank] = values[plan.small]
            source = Source(values, values.view(1, -1)[:0], part.mine, 1, 1.0)
            self._math.encode(wire, source, own.view(1, -1))
            with lane.turn():
                self.transport.all_gather("outer", lane, rows[self.local], own)
                if small:
                    everyone = exact.view(torch.uint8)
                    self.transport.all_gather("all", lane, everyone, everyone[self._rank])
            self._math.decode(wire, self._passed_on(lane, rows), part.whole, out)
            whole[:, plan.small] = exact
            return out

        self.transport.submit(run, [out, values]).wait()

    def _scatter(
        self,
        out: Tensor,
        shards: Tensor,
        wire: WireFormat,
        part: Part,
        inverse: float,
        feedback: Feedback | None,
        lane: Lane,
    ) -> Tensor:
        """Add up a part of this rank's shard."""
        length = part.lengths[0] // self.wide
        given = shards.view(-1)[part.start :]
        if self.here > 1:
            # To each rank of this host, of every host's part what belongs to it there.
            packed = lane.memory("packed", self._size * length * shards.itemsize)
            given = packed.view(shards.dtype)
            some = shards[:, part.start : part.start + length]
            torch.index_select(some, 0, self._index, out=given.view(-1, length))
        source, received, sent = self._encoded(wire, given, part, inverse, feedback, lane)
        with lane.turn():
            self.transport.all_to_all("outer", lane, received, sent)
        self._math.sum_rows(wire, source, received, out[part.start : part.start + length])
        return out

    def _encoded(
        self,
        wire: WireFormat,
        values: Tensor,
        part: Part,
        inverse: float,
        feedback: Feedback | None,
        lane: Lane,
    ) -> tuple[Source, Tensor, Tensor]:
        """Divide values between the ranks of this host, and encode rows of the sum for the hosts.

        Returns:
            What this host has, memory for what others send of it, and what is to be sent to each.
        """
        row_bytes = self.wide * part.row_bytes
        parts = [*values.split(part.lengths)] if self.here > 1 else [values]
        own = parts[self.local]
        beside = (self.here - 1) * -(-max(own.nbytes, row_bytes) // 16) * 16
        memory = lane.memory("received", beside + row_bytes)
        given = memory[: (self.here - 1) * own.nbytes].view(own.dtype)
        others = given.view(self.here - 1, own.numel())
        if self.here > 1:
            received = [*others]
            received.insert(self.local, given[:0])
            parts[self.local] = given[:0]
            self.transport.all_to_all_parts("inner", lane, received, parts)
        source = Source(own, others, part.mine, self.host, inverse)
        shape = self.wide, part.row_bytes
        sent = lane.memory("sent", row_bytes).view(shape)
        self._math.encode(wire, source, sent, feedback)
        return source, memory[beside:].view(shape), sent

    def _passed_on(self, lane: Lane, rows: Tensor) -> Tensor:
        """Send the other ranks of this host what other hosts sent; return all rows."""
        if self.here > 1:
            flat = rows.flatten(1)
            self.transport.all_gather("inner", lane, flat, flat[self.local])
        return rows.flatten(0, 1)

    def _count(self, what: str, row_bytes: int, nbytes: int, small: int) -> None:
        """Count what leaves a host, beside its ranks' share of what a ring of all ranks sends."""
        self._stats.exchanges += 1
        self._stats.bytes_sent[what] += (self.wide - 1) * row_bytes + self._in_a_ring(small)
        self._stats.bytes_uncompressed += self._in_a_ring(nbytes)

    def _in_a_ring(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes // self._size // self.here
