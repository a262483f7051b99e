"""What an op costs once it was listed: in a region that lists it, and in every other region.

The least of many short runs, in turn, in one process: other processes only ever add to a run that
is shorter than a time slice. Run with: OMP_NUM_THREADS=1 python -m benchmarks.autocast_ops
"""

import argparse
import math
import timeit
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.common import environment, markdown
from distamp import OpLists, autocast

FULL, WEIGHT, BIAS = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
IMAGE, KERNEL = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
# Inputs that no side has to cast.
OPS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(FULL, WEIGHT, BIAS),
    "mm": lambda: torch.mm(FULL, WEIGHT),
    "conv2d": lambda: F.conv2d(IMAGE, KERNEL),
    "erf": lambda: torch.erf(FULL),
    "softmax": lambda: torch.softmax(FULL, -1),
    "layer_norm": lambda: F.layer_norm(FULL, (4,), BIAS, BIAS),
    "cat": lambda: torch.cat([FULL, FULL]),
}
LISTS = OpLists(fp32=OPS)


def least(regions: dict[str, autocast], call: Callable[[], object], runs: int) -> list[float]:
    """Microseconds of a call in each region."""
    timer = timeit.Timer("call()", globals={"call": call})
    found = dict.fromkeys(regions, math.inf)
    for _ in range(runs):
        for name, region in regions.items():
            with region:
                found[name] = min(found[name], timer.timeit(60) / 60 * 1e6)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs
    print(environment())
    off, on = autocast("cpu", enabled=False), autocast("cpu")
    before = {name: least({"off": off, "on": on}, call, runs) for name, call in OPS.items()}
    listing = {"listing": autocast("cpu", ops=LISTS), "on": on, "off": off}
    rows = []
    for name, call in OPS.items():
        inside, after, outside = least(listing, call, runs)
        times = (before[name][0], inside, before[name][1], after, outside)
        rows.append([name, *(f"{each:.2f}" for each in times)])
    header = ["op, us", "off", "in fp32 by list", "on", "on, once listed", "off, once listed"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
