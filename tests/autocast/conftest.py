"""Helpers of the autocast tests, and a check that a test restores the thread's autocast state."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")
X = torch.ones(2, 2)


def product() -> torch.dtype:
    """Return the dtype in which this thread computes a matrix product."""
    return torch.mm(X, X).dtype


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread; return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def thread_state() -> list[object]:
    """Return torch's autocast settings in this thread, the depth of nested regions last."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    settings: list[object] = []
    for device_type in DEVICE_TYPES:
        enabled = torch.is_autocast_enabled(device_type)
        settings.append((device_type, enabled, torch.get_autocast_dtype(device_type)))
    settings.append(torch.is_autocast_cache_enabled())
    settings.append(nesting)
    return settings


@pytest.fixture(autouse=True)
def _state_is_restored() -> Iterator[None]:
    torch.manual_seed(0)
    state = thread_state()
    yield
    assert thread_state() == state, "the test left autocast's state changed"


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
