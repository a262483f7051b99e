"""Ranks with time enough to import a trainer on a busy machine, and the table of versions."""

import datetime
import importlib.util
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

PACKAGES = ("accelerate", "bitsandbytes", "lightning", "mmengine", "ray", "schedulefree")
PACKAGES += ("timm", "torchtitan", "transformers", "trl")
PAGE = """# Trainers that were tried

{date}, torch {torch}, Python {python}, 2 gloo ranks on {machine}:
{passed} tests passed, {failed} failed, {skipped} were skipped.

    make test-trainers

Each test runs the package itself, most of them on two ranks of which one overflows.
torchvision is installed without the CUDA build of torch that its wheel asks for, and its
kernels are not used.

| Package | Version |
|---|---|
{rows}
"""


@pytest.fixture(scope="session")
def trainer_ranks() -> Iterator[RankPool]:
    pool = RankPool(2, timeout=280)
    yield pool
    pool.close()


@pytest.fixture
def ranks2(trainer_ranks: RankPool) -> RankPool:
    return trainer_ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trainers-table", help="write the versions that were tried to this file")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    target = config.getoption("--trainers-table", default=None)
    if target is None:
        return
    tried = [package for package in PACKAGES if importlib.util.find_spec(package)]
    outcomes = ("passed", "failed", "skipped")
    page = PAGE.format(
        date=datetime.date.today(),
        torch=version("torch"),
        python=platform.python_version(),
        machine=platform.machine(),
        rows="\n".join(f"| {package} | {version(package)} |" for package in tried),
        **{each: len(terminalreporter.stats.get(each, [])) for each in outcomes},
    )
    Path(target).write_text(page)
