"""Fixtures for the whole suite: pools of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(4).run(function, *args)``: what the function returned on each of 4 gloo ranks.

    The pools live as long as the pytest process; one that fails is replaced at the next call.
    """
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture
def ranks1(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(1)


@pytest.fixture
def ranks2(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(2)


@pytest.fixture
def ranks4(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.fixture
def ranks8(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(8)


@pytest.fixture
def new_ranks() -> Iterator[Callable[..., RankPool]]:
    """``new_ranks(2)``: a pool of this test's own, for ranks that are killed."""
    pools: list[RankPool] = []

    def pool(world_size: int, **options: float) -> RankPool:
        pools.append(RankPool(world_size, **options))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()
