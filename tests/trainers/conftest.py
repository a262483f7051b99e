"""Ranks with time enough to import a trainer on a busy machine."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    with RankPool(2, timeout=280) as pool:
        yield lambda world_size: pool
