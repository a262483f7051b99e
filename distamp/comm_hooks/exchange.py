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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import formats
from distamp.comm_hooks.formats import BLOCK, Feedback, Places, WireFormat
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.lanes import (
    DeviceLanes,
    DeviceWire,
    HostLanes,
    HostWire,
    Lane,
    Lanes,
    Turn,
    Wire,
)
from distamp.comm_hooks.stats import Account

__all__ = ["Exchange", "Plan"]

# Shards are reduced in so many parts, of which two are on their way at once, that buffers take at
# most a quarter of the gradients in fp32; but not in parts of fewer elements.
CHUNKS = {1: 9, 2: 18}
LEAST_CHUNK = 1 << 17


@dataclass(frozen=True)
class Plan:
    """Where the elements of a bucket go.

    Args:
        numel: Its elements.
        part: Elements that one rank owns, in whole blocks.
        whole: Where the rows of all owners lie in the bucket.
        runs: As of `Places`, for each parameter of formats that keep them apart.
        mine: The rows that this rank sends to other hosts, in its host's part of the bucket.
        cuts: Where each local rank's part of the bucket begins, and where the last one ends.
    """

    numel: int
    part: int
    whole: Places
    runs: Sequence[tuple[int, int, int]] = field(repr=False)
    mine: Places
    cuts: Sequence[int]


