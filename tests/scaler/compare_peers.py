"""Count the cells in which each scaler is right: ``python -m tests.scaler.compare_peers``.

252 cells: 7 layouts x 3 optimizers x 3 orders x 4 faults on 4 gloo ranks, judged by the invariant
of ``test_invariant.py``. ``--all`` takes every cell of that test for DistGradScaler alone.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import platform
import sys
import time
from pathlib import Path

import torch

from tests.ranks import RankPool
from tests.scaler.cells import cell, cells
from tests.scaler.judge import Judge
from tests.scaler.layouts import LAYOUTS, WORLD

SCALERS = {
    "torch": "torch.amp.GradScaler",
    "sharded": "ShardedGradScaler",
    "distamp": "DistGradScaler",
}
PEER_LAYOUTS = ["DDP", "DDP, experts", "FSDP1", "FSDP2", "FSDP2 x TP", "plain and DTensor", "ZeRO"]
PEER_KINDS = ["SGD for-loop", "AdamW foreach", "Adam fused"]
PEER_ORDERS = ["step", "unscale", "two optimizers"]
PEER_FAULTS = ["none", "inf", "nan", "every rank"]

Cell = tuple[str, str, str, str]


def count(scaler: str, wanted: list[Cell], timeout: float) -> dict[Cell, list[str]]:
    """Each cell's complaints, one cell at a time: a wrong one may leave its ranks apart."""
    found: dict[Cell, list[str]] = {}
    with RankPool(WORLD) as pool:
        judge = Judge(pool, scaler, timeout)
        for number, each in enumerate(wanted):
            found[each] = judge.judge(cell(*each))[0]
            if sys.stderr.isatty():
                print(f"\r{scaler}: {number + 1} of {len(wanted)}", end="", file=sys.stderr)
    return found


def table(results: dict[str, dict[Cell, list[str]]]) -> str:
    """Right cells by layout, and the first words of what was wrong, as Markdown."""
    layouts = list(dict.fromkeys(each[0] for found in results.values() for each in found))
    lines = [
        "| layout | " + " | ".join(SCALERS[scaler] for scaler in results) + " |",
        "|---" * (len(results) + 1) + "|",
    ]
    for layout in [*layouts, "**all**"]:
        row = []
        for found in results.values():
            mine = [w for each, w in found.items() if layout in (each[0], "**all**")]
            row.append(f"{sum(not w for w in mine)} of {len(mine)}")
        lines.append(f"| {layout} | " + " | ".join(row) + " |")
    lines.append("")
    for scaler, found in results.items():
        reasons = collections.Counter(_reason(wrong) for wrong in found.values() if wrong)
        if reasons:
            lines += [f"{SCALERS[scaler]}, wrong cells by what was seen first:", ""]
            lines += [f"- {number} x {reason}" for reason, number in reasons.most_common()]
            lines.append("")
    return "\n".join(lines)


def _reason(wrong: list[str]) -> str:
    first = wrong[0].splitlines()[0]
    if "hung" in first:
        return "ranks hang"
    if "failed on rank" in first:
        return "ranks lose each other"
    if "raised" in first and "Error" in first:
        return "an error on clean or overflowing gradients: " + first.split(" raised ")[1][:70]
    for words in ("should have skipped", "should have stepped", "off the reference", "scale"):
        if words in first:
            return words
    return first[:70]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scalers", nargs="+", choices=list(SCALERS), default=list(SCALERS))
    parser.add_argument("--all", action="store_true", help="every cell, DistGradScaler alone")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds before a cell hung")
    parser.add_argument("--out", type=Path, help="write the Markdown here as well")
    options = parser.parse_args()
    if options.all:
        wanted, scalers = list(cells(LAYOUTS)), ["distamp"]
    else:
        wanted = list(cells(PEER_LAYOUTS, PEER_KINDS, PEER_ORDERS, PEER_FAULTS))
        scalers = options.scalers
    start = time.monotonic()
    results = {scaler: count(scaler, wanted, options.timeout) for scaler in scalers}
    for each, wrong in results.get("distamp", {}).items():
        if wrong:
            print(each, *wrong, sep="\n  ", file=sys.stderr)
    command = "python -m tests.scaler.compare_peers" + (" --all" if options.all else "")
    text = (
        f"# Right cells\n\n{datetime.date.today()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {WORLD} gloo ranks on {platform.machine()}, "
        f"{time.monotonic() - start:.0f} s.\n\n    {command}\n\n"
        f"{len(wanted)} cells of layout x optimizer x order x fault. A cell is right if all ranks "
        "agree on skipped,\nscale and parameters, a skipped step changes nothing and a kept step "
        f"equals the float64 reference.\n\n{table(results)}"
    )
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
