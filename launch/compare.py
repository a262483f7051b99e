"""Runs over each other: ``python -m launch.compare runs/fp32 runs/fp16 --out both.png``."""

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.config import read_config
from launch.metrics import draw_figure, read_records
from launch.program import flag, make_main, require


def _outcome(run: Path) -> dict[str, str]:
    rows = read_records(run)
    steps = [row for row in rows if "loss" in row]
    require(steps, f"{run}: it has no step yet")
    last, held_out = steps[-1], [row["validation_loss"] for row in rows if "validation_loss" in row]
    return {
        "step": str(last["step"]),
        "loss": f"{last['loss']:.4f}",
        "validation loss": f"{held_out[-1]:.4f}" if held_out else "-",
        "loss scale": f"{last['loss_scale']:g}" if "loss_scale" in last else "-",
        "skipped steps": str(last["skipped"]),
        "tokens/s": f"{statistics.median(row['tokens_per_second'] for row in steps):,.0f}",
    }


def compare_runs(first: Path, second: Path, /, *others: Path, out: Path | None = None) -> None:
    """Print what runs came to, and which of their flags differ.

    Args:
        first: The folder of a run.
        second: Of another one.
        others: Of more.
        out: A picture to draw, such as both.png.
    """
    runs = [first, second, *others]
    table = Table("", *(run.name for run in runs))
    outcomes = [_outcome(run) for run in runs]
    for name in outcomes[0]:
        table.add_row(name, *(outcome[name] for outcome in outcomes))
    table.add_section()
    left_out = {"run_dir", "resume", "overwrite"}
    flags = [read_config(run).model_dump(exclude=left_out) for run in runs]
    for name in flags[0]:
        values = [str(each[name]) for each in flags]
        if len(set(values)) > 1:
            table.add_row(flag(name), *values)
    Console().print(table)
    if out is not None:
        draw_figure(runs).savefig(out)


main = make_main("python -m launch.compare", compare_runs)

if __name__ == "__main__":
    raise SystemExit(main())
