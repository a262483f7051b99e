"""Compare runs in a table and a picture: ``python -m launch.compare runs/fp32 runs/fp16``."""

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.config import read_config
from launch.metrics import draw_figure, read_records
from launch.program import flag, make_main, require

# Flags that differ between any two runs.
_FLAGS_OF_EACH_RUN = {"run_dir", "resume", "overwrite"}


def _summarize(run: Path) -> dict[str, str]:
    """Return the results of a run as text, by their names in the table."""
    steps = []
    evaluations = []
    for record in read_records(run):
        if "loss" in record:
            steps.append(record)
        if "validation_loss" in record:
            evaluations.append(record)
    require(steps, f"{run}: it has no step yet")
    last = steps[-1]
    speed = statistics.median(record["tokens_per_second"] for record in steps)
    validation_loss = "-"
    if evaluations:
        validation_loss = f"{evaluations[-1]['validation_loss']:.4f}"
    return {
        "step": str(last["step"]),
        "loss": f"{last['loss']:.4f}",
        "validation loss": validation_loss,
        "loss scale": f"{last['loss_scale']:g}" if "loss_scale" in last else "-",
        "skipped steps": str(last["skipped"]),
        "tokens/s": f"{speed:,.0f}",
    }


def compare_runs(first: Path, second: Path, /, *more_runs: Path, out: Path | None = None) -> None:
    """Print the results of runs and the flags that differ between them.

    Args:
        first: Folder of a run.
        second: Folder of another run.
        more_runs: Folders of more runs.
        out: File for a picture of all runs, such as both.png.
    """
    runs = [first, second, *more_runs]
    table = Table("", *(run.name for run in runs))
    summaries = [_summarize(run) for run in runs]
    for name in summaries[0]:
        table.add_row(name, *(summary[name] for summary in summaries))
    table.add_section()
    flags = [read_config(run).model_dump(exclude=_FLAGS_OF_EACH_RUN) for run in runs]
    for name in flags[0]:
        values = [str(flags_of_run[name]) for flags_of_run in flags]
        if len(set(values)) > 1:
            table.add_row(flag(name), *values)
    Console().print(table)
    if out is not None:
        draw_figure(runs).savefig(out)


main = make_main("python -m launch.compare", compare_runs)

if __name__ == "__main__":
    raise SystemExit(main())
