"""A thread's state as a value, and what carries or leaves it: threads, generators, coroutines."""

import asyncio
import contextlib
import inspect
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from tests.autocast.conftest import DEVICE_TYPES, X, in_thread, product, thread_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LISTS = OpLists(fp32={"mm"})


def test_an_applied_state_gives_a_new_thread_all_settings_and_then_its_own_back():
    def unusual() -> tuple[list[object], AutocastState]:
        for number, device_type in enumerate(DEVICE_TYPES):
            torch.set_autocast_enabled(device_type, number % 2 == 0)
            torch.set_autocast_dtype(device_type, (FP16, BF16)[number % 3 == 0])
        torch.set_autocast_cache_enabled(False)
        return thread_state(), AutocastState.capture()

    def applied() -> list[list[object]]:
        before = thread_state()
        with state.apply():
            inside = thread_state()
        return [before, inside, thread_state()]

    wanted, state = in_thread(unusual)
    before, inside, after = in_thread(applied)
    assert inside[:-1] == wanted[:-1] != before[:-1]
    assert after == before
    everything = (*DEVICE_TYPES, "privateuseone", "meta", "ve", "vulkan", "lazy")
    names = {name for name, _, _ in state.devices}
    assert names == {each for each in everything if torch.amp.is_autocast_available(each)}


@pytest.mark.parametrize("ops", [None, LISTS])
def test_a_state_is_a_value(ops):
    with autocast("cpu", FP16, ops=ops):
        one, two = AutocastState.capture(), AutocastState.capture()
        wanted = product()
    for state in (two, pickle.loads(pickle.dumps(one))):
        assert (state, hash(state)) == (one, hash(one)) != AutocastState.capture()
        with state.apply():
            assert (product(), AutocastState.capture()) == (wanted, state)


def test_applying_puts_back_what_the_block_changed_or_left_open():
    with autocast("cpu", FP16):
        state = AutocastState.capture()
    with autocast("cpu", BF16, ops=LISTS):
        before = AutocastState.capture(), thread_state()
        with contextlib.suppress(ZeroDivisionError), state.apply():
            autocast("cpu", ops=OpLists(fp32={"softmax"})).__enter__()
            torch.autocast("cpu", enabled=False).__enter__()
            torch.set_autocast_enabled("xpu", True)
            torch.set_autocast_cache_enabled(False)
            _ = 1 / 0
        assert (AutocastState.capture(), thread_state(), product()) == (*before, FP32)


def test_an_applied_state_nests_in_regions_and_with_itself():
    with autocast("cpu", FP16):
        state = AutocastState.capture()
    weight = torch.ones(2, 2, requires_grad=True)
    found = []
    with autocast("cpu", BF16) as region:
        found.append(torch.mm(X, weight).dtype)
        with state.apply():
            found.append(torch.mm(X, weight).dtype)
            with state.apply(), region:
                found.append(torch.mm(X, weight).dtype)
            region.__exit__(None, None, None)  # none of the block's own
            found.append(torch.mm(X, weight).dtype)
        found.append(torch.mm(X, weight).dtype)
    assert found == [BF16, FP16, BF16, FP16, BF16]


@autocast("cpu", FP16, ops=LISTS)
def made_in_a_region() -> Any:
    return AutocastState.wrap(product)


@pytest.mark.parametrize("run", [in_thread, lambda fn: asyncio.run(asyncio.to_thread(fn))])
def test_a_propagated_function_computes_as_its_maker(run):
    with autocast("cpu", FP16, ops=LISTS):
        bound = AutocastState.wrap(lambda: (product(), torch.conv1d(X[None], X[None]).dtype))
    assert run(bound) == (FP32, FP16)
    with autocast("cpu"):
        assert run(product) is FP32
        assert pickle.loads(pickle.dumps(made_in_a_region()))() is FP32
        assert run(AutocastState.capture().wrap(product)) is BF16
    assert made_in_a_region().__name__ == "product"
    with pytest.raises(TypeError, match="callable"):
        AutocastState.wrap(3)  # type: ignore[arg-type]


def under_a_state(fn: Any) -> Any:
    with autocast("cpu", FP16):
        return AutocastState.wrap(fn)


PAIR = (FP16, FP32)  # What it computes in, and what its caller computes in meanwhile.


@pytest.mark.parametrize("bind", [autocast("cpu", FP16, ops=OpLists()), under_a_state])
@pytest.mark.parametrize("end", ["next", "throw", "close"])
def test_a_generator_is_in_the_region_between_suspensions_alone(bind, end):
    @bind
    def generate() -> Iterator[torch.dtype]:
        """Echo what is sent."""
        try:
            log.append((yield product()))
            yield product()
        except KeyError:
            yield product()
        finally:
            log.append(product())
        return "done"

    log: list[Any] = []
    generator = generate()
    assert (next(generator), product()) == PAIR
    if end == "throw":
        assert (generator.throw(KeyError()), product()) == PAIR
    elif end == "next":
        assert (generator.send("x"), product()) == PAIR
        with pytest.raises(StopIteration) as stop:
            next(generator)
        assert stop.value.value == "done"
    generator.close()
    assert log == (["x", FP16] if end == "next" else [FP16])
    assert inspect.isgeneratorfunction(generate)
    assert (generate.__name__, generate.__doc__) == ("generate", "Echo what is sent.")


def test_coroutines_of_one_loop_do_not_meet_each_others_region():
    async def task(own: asyncio.Event, other: asyncio.Event) -> list[torch.dtype]:
        seen = [product()]
        own.set()
        await other.wait()
        return [*seen, product()]

    async def main() -> list[list[torch.dtype]]:
        one, two = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(autocast("cpu", FP16)(task)(one, two), task(two, one)))

    assert asyncio.run(main()) == [[FP16] * 2, [FP32] * 2]


def test_an_asynchronous_generator_is_refused():
    async def rows() -> AsyncIterator[torch.dtype]:
        yield product()

    for bind in (autocast("cpu", FP16), AutocastState.wrap):
        with pytest.raises(TypeError, match="Decorate the coroutine that it awaits"):
            bind(rows)
