"""Measure the cost of regions, listed ops and reports.

    OMP_NUM_THREADS=1 python -m benchmarks.autocast [--rounds 40]

First each op is called on tensors that nobody has to cast, with and without a region, before and
while a region lists it; printed is the least of many short runs. Of regions, and of a step
under a report, all sides of a comparison run in turn; printed are medians and their quartiles, of
regions in the thread's own processor time.
"""

import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

from benchmarks.common import command, interleave, median, ratio, table
from distamp import AutocastState, OpLists, autocast, precision_report
from launch.config import Config
from launch.model import GPT

LOW = torch.bfloat16
NEW, TORCHS = "with autocast('cpu', dtype=LOW): pass", "with torch.autocast('cpu', dtype=LOW): pass"
KEPT, TORCHS_KEPT = "with mine: pass", "with theirs: pass"
# What is compared, distamp's statement and its peer.
REGIONS = (
    ("enter and leave, a new object each time", NEW, TORCHS),
    ("enter and leave, one object kept", KEPT, TORCHS_KEPT),
    (
        "a disabled region inside a region",
        "with mine, autocast('cpu', enabled=False): pass",
        "with theirs, torch.autocast('cpu', enabled=False): pass",
    ),
    ("a decorated function", "decorated()", "torchs_decorated()"),
    ("with op lists, beside ours without", "with listed: pass", KEPT),
    ("capture, beside a region of torch's", "AutocastState.capture()", TORCHS),
    ("apply and restore, beside it", "with state.apply(): pass", TORCHS),
)
FULL, BIAS = torch.randn(4, 4), torch.randn(4)
IMAGE, KERNEL = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
OPS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(FULL, FULL, BIAS),
    "mm": lambda: torch.mm(FULL, FULL),
    "conv2d": lambda: F.conv2d(IMAGE, KERNEL),
    "erf": lambda: torch.erf(FULL),
    "softmax": lambda: torch.softmax(FULL, -1),
    "layer_norm": lambda: F.layer_norm(FULL, (4,), BIAS, BIAS),
    "cat": lambda: torch.cat([FULL, FULL]),
}


def ops(rounds: int) -> None:
    """Time ops before and while lists have them."""
    off, on = autocast("cpu", enabled=False), autocast("cpu")
    before = [_least([off, on], call, rounds) for call in OPS.values()]
    everywhere = [autocast("cpu", ops=OpLists(fp32=OPS)), on, off]
    after = [_least(everywhere, call, rounds) for call in OPS.values()]
    rows = ([name, *first, *then] for name, first, then in zip(OPS, before, after, strict=True))
    table(["op, us", "off", "on", "in fp32 by list", "on, while listed", "off, while listed"], rows)


def _least(regions: list[autocast], call: Callable[[], object], rounds: int) -> list[str]:
    """Microseconds of a call in each region."""

    def inside(region: autocast) -> float:
        with region:
            return timeit.timeit(call, number=60) / 60 * 1e6

    runs = [[inside(region) for region in regions] for _ in range(5 * rounds)]
    return [f"{min(times):.2f}" for times in zip(*runs, strict=True)]


def regions(rounds: int) -> None:
    """Compare entering and leaving."""
    names: dict[str, Any] = {**globals(), "mine": autocast("cpu", dtype=LOW)}
    names["theirs"] = torch.autocast("cpu", dtype=LOW)
    names["listed"] = autocast("cpu", dtype=LOW, ops=OpLists(fp32={"softmax"}))
    names["decorated"] = autocast("cpu", dtype=LOW)(int)
    names["torchs_decorated"] = torch.autocast("cpu", dtype=LOW)(int)
    with names["mine"]:
        names["state"] = AutocastState.capture()
    rows = []
    for name, *statements in REGIONS:
        ours, peers = (timeit.Timer(each, globals=names) for each in statements)
        sides = {"ours": lambda: ours.timeit(2000), "peer's": lambda: peers.timeit(2000)}  # noqa: B023
        times = interleave(sides, rounds, clock=time.thread_time)
        micros = [median(each, 1e6 / 2000) for each in times.values()]
        rows.append([name, *micros, ratio(*times.values())])
    table(["", "ours, us", "peer's, us", "ratio [quartiles]"], rows)


def report(rounds: int) -> None:
    """Compare a step under a report, whose kernels hardly count, with one under a bare mode."""
    model = GPT(Config(layers=4, heads=4, d_model=32, seq_len=16), 256)
    tokens = torch.randint(256, (1, 16))

    def step(context: AbstractContextManager[Any]) -> Any:
        with context as found, autocast("cpu", dtype=LOW):
            model(tokens).float().square().mean().backward()
        return found

    kernels = step(precision_report(model)).calls
    steps: dict[str, Callable[[], object]] = {
        "the report": lambda: step(precision_report(model)),
        "a dispatch mode that does nothing": lambda: step(BaseTorchDispatchMode()),
        "no mode": lambda: step(nullcontext()),
    }
    times = interleave(steps, rounds)
    rows = (
        [name, median(each, 1e6 / kernels), ratio(times["the report"], each)]
        for name, each in times.items()
    )
    table(["a step under", "us for each kernel", "the report beside it"], rows)


def main(*, rounds: int = 40) -> None:
    """Compare ops, regions and a report with torch's and with none."""
    for part in (ops, regions, report):
        part(rounds)


if __name__ == "__main__":
    command(main)
