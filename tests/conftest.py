"""Fixtures for the whole suite: pools of real ranks.

The fixtures import the pools, because the process that starts the workers loads this file too, and
would import torch before the first worker starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.quick_cases import is_in_sample

if TYPE_CHECKING:
    from tests.ranks import RankPool
    from tests.simulated.pools import SimPool


# Before pytest deselects the slow cases.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of sampled tests slow that are not in the sample."""
    for item in items:
        if item.get_closest_marker("sampled") is not None and not is_in_sample(item):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test run on that has a longer limit than ``faulthandler_timeout``.

    pytest would end the whole process after that time, and with it the tests that are left.
    """
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker else item.config.getoption("timeout")
    if float(limit or 0) > float(item.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(4).run(function, *args)`` returns the results of a function on 4 gloo ranks.

    The pools live as long as the pytest process; one that fails is replaced at the next call.
    """
    from tests.ranks import RankPool

    with contextlib.ExitStack() as pools:
        yield functools.cache(lambda world_size: pools.enter_context(RankPool(world_size)))


@pytest.fixture
def ranks2(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(2)


@pytest.fixture
def ranks4(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.fixture
def new_ranks() -> Iterator[Callable[..., RankPool]]:
    """``new_ranks(2)`` is a new pool for this test alone, for ranks that are killed."""
    from tests.ranks import RankPool

    with contextlib.ExitStack() as pools:
        yield lambda world_size, **options: pools.enter_context(RankPool(world_size, **options))


@pytest.fixture(scope="session")
def sim_ranks() -> Iterator[Callable[..., SimPool]]:
    """``sim_ranks(2).run(function, *args)`` is the same on a simulated accelerator.

    The test is skipped with another torch, or without a compiler.
    """
    from tests.simulated.build import Unavailable
    from tests.simulated.pools import SimPool

    with contextlib.ExitStack() as pools:

        @functools.cache
        def pool(world_size: int, name: str = "sim") -> SimPool:
            try:
                sim_pool = SimPool(world_size, name=name)
            except Unavailable as reason:
                pytest.skip(str(reason))
            return pools.enter_context(contextlib.closing(sim_pool))

        yield pool


@pytest.fixture
def sim(sim_ranks: Callable[..., SimPool]) -> SimPool:
    """One process with four simulated devices and no process group."""
    return sim_ranks(1)


@pytest.fixture
def sim2(sim_ranks: Callable[..., SimPool]) -> SimPool:
    """Two ranks, each on another simulated device."""
    return sim_ranks(2)


@pytest.fixture
def sim_cuda(sim_ranks: Callable[..., SimPool]) -> SimPool:
    """One process in which "cuda" is the simulated accelerator."""
    return sim_ranks(1, "cuda")
