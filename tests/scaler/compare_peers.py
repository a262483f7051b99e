"""Count the cells in which each scaler is right: ``python -m tests.scaler.compare_peers``.

252 cells: 7 layouts x 3 optimizers x 3 orders x 4 faults on 4 gloo ranks, judged by the invariant
of ``test_invariant.py``; ``--scalers`` selects some of the three scalers. The table is Markdown.
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
LAYOUTS = ["DDP", "DDP, experts", "FSDP1", "FSDP2", "FSDP2 x TP", "plain and DTensor", "ZeRO"]
KINDS = ["SGD for-loop", "AdamW foreach", "Adam fused"]
ORDERS = ["step", "unscale", "two optimizers"]
FAULTS = ["none", "inf", "nan", "every rank"]
CELLS = list(cells(LAYOUTS, KINDS, ORDERS, FAULTS))

# The first violation of each cell, by layout. The text is empty if the scaler is right.
Violations = dict[str, list[str]]


def judge_cells(scaler: str) -> Violations:
    """Run all cells, one at a time, under one scaler."""
    first_violations: Violations = {layout: [] for layout in LAYOUTS}
    with RankPool(WORLD) as pool:
        judge = Judge(pool, scaler, timeout=20.0)
        for names in CELLS:
            violations = judge.judge(cell(*names))
            first_line = ""
            if violations:
                first_line = violations[0].splitlines()[0]
            layout = names[0]
            first_violations[layout].append(first_line[:90])
            if violations and scaler == "distamp":
                print(names, *violations, sep="\n  ", file=sys.stderr)
    return first_violations


def print_row(title: str, texts: list[list[str]]) -> None:
    """Print the number of right cells for each scaler."""
    columns = [f"{of_scaler.count('')} of {len(of_scaler)}" for of_scaler in texts]
    print(f"| {title} |", " | ".join(columns), "|")


def flatten(violations: Violations) -> list[str]:
    texts: list[str] = []
    for of_layout in violations.values():
        texts += of_layout
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scalers", nargs="+", choices=list(SCALERS), default=list(SCALERS))
    scalers = parser.parse_args().scalers
    results = {scaler: judge_cells(scaler) for scaler in scalers}
    print(f"{datetime.date.today()}, torch {torch.__version__}, {len(CELLS)} cells\n")
    titles = [SCALERS[scaler] for scaler in results]
    print("| layout |", " | ".join(titles), "|")
    print("|---" * (len(titles) + 1) + "|")
    for layout in LAYOUTS:
        print_row(layout, [violations[layout] for violations in results.values()])
    print_row("**all**", [flatten(violations) for violations in results.values()])
    for scaler, violations in results.items():
        counts = collections.Counter(flatten(violations))
        del counts[""]
        for text, number in counts.most_common():
            print(f"\n- {SCALERS[scaler]}, {number} x {text}")


if __name__ == "__main__":
    main()
