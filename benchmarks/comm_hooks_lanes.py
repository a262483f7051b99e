"""The time that two lanes save for a bucket: the real transport on a device with a simulated clock.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_lanes --hosts 16 --ranks 8 --gbit 400

`CompressedCollectives.all_reduce_mean` runs unchanged. Streams, communicators and kernels advance
clocks and do nothing else. A communicator carries one collective at a time, and one link carries
the messages between hosts. Kernels of two streams run at the same time. The rows are a communicator
for each lane and level, as hooks have it, a communicator for each level, and a single lane.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.common import run_command
from distamp.comm_hooks import COMM_FORMATS
from distamp.comm_hooks import transport as transports
from distamp.comm_hooks.collectives import BlockSlice, CompressedCollectives
from distamp.comm_hooks.residuals import Residual
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.topology import Topology

META = torch.device("meta")
# Number of timed buckets, and of fp32 values in each.
BUCKETS, NUMEL = 40, 25 << 18
# Bytes in a microsecond between the cards of a host, and in the memory of a card.
LOCAL_BANDWIDTH, MEMORY_BANDWIDTH = 300e3, 2000e3
# Microseconds to launch a kernel or a collective.
LAUNCH = 5.0


class NoOp:
    """A stream, communicator, work, future or kernel that takes no time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> "NoOp":
        """Take no time."""
        return self

    def __getattr__(self, name: str) -> Any:
        return self._do_nothing

    def _do_nothing(self, *_: Any, **__: Any) -> "NoOp":
        return self

    def __enter__(self) -> "NoOp":
        return self

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def simulate(
    hosts: int,
    ranks: int,
    comm_format: str,
    *,
    communicator: Any = NoOp,
    stream: Any = NoOp,
    kernels: Any = None,
    lanes: int = transports.NUM_SLOTS,
) -> Iterator[Callable[[], object]]:
    """Yield a function that averages a bucket of 25 MiB between simulated hosts.

    Args:
        hosts: Number of hosts.
        ranks: Number of ranks on each host.
        comm_format: Format of the messages.
        communicator: Makes a communicator.
        stream: Makes a stream.
        kernels: Has the kernels stage, encode, encode_mean and decode.
        lanes: Number of lanes.
    """
    ranks_by_host = [[host * ranks + local for local in range(ranks)] for host in range(hosts)]
    no_op = NoOp()
    if kernels is None:
        kernels = SimpleNamespace(stage=no_op, encode=no_op, encode_mean=no_op, decode=no_op)

    def reduce(*_: Any) -> Iterator[Any]:
        kernels.encode_mean()
        return iter(())

    group = mock.Mock(rank=lambda: 0, size=lambda: hosts * ranks)
    with (
        mock.patch.object(transports, "NUM_SLOTS", lanes),
        mock.patch.object(transports, "Future", NoOp),
        mock.patch.object(transports.torch_private, "new_communicator", communicator),
        mock.patch.object(BlockSlice, "copy_in", kernels.stage),
        mock.patch.object(CompressedCollectives, "_encode_rows", kernels.encode),
        mock.patch.object(CompressedCollectives, "_reduce", reduce),
        mock.patch.object(CompressedCollectives, "_decode", kernels.decode),
        mock.patch.object(torch, "Stream", stream),
        mock.patch.object(torch.accelerator, "current_stream", NoOp),
        mock.patch.object(torch.Tensor, "record_stream", NoOp),
    ):
        topology = Topology(0, ranks_by_host, "two levels", iter(["name"]))
        collectives = CompressedCollectives(topology, group, META, HookStats())
        values = torch.empty(NUMEL, device=META)
        encoding = COMM_FORMATS[comm_format]
        residuals = []
        if encoding.needs_error_feedback:
            residual = Residual.from_values(torch.empty(256, device=META))
            residuals = [residual, residual]
        layout = collectives.make_layout("buckets", encoding, [NUMEL], 4)
        assert layout is not None

        def average() -> None:
            collectives.all_reduce_mean(values, layout, hosts * ranks, residuals)

        yield average


class Clock:
    """The clock of a stream, a communicator or a link.

    Attributes:
        free: The time in microseconds from which it is free.
    """

    def __init__(self) -> None:
        self.free = 0.0


