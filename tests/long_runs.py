"""Run the long programs of the project one after another, and write their results to a page.

``python -m tests.long_runs`` runs all of them, which takes hours; ``--only NAME`` runs some. Each
result replaces its row of docs/results/long_runs.md as soon as the program ends, so that a run
which was interrupted keeps the rows that it has.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.torch_versions import read_commit

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "tests" / "long_runs.toml"
PAGE = ROOT / "docs" / "results" / "long_runs.md"
PYTEST = "python -m pytest -q -m slow -n 2 --dist loadgroup --timeout 1500"
HEADER = """\
# Long runs

{dates}, at the commits below, `python -m tests.long_runs`, or `--only NAME` for single runs.

Each row is one run. A `+` after a commit means that files had changes that were not committed.

| Run | Command | Date and commit | Minutes | Result |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class LongRun:
    """A program, and the part of its output that the page quotes.

    Attributes:
        name: The name of the row.
        command: The command, from the root of the repository.
        result: A pattern; the page shows its last match in the output. The last line if empty.
    """

    name: str
    command: str
    result: str = ""


PASSED = r"\d+ (?:passed|failed).*? in [\d.]+s"


def load_runs() -> list[LongRun]:
    """Return the programs of tests/long_runs.toml, in their order."""
    runs: list[LongRun] = []
    for name, entry in tomllib.loads(RUNS.read_text()).items():
        command = entry.get("command")
        pattern = entry.get("result", "")
        if command is None:
            command = f"{PYTEST} {entry['tests']}"
        if " pytest " in command:
            pattern = PASSED
        runs.append(LongRun(name, command, pattern))
    return runs


def describe_commit() -> str:
    """Return the short hash of the commit, with a ``+`` if files were changed since."""
    commit = read_commit()
    changes = ["git", "status", "--porcelain", "distamp", "launch", "tests", "benchmarks"]
    if subprocess.check_output(changes, cwd=ROOT, text=True).strip():
        commit += "+"
    return commit


def find_result(run: LongRun, output: str) -> str:
    """Return the part of the output that the page quotes."""
    lines = output.strip().splitlines()
    if run.result:
        lines = re.findall(run.result, output)
    last_line = lines[-1] if lines else "no result"
    return last_line.strip(" =|").replace("|", "/")


def execute(run: LongRun, log_folder: Path) -> str:
    """Run a program, keep its output, and return its row of the page."""
    commit = describe_commit()
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # The word python of a command is this interpreter.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    completed = subprocess.run(
        run.command,
        shell=True,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    minutes = (time.monotonic() - started) / 60
    log_folder.mkdir(parents=True, exist_ok=True)
    log_file = log_folder / f"{run.name.replace(' ', '_')}.log"
    log_file.write_text(completed.stdout)
    result = find_result(run, completed.stdout)
    if completed.returncode != 0:
        result = f"**exit code {completed.returncode}**: {result}"
    date = datetime.date.today()
    return f"| {run.name} | `{run.command}` | {date}, {commit} | {minutes:.0f} | {result} |"


def read_rows() -> dict[str, str]:
    """Return the rows of the page by the name of the run."""
    rows: dict[str, str] = {}
    if PAGE.exists():
        for line in PAGE.read_text().splitlines():
            name = line.split("|")[1].strip() if line.startswith("| ") else "Run"
            if name != "Run":
                rows[name] = line
    return rows


def write_rows(rows: dict[str, str]) -> None:
    """Write the page, with the rows in the order of the runs."""
    lines = [rows[run.name] for run in load_runs() if run.name in rows]
    dates = sorted(re.findall(r"\d{4}-\d\d-\d\d", " ".join(lines)))
    header = HEADER.format(dates=" to ".join(dict.fromkeys([dates[0], dates[-1]])))
    environment = f"torch {torch.__version__}, {os.cpu_count()} cores."
    PAGE.write_text(header + "\n".join(lines) + f"\n\n{environment}\n")


def main() -> int:
    """Run programs, write the page, and return the number of those that failed."""
    runs = load_runs()
    names = [run.name for run in runs]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "long_runs")
    arguments = parser.parse_args()
    failures = 0
    for run in runs:
        if run.name not in arguments.only:
            continue
        row = execute(run, arguments.logs)
        print(row, flush=True)
        failures += "**exit code" in row
        rows = read_rows()
        rows[run.name] = row
        write_rows(rows)
    return failures


if __name__ == "__main__":
    sys.exit(main())
