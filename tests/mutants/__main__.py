"""Plant each fault in a copy of the tree, run its test there, and print whether the test fails.

``python -m tests.mutants [--room ROOM] [--only NAME] [--table FILE]``. The exit status is 1 if a
test passes in spite of its fault, or fails without it.
"""

import argparse
import datetime
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.mutants.planted import ROOT, Fault, load_faults
from tests.torch_versions import read_commit

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Result(NamedTuple):
    """The outcome of one planted fault."""

    fault: Fault
    found: bool
    seconds: float
    output: str


def copy_tree(folder: Path) -> Path:
    """Copy the present tree, with the simulated accelerator that was built."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "dist")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True))


def run_tests(tree: Path, tests: Iterable[str], *options: str) -> tuple[list[str], str]:
    """Run tests in a tree, with options of pytest.

    Returns:
        The tests that failed, and the output of a run that failed in another way.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    environment = dict(os.environ, PYTHONPATH=str(tree), COLUMNS="400", OMP_NUM_THREADS="1")
    # Each test has a time limit, so a fault that hangs is found, too.
    run = subprocess.run(
        [*command, *options, *tests], cwd=tree, env=environment, capture_output=True, text=True
    )
    failed = _FAILED.findall(run.stdout) if run.returncode in (1, 2) else []
    if failed or run.returncode == 0:
        return failed, ""
    return [], run.stdout[-2000:] + run.stderr[-2000:]


def plant_and_test(fault: Fault, tree: Path) -> Result:
    """Plant a fault in a tree, run its test, and restore the tree."""
    path = tree / fault.file
    source = path.read_text()
    cache = Path(importlib.util.cache_from_source(str(path)))
    started = time.monotonic()
    try:
        path.write_text(fault.plant(source))
        cache.unlink(missing_ok=True)
        failed, output = run_tests(tree, [fault.found_by], "-x")
    finally:
        path.write_text(source)
        cache.unlink(missing_ok=True)
    return Result(fault, bool(failed), time.monotonic() - started, output)


def format_rows(results: list[Result], missed: list[Result]) -> list[str]:
    """Return a row for each room, as docs/results/planted_faults.md has them.

    Args:
        results: The outcomes.
        missed: The outcomes of faults that their test does not find.
    """
    planted = Counter(result.fault.room for result in results)
    missing = Counter(result.fault.room for result in missed)
    date = datetime.date.today().isoformat()
    commit = read_commit()
    rows = []
    for room, count in planted.items():
        rows.append(f"| {room} | {count} | {count - missing[room]} | {date} | {commit} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--room", action="append", help="plant the faults of this room")
    parser.add_argument("--only", action="append", help="plant the fault of this name")
    parser.add_argument("--table", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    faults = load_faults()
    if options.room:
        faults = [fault for fault in faults if fault.room in options.room]
    if options.only:
        faults = [fault for fault in faults if fault.name in options.only]
    results: list[Result] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        for fault in faults:
            result = plant_and_test(fault, tree)
            results.append(result)
            outcome = "found" if result.found else f"NOT FOUND {result.output}"
            print(f"{fault.room}: {fault.name}: {result.seconds:.0f} s: {outcome}", flush=True)
        tests = sorted({result.fault.found_by for result in results if result.found})
        failing, error_output = run_tests(tree, tests) if tests else ([], "")
    missed = [result for result in results if not result.found or result.fault.found_by in failing]
    if error_output:
        missed = results
    lines = format_rows(results, missed)
    for test in failing:
        lines.append(f"{test} fails without a fault, too.")
    if error_output:
        lines.append(f"Without a fault, the run of the tests failed: {error_output}")
    seconds = time.monotonic() - started
    num_found = len(results) - len(missed)
    lines.append(f"\n{num_found} of {len(results)} faults found, {seconds:.0f} s.")
    print("\n".join(lines))
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
