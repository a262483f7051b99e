"""Runs over each other: ``python -m launch.compare runs/fp32 runs/fp16 --out both.png``."""

import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.config import read_config
from launch.metrics import Record, draw, read_records
from launch.usage import flag, program, require


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


def main(runs: list[Path], /, out: Path | None = None) -> None:
    """Compare the records of runs.

    Args:
        runs: The folders of two runs or more.
        out: A picture to draw, such as both.png.
    """
    require(len(runs) > 1, "it takes the folders of two runs or more")
    Console().print(compare(runs))
    if out is not None:
        draw(runs, out)


if __name__ == "__main__":
    sys.exit(program("launch.compare", main))
