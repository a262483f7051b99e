"""What two lanes save: a bucket's time on a device whose clock is imagined, by the real transport.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_lanes --hosts 16 --ranks 8 --gbit 400

`Exchange.average` runs as it is; streams, communicators and kernels advance clocks instead of doing
anything. A communicator carries one collective at a time, and one link carries the messages between
hosts; kernels of two streams run beside each other. Once each lane and level has a communicator of
its own, as it is; once lanes share one of a level; and once there is one lane.
"""

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from distamp.comm_hooks import WIRE_FORMATS
from distamp.comm_hooks import exchange as exchanges
from distamp.comm_hooks import transport as transports
from distamp.comm_hooks.formats import Feedback
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.stats import HookStats

META, BUCKETS = torch.device("meta"), 40


class Clock:
    """A stream, a communicator or a link: when it is free, in microseconds."""

    def __init__(self) -> None:
        self.free = 0.0


class Device:
    """Streams whose clocks kernels and collectives advance; one link between hosts."""

    def __init__(self, link: float, inner: float, memory: float, launch: float) -> None:
        self.link, self.inner, self.memory, self.launch = link, inner, memory, launch
        self.current = self.network = Clock()
        self.streams: list[Stream] = []

    def kernel(self, nbytes: float) -> None:
        """Run on the current stream."""
        self.current.free += self.launch + nbytes / self.memory

    def collective(self, queue: Clock, nbytes: float, between_hosts: bool) -> None:
        """Run when its communicator, and the link, are free; the current stream waits for it."""
        clocks = [self.current, queue, *([self.network] if between_hosts else [])]
        start = max(clock.free for clock in clocks)
        took = self.launch + nbytes / (self.link if between_hosts else self.inner)
        for clock in clocks:
            clock.free = start + took


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

    def _send(self, nbytes: float) -> Any:
        self._device.collective(self, nbytes, self._outer)
        return mock.MagicMock()

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


def microseconds(given: argparse.Namespace, lanes: int, name_of: Callable[[str], str]) -> float:
    """Return the time of a bucket, of many; communicators of one name are one."""
    nic = given.gbit * 125.0 / given.ranks
    device = Device(nic, given.inner_gbs * 1e3, given.memory_gbs * 1e3, given.launch_us)
    made: dict[str, Communicator] = {}

    def communicator(name: str, *_: Any) -> Communicator:
        return made.setdefault(name_of(name), Communicator(device, "/outer/" in name))

    def runs(passes: float) -> Callable[..., None]:
        return lambda *_: device.kernel(passes)

    numel, wire = int(given.bucket_mb * (1 << 18)), WIRE_FORMATS[given.wire]
    share = 4 * numel / given.ranks
    kernels = SimpleNamespace(
        encode=runs(share * (given.ranks + 0.25)),
        sum_encode=runs(share),
        decode=runs(4 * numel * 1.25),
    )
    places = [
        [host * given.ranks + each for each in range(given.ranks)] for host in range(given.hosts)
    ]
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: given.hosts * given.ranks)
    with (
        mock.patch.object(transports, "LANES", lanes),
        mock.patch.object(transports, "Future", mock.MagicMock()),
        mock.patch.object(transports.torch_compat, "new_communicator", communicator),
        mock.patch.object(exchanges, "formats", kernels),
        mock.patch.object(torch, "Stream", side_effect=lambda *_, **__: Stream(device)),
        mock.patch.object(torch.accelerator, "current_stream"),
        mock.patch.object(torch.Tensor, "record_stream"),
    ):
        table = Hosts("name", places, "two levels")
        exchange = exchanges.Exchange(table, group, META, HookStats())
        plan = exchange.plan("buckets", wire, [numel], 4)
        assert plan is not None
        values, fed = torch.empty(numel, device=META), torch.empty(1, device=META)
        feedback = [Feedback(fed, fed)] * 2 if wire.needs_error_feedback else []
        for _ in range(BUCKETS):
            exchange.average(values, wire, plan, given.hosts * given.ranks, feedback)
    return max(stream.free for stream in device.streams) / BUCKETS


def ways(given: argparse.Namespace) -> dict[str, float]:
    """Return a bucket's microseconds by what lanes there are."""
    return {
        "two lanes, communicators of their own": microseconds(given, 2, lambda name: name),
        "two lanes, one communicator a level": microseconds(
            given, 2, lambda name: name.rpartition("/")[0]
        ),
        "one lane": microseconds(given, 1, lambda name: name),
    }


def arguments() -> argparse.ArgumentParser:
    """Return what a cluster is described by."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wire", choices=[*WIRE_FORMATS], default="int8")
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gbit", type=float, default=400.0, help="of all cards of a host")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--inner-gbs", type=float, default=300.0)
    parser.add_argument("--memory-gbs", type=float, default=2000.0)
    parser.add_argument("--launch-us", type=float, default=5.0)
    return parser


def main() -> None:
    """Print a line for each way."""
    found = ways(arguments().parse_args())
    own = next(iter(found.values()))
    for name, each in found.items():
        print(f"{name:<40}{each:7.0f} us a bucket   {each / own:.2f}")


if __name__ == "__main__":
    main()
