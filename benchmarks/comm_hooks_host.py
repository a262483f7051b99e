"""What a bucket costs in Python on a host whose device and network take no time.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_host --hosts 128 --ranks 8

Streams, communicators and kernels do nothing, and tensors have no memory: what is left is what the
calling thread does for a bucket of 25 MiB.
"""

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.common import environment
from distamp.comm_hooks import WIRE_FORMATS
from distamp.comm_hooks import exchange as exchanges
from distamp.comm_hooks import transport as transports
from distamp.comm_hooks.formats import Feedback
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.stats import HookStats

NUMEL, META = 25 << 18, torch.device("meta")


class Nothing:
    """A stream, communicator, work, future or kernel that takes no time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return self._nothing

    def _nothing(self, *_: Any, **__: Any) -> "Nothing":
        return self

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *_: object) -> None: ...


def microseconds(hosts: int, ranks: int, wire: str, rounds: int) -> float:
    """Return the median time of one bucket."""
    places = [[host * ranks + each for each in range(ranks)] for host in range(hosts)]
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: hosts * ranks)
    with (
        mock.patch.object(transports.torch_compat, "new_communicator", Nothing),
        mock.patch.object(transports.torch_compat, "all_gather", Nothing),
        mock.patch.object(transports, "Future", Nothing),
        mock.patch.object(exchanges, "formats", Nothing()),
        mock.patch.object(torch, "Stream", Nothing),
        mock.patch.object(torch.accelerator, "current_stream", Nothing),
        mock.patch.object(torch.Tensor, "record_stream", Nothing),
    ):
        table = Hosts("name", places, "two levels")
        exchange = exchanges.Exchange(table, group, META, HookStats())
        values, form = torch.empty(NUMEL, device=META), WIRE_FORMATS[wire]
        plan = exchange.plan("buckets", form, [NUMEL], 4)
        assert plan is not None
        fed: Any = ()
        if form.needs_error_feedback:
            fed = (Feedback(torch.empty(1, device=META), torch.empty(3, device=META)),) * 2
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            exchange.plan("buckets", form, [NUMEL], 4)
            exchange.average(values, form, plan, hosts * ranks, fed)
            times.append(time.perf_counter() - start)
        exchange.transport.close()
    return 1e6 * statistics.median(times)


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=500)
    given = parser.parse_args()
    print(environment())
    for wire in WIRE_FORMATS:
        found = microseconds(given.hosts, given.ranks, wire, given.rounds)
        print(f"{given.hosts} hosts of {given.ranks} ranks, {wire}: {found:.0f} us a bucket")


if __name__ == "__main__":
    main()
