"""Ranks on hosts with shaped links: start one on each, time phases, count what was sent."""

import gc
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.netns import HEADER_BYTES, Hosts, Traffic

__all__ = ["Phase", "Rounds", "link_speed", "measured_in_turn", "mib", "run_on_hosts", "slowest"]

_PORT = 29500


@dataclass(frozen=True)
class Phase:
    """What one phase of one step cost one rank.

    Attributes:
        seconds: Of wall time, on this rank.
        payload: Bytes that left its interface, without Ethernet, IP and TCP headers.
        wire: The same with them.
    """

    seconds: float
    payload: int
    wire: int


# By contender: for each round, the phases of its step.
Rounds = dict[str, list[dict[str, Phase]]]
Clock = Callable[[str, Callable[[], Any]], Any]


def measured_in_turn(
    contenders: Mapping[str, Callable[[Clock], object]], rounds: int, warmup: int
) -> Rounds:
    """Run each contender once a round, in an order drawn anew for each, the same on all ranks.

    A contender gets a function that runs one phase of its step between two barriers. The counters
    are read after the second, when the peers have received all of it; the time stops before it.
    """
    order = random.Random(0)
    results: Rounds = {name: [] for name in contenders}
    for number in range(-warmup, rounds):
        for name in order.sample(list(contenders), len(contenders)):
            phases: dict[str, Phase] = {}
            contenders[name](lambda phase, work, into=phases: _phase(into, phase, work))
            if number >= 0:
                results[name].append(phases)
        if dist.get_rank() == 0:
            print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return results


def _phase(phases: dict[str, Phase], name: str, work: Callable[[], Any]) -> Any:
    dist.barrier()
    before, began = Traffic.sent(), time.perf_counter()
    value = work()
    seconds = time.perf_counter() - began
    dist.barrier()
    sent = Traffic.sent() - before
    phases[name] = Phase(seconds, sent.payload, sent.bytes)
    return value


def run_on_hosts(
    module: str,
    hosts: int,
    rate: str | None,
    mtu: int,
    options: Mapping[str, Any],
    timeout: float,
    congestion: str | None = None,
    local: int = 1,
) -> list[Any]:
    """Call ``module.rank(**options)`` on ``local`` ranks of each host; return what each returned.

    What it returns must be writable as JSON; a `Phase` comes back as a dict.
    """
    network = Hosts(hosts, rate, mtu=mtu, congestion=congestion)
    with tempfile.TemporaryDirectory() as folder, network:
        started = []
        for number in range(hosts * local):
            host = network[number // local]
            environment = {
                **os.environ,
                "RANK": str(number),
                "WORLD_SIZE": str(hosts * local),
                "LOCAL_RANK": str(number % local),
                "LOCAL_WORLD_SIZE": str(local),
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it cannot name the peers of a socket
                "MASTER_ADDR": network[0].name,
                "MASTER_PORT": str(_PORT),
            }
            command = [sys.executable, "-m", "benchmarks.shaped", module, folder]
            command.append(json.dumps(dict(options)))
            started.append(host.popen(command, env=environment))
        _wait(started, timeout)
        return [json.loads((Path(folder) / str(n)).read_text()) for n in range(hosts * local)]


def _wait(started: list[subprocess.Popen[Any]], timeout: float) -> None:
    end = time.monotonic() + timeout
    while (codes := {process.poll() for process in started}) != {0}:
        if codes - {0, None}:
            raise SystemExit("a rank failed")
        if time.monotonic() > end:
            raise SystemExit(f"not done after {timeout:g} s")
        time.sleep(0.1)


def link_speed(megabytes: int = 8) -> float:
    """Return how many Mbit/s of payload each rank sends to its neighbour, all at once.

    The best of three: what the links carry when nothing is computed.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    data, received = torch.zeros(2, megabytes << 20, dtype=torch.uint8)
    best = 0.0
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        work = [dist.irecv(received, (rank - 1) % size), dist.isend(data, (rank + 1) % size)]
        for each in work:
            if each is not None:
                each.wait()
        best = max(best, data.numel() * 8e-6 / (time.perf_counter() - began))
    return best


def slowest(ranks: list[Rounds], name: str, phase: str) -> list[float]:
    """Return, for each round, the seconds of the slowest rank in one phase."""
    rounds = zip(*(rank[name] for rank in ranks), strict=True)
    return [max(steps[phase]["seconds"] for steps in each) for each in rounds]  # type: ignore[index]


def mib(size: float) -> str:
    """Show bytes as MiB."""
    return f"{size / 2**20:.2f}"


def headers(mtu: int) -> str:
    """Say how much of a full packet is headers."""
    return f"{HEADER_BYTES / (mtu + 14):.1%}"


def main() -> None:
    """Be one rank: call the module's function within a process group and write what it returned."""
    module, folder, options = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Imported while a group exists, it would keep the group's threads alive for ever.
    importlib.import_module("torch._dynamo")
    # Newer spellings of reduce_scatter_tensor and others, which the oldest torch lacks.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    measure = importlib.import_module(module).rank
    dist.init_process_group("gloo")
    returned = measure(**json.loads(options))
    (Path(folder) / os.environ["RANK"]).write_text(json.dumps(returned, default=asdict))
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
