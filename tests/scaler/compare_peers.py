"""Count the cells in which each scaler is right: ``python -m tests.scaler.compare_peers``.

252 cells: 7 layouts x 3 optimizers x 3 orders x 4 faults on 4 gloo ranks, judged by the invariant
of ``test_invariant.py``; ``--scalers`` picks some of the three. The table is Markdown.
"""

import argparse
import collections
import datetime
import sys

import torch

from tests.ranks import RankPool
from tests.scaler.matrix.cells import cell, cells
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import WORLD

SCALERS = {
    "torch": "torch.amp.GradScaler",
    "sharded": "ShardedGradScaler",
    "distamp": "DistGradScaler",
}
CELLS = list(
    cells(
        ["DDP", "DDP, experts", "FSDP1", "FSDP2", "FSDP2 x TP", "plain and DTensor", "ZeRO"],
        ["SGD for-loop", "AdamW foreach", "Adam fused"],
        ["step", "unscale", "two optimizers"],
        ["none", "inf", "nan", "every rank"],
    )
)


def count(scaler: str) -> dict[str, list[str]]:
    """For each layout what was seen first in each cell, one at a time; empty where it is right."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    with RankPool(WORLD) as pool:
        judge = Judge(pool, scaler, timeout=20.0)
        for each in CELLS:
            wrong = judge.judge(cell(*each))
            found[each[0]].append(wrong[0].splitlines()[0][:90] if wrong else "")
            if wrong and scaler == "distamp":
                print(each, *wrong, sep="\n  ", file=sys.stderr)
    found["**all**"] = [wrong for of_layout in found.values() for wrong in of_layout]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scalers", nargs="+", choices=list(SCALERS), default=list(SCALERS))
    results = {scaler: count(scaler) for scaler in parser.parse_args().scalers}
    print(f"{datetime.date.today()}, torch {torch.__version__}, {len(CELLS)} cells\n")
    print("| layout |", " | ".join(SCALERS[scaler] for scaler in results), "|")
    print("|---" * (len(results) + 1) + "|")
    for layout in next(iter(results.values())):
        row = [f"{found[layout].count('')} of {len(found[layout])}" for found in results.values()]
        print(f"| {layout} |", " | ".join(row), "|")
    for scaler, found in results.items():
        seen = collections.Counter(filter(None, found["**all**"]))
        for wrong, number in seen.most_common():
            print(f"\n- {SCALERS[scaler]}, {number} x {wrong}")


if __name__ == "__main__":
    main()
