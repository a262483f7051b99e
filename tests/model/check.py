"""Check the models of the protocol with SPIN, and that each planted fault is found."""

import csv
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FAULTS", "HOLDS", "MISSING", "RUNS", "Outcome", "Run", "check", "run_tool"]

FOLDER = Path(__file__).parent
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
# More than any run takes on a busy machine.
TIMEOUT_S = 580.0
RUNS_FILE = FOLDER / "runs.csv"


@dataclass(frozen=True)
class Run:
    """One run of the model checker.

    Args:
        model: ``scaler``, ``guard`` or ``exchange``.
        defines: Macros of the model, without ``-D``.
        violation: A part of SPIN's message about a planted fault; empty if all must hold.
        is_quick: Whether `make test` has it.
        is_large: Whether it takes more than a million states; only with ``--large``.
    """

    model: str
    defines: str
    violation: str = ""
    is_quick: bool = False
    is_large: bool = False

    @property
    def name(self) -> str:
        """The name of the run in the table."""
        return f"{self.model} {self.defines}"


@dataclass(frozen=True)
class Outcome:
    """The result of the model checker.

    Args:
        violation: SPIN's message if an assertion or a rank failed, else empty.
        states: The number of states.
        depth: The length of the longest run of the model.
        seconds: The time of the search.
    """

    violation: str
    states: int
    depth: int
    seconds: float


def load_runs() -> list[Run]:
    """Return the runs in runs.csv."""
    runs: list[Run] = []
    with RUNS_FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            is_quick, is_large = row["when"] == "quick", row["when"] == "large"
            run = Run(row["model"], row["defines"], row["violation"], is_quick, is_large)
            runs.append(run)
    return runs


RUNS = load_runs()
HOLDS = [run for run in RUNS if not run.violation]
FAULTS = [run for run in RUNS if run.violation]


def check(run: Run) -> Outcome:
    """Run the model checker over all states.

    Raises:
        RuntimeError: The search did not end.
    """
    defines = [f"-D{define}" for define in run.defines.split()]
    with tempfile.TemporaryDirectory() as folder:
        model = FOLDER / f"{run.model}.pml"
        run_tool(["spin", "-a", *defines, str(model)], folder)
        options = ["-DSAFETY", "-DCOLLAPSE", "-DNOFAIR", "-DMEMLIM=6000"]
        # Optimization takes minutes, which is longer than it saves.
        run_tool(["gcc", "-O0", "-w", *options, "-o", "pan", "pan.c"], folder)
        start = time.perf_counter()
        output = run_tool(["./pan", "-m1000000"], folder)
        seconds = time.perf_counter() - start
    violation = re.search(r"pan:\d+: (.*) \(at depth", output)
    if violation is None:
        is_complete = "Search not completed" not in output and "max search depth" not in output
        if "errors: 0" not in output or not is_complete:
            raise RuntimeError(f"{run.name}: {output}")
    return Outcome(
        "" if violation is None else violation[1],
        _number(r"(\d+) states, stored", output),
        _number(r"depth reached (\d+)", output),
        seconds,
    )


def _number(pattern: str, output: str) -> int:
    """Return the number that a pattern finds in SPIN's output; 0 without one."""
    match = re.search(pattern, output)
    return 0 if match is None else int(match[1])


def run_tool(command: list[str], folder: str) -> str:
    """Return the output of a command.

    Raises:
        RuntimeError: The command failed.
    """
    process = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    output = process.stdout + process.stderr
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {output}")
    return output
