"""What every script here does: options, contenders timed in turn, ratios to a peer, tables."""

import functools
import itertools
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cyclopts
import torch

__all__ = ["command", "environment", "interleave", "median", "ratio", "slowest", "table"]

# Seconds by contender, one for each round.
Timings = dict[str, list[float]]


def command(main: Callable[..., object]) -> None:
    """Print the environment and call a script's function, whose arguments are the options."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> None:
        print(environment(), flush=True)
        main(*args, **kwargs)

    several = cyclopts.Parameter(consume_multiple=True, negative="")
    app = cyclopts.App(default_parameter=several, version_flags=[])
    app.default(run)
    app()


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 3,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
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
        clock: Seconds; ``time.thread_time`` leaves out what else the machine does.
    """
    timings: Timings = {name: [] for name in contenders}
    order = random.Random(0)
    for number in range(-warmup, rounds):
        for name in order.sample(list(contenders), len(contenders)):
            before()
            _synchronize()
            start = clock()
            contenders[name]()
            _synchronize()
            seconds = clock() - start
            if number >= 0:
                timings[name].append(seconds)
    return timings


def ratio(mine: list[float], peers: list[float]) -> str:
    """Return the median of ``mine / peers``, round by round, and its quartiles."""
    ratios = [a / b for a, b in zip(mine, peers, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def slowest(ranks: list[Timings]) -> Timings:
    """Return, for each contender and round, the time of the slowest rank."""
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def median(times: Sequence[float], factor: float = 1e3) -> str:
    """Return the median of seconds in three digits: in milliseconds, or in others by a factor."""
    return f"{float(f'{factor * statistics.median(times):.3g}'):g}"


def table(header: Sequence[str], rows: Iterable[Iterable[object]], title: str = "") -> None:
    """Print a Markdown table, each row as soon as it is there."""
    print(f"\n{title}\n" if title else "")
    for cells in itertools.chain([header, ["---"] * len(header)], rows):
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def environment() -> str:
    """Return the device and the versions that a figure depends on, in one line."""
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        device = f"{torch.accelerator.device_count()} x {module.get_device_name()}"
    else:
        names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = f"{len(names)} x {names[0]}" if names else platform.machine()
        device = f"CPU only ({cpu}, {torch.get_num_threads()} thread)"
    return f"{device}; torch {torch.__version__}, python {platform.python_version()}"


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
