"""The cost of autocast regions, of ops that op lists name, and of precision reports.

    OMP_NUM_THREADS=1 python -m benchmarks.autocast [--rounds 40]

The first table times each op on tensors that need no cast, with and without a region, before a
region lists the op and while one does. Its values are the least of many short runs. In the tables
of regions and of a step under a report, all sides of a comparison run in turn. Their values are
medians and quartiles. The time of regions is the processor time of the thread.
"""

import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

from benchmarks.common import format_median, format_ratio, interleave, print_table, run_command
from distamp import AutocastState, OpLists, autocast, precision_report
from launch.config import Config
from launch.model import GPT

LOW = torch.bfloat16
NEW_DISTAMP = "with autocast('cpu', dtype=LOW): pass"
NEW_TORCH = "with torch.autocast('cpu', dtype=LOW): pass"
REUSED_DISTAMP = "with distamp_region: pass"
REUSED_TORCH = "with torch_region: pass"
# The names of the comparisons, with a statement of distamp and the statement of its peer.
REGIONS = (
    ("enter and leave, a new object each time", NEW_DISTAMP, NEW_TORCH),
    ("enter and leave, one object kept", REUSED_DISTAMP, REUSED_TORCH),
    (
        "a disabled region inside a region",
        "with distamp_region, autocast('cpu', enabled=False): pass",
        "with torch_region, torch.autocast('cpu', enabled=False): pass",
    ),
    ("a decorated function", "distamp_function()", "torch_function()"),
    ("with op lists, compared with none", "with listing_region: pass", REUSED_DISTAMP),
    ("capture, compared with a region of torch", "AutocastState.capture()", NEW_TORCH),
    ("apply and restore, compared with it", "with state.apply(): pass", NEW_TORCH),
)
# Calls in each timed run of a statement.
STATEMENT_CALLS = 2000
OP_CALLS = 60
FULL = torch.randn(4, 4)
BIAS = torch.randn(4)
IMAGE = torch.randn(1, 1, 4, 4)
KERNEL = torch.randn(1, 1, 2, 2)
OPS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(FULL, FULL, BIAS),
    "mm": lambda: torch.mm(FULL, FULL),
    "conv2d": lambda: F.conv2d(IMAGE, KERNEL),
    "erf": lambda: torch.erf(FULL),
    "softmax": lambda: torch.softmax(FULL, -1),
    "layer_norm": lambda: F.layer_norm(FULL, (4,), BIAS, BIAS),
    "cat": lambda: torch.cat([FULL, FULL]),
}


def time_ops(rounds: int) -> None:
    """Time ops before a region lists them, and while one does."""
    off = autocast("cpu", enabled=False)
    on = autocast("cpu")
    rows = []
    for name, call in OPS.items():
        times = least_times([off, on], call, rounds)
        rows.append([name, *times])
    listing = autocast("cpu", ops=OpLists(fp32=OPS))
    for row, call in zip(rows, OPS.values(), strict=True):
        row += least_times([listing, on, off], call, rounds)
    header = ["op, us", "off", "on", "in fp32 by list", "on, while listed", "off, while listed"]
    print_table(header, rows)


def least_times(regions: Sequence[autocast], call: Callable[[], object], rounds: int) -> list[str]:
    """Return the microseconds of a call in each region, as text."""
    times: list[list[float]] = [[] for _ in regions]
    for _ in range(5 * rounds):
        for region, region_times in zip(regions, times, strict=True):
            with region:
                seconds = timeit.timeit(call, number=OP_CALLS)
            microseconds = seconds / OP_CALLS * 1e6
            region_times.append(microseconds)
    return [f"{min(region_times):.2f}" for region_times in times]


def time_regions(rounds: int) -> None:
    """Compare the time to enter and leave regions."""
    distamp_region = autocast("cpu", dtype=LOW)
    torch_region = torch.autocast("cpu", dtype=LOW)
    op_lists = OpLists(fp32={"softmax"})
    with distamp_region:
        state = AutocastState.capture()
    # The names that the statements use.
    names: dict[str, Any] = dict(globals())
    names["distamp_region"] = distamp_region
    names["torch_region"] = torch_region
    names["listing_region"] = autocast("cpu", dtype=LOW, ops=op_lists)
    names["distamp_function"] = autocast("cpu", dtype=LOW)(int)
    names["torch_function"] = torch.autocast("cpu", dtype=LOW)(int)
    names["state"] = state
    rows = []
    for name, statement, peer_statement in REGIONS:
        contenders = {
            "distamp": make_run(statement, names),
            "peer": make_run(peer_statement, names),
        }
        times = interleave(contenders, rounds, clock=time.thread_time)
        microseconds = 1e6 / STATEMENT_CALLS
        distamp_median = format_median(times["distamp"], microseconds)
        peer_median = format_median(times["peer"], microseconds)
        ratio = format_ratio(times["distamp"], times["peer"])
        rows.append([name, distamp_median, peer_median, ratio])
    print_table(["", "distamp, us", "peer, us", "ratio [quartiles]"], rows)


def make_run(statement: str, names: dict[str, Any]) -> Callable[[], object]:
    """Return a function that runs a statement many times."""
    timer = timeit.Timer(statement, globals=names)
    return lambda: timer.timeit(STATEMENT_CALLS)


def time_report(rounds: int) -> None:
    """Compare a step under a report with steps under other modes.

    The model is so small that the kernels take little of the time.
    """
    model = GPT(Config(layers=4, heads=4, d_model=32, seq_len=16), 256)
    tokens = torch.randint(256, (1, 16))

    def step(context: AbstractContextManager[Any]) -> Any:
        with context as entered, autocast("cpu", dtype=LOW):
            logits = model(tokens)
            loss = logits.float().square().mean()
            loss.backward()
        return entered

    num_kernels = step(precision_report(model)).calls
    steps: dict[str, Callable[[], object]] = {
        "the report": lambda: step(precision_report(model)),
        "a dispatch mode that does nothing": lambda: step(BaseTorchDispatchMode()),
        "no mode": lambda: step(nullcontext()),
    }
    times = interleave(steps, rounds)
    rows = []
    for name, seconds in times.items():
        median = format_median(seconds, 1e6 / num_kernels)
        ratio = format_ratio(times["the report"], seconds)
        rows.append([name, median, ratio])
    print_table(["a step under", "us for each kernel", "ratio of the report to it"], rows)


def main(*, rounds: int = 40) -> None:
    """Compare ops, regions and a report with torch's regions and with no region."""
    time_ops(rounds)
    time_regions(rounds)
    time_report(rounds)


if __name__ == "__main__":
    run_command(main)
