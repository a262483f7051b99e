"""What every autocast test leaves behind: the thread's autocast state as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")


def thread_state() -> list[object]:
    """All of torch's autocast state in this thread, read setting by setting, nesting included."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return [
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICE_TYPES),
        torch.is_autocast_cache_enabled(),
        nesting,
        torch._C._is_torch_function_mode_enabled(),
    ]


NEW_THREAD = thread_state()


def reset() -> None:
    """Put this thread's autocast state back to that of a new thread."""
    for device_type, enabled, dtype in NEW_THREAD[: len(DEVICE_TYPES)]:  # type: ignore[misc]
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(True)
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()


@pytest.fixture
def leaks() -> Iterator[None]:
    """For tests that make torch's own class leak: put the state right afterwards."""
    yield
    reset()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random inputs and weights in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    before = thread_state()
    yield
    if "leaks" not in request.fixturenames:
        after = thread_state()
        if after != before:
            reset()
        assert after == before, "the test left autocast's state changed"
