"""Ranks with time enough to import a trainer on a busy machine, and the table of versions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.trainers.table import markdown


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


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    target = config.getoption("--trainers-table", default=None)
    if target is None:
        return
    outcomes = {
        outcome: [report.nodeid for report in terminalreporter.stats.get(outcome, [])]
        for outcome in ("passed", "failed", "skipped")
    }
    started = terminalreporter._session_start
    seconds = time.time() - getattr(started, "time", started)
    Path(target).write_text(markdown(outcomes, seconds))
