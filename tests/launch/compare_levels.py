"""What each level of precision ends at in the launcher, in each of four layouts, beside fp32.

    OMP_NUM_THREADS=1 python -m tests.launch.compare_levels [--steps 150] [--write]

Every run has the same flags but for the level and the strategy. O3 alone cannot have AdamW's eps of
1e-8, which its fp16 state rounds to 0, so it stands beside an fp32 run that has the same eps as O3.
Trained on the source of the Python standard library, on two ranks where there are several.
``--write`` puts the table into docs/levels.md; ``--only ddp fsdp1`` trains a part and prints it.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from distamp.precision import LEVELS
from launch.strategies import STRATEGIES
from tests.launch import pooled
from tests.ranks import RankPool

__all__ = ["FLAGS", "FOUR", "ROWS", "beside", "compare", "table"]

PAGE = Path("docs/levels.md")
BEGIN, END = "<!-- launched: begin -->\n", "<!-- launched: end -->"
FOUR = ("none", "ddp", "fsdp1", "fsdp2")
FLAGS: tuple[object, ...] = (
    *("--layers", 2, "--width", 32, "--heads", 2, "--block", 32, "--batch", 16, "--warmup", 20),
    *("--validation-windows", 256, "--evaluate-every", 1000, "--checkpoint-every", 1000),
)
# A row's level, what else it is given, and the row it stands beside.
ROWS: dict[str, tuple[str, tuple[object, ...], str]] = {
    **{name: (name, (), "O0") for name in LEVELS if name != "O3"},
    "O0, eps 1e-3": ("O0", ("--eps", 1e-3), "O0, eps 1e-3"),
    "O3, eps 1e-3": ("O3", ("--eps", 1e-3), "O0, eps 1e-3"),
}
Losses = dict[tuple[str, str], float]


def compare(steps: int, strategies: Sequence[str] = FOUR) -> Losses:
    """Return the last validation loss of each row and strategy, and print it."""
    losses: Losses = {}
    pool = RankPool(2)
    with tempfile.TemporaryDirectory() as folder:
        for strategy in strategies:
            for row, (level, more, _) in ROWS.items():
                run = (*FLAGS, *more, "--steps", steps, "--opt-level", level)
                run = (*run, "--strategy", strategy)
                where = Path(folder, strategy, row)
                if STRATEGIES[strategy].several:
                    records = pool.run(pooled.train, where, run, timeout=3600.0)[0]
                else:
                    records = pooled.train(where, run)
                losses[row, strategy] = records[-1]["validation_loss"]
                print(f"{strategy}: {row}: {_cell(losses, row, strategy)}", flush=True)
    pool.close()
    return losses


def beside(losses: Losses, row: str, strategy: str) -> float:
    """Return how far a loss is above that of fp32 in the same layout, as a part of it."""
    return losses[row, strategy] / losses[ROWS[row][2], strategy] - 1


def table(losses: Losses) -> str:
    """Return a line for each row of ROWS."""
    lines = [f"| Level | {' | '.join(FOUR)} |\n", "| --- |" + " --- |" * len(FOUR) + "\n"]
    for row in ROWS:
        cells = " | ".join(_cell(losses, row, strategy) for strategy in FOUR)
        lines.append(f"| {row} | {cells} |\n")
    return "".join(lines)


def _cell(losses: Losses, row: str, strategy: str) -> str:
    if ROWS[row][2] == row:
        return f"{losses[row, strategy]:.4f}"
    return f"{losses[row, strategy]:.4f} ({beside(losses, row, strategy):+.2%})"


def main() -> None:
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", choices=FOUR)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.only:
        compare(asked.steps, asked.only)
        return
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
