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
from dataclasses import dataclass, field
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

__all__ = ["BlockLayout", "Chunk", "CommLayout", "CompressedCollectives", "LayoutBuilder"]

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

    def copy_in(self, flat: Tensor, blocks: Tensor, offset: int = 0) -> None:
        """Copy elements of a flat tensor to ``blocks`` (n, 256), and zeros to the padding.

        Args:
            flat: The flat tensor, in which the parameters begin at ``offset``.
            blocks: The blocks.
            offset: The place of the parameters.
        """
        padded = blocks.view(-1)
        stop = 0
        for segment in self.segments:
            start = segment.block * BLOCK_NUMEL
            if stop < start:
                padded[stop:start].zero_()
            stop = start + segment.numel
            first = offset + segment.start
            padded[start:stop].copy_(flat[first : first + segment.numel])
        if stop < padded.numel():
            padded[stop:].zero_()

    def copy_out(self, blocks: Tensor, flat: Tensor, offset: int = 0) -> None:
        """Copy ``blocks`` (n, 256) without the padding to a flat tensor, as `copy_in` reads it."""
        padded = blocks.view(-1)
        for segment in self.segments:
            start = segment.block * BLOCK_NUMEL
            elements = padded[start : start + segment.numel]
            first = offset + segment.start
            flat[first : first + segment.numel].copy_(elements)


