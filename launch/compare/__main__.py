"""The command line: ``python -m launch.compare RUN RUN``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.compare.plot import draw
from launch.compare.run import read_runs
from launch.compare.table import compare

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare runs; return the exit code: 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.compare",
        description="Read metrics.jsonl of two runs (up to six), draw their losses, loss scales "
        "and skipped steps over each other, and print how they ended.",
    )
    parser.add_argument("runs", nargs="+", metavar="run", help="the folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("compare.png"),
        help="the picture; .png, .svg or .pdf (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    out: Path = options.out
    try:
        runs = read_runs(options.runs)
        print(compare(runs))
    except ValueError as error:
        return _fail(str(error))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, out, " and ".join(run.name for run in runs))
    except (OSError, ModuleNotFoundError, ValueError) as error:
        return _fail(f"cannot write {out}: {error}")
    print(f"wrote {out}")
    return 0


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
