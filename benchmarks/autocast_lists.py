"""Measure regions with op lists, and plain regions while lists exist and after they are gone.

    OMP_NUM_THREADS=1 python -m benchmarks.autocast_lists [--rounds 100]

Every op is called in a plain region of torch before a list has it. Then it is called in a region
with lists of another op, in a region with lists that have the op, in a plain region while these
lists exist, and in a plain region after they are gone. An op that is never listed runs in turn with
it in a plain region, and each time is divided by the time of that op, so that a busy machine slows
both. The ratios compare the quotients with the quotients of the first phase. The column
`plain, again` repeats the first phase and shows the spread of the machine.
"""

import time
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.common import format_median, format_ratio, interleave, print_table, run_command
from distamp import OpLists, autocast

HALF = torch.randn(4, 4, dtype=torch.bfloat16)
FULL, BIAS = torch.randn(4, 4), torch.randn(4, dtype=torch.bfloat16)
OPS: dict[str, Callable[[], Tensor]] = {
    "softmax": lambda: torch.softmax(HALF, -1),
    "layer_norm": lambda: F.layer_norm(HALF, (4,), BIAS, BIAS),
    "linear": lambda: F.linear(FULL, FULL),
}
CALLS = 500
MICROSECONDS = 1e6 / CALLS


Times = tuple[list[float], list[float]]


def measure(region: torch.autocast, call: Callable[[], Tensor], rounds: int) -> Times:
    """Return the times of an op in a region, and their quotients by the times of a control.

    The control is an op in a plain region that no list has.
    """

    def run() -> None:
        with region:
            timeit.timeit(call, number=CALLS)

    def run_control() -> None:
        with torch.autocast("cpu"):
            timeit.timeit(lambda: torch.erf(HALF), number=CALLS)

    times = interleave({"op": run, "control": run_control}, rounds, clock=time.thread_time)
    quotients = []
    for op_time, control_time in zip(times["op"], times["control"], strict=True):
        quotients.append(op_time / control_time)
    quotients.sort()
    return times["op"], quotients


def measure_phases(name: str, call: Callable[[], Tensor], rounds: int) -> list[str]:
    """Return the row of an op. Its lists are freed in this function."""
    plain = torch.autocast("cpu")
    times, first = measure(plain, call, rounds)
    row = [name, format_median(times, MICROSECONDS)]
    _, again = measure(plain, call, rounds)
    row.append(format_ratio(again, first))
    other_lists = OpLists(fp32={"tanh"})
    region = autocast("cpu", ops=other_lists)
    _, unlisted = measure(region, call, rounds)
    row.append(format_ratio(unlisted, first))
    lists = OpLists(fp32={name})
    region = autocast("cpu", ops=lists)
    _, listed = measure(region, call, rounds)
    row.append(format_ratio(listed, first))
    _, meanwhile = measure(plain, call, rounds)
    row.append(format_ratio(meanwhile, first))
    del lists, region
    _, gone = measure(plain, call, rounds)
    row.append(format_ratio(gone, first))
    return row


def main(*, rounds: int = 100) -> None:
    """Compare an op in a plain region before, under and after lists in one process."""
    rows = []
    for name, call in OPS.items():
        row = measure_phases(name, call, rounds)
        rows.append(row)
    columns = ["op", "plain region, us", "plain, again", "lists of another op", "lists with the op"]
    columns += ["plain, while lists have it", "plain, after the lists"]
    print_table(columns, rows)


if __name__ == "__main__":
    run_command(main)
