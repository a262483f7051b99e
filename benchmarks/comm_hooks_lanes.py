"""What two lanes save: a bucket's time on a device whose clock is imagined, by the real transport.

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

from benchmarks.common import command
from distamp.comm_hooks import COMM_FORMATS
from distamp.comm_hooks import transport as transports
from distamp.comm_hooks.collectives import BlockSlice, CompressedCollectives
from distamp.comm_hooks.residuals import Residual
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.topology import Topology

META, BUCKETS = torch.device("meta"), 40
# Of fp32 values; and, in bytes in a microsecond and microseconds, what a card can do.
NUMEL = 25 << 18
INNER, MEMORY, LAUNCH = 300e3, 2000e3, 5.0


class Nothing:
    """A stream, communicator, work, future or kernel that takes no time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> "Nothing":
        """Take no time."""
        return self

    def __getattr__(self, name: str) -> Any:
        return self._nothing

    def _nothing(self, *_: Any, **__: Any) -> "Nothing":
        return self

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def imagined(
    hosts: int,
    ranks: int,
    wire: str,
    *,
    communicator: Any = Nothing,
    stream: Any = Nothing,
    kernels: Any = None,
    lanes: int = transports.NUM_SLOTS,
) -> Iterator[Callable[[], object]]:
    """Yield what averages a bucket of 25 MiB between hosts of so many ranks, on no device."""
    ranks_by_host = [[host * ranks + local for local in range(ranks)] for host in range(hosts)]
    nothing = Nothing()
    stage = getattr(kernels, "stage", nothing)
    encode = getattr(kernels, "encode", nothing)
    encode_mean = getattr(kernels, "encode_mean", nothing)

    def reduce(*_: Any) -> Iterator[Any]:
        encode_mean()
        return iter(())

    decode = getattr(kernels, "decode", nothing)
    group = mock.Mock(rank=lambda: 0, size=lambda: hosts * ranks)
    with (
        mock.patch.object(transports, "NUM_SLOTS", lanes),
        mock.patch.object(transports, "Future", Nothing),
        mock.patch.object(transports.torch_private, "new_communicator", communicator),
        mock.patch.object(BlockSlice, "copy_in", stage),
        mock.patch.object(CompressedCollectives, "_encode_rows", encode),
        mock.patch.object(CompressedCollectives, "_reduce", reduce),
        mock.patch.object(CompressedCollectives, "_decode", decode),
        mock.patch.object(torch, "Stream", stream),
        mock.patch.object(torch.accelerator, "current_stream", Nothing),
        mock.patch.object(torch.Tensor, "record_stream", Nothing),
    ):
        topology = Topology(0, ranks_by_host, "two levels", iter(["name"]))
        collectives = CompressedCollectives(topology, group, META, HookStats())
        values = torch.empty(NUMEL, device=META)
        form = COMM_FORMATS[wire]
        residual = Residual.from_values(torch.empty(256, device=META))
        residuals = [residual] * 2 if form.needs_error_feedback else []

        layout = collectives.make_layout("buckets", form, [NUMEL], 4)
        assert layout is not None

        def average() -> None:
            collectives.all_reduce_mean(values, layout, hosts * ranks, residuals)

        yield average


class Clock:
    """A stream, a communicator or a link: when it is free, in microseconds."""

    def __init__(self) -> None:
        self.free = 0.0


class Device:
    """Streams whose clocks kernels and collectives advance; one link between hosts."""

    def __init__(self, link: float) -> None:
        self.link = link
        self.current = self.network = Clock()
        self.streams: list[Stream] = []

    def kernel(self, nbytes: float) -> None:
        """Run on the current stream."""
        self.current.free += LAUNCH + nbytes / MEMORY

    def collective(self, queue: Clock, nbytes: float, between_hosts: bool) -> Nothing:
        """Run when its communicator, and the link, are free; the current stream waits for it."""
        clocks = [self.current, queue, *([self.network] if between_hosts else [])]
        start = max(clock.free for clock in clocks)
        took = LAUNCH + nbytes / (self.link if between_hosts else INNER)
        for clock in clocks:
            clock.free = start + took
        return Nothing()


class Stream(Clock):
    """Of a lane."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        device.streams.append(self)

    def wait_stream(self, _: object) -> None:
        """The backward pass has always gone on."""

    def __enter__(self) -> None:
        self._device.current = self

    def __exit__(self, *_: object) -> None: ...


class Communicator(Clock):
    """Of a level, and of a lane."""

    def __init__(self, device: Device, outer: bool) -> None:
        super().__init__()
        self._device, self._outer = device, outer

    def alltoall_base(self, received: Any, sent: Any, *_: Any) -> Any:
        """Each rank's rows but its own."""
        return self._send(sent.nbytes * (len(sent) - 1) / len(sent))

    def alltoall(self, received: Any, sent: Any) -> Any:
        """Each rank's parts but its own."""
        return self._send(sum(each.nbytes for each in sent))

    def shutdown(self) -> None:
        """Nothing to give back."""

    def _allgather_base(self, rows: Any, own: Any) -> Any:
        return self._send(own.nbytes * (len(rows) - 1))

    def _send(self, nbytes: float) -> Any:
        return self._device.collective(self, nbytes, self._outer)


def microseconds(
    hosts: int, ranks: int, gbit: float, lanes: int, name_of: Callable[[str], str]
) -> float:
    """Return the time of a bucket, of many; communicators of one name are one."""
    device = Device(gbit * 125.0 / ranks)
    made: dict[str, Communicator] = {}

    def communicator(name: str, *_: Any) -> Communicator:
        return made.setdefault(name_of(name), Communicator(device, "/outer/" in name))

    def runs(nbytes: float) -> Callable[..., None]:
        return lambda *_: device.kernel(nbytes)

    share = 4 * NUMEL / ranks
    kernels = SimpleNamespace(
        stage=runs(8 * NUMEL),
        encode=runs(share * (ranks + 0.25)),
        encode_mean=runs(share),
        decode=runs(4 * NUMEL * 1.25),
    )
    how: Any = {"communicator": communicator, "kernels": kernels, "lanes": lanes}
    how["stream"] = lambda *_, **__: Stream(device)
    with imagined(hosts, ranks, "int8", **how) as average:
        for _ in range(BUCKETS):
            average()
    return max(stream.free for stream in device.streams) / BUCKETS


def main(*, hosts: int = 16, ranks: int = 8, gbit: float = 400.0) -> None:
    """Print a line for each way.

    Args:
        hosts: How many.
        ranks: Of each host.
        gbit: Of all cards of a host.
    """
    cluster = hosts, ranks, gbit
    found = {
        "two lanes, communicators of their own": microseconds(*cluster, 2, str),
        "two lanes, one communicator a level": microseconds(
            *cluster, 2, lambda name: name.rpartition("/")[0]
        ),
        "one lane": microseconds(*cluster, 1, str),
    }
    own = next(iter(found.values()))
    for name, each in found.items():
        print(f"{name:<40}{each:7.0f} us a bucket   {each / own:.2f}")


if __name__ == "__main__":
    command(main)
