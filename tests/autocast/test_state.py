"""A thread's state as a value: captured, applied, and carried by functions and executors."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distamp import autocast
from distamp.autocast import AutocastState, OpLists, propagate
from distamp.errors import RegionError
from tests.autocast.conftest import DEVICE_TYPES, thread_state

X = torch.ones(2, 2)


def product() -> torch.dtype:
    return torch.mm(X, X).dtype


def in_thread(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


@pytest.fixture
def unusual() -> Iterator[list[object]]:
    """Every setting of every device type other than a new thread's; what it is."""
    found = thread_state()
    for number, device_type in enumerate(DEVICE_TYPES):
        torch.set_autocast_enabled(device_type, number % 2 == 0)
        torch.set_autocast_dtype(device_type, (torch.float16, torch.bfloat16)[number % 3 == 0])
    torch.set_autocast_cache_enabled(False)
    yield thread_state()
    for device_type, enabled, dtype in found[: len(DEVICE_TYPES)]:  # type: ignore[misc]
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(True)


def test_the_device_types_are_all_that_torch_has_autocast_for():
    names = {name for name, _, _ in AutocastState.capture().devices}
    everything = (*DEVICE_TYPES, "privateuseone", "meta", "ve", "vulkan", "lazy")
    assert names == {each for each in everything if torch.amp.is_autocast_available(each)}


def test_a_new_thread_starts_with_nothing_and_an_applied_state_gives_all(unusual):
    state = AutocastState.capture()
    settings = slice(0, len(DEVICE_TYPES) + 1)

    def work() -> list[object]:
        before = thread_state()
        with state.apply():
            inside = thread_state()
        assert thread_state() == before
        assert before[settings] != inside[settings]
        return inside

    inside = in_thread(work)
    assert inside[settings] == unusual[settings]
    assert set(state.devices) >= set(unusual[:9])


def test_capture_is_a_value():
    with autocast("cpu", dtype=torch.float16):
        one, two = AutocastState.capture(), AutocastState.capture()
    assert one == two
    assert hash(one) == hash(two)
    assert one != AutocastState.capture()
    assert pickle.loads(pickle.dumps(one)) == one


def test_capture_sees_the_op_lists():
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        state = AutocastState.capture()
    assert state != AutocastState.capture()
    for each in (state, pickle.loads(pickle.dumps(state))):
        assert each == state
        with each.apply():
            assert product() is torch.float32
            assert torch.bmm(X[None], X[None]).dtype is torch.float32  # mm's family
            assert torch.nn.functional.conv1d(X[None], X[None]).dtype is torch.bfloat16
            assert AutocastState.capture() == state
        assert torch.is_autocast_enabled("cpu") is False


def test_a_state_without_op_lists_is_applied_inside_a_region_with_them():
    plain = AutocastState.capture()
    before = thread_state()
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        within = thread_state()
        with plain.apply():
            assert thread_state()[:-2] == before[:-2]
        assert thread_state() == within
        assert product() is torch.float32


def test_applying_puts_back_what_the_block_changed_or_left_open():
    with autocast("cpu", dtype=torch.float16):
        state = AutocastState.capture()
    before = thread_state()
    with state.apply():
        autocast("cpu", dtype=torch.bfloat16, ops=OpLists(fp32={"mm"})).__enter__()
        torch.autocast("cpu", enabled=False).__enter__()
        torch.set_autocast_enabled("xpu", True)
        torch.set_autocast_cache_enabled(False)
    assert thread_state() == before


def test_an_applied_state_nests_in_regions_and_with_itself():
    with autocast("cpu", dtype=torch.float16):
        state = AutocastState.capture()
    weight = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", dtype=torch.bfloat16) as region:
        assert torch.mm(X, weight).dtype is torch.bfloat16
        with state.apply():
            assert torch.mm(X, weight).dtype is torch.float16
            with state.apply(), region:
                assert torch.mm(X, weight).dtype is torch.bfloat16
        assert torch.mm(X, weight).dtype is torch.bfloat16


def test_a_region_cannot_end_under_a_state_applied_within_it():
    region = autocast("cpu")
    with region:
        with AutocastState.capture().apply(), pytest.raises(RegionError):
            region.__exit__(None, None, None)
        assert product() is torch.bfloat16


def test_an_error_under_an_applied_state_restores_and_comes_through():
    with autocast("cpu"):
        state = AutocastState.capture()
    before = thread_state()
    with pytest.raises(ZeroDivisionError), state.apply():
        _ = 1 / 0
    assert thread_state() == before


CARRIERS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "a thread of a pool": in_thread,
    "asyncio.to_thread": lambda fn: asyncio.run(asyncio.to_thread(fn)),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_propagated_function_computes_as_its_maker(carrier):
    with autocast("cpu", dtype=torch.float16, ops=OpLists(fp32={"mm"})):
        bound = propagate(lambda: (product(), torch.conv1d(X[None], X[None]).dtype))
    assert CARRIERS[carrier](bound) == (torch.float32, torch.float16)
    assert CARRIERS[carrier](product) is torch.float32


@autocast("cpu", dtype=torch.float16)
def made_under_float16() -> Callable[[], torch.dtype]:
    return propagate(product)


def test_a_propagated_function_keeps_its_name_and_pickles():
    bound = made_under_float16()
    assert bound.__name__ == "product"
    assert pickle.loads(pickle.dumps(bound))() is torch.float16


def test_a_propagated_generator_has_the_state_only_while_it_runs():
    with autocast("cpu"):

        @propagate
        def generate() -> Iterator[torch.dtype]:
            yield product()

    for dtype in generate():
        assert (dtype, product()) == (torch.bfloat16, torch.float32)


def test_propagating_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="callable"):
        propagate(3)
