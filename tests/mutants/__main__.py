"""Plant each fault in a copy of the tree, and say which test finds it.

``python -m tests.mutants [--room R] [--only NAME] [--quick] [--table FILE]``; the exit
status is 1 where a fault is not found.
"""

import argparse
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

from tests.mutants.planted import ROOT, Fault, planted, record, recorded

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Result(NamedTuple):
    fault: Fault
    found_by: str | None
    seconds: float
    why: str = ""


def copied(folder: Path) -> Path:
    """The tree as it is now, with the simulated accelerator that was built."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "dist")
    return Path(shutil.copytree(ROOT, folder, ignore=left_out, dirs_exist_ok=True))


def pytest(tree: Path, tests: Iterable[str], *options: str) -> tuple[list[str], str]:
    """The tests that fail in a tree, and why there is nothing to say where none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "400", "OMP_NUM_THREADS": "1"}
    # A test that hangs has a limit of its own, which finds the fault.
    run = subprocess.run(
        [*command, *options, *tests], cwd=tree, env=environment, capture_output=True, text=True
    )
    failed = _FAILED.findall(run.stdout) if run.returncode in (1, 2) else []
    return failed, "" if failed or run.returncode == 0 else run.stdout[-2000:] + run.stderr[-2000:]


def find(fault: Fault, tree: Path, tries: list[list[str]]) -> Result:
    """Plant one fault in a tree, run tests until one fails, and put the tree right again."""
    path, started, why = tree / fault.file, time.monotonic(), ""
    before = path.read_text()
    cached = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(fault.mutated(before))
        cached.unlink(missing_ok=True)
        for tests in tries:
            failed, why = pytest(tree, tests, "-x") if tests else ([], "")
            if failed:
                return Result(fault, failed[0], time.monotonic() - started)
        return Result(fault, None, time.monotonic() - started, why)
    finally:
        path.write_text(before)
        cached.unlink(missing_ok=True)


def tries_of(fault: Fault, known: dict[str, str]) -> list[list[str]]:
    """The test that found it last, then its file, then the room by how much each file has found."""
    last = known.get(fault.name, "")
    file = last.partition("::")[0]
    there = file and (ROOT / file).exists()
    counted = Counter(test.partition("::")[0] for test in known.values())
    files = {str(path.relative_to(ROOT)) for name in fault.tests for path in ROOT.glob(name)}
    rest = sorted(files - {file}, key=lambda name: (-counted[name], name))
    first = [[last], [file]] if last != file else [[file]]
    return [*(first if there else []), rest]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--room", action="append", help="only this room's faults")
    parser.add_argument("--only", action="append", help="only this fault")
    parser.add_argument(
        "--quick", action="store_true", help="only the test that found it last, and its file"
    )
    parser.add_argument("--table", type=Path, help="write the table to this file")
    given = parser.parse_args()
    known, started = recorded(), time.monotonic()
    faults = [
        fault
        for fault in planted()
        if (not given.room or fault.room in given.room)
        and (not given.only or fault.name in given.only)
    ]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for fault in faults:
            tries = tries_of(fault, known)
            results.append(find(fault, tree, tries[:-1] if given.quick else tries))
            print(f"{fault.room}: {fault.name}: {results[-1].seconds:.0f} s: ", end="")
            print(results[-1].found_by or f"NOT FOUND {results[-1].why}", flush=True)
        found = {each.fault.name: each.found_by for each in results if each.found_by}
        # What fails without a fault too has found nothing.
        failing = pytest(tree, sorted({*found.values()}))[0] if found and not given.quick else []
    record({name: test for name, test in found.items() if test not in failing})
    lines = table(sorted(results, key=lambda it: (it.fault.room, it.fault.name)), failing)
    missed = sum(line.count("**") > 0 for line in lines)
    seconds = time.monotonic() - started
    lines.append(f"\n{len(faults)} faults, {missed} not found, {seconds:.0f} s.")
    print("\n".join(lines))
    if given.table:
        given.table.write_text("\n".join(lines) + "\n")
    return int(missed > 0)


def table(results: list[Result], failing: list[str]) -> list[str]:
    """Each fault and the test that found it; what a user would lose stands in the room's file."""
    lines = ["| room | fault | found by |", "|---|---|---|"]
    for fault, test, *_ in results:
        by = f"`{test.removeprefix('tests/')}`" if test else "**NOT FOUND**"
        by = f"**fails without it too:** {by}" if test in failing else by
        by = by.replace("|", "\\|")
        lines.append(f"| {fault.room} | `{fault.name}` | {by} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
