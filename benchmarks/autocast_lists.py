"""Measure a plain region after op lists have come and gone, relative to the time before.

    OMP_NUM_THREADS=1 python -m benchmarks.autocast_lists [--rounds 100]

Every op is called in a plain region of torch: before a list has it, while a list has it, and
after the list is gone. An op that is never listed runs in turn with it, and each time is
divided by the time of that op, so that a busy machine slows both. The ratios compare the quotients
with the quotients of the first phase. The column `before` repeats the first phase and shows the
spread of the machine.
"""

import time
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.common import command, interleave, median, ratio, table
from distamp import OpLists, autocast

HALF = torch.randn(4, 4, dtype=torch.bfloat16)
FULL, BIAS = torch.randn(4, 4), torch.randn(4, dtype=torch.bfloat16)
OPS: dict[str, Callable[[], Tensor]] = {
    "softmax": lambda: torch.softmax(HALF, -1),
    "layer_norm": lambda: F.layer_norm(HALF, (4,), BIAS, BIAS),
    "linear": lambda: F.linear(FULL, FULL),
}
CALLS = 500


def time_in_region(call: Callable[[], Tensor]) -> Callable[[], object]:
    """Return a function that runs an op in a plain region of torch."""

    def run() -> None:
        with torch.autocast("cpu"):
            timeit.timeit(call, number=CALLS)

    return run


def measure(run: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Return the times of an op, and their quotients by the times of an op that is never listed."""
    control = time_in_region(lambda: torch.erf(HALF))
    times = interleave({"op": run, "control": control}, rounds, clock=time.thread_time)
    quotients = [op / erf for op, erf in zip(times["op"], times["control"], strict=True)]
    return times["op"], quotients


def main(*, rounds: int = 100) -> None:
    """Compare an op in a plain region before, under and after lists in one process."""
    rows = []
    for name, call in OPS.items():
        run = time_in_region(call)
        times, first = measure(run, rounds)
        _, again = measure(run, rounds)
        lists = OpLists(fp32={name})
        with autocast("cpu", ops=lists):
            call()
        _, listed = measure(run, rounds)
        del lists
        _, gone = measure(run, rounds)
        row = [name, median(times, 1e6 / CALLS)]
        first.sort()
        for phase in (again, listed, gone):
            phase.sort()
            row.append(ratio(phase, first))
        rows.append(row)
    table(["op", "torch's, us", "before", "while a list has it", "after the list is gone"], rows)


if __name__ == "__main__":
    command(main)