class Exchange:
    """Averages and reduce-scatters flat tensors of one device over the ranks of one group.

    Making one is collective.

    Args:
        hosts: Which ranks are on which hosts.
        group: The ranks.
        device: Where the gradients lie.
        account: Where bytes are counted.
    """

    def __init__(
        self, hosts: Hosts, group: ProcessGroup, device: torch.device, account: Account
    ) -> None:
        self.hosts, self.device, self.account = hosts, device, account
        self.size = group.size()
        self.host, self.local = hosts.place(group.rank())
        self._plans: dict[tuple[int, str], Plan] = {}
        # Where the rows of shards lie, by their lengths.
        self._known: dict[tuple[int, int, int, int], Places] = {}
        self.lanes: Lanes
        self.wire: Wire
        levels = {"inner": hosts.ranks[self.host], "outer": hosts.column(self.local)}
        self._math: Any = formats
        if device.type == "cpu":
            self.wire = wire = HostWire(hosts.name, group, levels, account)
            self.lanes = HostLanes(wire.close)
        else:
            self.wire = DeviceWire(hosts.name, group, levels, device)
            self.lanes = DeviceLanes(device)
            self._math, account.arithmetic = _arithmetic(device)

    # -- whole gradients -------------------------------------------------------------------------

    def plan(self, numel: int, wire: WireFormat, numels: Sequence[int] = ()) -> Plan:
        """Return where the elements of a bucket go.

        Args:
            numel: Its elements.
            wire: The format.
            numels: Those of its parameters, where no block may have elements of two.
        """
        key = (numel, wire.name)
        if not numels and key in self._plans:
            return self._plans[key]
        runs, padded, flat = [], 0, 0
        for length in numels or [numel]:
            runs.append((padded, flat, length))
            padded += -(-length // BLOCK) * BLOCK
            flat += length
        wide, here = self.hosts.count, self.hosts.local_size
        part = -(-padded // BLOCK // (wide * here)) * BLOCK
        whole = Places(wide * here, part, runs)
        first = self.local * wide * part
        cuts = [0, *(_flat(whole, each * wide * part, numel) for each in range(1, here)), numel]
        mine = [
            (begin - first, at - cuts[self.local], length)
            for begin, at, length in whole.inside(first, first + wide * part)
        ]
        plan = Plan(numel, part, whole, runs, Places(wide, part, mine), cuts)
        if not numels:
            self._plans[key] = plan
        return plan

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
        inverse = 1.0 / (self.size if divisor is None else divisor)
        nbytes = values.numel() * values.itemsize
        outer, own = (self.hosts.count - 1) * wire.row_bytes(plan.part), plan.cuts[self.local :]
        inner = nbytes - (own[1] - own[0]) * values.itemsize
        inner += (self.hosts.local_size - 1) * self.hosts.count * wire.row_bytes(plan.part)
        inner = inner if self.hosts.local_size > 1 else 0
        self.account.add(wire.name, 2 * outer, inner, self._ring(2 * nbytes))
        fed = [] if feedback is None else [each for one in feedback for each in one]
        uses = [values, *fed] if self.device.type != "cpu" else []
        return self.lanes.submit(
            lambda lane, turn: self._average(lane, turn, values, wire, plan, inverse, feedback),
            uses,
        )

    def _average(
        self,
        lane: Lane,
        turn: Turn,
        values: Tensor,
        wire: WireFormat,
        plan: Plan,
        inverse: float,
        feedback: tuple[Feedback, Feedback] | None,
    ) -> Tensor:
        wide, here = self.hosts.count, self.hosts.local_size
        row = wire.row_bytes(plan.part)
        of_mine, of_mean = feedback or (None, None)
        own = values[plan.cuts[self.local] : plan.cuts[self.local + 1]]
        nbytes = own.numel() * own.itemsize
        others = lane.memory("received", max((here - 1) * nbytes, wide * here * row))
        others = others[: (here - 1) * nbytes].view(values.dtype).view(here - 1, own.numel())
        if here > 1:
            parts = [values[a:b].view(torch.uint8) for a, b in pairwise(plan.cuts)]
            self._inner(lane, others.view(torch.uint8), parts)
        sent = lane.memory("sent", wide * row).view(wide, row)
        self._math.encode(wire, own, others, plan.mine, sent, inverse, of_mine)
        everything = lane.memory("received", wide * here * row).view(here, wide, row)
        received = everything[0]
        with turn:
            self.wire.swap("outer", lane, [*received], [*sent])
            mean = sent[:1]
            self._math.sum_encode(wire, received, plan.part, mean, of_mean)
            received = everything[self.local]
            self.wire.swap("outer", lane, [*received], [mean[0]] * wide)
        if here > 1:
            flat = everything.view(here, wide * row)
            got = [part if local != self.local else part[:0] for local, part in enumerate(flat)]
            sending = flat[self.local]
            self.wire.swap("inner", lane, got, [sending if len(part) else part for part in got])
        self._math.decode(wire, everything.view(wide * here, row), plan.whole, values)
        return values

    def _inner(self, lane: Lane, received: Tensor, parts: Sequence[Tensor]) -> None:
        """Send each rank of this host its part, and receive one's own from all but oneself."""
        rows = iter(received)
        got = [parts[0][:0] if local == self.local else next(rows) for local in range(len(parts))]
        sent = [part[:0] if local == self.local else part for local, part in enumerate(parts)]
        self.wire.swap("inner", lane, got, sent)

    # -- shards ----------------------------------------------------------------------------------

    def reduce_scatter(
        self, out: Tensor, values: Tensor, wire: WireFormat, *, divisor: float | None = None
    ) -> None:
        """Write to ``out`` this rank's part of the sum of ``values`` over all ranks, divided.

        Args:
            out: 1-D, contiguous, floating.
            values: 1-D, contiguous, floating; a part of ``out``'s length for each rank.
            wire: The format.
            divisor: By which the sum is divided; None for the number of ranks.
        """
        inverse = 1.0 / (self.size if divisor is None else divisor)
        most = CHUNKS[min(2, self.hosts.local_size)]
        chunks = max(1, min(most, values.numel() // LEAST_CHUNK))
        step = max(1, -(-out.numel() // chunks // BLOCK)) * BLOCK
        rows = values.view(self.size, -1)
        done, sent = [], 0
        for start in range(0, out.numel(), step):
            place = (start, min(start + step, out.numel()))
            done.append(
                self.lanes.submit(
                    lambda lane, turn, place=place: self._scatter(  # type: ignore[misc]
                        lane, turn, out, rows, place, wire, inverse
                    )
                )
            )
            sent += wire.row_bytes(-(-(place[1] - start) // BLOCK) * BLOCK)
        nbytes = values.numel() * values.itemsize
        inside = nbytes * (self.hosts.local_size - 1) // self.hosts.local_size
        self.account.add(wire.name, (self.hosts.count - 1) * sent, inside, self._ring(nbytes))
        for each in done:
            each.wait()

    def _scatter(
        self,
        lane: Lane,
        turn: Turn,
        out: Tensor,
        rows: Tensor,
        place: tuple[int, int],
        wire: WireFormat,
        inverse: float,
    ) -> Tensor:
        wide, here = self.hosts.count, self.hosts.local_size
        start, stop = place
        length = stop - start
        part = -(-length // BLOCK) * BLOCK
        row = wire.row_bytes(part)
        values, stride = rows.view(-1)[start:], rows.shape[1]
        others = values[:0].view(0, 0)
        if here > 1:
            # To the ranks of this host, of every host's part what theirs there will have.
            nbytes = wide * length * rows.itemsize
            memory = lane.memory("received", max((2 * here - 1) * nbytes, wide * row))
            packed = memory[: here * nbytes].view(rows.dtype).view(here, wide, length)
            packed.copy_(rows.view(wide, here, -1)[..., start:stop].transpose(0, 1))
            received = memory[here * nbytes : (2 * here - 1) * nbytes].view(here - 1, nbytes)
            self._inner(lane, received, [*packed.view(here, -1).view(torch.uint8)])
            values, others, stride = packed[self.local].view(-1), received.view(rows.dtype), length
        sent = lane.memory("sent", wide * row).view(wide, row)
        places = self._places(wide, part, length, stride)
        self._math.encode(wire, values, others, places, sent, inverse, None)
        wires = lane.memory("received", wide * row).view(wide, row)
        with turn:
            self.wire.swap("outer", lane, [*wires], [*sent])
        self._math.sum_rows(wire, wires, self._places(1, part, length, 0), out[start:stop])
        return out

    def _places(self, rows: int, part: int, length: int, stride: int) -> Places:
        """Return the places of rows that begin every ``stride`` elements."""
        key = (rows, part, length, stride)
        if key not in self._known:
            runs = [(index * part, index * stride, length) for index in range(rows)]
            self._known[key] = Places(rows, part, runs)
        return self._known[key]

    def _ring(self, nbytes: int) -> int:
        """Return what a ring sends of so many bytes over the network for each rank."""
        count = self.hosts.count
        return (count - 1) * nbytes // count // self.hosts.local_size


def _flat(places: Places, begin: int, numel: int) -> int:
    """Return the first element of a tensor whose place in the rows is ``begin`` or later."""
    return next((flat for _, flat, _ in places.inside(begin, places.rows * places.numel)), numel)


def _arithmetic(device: torch.device) -> tuple[Any, str]:
    """Return what writes and reads wires on a device, and its name for `HookStats`."""
    if device.type != "cuda":
        return formats, "torch ops"
    try:
        from distamp.comm_hooks import kernels
    except ImportError:
        return formats, "torch ops, as Triton is not installed"
    return kernels, "Triton kernels"
