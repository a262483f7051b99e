"""Collectives that send encoded blocks: all-reduce mean, reduce-scatter mean and all-gather.

With N hosts of G ranks, the ranks of a host first divide a bucket among them and add up their
parts in fp32. They send the parts in the dtype of the gradients, so nothing is rounded there. Each
rank then sends its part, encoded, to the ranks with the same local rank on other hosts. All N ranks
own 1 / N of the part, add it up in fp32 and send the encoded mean back. At last
the ranks of a host send each other the encoded means, so all ranks decode the same bytes. A host
with G ranks sends the bytes of a host with one rank, and a gradient is rounded twice, however many
ranks there are. Shards stay on the rank that added them up, and weights begin there. If each rank
is a separate host, the first and the last exchange are left out.

Parameters that would grow in blocks are sent uncompressed, over the same connections, so that the
other ranks raise if one rank fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks.formats import BLOCK_NUMEL, CommFormat
from distamp.comm_hooks.residuals import Residual
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.topology import Topology
from distamp.comm_hooks.transport import CommSlot, GlooTransport, NcclTransport, Transport

__all__ = ["BlockLayout", "CommLayout", "CompressedCollectives"]

# Shards are reduced in slices, two at a time, so that buffers take at most a quarter of the memory
# of the gradients in fp32. A slice has no fewer elements than the minimum.
MAX_SLICES = 9
MAX_SLICES_OF_TWO_LEVELS = 18
MIN_SLICE_NUMEL = 1 << 17
# A CPU encodes so many blocks at once that they fit into its cache. The scales of so many blocks
# end at a multiple of 16 bytes, so a row has the same length in one chunk as in several.
CPU_CHUNK_BLOCKS = 1 << 11


class Segment(NamedTuple):
    """Elements of one parameter, which begin a block.

    Attributes:
        start: The first element in the flat tensor.
        numel: The number of elements.
        block: The first block.
    """

    start: int
    numel: int
    block: int

    @property
    def stop_block(self) -> int:
        """The block after the last."""
        return self.block + count_blocks(self.numel)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of a flat tensor, each with elements of one parameter and zeros after these.

    Attributes:
        segments: The parameters, in the order of their blocks.
        num_blocks: The number of blocks. Blocks after the last parameter are zeros.
    """

    segments: Sequence[Segment]
    num_blocks: int

    def narrow(self, start: int, stop: int) -> BlockLayout:
        """Return the layout of the blocks from ``start`` to ``stop``."""
        segments = []
        for segment in self.segments:
            first = max(start, segment.block)
            last = min(stop, segment.stop_block)
            if first < last:
                skipped = (first - segment.block) * BLOCK_NUMEL
                numel = min(segment.numel - skipped, (last - first) * BLOCK_NUMEL)
                segments.append(Segment(segment.start + skipped, numel, first - start))
        return BlockLayout(segments, stop - start)

    def shift(self, offset: int) -> BlockLayout:
        """Return the same layout of a flat tensor in which the elements begin at ``offset``."""
        segments = []
        for segment in self.segments:
            segments.append(Segment(segment.start + offset, segment.numel, segment.block))
        return BlockLayout(segments, self.num_blocks)

    def copy_in(self, flat: Tensor, blocks: Tensor) -> None:
        """Copy elements of a flat tensor to ``blocks`` (n, 256), and zeros to the padding."""
        padded = blocks.view(-1)
        stop = 0
        for segment in self.segments:
            start = segment.block * BLOCK_NUMEL
            if stop < start:
                padded[stop:start].zero_()
            stop = start + segment.numel
            padded[start:stop].copy_(flat[segment.start : segment.start + segment.numel])
        if stop < padded.numel():
            padded[stop:].zero_()

    def copy_out(self, blocks: Tensor, flat: Tensor) -> None:
        """Copy ``blocks`` (n, 256) without the padding to the elements of a flat tensor."""
        padded = blocks.view(-1)
        for segment in self.segments:
            start = segment.block * BLOCK_NUMEL
            elements = padded[start : start + segment.numel]
            flat[segment.start : segment.start + segment.numel].copy_(elements)


