"""The autocast state of a thread as a value, in threads, generators and coroutines."""

import asyncio
import contextlib
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from tests.autocast.conftest import DEVICE_TYPES, X, in_thread, product, thread_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LISTS = OpLists(fp32={"mm"})


def change_all_settings() -> tuple[list[object], AutocastState]:
    """Change every autocast setting of this thread; return the settings and the state."""
    for number, device_type in enumerate(DEVICE_TYPES):
        torch.set_autocast_enabled(device_type, number % 2 == 0)
        torch.set_autocast_dtype(device_type, BF16 if number % 3 == 0 else FP16)
    torch.set_autocast_cache_enabled(False)
    return thread_state(), AutocastState.capture()


def test_an_applied_state_has_all_settings_and_the_end_restores_the_old_ones():
    def apply_in_thread() -> tuple[list[object], list[object], list[object]]:
        first_settings = thread_state()
        with state.apply():
            applied_settings = thread_state()
        return first_settings, applied_settings, thread_state()

    changed_settings, state = in_thread(change_all_settings)
    first_settings, applied_settings, last_settings = in_thread(apply_in_thread)
    # The last entry is the depth of nested regions, which is one more inside.
    assert applied_settings[:-1] == changed_settings[:-1]
    assert applied_settings[:-1] != first_settings[:-1]
    assert last_settings == first_settings


def test_a_state_has_every_device_type_that_has_autocast():
    state = AutocastState.capture()
    candidates = (*DEVICE_TYPES, "privateuseone", "meta", "ve", "vulkan", "lazy")
    available = {name for name in candidates if torch.amp.is_autocast_available(name)}
    assert {name for name, _, _ in state.devices} == available


@pytest.mark.parametrize("ops", [None, LISTS])
def test_states_of_equal_settings_are_equal(ops):
    with autocast("cpu", FP16, ops=ops):
        state = AutocastState.capture()
        same_state = AutocastState.capture()
    assert same_state == state
    assert hash(same_state) == hash(state)
    assert AutocastState.capture() != state


@pytest.mark.parametrize("ops", [None, LISTS])
def test_a_pickled_state_is_equal_and_can_be_applied(ops):
    with autocast("cpu", FP16, ops=ops):
        state = AutocastState.capture()
        dtype = product()
    unpickled = pickle.loads(pickle.dumps(state))
    assert unpickled == state
    assert hash(unpickled) == hash(state)
    for applied in (state, unpickled):
        with applied.apply():
            assert product() is dtype
            assert AutocastState.capture() == state


def test_the_end_of_an_applied_state_restores_settings_that_the_block_changed():
    with autocast("cpu", FP16):
        state = AutocastState.capture()
    with autocast("cpu", BF16, ops=LISTS):
        outer_state, outer_settings = AutocastState.capture(), thread_state()
        with contextlib.suppress(ZeroDivisionError), state.apply():
            autocast("cpu", ops=OpLists(fp32={"softmax"})).__enter__()
            torch.autocast("cpu", enabled=False).__enter__()
            torch.set_autocast_enabled("xpu", True)
            torch.set_autocast_cache_enabled(False)
            _ = 1 / 0
        assert AutocastState.capture() == outer_state
        assert thread_state() == outer_settings
        assert product() is FP32


def test_an_applied_state_nests_in_regions_and_with_itself():
    with autocast("cpu", FP16):
        state = AutocastState.capture()
    weight = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", BF16) as region:
        assert torch.mm(X, weight).dtype is BF16
        with state.apply():
            assert torch.mm(X, weight).dtype is FP16
            with state.apply(), region:
                assert torch.mm(X, weight).dtype is BF16
            # The block did not enter this region, so the exit changes nothing.
            region.__exit__(None, None, None)
            assert torch.mm(X, weight).dtype is FP16
        assert torch.mm(X, weight).dtype is BF16


@autocast("cpu", FP16, ops=LISTS)
def made_in_a_region() -> Any:
    return AutocastState.wrap(product)


