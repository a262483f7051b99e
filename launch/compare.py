"""Runs over each other: ``python -m launch.compare runs/fp32 runs/fp16 --out both.png``."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.config import read_config
from launch.metrics import Record, draw, read_records
from launch.usage import Parser, exit_code_of, flag, require


def compare(runs: list[Path]) -> Table:
    """Return a table of what runs came to, and of the flags that differ.

    Raises:
        UsageError: One of them is not there, or has no step.
    """
    table = Table("")
    columns = []
    for run in runs:
        rows = read_records(run)
        steps = [row for row in rows if "loss" in row]
        require(steps, f"{run}: it has no step yet")
        columns.append(_outcome(rows, steps))
        table.add_column(run.name, justify="right")
    flags = [{name: str(value) for name, value in asdict(read_config(run)).items()} for run in runs]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    table.add_section()
    for name in flags[0]:
        values = [each[name] for each in flags]
        if len(set(values)) > 1 and name not in ("run_dir", "resume", "overwrite"):
            table.add_row(flag(name), *values)
    return table


def _outcome(rows: list[Record], steps: list[Record]) -> dict[str, str]:
    last = steps[-1]
    held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return {
        "step": str(last["step"]),
        "loss": f"{last['loss']:.4f}",
        "validation loss": f"{held_out[-1]:.4f}" if held_out else "-",
        "loss scale": f"{last['loss_scale']:g}" if "loss_scale" in last else "-",
        "skipped steps": str(last.get("skipped", "-")),
        "tokens/s": f"{statistics.median(row['tokens_per_second'] for row in steps):,.0f}",
    }


def main(args: Sequence[str] | None = None) -> int:
    """Compare the records of runs; return the exit code."""
    parser = Parser("python -m launch.compare", (__doc__ or "").partition(":")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="the folders of two runs or more")
    parser.add_argument("--out", type=Path, help="a picture to draw, such as both.png")

    def program() -> None:
        given = parser.read(args)
        require(len(given.runs) > 1, "it takes the folders of two runs or more")
        Console().print(compare(given.runs))
        if given.out is not None:
            draw(given.runs, given.out)

    return exit_code_of(program)


if __name__ == "__main__":
    sys.exit(main())