def count_blocks(numel: int) -> int:
    """Return the number of blocks of so many elements."""
    return -(-numel // BLOCK_NUMEL)


@dataclass(frozen=True, eq=False)
class BlockSlice:
    """Blocks that are sent in one message to each rank.

    Attributes:
        rows: For each rank, in `Topology.gather_order`, the layout of its row in the flat tensor of
            all ranks. All rows have the same number of blocks.
        shard: Of shards and weights, the layout of a row in the flat tensor of one rank.
        first_block: The place of the slice's residual in that of the bucket.
        bucket: Of a bucket, the layout of all rows, one after another.
    """

    rows: Sequence[BlockLayout]
    shard: BlockLayout
    first_block: int = 0
    bucket: BlockLayout | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a row."""
        return self.shard.num_blocks

    def copy_in(self, flat: Tensor, staged: Tensor) -> None:
        """Copy the rows of all ranks to ``staged`` (ranks, n, 256)."""
        if self.bucket is not None:
            self.bucket.copy_in(flat, staged.flatten(0, 1))
            return
        for row, blocks in zip(self.rows, staged, strict=True):
            row.copy_in(flat, blocks)


@dataclass(frozen=True, eq=False)
class CommLayout:
    """The blocks of a bucket, of shards or of weights.

    Attributes:
        slices: The slices, which are sent one after another.
        uncompressed_index: int64, the elements that are sent uncompressed.
        residual_numels: The number of elements of each rounding that has error feedback.
    """

    slices: Sequence[BlockSlice]
    uncompressed_index: Tensor
    residual_numels: Sequence[int] = ()


class LayoutBuilder:
    """Makes the layouts of one format.

    A layout is None if the message would not have fewer bytes than the tensor.

    Args:
        format: The format.
        num_hosts: The number of hosts.
        ranks_per_host: The number of ranks on each host.
        numels: The lengths of the parameters. Each parameter begins a block.
        itemsize: The bytes of an element.
    """

    def __init__(
        self,
        format: CommFormat,
        num_hosts: int,
        ranks_per_host: int,
        numels: Sequence[int],
        itemsize: int,
    ) -> None:
        self._format = format
        self._num_hosts = num_hosts
        self._ranks_per_host = ranks_per_host
        self._num_ranks = num_hosts * ranks_per_host
        self._numel = sum(numels)
        self._nbytes = self._numel * itemsize
        self._itemsize = itemsize
        segments: list[Segment] = []
        uncompressed: list[int] = []
        block = start = 0
        for numel in numels:
            if count_blocks(numel) * format.block_bytes > torch.float32.itemsize * numel:
                uncompressed.extend(range(start, start + numel))
            elif numel:
                segments.append(Segment(start, numel, block))
                block += count_blocks(numel)
            start += numel
        self._blocks = BlockLayout(segments, block)
        self._uncompressed = torch.tensor(uncompressed, dtype=torch.int64, device="cpu")

    def bucket(self) -> CommLayout | None:
        """Return the layout of a bucket. Each rank owns a row of the mean."""
        num_blocks = -(-self._blocks.num_blocks // self._num_ranks)
        row_bytes = self._row_bytes(num_blocks)
        message_bytes = self._num_ranks * row_bytes + 4 * len(self._uncompressed)
        if not self._blocks.segments or message_bytes >= self._nbytes:
            return None
        rows = []
        for index in range(self._num_ranks):
            rows.append(self._blocks.narrow(index * num_blocks, (index + 1) * num_blocks))
        row_numel = num_blocks * BLOCK_NUMEL
        residual_numels = [self._num_hosts * row_numel, row_numel]
        bucket = self._blocks.narrow(0, self._num_ranks * num_blocks)
        block_slice = BlockSlice(rows, rows[0], bucket=bucket)
        return CommLayout([block_slice], self._uncompressed, residual_numels)

    def shards(self, gather_order: Sequence[int]) -> CommLayout | None:
        """Return the layout of gradients. Each rank gets a shard of the mean."""
        num_blocks = self._blocks.num_blocks
        max_slices = MAX_SLICES if self._ranks_per_host == 1 else MAX_SLICES_OF_TWO_LEVELS
        num_slices = min(max_slices, self._numel * self._num_ranks // MIN_SLICE_NUMEL)
        slice_blocks = max(1, -(-num_blocks // max(1, num_slices)))
        slices = []
        message_bytes = 0
        for start in range(0, num_blocks, slice_blocks):
            stop = min(start + slice_blocks, num_blocks)
            shard = self._blocks.narrow(start, stop)
            rows = [shard.shift(rank * self._numel) for rank in gather_order]
            slices.append(BlockSlice(rows, shard, self._num_hosts * start))
            message_bytes += self._row_bytes(stop - start)
        # Uncompressed elements are all-reduced, so a rank sends and receives all of them.
        message_bytes += 8 * len(self._uncompressed)
        if not slices or message_bytes >= self._nbytes:
            return None
        residual_numel = self._num_hosts * num_blocks * BLOCK_NUMEL
        return CommLayout(slices, self._uncompressed, [residual_numel])

    def weights(self, gather_order: Sequence[int]) -> CommLayout | None:
        """Return the layout of weights. Each rank has a shard."""
        message_bytes = self._row_bytes(self._blocks.num_blocks)
        message_bytes += self._itemsize * len(self._uncompressed)
        if not self._blocks.segments or message_bytes >= self._nbytes:
            return None
        rows = [self._blocks.shift(rank * self._numel) for rank in gather_order]
        return CommLayout([BlockSlice(rows, self._blocks)], self._uncompressed)

    def _row_bytes(self, num_blocks: int) -> int:
        return self._format.row_bytes(num_blocks * BLOCK_NUMEL)


@dataclass(frozen=True, eq=False)
class HostSum:
    """The sum of the rows of one slice over the ranks of this host, divided.

    Attributes:
        values: The flat tensor of this rank. Used if a host has one rank.
        rows: For each host, the layout of its row in ``values``.
        staged: For each rank of this host, in the order of addition, its rows (hosts, n, 256) in
            the dtype of the values. Empty if a host has one rank.
        inverse: The inverse of the divisor.
    """

    values: Tensor
    rows: Sequence[BlockLayout]
    staged: Sequence[Tensor]
    inverse: float

    def copy_row(self, host: int, start: int, stop: int, blocks: Tensor) -> None:
        """Write the blocks from ``start`` to ``stop`` of a host's row to ``blocks``, in fp32."""
        if not self.staged:
            self.rows[host].narrow(start, stop).copy_in(self.values, blocks)
            blocks.mul_(self.inverse)
            return
        blocks.copy_(self.staged[0][host, start:stop]).mul_(self.inverse)
        for peer in self.staged[1:]:
            blocks.add_(peer[host, start:stop].to(torch.float32, copy=True).mul_(self.inverse))


class CompressedCollectives:
    """Collectives of tensors of one device over the ranks of one group.

    Making one is collective: every rank of the group must do so.

    Args:
        topology: The ranks and their hosts.
        group: The ranks.
        device: The device of the tensors.
        stats: The counts to which bytes are added.

    Attributes:
        name: The numbers of hosts and of ranks on each, such as "2x4".
        transport: The connections.
    """

    # Private attributes that survive a call:
    # _layouts: by use, format and lengths, a layout.

    def __init__(
        self, topology: Topology, group: ProcessGroup, device: torch.device, stats: HookStats
    ) -> None:
        self._device = device
        self._stats = stats
        self._num_hosts = topology.num_hosts
        self._ranks_per_host = topology.ranks_per_host
        self._host = topology.host_index
        self._local_rank = topology.local_rank
        self._rank = group.rank()
        self._size = group.size()
        self._gather_order = topology.gather_order
        self._layouts: dict[tuple[object, ...], CommLayout | None] = {}
        self.name = f"{self._num_hosts}x{self._ranks_per_host}"
        transport_class = GlooTransport if device.type == "cpu" else NcclTransport
        self.transport: Transport = transport_class(topology, group, device, stats)

    def layout_for(
        self, usage: str, format: CommFormat, numels: Sequence[int], itemsize: int
    ) -> CommLayout | None:
        """Return a layout, or None if the message would not have fewer bytes than the tensor.

        Args:
            usage: "buckets", "shards" or "weights".
            format: The format.
            numels: The lengths of the parameters, in one shard if there are shards.
            itemsize: The bytes of an element.
        """
        key = usage, format.name, itemsize, *numels
        if key not in self._layouts:
            builder = LayoutBuilder(format, self._num_hosts, self._ranks_per_host, numels, itemsize)
            if usage == "shards":
                layout = builder.shards(self._gather_order)
            elif usage == "weights":
                layout = builder.weights(self._gather_order)
            else:
                layout = builder.bucket()
            if layout is not None:
                index = layout.uncompressed_index.to(self._device)
                layout = CommLayout(layout.slices, index, layout.residual_numels)
            self._layouts[key] = layout
        return self._layouts[key]

    def all_reduce_mean(
        self,
        values: Tensor,
        format: CommFormat,
        layout: CommLayout,
        divisor: float,
        residuals: Sequence[Residual] = (),
    ) -> Future[Tensor]:
        """Replace ``values`` by their sum over all ranks, divided, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating, and of one length on all ranks.
            format: The format.
            layout: The layout of a bucket.
            divisor: The divisor of the sum.
            residuals: The errors of the part that this rank sends, and of the mean that it owns.
        """
        (block_slice,) = layout.slices
        row_bytes = self._row_bytes(format, block_slice)
        num_uncompressed = layout.uncompressed_index.numel()
        self._count(format.name, 2 * row_bytes, 2 * values.nbytes, 8 * num_uncompressed)

        def job(slot: CommSlot) -> Tensor:
            host_sum, sent = self._encode(slot, format, block_slice, values, divisor, residuals[:1])
            gathered = slot.buffer("received", (self._size, row_bytes))
            received = gathered[self._local_rank * self._num_hosts :][: self._num_hosts]
            # This rank sends no row to itself, so the mean that it owns takes the place.
            mean = sent[self._host]
            with slot.network_order():
                self.transport.all_to_all_single("outer", slot, received, sent)
                self._encode_mean(format, block_slice, host_sum, received, mean, residuals[1:])
                # All received rows are added up, so the means of all owners take their memory.
                self.transport.all_gather("outer", slot, received, mean)
                if num_uncompressed:
                    total = self._reduce_uncompressed(slot, values, layout, divisor)
                    values[layout.uncompressed_index] = total.to(values.dtype)
            self._all_gather_in_host(slot, gathered)
            self._decode(format, block_slice, gathered, values)
            return values

        tensors = chain.from_iterable(residual.tensors for residual in residuals)
        return self.transport.submit(job, [values, *tensors])

    def reduce_scatter_mean(
        self,
        output: Tensor,
        input: Tensor,
        format: CommFormat,
        layout: CommLayout,
        divisor: float,
        residuals: Sequence[Residual] = (),
    ) -> None:
        """Write this rank's shard of the sum of ``input`` over all ranks, divided, to ``output``.

        Args:
            output: 1-D, contiguous, floating.
            input: 1-D, contiguous, floating: a shard for each rank.
            format: The format.
            layout: The layout of shards.
            divisor: The divisor of the sum.
            residuals: The error of the shards that this rank sends.
        """
        num_uncompressed = layout.uncompressed_index.numel()
        row_bytes = sum(self._row_bytes(format, block_slice) for block_slice in layout.slices)
        self._count(format.name, row_bytes, input.nbytes, 8 * num_uncompressed * self._size)

        def job(block_slice: BlockSlice, slot: CommSlot) -> Tensor:
            host_sum, sent = self._encode(slot, format, block_slice, input, divisor, residuals)
            received = slot.buffer("received", tuple(sent.shape))
            with slot.network_order():
                self.transport.all_to_all_single("outer", slot, received, sent)
                if num_uncompressed and block_slice is layout.slices[0]:
                    shards = input.view(self._size, -1)
                    total = self._reduce_uncompressed(slot, shards, layout, divisor)[self._rank]
                    output[layout.uncompressed_index] = total.to(output.dtype)
            for start, stop, blocks in self._reduce(format, block_slice, host_sum, received):
                block_slice.shard.narrow(start, stop).copy_out(blocks, output)
            return output

        tensors = list(chain.from_iterable(residual.tensors for residual in residuals))
        futures = []
        for block_slice in layout.slices:
            futures.append(self.transport.submit(partial(job, block_slice), tensors))
        for future in futures:
            future.wait()

    def all_gather(
        self, output: Tensor, input: Tensor, format: CommFormat, layout: CommLayout
    ) -> None:
        """Write the ``input`` of each rank, one after another, to ``output``.

        All ranks write the same bits, and a rank also decodes the ``input`` that it sent.

        Args:
            output: 1-D, contiguous, floating: an input for each rank.
            input: 1-D, contiguous, floating. It may be this rank's part of ``output``.
            format: The format.
            layout: The layout of weights.
        """
        (block_slice,) = layout.slices
        row_bytes = self._row_bytes(format, block_slice)
        index = layout.uncompressed_index
        uncompressed_bytes = 4 * index.numel() * self._size
        self._count(f"{format.name} weights", row_bytes, output.nbytes, uncompressed_bytes)

        def job(slot: CommSlot) -> Tensor:
            rows = slot.buffer("received", (self._size, row_bytes))
            first = self._local_rank * self._num_hosts
            row = rows[first + self._host]
            for start, stop, blocks in self._chunks(block_slice.num_blocks):
                block_slice.shard.narrow(start, stop).copy_in(input, blocks)
                format.encode(blocks, _chunk(format, row, start, stop))
            uncompressed = input.new_empty(self._size, index.numel())
            uncompressed_row = input[index].view(torch.uint8)
            with slot.network_order():
                self.transport.all_gather("outer", slot, rows[first : first + self._num_hosts], row)
                if index.numel():
                    uncompressed_rows = uncompressed.view(torch.uint8)
                    self.transport.all_gather("all", slot, uncompressed_rows, uncompressed_row)
            self._all_gather_in_host(slot, rows)
            self._decode(format, block_slice, rows, output)
            output.view(self._size, -1)[:, index] = uncompressed
            return output

        self.transport.submit(job, [output, input]).wait()

    # -- the steps of a job ----------------------------------------------------------------------

    def _encode(
        self,
        slot: CommSlot,
        format: CommFormat,
        block_slice: BlockSlice,
        values: Tensor,
        divisor: float,
        residuals: Sequence[Residual],
    ) -> tuple[HostSum, Tensor]:
        """Add up a slice over the ranks of this host, and encode the rows that it sends.

        Returns:
            The sum, and the rows to send, uint8 (hosts, bytes).
        """
        sent = slot.buffer("sent", (self._num_hosts, self._row_bytes(format, block_slice)))
        host_sum = self._add_up_in_host(slot, block_slice, values, 1.0 / divisor)
        self._encode_rows(format, block_slice, host_sum, sent, residuals)
        return host_sum, sent

    def _encode_rows(
        self,
        format: CommFormat,
        block_slice: BlockSlice,
        host_sum: HostSum,
        sent: Tensor,
        residuals: Sequence[Residual],
    ) -> None:
        """Encode the rows that this rank sends to other hosts."""
        for host in range(self._num_hosts):
            if host == self._host:
                continue
            for start, stop, blocks in self._chunks(block_slice.num_blocks):
                host_sum.copy_row(host, start, stop, blocks)
                residual = None
                if residuals:
                    first = block_slice.first_block + host * block_slice.num_blocks
                    residual = residuals[0].narrow(first + start, first + stop)
                _encode_blocks(format, blocks, _chunk(format, sent[host], start, stop), residual)

    def _add_up_in_host(
        self, slot: CommSlot, block_slice: BlockSlice, values: Tensor, inverse: float
    ) -> HostSum:
        """Send each rank of this host its rows, uncompressed."""
        first = self._local_rank * self._num_hosts
        rows = block_slice.rows[first : first + self._num_hosts]
        if self._ranks_per_host == 1:
            return HostSum(values, rows, (), inverse)
        shape = self._num_hosts, block_slice.num_blocks, BLOCK_NUMEL
        staged = slot.buffer("staged", (self._ranks_per_host, *shape), values.dtype)
        block_slice.copy_in(values, staged.flatten(0, 1))
        peers = slot.buffer("peers", (self._ranks_per_host - 1, *shape), values.dtype)
        sent = list(staged)
        received = list(peers)
        # This rank sends nothing to itself.
        nothing = staged.new_empty(0)
        sent[self._local_rank] = nothing
        received.insert(self._local_rank, nothing)
        self.transport.all_to_all("inner", slot, received, sent)
        return HostSum(values, rows, [staged[self._local_rank], *peers], inverse)

    def _reduce(
        self, format: CommFormat, block_slice: BlockSlice, host_sum: HostSum, received: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield chunks of this rank's row, added up over all hosts, the next host first."""
        for start, stop, blocks in self._chunks(block_slice.num_blocks):
            host_sum.copy_row(self._host, start, stop, blocks)
            for shift in range(1, self._num_hosts):
                row = received[(self._host + shift) % self._num_hosts]
                format.decode(_chunk(format, row, start, stop), blocks, accumulate=True)
            yield start, stop, blocks

    def _encode_mean(
        self,
        format: CommFormat,
        block_slice: BlockSlice,
        host_sum: HostSum,
        received: Tensor,
        mean: Tensor,
        residuals: Sequence[Residual],
    ) -> None:
        """Encode this rank's row, added up over all hosts."""
        for start, stop, blocks in self._reduce(format, block_slice, host_sum, received):
            residual = residuals[0].narrow(start, stop) if residuals else None
            _encode_blocks(format, blocks, _chunk(format, mean, start, stop), residual)

    def _decode(
        self, format: CommFormat, block_slice: BlockSlice, rows: Tensor, flat: Tensor
    ) -> None:
        for row, layout in zip(rows, block_slice.rows, strict=True):
            for start, stop, blocks in self._chunks(block_slice.num_blocks):
                format.decode(_chunk(format, row, start, stop), blocks)
                layout.narrow(start, stop).copy_out(blocks, flat)

    def _all_gather_in_host(self, slot: CommSlot, rows: Tensor) -> None:
        """Send the rows of all hosts to the ranks of this host."""
        if self._ranks_per_host > 1:
            by_rank = rows.view(self._ranks_per_host, -1)
            self.transport.all_gather("inner", slot, by_rank, by_rank[self._local_rank])

    def _reduce_uncompressed(
        self, slot: CommSlot, rows: Tensor, layout: CommLayout, divisor: float
    ) -> Tensor:
        """Add up the uncompressed elements of rows over all ranks, in fp32."""
        total = rows[..., layout.uncompressed_index].float().mul_(1.0 / divisor)
        self.transport.all_reduce(slot, total)
        return total

    def _chunks(self, num_blocks: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the first block, the block after the last, and fp32 memory for these blocks."""
        size = num_blocks
        if self._device.type == "cpu":
            size = min(CPU_CHUNK_BLOCKS, num_blocks)
        memory = torch.empty(size, BLOCK_NUMEL, dtype=torch.float32, device=self._device)
        for start in range(0, num_blocks, max(1, size)):
            stop = min(start + size, num_blocks)
            yield start, stop, memory[: stop - start]

    # -- counts ----------------------------------------------------------------------------------

    def _row_bytes(self, format: CommFormat, block_slice: BlockSlice) -> int:
        return format.row_bytes(block_slice.num_blocks * BLOCK_NUMEL)

    def _count(self, label: str, row_bytes: int, nbytes: int, uncompressed_bytes: int) -> None:
        """Count the bytes that leave this host, and this rank's share of the bytes of a ring."""
        self._stats.exchanges += 1
        sent = (self._num_hosts - 1) * row_bytes + self._ring_bytes(uncompressed_bytes)
        self._stats.bytes_sent[label] += sent
        self._stats.bytes_uncompressed += self._ring_bytes(nbytes)

    def _ring_bytes(self, nbytes: int) -> int:
        return (self._size - 1) * nbytes // self._size // self._ranks_per_host


def _encode_blocks(
    format: CommFormat, blocks: Tensor, out: Tensor, residual: Residual | None
) -> None:
    """Encode blocks, with error feedback if there is a residual."""
    if residual is None:
        format.encode(blocks, out)
    else:
        residual.encode(format, blocks, out)


def _chunk(format: CommFormat, row: Tensor, start: int, stop: int) -> Tensor:
    """Return the bytes of the blocks from ``start`` to ``stop`` of an encoded row."""
    first = format.row_bytes(start * BLOCK_NUMEL)
    return row[first : first + format.row_bytes((stop - start) * BLOCK_NUMEL)]
