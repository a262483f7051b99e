"""Test the installed torch and print a row for docs/results/torch_versions.md.

python -m tests.torch_versions tests/scaler tests/guard -n 2 --dist loadgroup
"""

import datetime
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
_RESULTS = re.compile(r"\d+ (?:passed|failed|skipped|errors?)\b")


def describe_build() -> str:
    """Return the build of torch, and the device that it ran on."""
    if not torch.version.cuda:
        return "CPU"
    device = torch.accelerator.current_accelerator()
    return f"CUDA {torch.version.cuda}" + ("" if device else ", on a CPU")


def read_commit() -> str:
    """Return the short hash of the commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def run_tests(arguments: list[str]) -> str:
    """Run tests and return the counts of their summary; print the tests that failed to stderr.

    Args:
        arguments: Tests and options of pytest.
    """
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = run.stdout.rstrip().splitlines() or [""]
    failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    print(*failures, sep="\n", file=sys.stderr)
    summary = lines[-1]
    return ", ".join(_RESULTS.findall(summary)) or f"no summary, exit code {run.returncode}"


def format_row(arguments: list[str], result: str) -> str:
    """Return the row of the table, which names the tests and no options."""
    version = torch.__version__.partition("+")[0]
    python = platform.python_version()
    paths = [path for path in arguments if (ROOT / path.partition("::")[0]).exists()]
    tests = ", ".join(f"`{path}`" for path in paths)
    date = datetime.date.today()
    build = describe_build()
    commit = read_commit()
    tests = tests or "all"
    return f"| {version} | {build}, Python {python} | {tests}, {date} at {commit} | {result} |"


if __name__ == "__main__":
    pytest_arguments = sys.argv[1:]
    print(format_row(pytest_arguments, run_tests(pytest_arguments)))
