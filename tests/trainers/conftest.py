"""Ranks with time enough to import a trainer on a busy machine."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def trainer_ranks() -> Iterator[RankPool]:
    pool = RankPool(2, timeout=280)
    yield pool
    pool.close()


@pytest.fixture
def ranks2(trainer_ranks: RankPool) -> RankPool:
    return trainer_ranks