class Device:
    """Streams with clocks that kernels and collectives advance, and one link between hosts.

    Args:
        link: Bytes in a microsecond between hosts.
    """

    def __init__(self, link: float) -> None:
        self.link = link
        self.network = Clock()
        self.current = self.network
        self.streams: list[Stream] = []

    def run_kernel(self, nbytes: float) -> None:
        """Run a kernel on the current stream."""
        self.current.free += LAUNCH + nbytes / MEMORY_BANDWIDTH

    def run_collective(self, queue: Clock, nbytes: float, between_hosts: bool) -> NoOp:
        """Run a collective as soon as its communicator, and the link, are free.

        The current stream waits for it.
        """
        clocks = [self.current, queue]
        bandwidth = LOCAL_BANDWIDTH
        if between_hosts:
            clocks.append(self.network)
            bandwidth = self.link
        end = max(clock.free for clock in clocks) + LAUNCH + nbytes / bandwidth
        for clock in clocks:
            clock.free = end
        return NoOp()


class Stream(Clock):
    """The stream of a lane."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        device.streams.append(self)

    def wait_stream(self, _: object) -> None:
        """Do not wait, because the backward pass is always ahead."""

    def __enter__(self) -> None:
        self._device.current = self

    def __exit__(self, *_: object) -> None: ...


class Communicator(Clock):
    """The communicator of a level, and of a lane."""

    def __init__(self, device: Device, between_hosts: bool) -> None:
        super().__init__()
        self._device = device
        self._between_hosts = between_hosts

    def alltoall_base(self, received: Any, sent: Any, *_: Any) -> Any:
        """Send the rows of all other ranks."""
        return self._send(sent.nbytes * (len(sent) - 1) / len(sent))

    def alltoall(self, received: Any, sent: Any) -> Any:
        """Send all tensors."""
        return self._send(sum(tensor.nbytes for tensor in sent))

    def shutdown(self) -> None:
        """Do nothing, because there is nothing to free."""

    def _allgather_base(self, rows: Any, row: Any) -> Any:
        return self._send(row.nbytes * (len(rows) - 1))

    def _send(self, nbytes: float) -> Any:
        return self._device.run_collective(self, nbytes, self._between_hosts)


def measure_bucket(
    hosts: int, ranks: int, gbit: float, lanes: int, shared_by: Callable[[str], str]
) -> float:
    """Return the mean time of a bucket in microseconds.

    Args:
        hosts: Number of hosts.
        ranks: Number of ranks on each host.
        gbit: Gbit/s of all cards of a host.
        lanes: Number of lanes.
        shared_by: Maps the name of a communicator to a key. Equal keys share a communicator.
    """
    device = Device(gbit * 125.0 / ranks)
    communicators: dict[str, Communicator] = {}

    def make_communicator(name: str, *_: Any) -> Communicator:
        communicator = Communicator(device, "/outer/" in name)
        return communicators.setdefault(shared_by(name), communicator)

    def make_kernel(nbytes: float) -> Callable[..., None]:
        return lambda *_: device.run_kernel(nbytes)

    rank_bytes = 4 * NUMEL / ranks
    kernels = SimpleNamespace(
        stage=make_kernel(8 * NUMEL),
        encode=make_kernel(rank_bytes * (ranks + 0.25)),
        encode_mean=make_kernel(rank_bytes),
        decode=make_kernel(4 * NUMEL * 1.25),
    )
    with simulate(
        hosts,
        ranks,
        "int8",
        communicator=make_communicator,
        stream=lambda *_, **__: Stream(device),
        kernels=kernels,
        lanes=lanes,
    ) as average:
        for _ in range(BUCKETS):
            average()
    return max(stream.free for stream in device.streams) / BUCKETS


def main(*, hosts: int = 16, ranks: int = 8, gbit: float = 400.0) -> None:
    """Print the time of a bucket with each arrangement of lanes and communicators.

    Args:
        hosts: Number of hosts.
        ranks: Number of ranks on each host.
        gbit: Gbit/s of all cards of a host.
    """

    def level_of(name: str) -> str:
        return name.rpartition("/")[0]

    times = {
        "two lanes, a communicator each": measure_bucket(hosts, ranks, gbit, 2, str),
        "two lanes, one communicator a level": measure_bucket(hosts, ranks, gbit, 2, level_of),
        "one lane": measure_bucket(hosts, ranks, gbit, 1, str),
    }
    baseline = next(iter(times.values()))
    for name, microseconds in times.items():
        ratio = microseconds / baseline
        print(f"{name:<40}{microseconds:7.0f} us a bucket   {ratio:.2f}")


if __name__ == "__main__":
    run_command(main)
