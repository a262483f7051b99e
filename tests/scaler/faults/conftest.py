"""Pools for tests in which ranks may wait for each other in vain: short timeouts, new processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import RankPool

# What a collective may take before it counts as one that nobody answers. A test that holds never
# waits for it, but where it says that it does.
GROUP_TIMEOUT_S = 10.0


@pytest.fixture
def pair(new_ranks: Callable[..., RankPool]) -> RankPool:
    """Two ranks of this test's own."""
    return new_ranks(2, timeout=60.0, group_timeout=GROUP_TIMEOUT_S)


@pytest.fixture
def four(new_ranks: Callable[..., RankPool]) -> RankPool:
    """Four ranks of this test's own."""
    return new_ranks(4, timeout=60.0, group_timeout=GROUP_TIMEOUT_S)