def count_blocks(numel: int) -> int:
    """Return the number of blocks of so many elements."""
    return -(-numel // BLOCK_NUMEL)


class Chunk(NamedTuple):
    """Blocks of one row that are encoded at once.

    Attributes:
        layout: The layout of these blocks.
        start: The first block in the row.
        stop: The block after the last.
        data: The place of the encoded blocks in the encoded row.
    """

    layout: BlockLayout
    start: int
    stop: int
    data: slice


class Row(NamedTuple):
    """The blocks that one rank adds up, or that one rank sends to all.

    Attributes:
        chunks: The chunks.
        offset: The place of the chunks' elements in the flat tensor of all ranks.
    """

    chunks: Sequence[Chunk]
    offset: int = 0


@dataclass(frozen=True, eq=False)
class BlockSlice:
    """Blocks that are sent in one message to each rank.

    Attributes:
        rows: For each rank, in `Topology.gather_order`, its row in the flat tensor of all ranks.
            All rows have the same number of blocks. Those of shards and weights have the same
            chunks.
        num_blocks: The number of blocks of a row.
        chunk_shape: The shape of the blocks of the first chunk, which no other chunk exceeds.
        row_bytes: The bytes of an encoded row.
        first_block: The place of the slice's residual in that of the bucket.
        bucket: Of a bucket, the layout of all rows, one after another.
    """

    rows: Sequence[Row]
    num_blocks: int
    chunk_shape: tuple[int, int]
    row_bytes: int
    first_block: int = 0
    bucket: BlockLayout | None = None

    def copy_in(self, flat: Tensor, staged: Tensor) -> None:
        """Copy the rows of all ranks to ``staged`` (ranks, n, 256)."""
        if self.bucket is not None:
            self.bucket.copy_in(flat, staged.flatten(0, 1))
            return
        for row, blocks in zip(self.rows, staged, strict=True):
            for chunk in row.chunks:
                chunk.layout.copy_in(flat, blocks[chunk.start : chunk.stop], row.offset)


@dataclass(frozen=True, eq=False)
class CommLayout:
    """The blocks of a bucket, of shards or of weights, in one format.

    Attributes:
        format: The format.
        slices: The slices, which are sent one after another.
        uncompressed_index: int64, the elements that are sent uncompressed.
        sent_bytes: The bytes that this rank sends to other hosts.
        ring_bytes: The bytes that an uncompressed ring over all ranks, which visits each host once,
            would send to other hosts, for each rank.
        residual_numels: The number of elements of each rounding that has error feedback.
    """

    format: CommFormat
    slices: Sequence[BlockSlice]
    uncompressed_index: Tensor
    sent_bytes: int
    ring_bytes: int
    residual_numels: list[int] = field(default_factory=list)


class LayoutBuilder:
    """Makes the layouts of one format.

    A layout is None if the message would not have fewer bytes than the tensor.

    Args:
        format: The format.
        num_hosts: The number of hosts.
        ranks_per_host: The number of ranks on each host.
        numels: The lengths of the parameters. Each parameter begins a block.
        itemsize: The bytes of an element.
        device: The device of the tensors.
    """

    def __init__(
        self,
        format: CommFormat,
        num_hosts: int,
        ranks_per_host: int,
        numels: Sequence[int],
        itemsize: int,
        device: torch.device,
    ) -> None:
        self._format = format
        self._num_hosts = num_hosts
        self._ranks_per_host = ranks_per_host
        self._num_ranks = num_hosts * ranks_per_host
        self._numel = sum(numels)
        self._nbytes = self._numel * itemsize
        self._itemsize = itemsize
        # A GPU encodes a row at once.
        self._max_chunk_blocks = CPU_CHUNK_BLOCKS if device.type == "cpu" else None
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
        self._uncompressed = torch.tensor(uncompressed, dtype=torch.int64, device=device)

    def bucket(self) -> CommLayout | None:
        """Return the layout of a bucket. Each rank owns a row of the mean."""
        num_blocks = -(-self._blocks.num_blocks // self._num_ranks)
        row_bytes = self._row_bytes(num_blocks)
        message_bytes = self._num_ranks * row_bytes + 4 * len(self._uncompressed)
        if not self._blocks.segments or message_bytes >= self._nbytes:
            return None
        rows = []
        for index in range(self._num_ranks):
            row = self._blocks.narrow(index * num_blocks, (index + 1) * num_blocks)
            rows.append(Row(self._chunks(row)))
        bucket = self._blocks.narrow(0, self._num_ranks * num_blocks)
        block_slice = self._slice(rows, bucket=bucket)
        row_numel = num_blocks * BLOCK_NUMEL
        residual_numels = [self._num_hosts * row_numel, row_numel]
        # A rank sends its rows, and then the mean that it owns.
        uncompressed_bytes = 8 * len(self._uncompressed)
        return self._layout(
            [block_slice], 2 * row_bytes, uncompressed_bytes, 2 * self._nbytes, residual_numels
        )

    def shards(self, gather_order: Sequence[int]) -> CommLayout | None:
        """Return the layout of gradients. Each rank gets a shard of the mean."""
        num_blocks = self._blocks.num_blocks
        max_slices = MAX_SLICES if self._ranks_per_host == 1 else MAX_SLICES_OF_TWO_LEVELS
        num_slices = min(max_slices, self._numel * self._num_ranks // MIN_SLICE_NUMEL)
        slice_blocks = max(1, -(-num_blocks // max(1, num_slices)))
        slices = []
        row_bytes = 0
        for start in range(0, num_blocks, slice_blocks):
            stop = min(start + slice_blocks, num_blocks)
            shard = self._blocks.narrow(start, stop)
            rows = self._shard_rows(shard, gather_order)
            slices.append(self._slice(rows, self._num_hosts * start))
            row_bytes += slices[-1].row_bytes
        # Uncompressed elements are all-reduced, so a rank sends and receives all of them.
        uncompressed_bytes = 8 * len(self._uncompressed)
        if not slices or row_bytes + uncompressed_bytes >= self._nbytes:
            return None
        residual_numel = self._num_hosts * num_blocks * BLOCK_NUMEL
        return self._layout(
            slices,
            row_bytes,
            self._num_ranks * uncompressed_bytes,
            self._num_ranks * self._nbytes,
            [residual_numel],
        )

    def weights(self, gather_order: Sequence[int]) -> CommLayout | None:
        """Return the layout of weights. Each rank has a shard."""
        row_bytes = self._row_bytes(self._blocks.num_blocks)
        message_bytes = row_bytes + self._itemsize * len(self._uncompressed)
        if not self._blocks.segments or message_bytes >= self._nbytes:
            return None
        block_slice = self._slice(self._shard_rows(self._blocks, gather_order))
        uncompressed_bytes = self._num_ranks * 4 * len(self._uncompressed)
        return self._layout(
            [block_slice], row_bytes, uncompressed_bytes, self._num_ranks * self._nbytes
        )

    def _shard_rows(self, shard: BlockLayout, gather_order: Sequence[int]) -> list[Row]:
        """Return the same blocks of the shards of all ranks."""
        chunks = self._chunks(shard)
        return [Row(chunks, rank * self._numel) for rank in gather_order]

    def _chunks(self, row: BlockLayout) -> list[Chunk]:
        size = min(self._max_chunk_blocks or row.num_blocks, row.num_blocks)
        chunks = []
        for start in range(0, row.num_blocks, size):
            stop = min(start + size, row.num_blocks)
            first_byte = self._row_bytes(start)
            data = slice(first_byte, first_byte + self._row_bytes(stop - start))
            chunks.append(Chunk(row.narrow(start, stop), start, stop, data))
        return chunks

    def _slice(
        self, rows: Sequence[Row], first_block: int = 0, bucket: BlockLayout | None = None
    ) -> BlockSlice:
        num_blocks = rows[0].chunks[-1].stop
        return BlockSlice(
            rows,
            num_blocks,
            chunk_shape=(rows[0].chunks[0].stop, BLOCK_NUMEL),
            row_bytes=self._row_bytes(num_blocks),
            first_block=first_block,
            bucket=bucket,
        )

    def _layout(
        self,
        slices: Sequence[BlockSlice],
        row_bytes: int,
        uncompressed_bytes: int,
        nbytes: int,
        residual_numels: list[int] | None = None,
    ) -> CommLayout:
        """Return a layout with its counts of bytes.

        Args:
            slices: The slices.
            row_bytes: The bytes that this rank sends to each other host in blocks.
            uncompressed_bytes: The bytes of the ring that adds up uncompressed elements.
            nbytes: The bytes of the ring that the layout replaces.
            residual_numels: As in `CommLayout`. None for a tensor without error feedback.
        """
        sent_bytes = (self._num_hosts - 1) * row_bytes + self._ring_bytes(uncompressed_bytes)
        return CommLayout(
            self._format,
            slices,
            self._uncompressed,
            sent_bytes,
            self._ring_bytes(nbytes),
            residual_numels or [],
        )

    def _ring_bytes(self, nbytes: int) -> int:
        """Return one rank's share of the bytes that a ring sends to other hosts."""
        return (self._num_ranks - 1) * nbytes // self._num_ranks // self._ranks_per_host

    def _row_bytes(self, num_blocks: int) -> int:
        return self._format.row_bytes(num_blocks * BLOCK_NUMEL)


class JobBuffers(NamedTuple):
    """The memory of a slot, as the jobs of one slice use it.

    Attributes:
        rows: uint8 (ranks, bytes), the encoded rows of all ranks. Of shards (hosts, bytes).
        received: uint8 (hosts, bytes), the part of ``rows`` that other hosts send to this rank.
        sent: uint8 (hosts, bytes), the encoded rows that this rank sends to other hosts.
        staged: (ranks of all hosts, n, 256), all rows in the dtype of the values. Like the
            following, it is empty if a host has one rank.
        sent_in_host: For each rank of this host, the staged rows that this rank sends to it.
        received_in_host: For each rank of this host, the staged rows that it sends.
        summands: For each rank of this host, in the order of addition, the rows of this rank.
    """

    rows: Tensor
    received: Tensor
    sent: Tensor
    staged: Tensor
    sent_in_host: Sequence[Tensor] = ()
    received_in_host: Sequence[Tensor] = ()
    summands: Sequence[Tensor] = ()


class HostSum(NamedTuple):
    """The sum of one slice over the ranks of this host, divided.

    Attributes:
        values: The flat tensor of this rank. Used if a host has one rank.
        inverse: The inverse of the divisor.
        summands: For each rank of this host, in the order of addition, its rows (hosts, n, 256) in
            the dtype of the values. Empty if a host has one rank.
    """

    values: Tensor
    inverse: float
    summands: Sequence[Tensor]

    def copy_chunk(self, host: int, row: Row, chunk: Chunk, blocks: Tensor) -> None:
        """Write a chunk of the row of a host to ``blocks``, in fp32."""
        if not self.summands:
            chunk.layout.copy_in(self.values, blocks, row.offset)
            blocks.mul_(self.inverse)
            return
        blocks.copy_(self.summands[0][host, chunk.start : chunk.stop]).mul_(self.inverse)
        for summand in self.summands[1:]:
            elements = summand[host, chunk.start : chunk.stop].to(torch.float32, copy=True)
            blocks.add_(elements.mul_(self.inverse))


class CompressedCollectives:
    """Collectives of tensors of one device over the ranks of one group.

    Making one is collective: every rank of the group must do so.

    Args:
        topology: The ranks and their hosts.
        group: The ranks.
        device: The device of the tensors.
        stats: The counts to which bytes are added.

    Attributes:
        name: The numbers of hosts and ranks of each, which name residuals in checkpoints.
        transport: The connections.
    """

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
        # The rows of the ranks that this rank sends to on other hosts, and its own.
        first_row = self._local_rank * self._num_hosts
        self._outer_rows = slice(first_row, first_row + self._num_hosts)
        self._own_row = first_row + self._host
        self.name = f"{self._num_hosts}x{self._ranks_per_host}"
        transport_class = GlooTransport if device.type == "cpu" else NcclTransport
        self.transport: Transport = transport_class(topology, group, device, stats)

    def make_layout(
        self, usage: str, format: CommFormat, numels: Sequence[int], itemsize: int
    ) -> CommLayout | None:
        """Return a layout, or None if the message would not have fewer bytes than the tensor.

        Args:
            usage: "buckets", "shards" or "weights".
            format: The format.
            numels: The lengths of the parameters, in one shard if there are shards.
            itemsize: The bytes of an element.
        """
        builder = LayoutBuilder(
            format, self._num_hosts, self._ranks_per_host, numels, itemsize, self._device
        )
        if usage == "shards":
            return builder.shards(self._gather_order)
        if usage == "weights":
            return builder.weights(self._gather_order)
        return builder.bucket()

    def all_reduce_mean(
        self,
        values: Tensor,
        layout: CommLayout,
        divisor: float,
        residuals: Sequence[Residual] = (),
    ) -> Future[Tensor]:
        """Replace ``values`` by their sum over all ranks, divided, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating, and of one length on all ranks.
            layout: The layout of a bucket.
            divisor: The divisor of the sum.
            residuals: The errors of the part that this rank sends, and of the mean that it owns.
        """
        format = layout.format
        (block_slice,) = layout.slices
        self._count(format.name, layout)

        def job(slot: CommSlot) -> Tensor:
            buffers = self._buffers(slot, block_slice, self._size, values.dtype)
            memory = torch.empty(block_slice.chunk_shape, dtype=torch.float32, device=self._device)
            received, sent = buffers.received, buffers.sent
            # This rank sends no row to itself, so the mean that it owns takes the place.
            mean = sent[self._host]
            if self._ranks_per_host > 1:
                self._exchange_in_host(slot, block_slice, values, buffers)
            host_sum = HostSum(values, 1.0 / divisor, buffers.summands)
            self._encode_rows(format, block_slice, host_sum, memory, sent, residuals)
            with slot.network_order():
                self.transport.all_to_all("outer", slot, received, sent)
                for chunk, blocks in self._reduce(format, block_slice, host_sum, memory, received):
                    if residuals:
                        residuals[1].encode(format, blocks, mean[chunk.data], chunk.start)
                    else:
                        format.encode(blocks, mean[chunk.data])
                # All received rows are added up, so the means of all owners take their memory.
                self.transport.all_gather("outer", slot, received, mean)
                if layout.uncompressed_index.numel():
                    total = self._reduce_uncompressed(slot, values, layout, divisor)
                    values[layout.uncompressed_index] = total.to(values.dtype)
            if self._ranks_per_host > 1:
                self._all_gather_in_host(slot, buffers.rows)
            self._decode(format, block_slice, buffers.rows, memory, values)
            return values

        return self.transport.submit(job, [values, *chain.from_iterable(residuals)])

    def reduce_scatter_mean(
        self,
        output: Tensor,
        input: Tensor,
        layout: CommLayout,
        divisor: float,
        residuals: Sequence[Residual] = (),
    ) -> None:
        """Write this rank's shard of the sum of ``input`` over all ranks, divided, to ``output``.

        Args:
            output: 1-D, contiguous, floating.
            input: 1-D, contiguous, floating: a shard for each rank.
            layout: The layout of shards.
            divisor: The divisor of the sum.
            residuals: The error of the shards that this rank sends.
        """
        format = layout.format
        self._count(format.name, layout)

        def job(block_slice: BlockSlice, slot: CommSlot) -> Tensor:
            buffers = self._buffers(slot, block_slice, self._num_hosts, input.dtype)
            memory = torch.empty(block_slice.chunk_shape, dtype=torch.float32, device=self._device)
            received, sent = buffers.received, buffers.sent
            if self._ranks_per_host > 1:
                self._exchange_in_host(slot, block_slice, input, buffers)
            host_sum = HostSum(input, 1.0 / divisor, buffers.summands)
            self._encode_rows(format, block_slice, host_sum, memory, sent, residuals)
            with slot.network_order():
                self.transport.all_to_all("outer", slot, received, sent)
                if layout.uncompressed_index.numel() and block_slice is layout.slices[0]:
                    shards = input.view(self._size, -1)
                    total = self._reduce_uncompressed(slot, shards, layout, divisor)[self._rank]
                    output[layout.uncompressed_index] = total.to(output.dtype)
            reduced = self._reduce(format, block_slice, host_sum, memory, received)
            for chunk, blocks in reduced:
                chunk.layout.copy_out(blocks, output)
            return output

        tensors = list(chain.from_iterable(residuals))
        futures = []
        for block_slice in layout.slices:
            futures.append(self.transport.submit(partial(job, block_slice), tensors))
        for future in futures:
            future.wait()

    def all_gather(self, output: Tensor, input: Tensor, layout: CommLayout) -> None:
        """Write the ``input`` of each rank, one after another, to ``output``.

        All ranks write the same bits, and a rank also decodes the ``input`` that it sent.

        Args:
            output: 1-D, contiguous, floating: an input for each rank.
            input: 1-D, contiguous, floating. It may be this rank's part of ``output``.
            layout: The layout of weights.
        """
        format = layout.format
        (block_slice,) = layout.slices
        index = layout.uncompressed_index
        self._count(f"{format.name} weights", layout)

        def job(slot: CommSlot) -> Tensor:
            rows = slot.buffer("received", (self._size, block_slice.row_bytes))
            data = rows[self._own_row]
            memory = torch.empty(block_slice.chunk_shape, dtype=torch.float32, device=self._device)
            for chunk in block_slice.rows[self._own_row].chunks:
                blocks = memory[: chunk.layout.num_blocks]
                chunk.layout.copy_in(input, blocks)
                format.encode(blocks, data[chunk.data])
            uncompressed = input.new_empty(self._size, index.numel())
            uncompressed_row = input[index].view(torch.uint8)
            with slot.network_order():
                self.transport.all_gather("outer", slot, rows[self._outer_rows], data)
                if index.numel():
                    uncompressed_rows = uncompressed.view(torch.uint8)
                    self.transport.all_gather("all", slot, uncompressed_rows, uncompressed_row)
            if self._ranks_per_host > 1:
                self._all_gather_in_host(slot, rows)
            self._decode(format, block_slice, rows, memory, output)
            output.view(self._size, -1)[:, index] = uncompressed
            return output

        self.transport.submit(job, [output, input]).wait()

    def _count(self, label: str, layout: CommLayout) -> None:
        """Count a collective and its bytes."""
        self._stats.exchanges += 1
        self._stats.bytes_sent[label] += layout.sent_bytes
        self._stats.bytes_uncompressed += layout.ring_bytes

    # -- the steps of a job ----------------------------------------------------------------------
    # `memory` is fp32 memory for the blocks of one chunk.

    def _buffers(
        self, slot: CommSlot, block_slice: BlockSlice, num_rows: int, dtype: torch.dtype
    ) -> JobBuffers:
        """Return the memory of a job. The next job of the slot and the slice gets the same."""
        key = block_slice, dtype
        buffers: JobBuffers | None = slot.views.get(key)
        if buffers is None:
            buffers = self._make_buffers(slot, block_slice, num_rows, dtype)
            slot.views[key] = buffers
        return buffers

    def _make_buffers(
        self, slot: CommSlot, block_slice: BlockSlice, num_rows: int, dtype: torch.dtype
    ) -> JobBuffers:
        hosts, ranks = self._num_hosts, self._ranks_per_host
        rows = slot.buffer("received", (num_rows, block_slice.row_bytes))
        received = rows if num_rows == hosts else rows[self._outer_rows]
        sent = slot.buffer("sent", (hosts, block_slice.row_bytes))
        if ranks == 1:
            return JobBuffers(rows, received, sent, staged=rows.new_empty(0))
        shape = hosts, block_slice.num_blocks, BLOCK_NUMEL
        staged = slot.buffer("staged", (ranks, *shape), dtype)
        peers = slot.buffer("peers", (ranks - 1, *shape), dtype)
        # This rank sends nothing to itself.
        nothing = staged.new_empty(0)
        sent_in_host = list(staged)
        sent_in_host[self._local_rank] = nothing
        received_in_host = list(peers)
        received_in_host.insert(self._local_rank, nothing)
        summands = [staged[self._local_rank], *peers]
        return JobBuffers(
            rows, received, sent, staged.flatten(0, 1), sent_in_host, received_in_host, summands
        )

    def _exchange_in_host(
        self, slot: CommSlot, block_slice: BlockSlice, values: Tensor, buffers: JobBuffers
    ) -> None:
        """Send each rank of this host its rows, uncompressed."""
        block_slice.copy_in(values, buffers.staged)
        self.transport.all_to_all("inner", slot, buffers.received_in_host, buffers.sent_in_host)

    def _encode_rows(
        self,
        format: CommFormat,
        block_slice: BlockSlice,
        host_sum: HostSum,
        memory: Tensor,
        sent: Tensor,
        residuals: Sequence[Residual],
    ) -> None:
        """Encode the rows that this rank sends to other hosts in ``sent`` (hosts, bytes)."""
        for host, row in enumerate(block_slice.rows[self._outer_rows]):
            if host == self._host:
                continue
            first_block = block_slice.first_block + host * block_slice.num_blocks
            for chunk in row.chunks:
                blocks = memory[: chunk.layout.num_blocks]
                data = sent[host, chunk.data]
                host_sum.copy_chunk(host, row, chunk, blocks)
                if residuals:
                    residuals[0].encode(format, blocks, data, first_block + chunk.start)
                else:
                    format.encode(blocks, data)

    def _reduce(
        self,
        format: CommFormat,
        block_slice: BlockSlice,
        host_sum: HostSum,
        memory: Tensor,
        received: Tensor,
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield chunks of this rank's row, added up over all hosts, the next host first."""
        row = block_slice.rows[self._own_row]
        for chunk in row.chunks:
            blocks = memory[: chunk.layout.num_blocks]
            host_sum.copy_chunk(self._host, row, chunk, blocks)
            for shift in range(1, self._num_hosts):
                data = received[(self._host + shift) % self._num_hosts]
                format.decode(data[chunk.data], blocks, accumulate=True)
            yield chunk, blocks

    def _decode(
        self,
        format: CommFormat,
        block_slice: BlockSlice,
        rows: Tensor,
        memory: Tensor,
        flat: Tensor,
    ) -> None:
        """Decode the rows of all ranks into a flat tensor."""
        for data, row in zip(rows, block_slice.rows, strict=True):
            for chunk in row.chunks:
                blocks = memory[: chunk.layout.num_blocks]
                format.decode(data[chunk.data], blocks)
                chunk.layout.copy_out(blocks, flat, row.offset)

    def _all_gather_in_host(self, slot: CommSlot, rows: Tensor) -> None:
        """Send the rows of all hosts to the ranks of this host."""
        by_rank = rows.view(self._ranks_per_host, -1)
        self.transport.all_gather("inner", slot, by_rank, by_rank[self._local_rank])

    def _reduce_uncompressed(
        self, slot: CommSlot, rows: Tensor, layout: CommLayout, divisor: float
    ) -> Tensor:
        """Add up the uncompressed elements of rows over all ranks, in fp32."""
        total = rows[..., layout.uncompressed_index].float().mul_(1.0 / divisor)
        self.transport.all_reduce(slot, total)
        return total