def in_asyncio_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of asyncio; return its result."""
    return asyncio.run(asyncio.to_thread(function))


@pytest.mark.parametrize("run", [in_thread, in_asyncio_thread])
def test_a_wrapped_function_computes_in_the_state_of_its_maker(run):
    def dtypes() -> tuple[torch.dtype, torch.dtype]:
        convolution = torch.conv1d(X[None], X[None])
        return product(), convolution.dtype

    with autocast("cpu", FP16, ops=LISTS):
        wrapped = AutocastState.wrap(dtypes)
    assert run(wrapped) == (FP32, FP16)


@pytest.mark.parametrize("run", [in_thread, in_asyncio_thread])
def test_a_captured_state_can_wrap_a_function(run):
    with autocast("cpu"):
        assert run(product) is FP32, "a thread does not inherit the region"
        assert run(AutocastState.capture().wrap(product)) is BF16


def test_a_wrapped_function_can_be_pickled_and_keeps_its_name():
    wrapped = made_in_a_region()
    assert wrapped.__name__ == "product"
    with autocast("cpu"):
        assert pickle.loads(pickle.dumps(wrapped))() is FP32


def test_only_a_callable_can_be_wrapped():
    with pytest.raises(TypeError, match="callable"):
        AutocastState.wrap(3)  # type: ignore[arg-type]


def bind_to_a_state(function: Any) -> Any:
    with autocast("cpu", FP16):
        return AutocastState.wrap(function)


bind_to_a_region = autocast("cpu", FP16, ops=OpLists())
BINDINGS = [
    pytest.param(bind_to_a_region, id="region"),
    pytest.param(bind_to_a_state, id="state"),
]


def make_generator(bind: Any, log: list[Any]) -> Any:
    """Return a generator function that yields the dtype of products and logs sent values.

    Its last entry in the log is the dtype of a product in its ``finally`` block.
    """

    @bind
    def generate() -> Iterator[torch.dtype]:
        """Log the values that are sent."""
        try:
            log.append((yield product()))
            yield product()
        except KeyError:
            yield product()
        finally:
            log.append(product())
        return "done"

    return generate


@pytest.mark.parametrize("bind", BINDINGS)
def test_a_generator_computes_in_its_region_and_its_caller_does_not(bind):
    log: list[Any] = []
    generator = make_generator(bind, log)()
    assert next(generator) is FP16
    assert product() is FP32
    assert generator.send("sent") is FP16
    assert product() is FP32
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "done"
    assert log == ["sent", FP16]


@pytest.mark.parametrize("bind", BINDINGS)
def test_an_error_that_is_thrown_into_a_generator_is_caught_in_its_region(bind):
    log: list[Any] = []
    generator = make_generator(bind, log)()
    assert next(generator) is FP16
    assert generator.throw(KeyError()) is FP16
    assert product() is FP32
    generator.close()
    assert log == [FP16]


@pytest.mark.parametrize("bind", BINDINGS)
def test_a_generator_is_closed_in_its_region(bind):
    log: list[Any] = []
    generator = make_generator(bind, log)()
    next(generator)
    generator.close()
    assert product() is FP32
    assert log == [FP16]


@pytest.mark.parametrize("bind", BINDINGS)
def test_a_bound_generator_function_keeps_its_kind_name_and_docstring(bind):
    generate = make_generator(bind, [])
    assert inspect.isgeneratorfunction(generate)
    assert generate.__name__ == "generate"
    assert generate.__doc__ == "Log the values that are sent."


def test_a_coroutine_does_not_run_in_the_region_of_another_coroutine():
    async def task(ready: asyncio.Event, continued: asyncio.Event) -> list[torch.dtype]:
        first_dtype = product()
        ready.set()
        await continued.wait()
        return [first_dtype, product()]

    async def main() -> list[list[torch.dtype]]:
        first, second = asyncio.Event(), asyncio.Event()
        decorated_task = autocast("cpu", FP16)(task)
        return await asyncio.gather(decorated_task(first, second), task(second, first))

    decorated_dtypes, plain_dtypes = asyncio.run(main())
    assert decorated_dtypes == [FP16, FP16]
    assert plain_dtypes == [FP32, FP32]


def test_an_asynchronous_generator_is_refused():
    async def rows() -> AsyncIterator[torch.dtype]:
        yield product()

    for bind in (autocast("cpu", FP16), AutocastState.wrap):
        with pytest.raises(TypeError, match="Decorate the coroutine that it awaits"):
            bind(rows)
