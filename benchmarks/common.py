"""Options, timing in turns, ratios and tables for the scripts in this folder."""

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

__all__ = [
    "describe_environment",
    "format_median",
    "format_ratio",
    "interleave",
    "print_table",
    "run_command",
    "slowest_times",
]

# Seconds by contender, one for each round.
Timings = dict[str, list[float]]


def run_command(main: Callable[..., object]) -> None:
    """Print the environment and call a script's function with the options of the command line."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> None:
        print(describe_environment(), flush=True)
        main(*args, **kwargs)

    # An option of several values takes all words up to the next option.
    defaults = cyclopts.Parameter(consume_multiple=True, negative="")
    app = cyclopts.App(default_parameter=defaults, version_flags=[])
    app.default(run)
    app()


def _do_nothing() -> None:
    pass


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 3,
    setup: Callable[[], object] = _do_nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time every contender once in each round, so that a busy machine slows all of them.

    Each round has a new random order. Otherwise a contender would always follow the same neighbour,
    which may have used up its time slice. On several ranks, every rank must call this with the same
    contenders, and draws the same orders.

    Args:
        contenders: The functions to time, by name.
        rounds: Number of timed rounds.
        warmup: Number of rounds before them that are not timed.
        setup: Called before each contender and not timed. It restores the data, or waits for other
            ranks.
        clock: Returns seconds. ``time.thread_time`` leaves out other work of the machine.
    """
    timings: Timings = {name: [] for name in contenders}
    order = random.Random(0)
    for number in range(-warmup, rounds):
        for name in order.sample(list(contenders), len(contenders)):
            setup()
            _synchronize()
            start = clock()
            contenders[name]()
            _synchronize()
            seconds = clock() - start
            if number >= 0:
                timings[name].append(seconds)
    return timings


def format_ratio(times: Sequence[float], peer_times: Sequence[float]) -> str:
    """Return the median of ``times / peer_times``, round by round, with its quartiles."""
    ratios = [seconds / peer for seconds, peer in zip(times, peer_times, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def slowest_times(ranks: Sequence[Timings]) -> Timings:
    """Return the time of the slowest rank for each contender and round."""
    slowest: Timings = {}
    for name in ranks[0]:
        rounds = zip(*(rank[name] for rank in ranks), strict=True)
        slowest[name] = [max(times) for times in rounds]
    return slowest


def format_median(times: Sequence[float], factor: float = 1e3) -> str:
    """Return the median of seconds with three digits, in milliseconds or times another factor."""
    median = factor * statistics.median(times)
    rounded = float(f"{median:.3g}")
    return f"{rounded:g}"


def print_table(header: Sequence[str], rows: Iterable[Iterable[object]], title: str = "") -> None:
    """Print a Markdown table, each row as soon as it is measured."""
    print(f"\n{title}\n" if title else "")
    rule = ["---"] * len(header)
    for row in itertools.chain([header, rule], rows):
        cells = " | ".join(str(cell) for cell in row)
        print(f"| {cells} |", flush=True)


def describe_environment() -> str:
    """Return the device and the versions that a figure depends on, in one line."""
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        device = f"{torch.accelerator.device_count()} x {module.get_device_name()}"
    else:
        cpuinfo = Path("/proc/cpuinfo").read_text()
        names = re.findall(r"^model name\s*: (.*)", cpuinfo, re.MULTILINE)
        cpu = f"{len(names)} x {names[0]}" if names else platform.machine()
        device = f"CPU only ({cpu}, {torch.get_num_threads()} thread)"
    return f"{device}; torch {torch.__version__}, python {platform.python_version()}"


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
