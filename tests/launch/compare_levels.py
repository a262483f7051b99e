"""What each level of precision ends at in the launcher, in each of four layouts, beside fp32.

    OMP_NUM_THREADS=1 python -m tests.launch.compare_levels [--steps 120] [--write]

Every run has the same flags but for the level and the strategy, AdamW's eps among them: 1e-3, as
that of O3, whose state is fp16. Trained on the source of the Python standard library, on two ranks
where there are several. ``--write`` puts the table into docs/levels.md.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import torch

from distamp.precision import LEVELS
from launch.strategies import STRATEGIES
from tests.launch import pooled
from tests.ranks import RankPool

__all__ = ["FLAGS", "FOUR", "compare", "table"]

PAGE = Path("docs/levels.md")
BEGIN, END = "<!-- launched: begin -->\n", "<!-- launched: end -->"
FOUR = ("none", "ddp", "fsdp1", "fsdp2")
FLAGS: tuple[object, ...] = (
    *("--layers", 2, "--width", 32, "--heads", 2, "--block", 32, "--batch", 16, "--eps", 1e-3),
    *("--lr", 1e-2, "--warmup", 20, "--validation-windows", 256, "--evaluate-every", 1000),
    *("--checkpoint-every", 1000),
)
Losses = dict[tuple[str, str], float]


def compare(steps: int, levels: tuple[str, ...] = tuple(LEVELS)) -> Losses:
    """Return the last validation loss of each level and strategy, and print it."""
    losses: Losses = {}
    pool = RankPool(2)
    with tempfile.TemporaryDirectory() as folder:
        for strategy in FOUR:
            for level in levels:
                run = (*FLAGS, "--steps", steps, "--opt-level", level, "--strategy", strategy)
                where = Path(folder, strategy, level)
                if STRATEGIES[strategy].several:
                    rows = pool.run(pooled.train, where, run, timeout=3600.0)[0]
                else:
                    rows = pooled.train(where, run)
                losses[level, strategy] = rows[-1]["validation_loss"]
                beside = losses[level, strategy] / losses[levels[0], strategy] - 1
                skipped = rows[-2]["skipped"]
                print(f"{strategy} {level} {losses[level, strategy]:.4f} {beside:+.2%} {skipped}")
                sys.stdout.flush()
    pool.close()
    return losses


def table(losses: Losses) -> str:
    """Return a row for each level, with what it ends at beside O0 of the same layout."""
    levels = list(dict.fromkeys(level for level, _ in losses))
    lines = [f"| Level | {' | '.join(FOUR)} |\n", "| --- |" + " --- |" * len(FOUR) + "\n"]
    for level in levels:
        cells = []
        for strategy in FOUR:
            loss, fp32 = losses[level, strategy], losses["O0", strategy]
            beside = "" if level == "O0" else f" ({100 * (loss / fp32 - 1):+.2f} %)"
            cells.append(f"{loss:.4f}{beside}")
        lines.append(f"| {level} | {' | '.join(cells)} |\n")
    return "".join(lines)


def main() -> None:
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    flags = " ".join(map(str, FLAGS))
    text = (
        f"{asked.steps} steps with `{flags}`; CPU ({platform.machine()}), torch "
        f"{torch.__version__}, Python {platform.python_version()}. Written by "
        f"`OMP_NUM_THREADS=1 python -m tests.launch.compare_levels --steps {asked.steps} "
        f"--write`.\n\n{table(compare(asked.steps))}"
    )
    print(text)
    if asked.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
