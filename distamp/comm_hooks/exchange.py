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
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import formats
from distamp.comm_hooks.formats import Feedback, Source, WireFormat
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.plans import Part, Plan, bucket_plan, shard_plan, weight_plan
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.transport import DeviceTransport, HostTransport, Lane

__all__ = ["Exchange"]


class _Buffers(NamedTuple):
    """A lane's memory: uint8 rows, but for the first two.

    Args:
        others: (ranks of this host - 1, elements): their values of this rank's part.
        parts: The same for each rank of this host, of which its own is empty.
        received: (hosts, bytes): what other hosts sent of this rank's part.
        sent: (hosts, bytes): what it sends to them.
        mean: (1, bytes): of these, what it sends to none: there is the mean that it owns.
        means: (hosts, bytes): those of the other hosts, in the place of ``others``.
        flat: (ranks of this host, bytes): those of all of them, of which ``means`` is this rank's.
        rows: (ranks, bytes): the same, a row for each.
    """

    others: Tensor
    parts: list[Tensor]
    received: Tensor
    sent: Tensor
    mean: Tensor
    means: Tensor
    flat: Tensor
    rows: Tensor


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
        self.transport: HostTransport | DeviceTransport
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
        (part,), inverse, small = plan.parts, 1.0 / divisor, plan.small.numel()
        of_mine, of_mean = feedback or (None, None)
        self._count(wire.name, 2 * part.row_bytes, 2 * values.nbytes, 8 * small)

        def run(lane: Lane) -> Tensor:
            source, buffers = self._encoded(wire, values, part, inverse, of_mine, lane)
            with lane.turn:
                self.transport.all_to_all("outer", lane, buffers.received, buffers.sent)
                self._math.sum_encode(wire, source, buffers.received, buffers.mean, of_mean)
                # All that was added up is read: the means of all owners take its place.
                self.transport.all_gather("outer", lane, buffers.means, buffers.mean)
                if small:
                    total = values[plan.small].float().mul_(inverse)
                    self.transport.all_reduce(lane, total)
                    values[plan.small] = total.to(values.dtype)
            self._pass_on(lane, buffers)
            self._math.decode(wire, buffers.rows, part.whole, values)
            return values

        return self.transport.submit(run, [values, *chain(*feedback)])

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
        shards, inverse, small = values.view(self._size, -1), 1.0 / divisor, plan.small.numel()
        row = sum(part.row_bytes for part in plan.parts)
        self._count(wire.name, row, values.nbytes, 8 * small * self._size)
        before, done = 0, []
        for part in plan.parts:
            fed = feedback[0].part(before, part.mine.numel) if feedback else None
            job = partial(self._scatter, out, shards, wire, part, inverse, fed)
            done.append(self.transport.submit(job, [*chain(*feedback)]))
            before += part.mine.numel

        def add_small(lane: Lane) -> Tensor:
            with lane.turn:
                total = shards[:, plan.small].float().mul_(inverse)
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
        (part,), small = plan.parts, plan.small.numel()
        self._count(f"{wire.name} weights", part.row_bytes, out.nbytes, 4 * small * self._size)

        def run(lane: Lane) -> Tensor:
            buffers = self._buffers(part, values.dtype, lane)
            source = Source(values, values.view(1, -1)[:0], part.mine, 1, 1.0)
            mine = buffers.means[self.host : self.host + 1]
            self._math.encode(wire, source, mine)
            exact = values.new_empty(self._size, small)
            exact[self._rank] = values[plan.small]
            with lane.turn:
                self.transport.all_gather("outer", lane, buffers.means, mine)
                if small:
                    everyone = exact.view(torch.uint8)
                    own = everyone[self._rank].clone().view(1, -1)
                    self.transport.all_gather("all", lane, everyone, own)
            self._pass_on(lane, buffers)
            self._math.decode(wire, buffers.rows, part.whole, out)
            out.view(self._size, -1)[:, plan.small] = exact
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
        source, buffers = self._encoded(wire, given, part, inverse, feedback, lane)
        with lane.turn:
            self.transport.all_to_all("outer", lane, buffers.received, buffers.sent)
        some = out[part.start : part.start + length]
        self._math.sum_rows(wire, source, buffers.received, some)
        return out

    def _encoded(
        self,
        wire: WireFormat,
        values: Tensor,
        part: Part,
        inverse: float,
        feedback: Feedback | None,
        lane: Lane,
    ) -> tuple[Source, _Buffers]:
        """Divide values between the ranks of this host, and encode rows of the sum for the hosts.

        Returns:
            What this host has, and buffers of which ``sent`` is to be sent.
        """
        buffers = self._buffers(part, values.dtype, lane)
        if self.here > 1:
            parts = [*values.split_with_sizes(part.lengths)]
            values, parts[self.local] = parts[self.local], buffers.parts[self.local]
            self.transport.all_to_all_parts("inner", lane, buffers.parts, parts)
        source = Source(values, buffers.others, part.mine, self.host, inverse)
        self._math.encode(wire, source, buffers.sent, feedback)
        return source, buffers

    def _buffers(self, part: Part, dtype: torch.dtype, lane: Lane) -> _Buffers:
        """Return a lane's memory as a part of a plan uses it; made once."""
        key = part, dtype
        if key not in lane.views:
            own = part.lengths[self.local] if part.lengths else 0
            shape, rows_bytes = (self.wide, part.row_bytes), self.wide * part.row_bytes
            nbytes = own * dtype.itemsize
            beside = (self.here - 1) * -(-max(nbytes, rows_bytes) // 16) * 16
            memory = lane.memory("received", beside + rows_bytes)
            # Weights are written where they are gathered.
            sent = lane.memory("sent", rows_bytes if part.lengths else 0).view(-1, part.row_bytes)
            others = memory[: (self.here - 1) * nbytes].view(dtype).view(self.here - 1, own)
            parts = [*others]
            parts.insert(self.local, others.view(-1)[:0])
            rows = memory[: self.here * rows_bytes].view(self.here, *shape)
            lane.views[key] = _Buffers(
                others=others,
                parts=parts,
                received=memory[beside:].view(shape),
                sent=sent,
                mean=sent[self.host : self.host + 1],
                means=rows[self.local],
                flat=rows.flatten(1),
                rows=rows.flatten(0, 1),
            )
        found: _Buffers = lane.views[key]
        return found

    def _pass_on(self, lane: Lane, buffers: _Buffers) -> None:
        """Send the other ranks of this host what other hosts sent."""
        if self.here > 1:
            own = buffers.flat[self.local : self.local + 1]
            self.transport.all_gather("inner", lane, buffers.flat, own)

    def _count(self, what: str, row_bytes: int, nbytes: int, small: int) -> None:
        """Count what leaves a host, beside its ranks' share of what a ring of all ranks sends."""
        self._stats.exchanges += 1
        self._stats.bytes_sent[what] += (self.wide - 1) * row_bytes + self._in_a_ring(small)
        self._stats.bytes_uncompressed += self._in_a_ring(nbytes)

    def _in_a_ring(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes // self._size // self.here
