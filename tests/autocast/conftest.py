"""What every autocast test leaves behind: the thread's autocast state as it found it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")
X = torch.ones(2, 2)


def product() -> torch.dtype:
    """The dtype in which this thread computes a matrix product."""
    return torch.mm(X, X).dtype


def in_thread(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


def thread_state() -> list[object]:
    """All of torch's autocast state in this thread, read setting by setting, nesting last."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return [
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICE_TYPES),
        torch.is_autocast_cache_enabled(),
        nesting,
    ]


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    torch.manual_seed(0)
    before = thread_state()
    yield
    assert thread_state() == before, "the test left autocast's state changed"


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
