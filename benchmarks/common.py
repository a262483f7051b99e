"""Interleaved timing of several contenders in one run: ratios to a peer, with their spread."""

import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Ratio", "environment", "interleave", "markdown", "ratio", "slowest"]

Timings = dict[str, list[float]]


@dataclass(frozen=True)
class Ratio:
    """How long something takes beside a peer, from ratios taken round by round.

    Args:
        median: Of the ratios; below 1 is faster than the peer.
        low: Their lower quartile.
        high: Their upper quartile.
        rounds: How many ratios there are.
    """

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 3,
    before: Callable[[], object] = lambda: None,
) -> Timings:
    """Time every contender once in each round, so that a busy machine is busy for all of them.

    The order is drawn anew for each round, so nobody always follows the same neighbour, whose long
    run may have used up the scheduler's favour. With several ranks, every rank calls this with the
    same contenders and draws the same orders.

    Args:
        contenders: What to time, by name.
        rounds: Timed rounds.
        warmup: Rounds before those, not timed.
        before: Called before each contender, not timed: restores the data, waits for other ranks.

    Returns:
        Seconds of wall time, by contender, one for each round.
    """
    names = list(contenders)
    timings: Timings = {name: [] for name in names}
    order = random.Random(0)
    for number in range(-warmup, rounds):
        for name in order.sample(names, len(names)):
            before()
            _synchronize()
            start = time.perf_counter()
            contenders[name]()
            _synchronize()
            seconds = time.perf_counter() - start
            if number >= 0:
                timings[name].append(seconds)
    return timings


def ratio(mine: list[float], peers: list[float]) -> Ratio:
    """Return the quartiles of ``mine / peers``, round by round."""
    ratios = [a / b for a, b in zip(mine, peers, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high, len(ratios))


def slowest(ranks: list[Timings]) -> Timings:
    """Return, for each contender and round, the time of the slowest rank."""
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def environment() -> str:
    """Return the device and the versions that a figure depends on, in one line."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        module = torch.get_device_module(accelerator)
        device = f"{torch.accelerator.device_count()} x {module.get_device_name()}"
    else:
        device = f"CPU only ({_cpu_model()}, {torch.get_num_threads()} thread)"
    versions = f"torch {torch.__version__}, python {platform.python_version()}"
    if torch.version.cuda is not None and torch.cuda.is_available():
        versions += f", CUDA {torch.version.cuda}"
        if torch.distributed.is_nccl_available():
            versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return f"{device}; {versions}"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
