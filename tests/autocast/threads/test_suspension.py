"""Generators, coroutines and asynchronous generators: a region never outlasts a suspension."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

from distamp import autocast
from distamp.errors import RegionError

X = torch.ones(2, 2)


def _product() -> torch.dtype:
    return torch.mm(X, X).dtype


def test_torch_leaks_a_suspended_generators_region(leaks):
    def generate() -> Iterator[int]:
        with torch.autocast("cpu"):
            yield 1

    generator = generate()
    next(generator)
    assert torch.is_autocast_enabled("cpu")


def test_torch_leaks_a_region_to_other_tasks():
    async def task() -> None:
        with torch.autocast("cpu"):
            await asyncio.sleep(0)

    async def main() -> bool:
        other = asyncio.create_task(task())
        await asyncio.sleep(0)
        seen = torch.is_autocast_enabled("cpu")
        await other
        return seen

    assert asyncio.run(main())


@contextlib.contextmanager
def managed() -> Iterator[None]:
    with autocast("cpu"):
        yield


@contextlib.asynccontextmanager
async def managed_async() -> AsyncIterator[None]:
    with autocast("cpu"):
        yield


def plain() -> Iterator[int]:
    with autocast("cpu"):
        yield 1


def among_others() -> Iterator[int]:
    with contextlib.nullcontext(), autocast("cpu"), torch.no_grad():
        for number in range(2):
            try:
                yield number
            finally:
                pass


def in_a_handler() -> Iterator[int]:
    with autocast("cpu"):
        try:
            raise KeyError
        except KeyError:
            with contextlib.nullcontext():
                yield 1


def through_a_contextmanager() -> Iterator[int]:
    with managed():
        yield 1


def on_an_exit_stack() -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast("cpu"))
        try:
            yield 1
        finally:
            pass


def delegating() -> Iterator[int]:
    with autocast("cpu"):
        yield from [1, 2]


async def awaiting() -> None:
    with autocast("cpu"):
        await asyncio.sleep(0)


async def iterating() -> None:
    with autocast("cpu"):
        async for _ in asynchronous():
            pass


async def asynchronous() -> AsyncIterator[int]:
    yield 1


async def asynchronous_open() -> AsyncIterator[int]:
    with autocast("cpu"):
        yield 1


async def through_an_async_contextmanager() -> None:
    async with managed_async():
        pass


def _run(fn: Callable[[], Any]) -> Any:
    if inspect.iscoroutinefunction(fn):
        return asyncio.run(fn())
    if inspect.isasyncgenfunction(fn):

        async def collect() -> list[Any]:
            return [each async for each in fn()]

        return asyncio.run(collect())
    return list(fn())


@pytest.mark.parametrize(
    "fn",
    [
        plain,
        among_others,
        in_a_handler,
        through_a_contextmanager,
        on_an_exit_stack,
        delegating,
        awaiting,
        iterating,
        asynchronous_open,
        through_an_async_contextmanager,
    ],
)
def test_a_body_that_suspends_is_refused_before_it_begins(fn):
    with pytest.raises(RegionError, match=r"Decorate the function") as error:
        _run(fn)
    where = fn.__name__ if fn is not through_an_async_contextmanager else "managed_async"
    assert str(error.value).startswith(where)


def test_the_error_names_both_lines():
    first = plain.__code__.co_firstlineno
    with pytest.raises(RegionError, match=rf"on line {first + 1} .* on line {first + 2} "):
        next(plain())


def closed_before_the_yield() -> Iterator[torch.dtype]:
    with autocast("cpu"):
        try:
            dtype = _product()
        finally:
            pass
    yield dtype
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast("cpu"))
        dtype = _product()
    yield dtype
    with managed():
        dtype = _product()
    yield dtype
    region = autocast("cpu")
    region.__enter__()
    dtype = _product()
    region.__exit__(None, None, None)
    yield dtype


async def closed_before_the_await() -> list[torch.dtype]:
    with autocast("cpu"):
        dtype = _product()
    await asyncio.sleep(0)
    return [dtype]


@pytest.mark.parametrize("fn", [closed_before_the_yield, closed_before_the_await])
def test_a_body_that_does_not_suspend_is_left_alone(fn):
    assert set(_run(fn)) == {torch.bfloat16}


def test_a_yield_around_the_region_and_one_in_a_loop_after_it_are_no_concern():
    def batches() -> Iterator[torch.dtype]:
        for _ in range(2):
            yield torch.float64
            with autocast("cpu"):
                dtype = _product()
            yield dtype

    assert list(batches()) == [torch.float64, torch.bfloat16] * 2


def test_contextlibs_contextmanager_serves_a_plain_caller():
    with managed():
        assert _product() is torch.bfloat16
    assert _product() is torch.float32


def test_a_contextmanager_that_calls_enter_and_exit_serves_too():
    @contextlib.contextmanager
    def by_hand() -> Iterator[None]:
        region = autocast("cpu")
        region.__enter__()
        try:
            yield
        finally:
            region.__exit__(None, None, None)

    def suspends() -> Iterator[int]:
        with by_hand():
            yield 1

    with by_hand():
        assert _product() is torch.bfloat16
    with pytest.raises(RegionError):
        next(suspends())
    assert _product() is torch.float32


@autocast("cpu")
def generate(log: list[Any]) -> Any:
    """Yield dtypes."""
    try:
        sent = yield _product()
        log.append(sent)
        try:
            yield _product()
        except KeyError:
            log.append("thrown")
        yield _product()
    finally:
        log.append(_product())
    return "done"


def test_a_decorated_generator_is_in_the_region_only_while_it_runs():
    log: list[Any] = []
    generator = generate(log)
    seen = [next(generator), _product(), generator.send("sent"), _product()]
    seen += [generator.throw(KeyError("k")), _product()]
    with pytest.raises(StopIteration) as stop:
        next(generator)
    low, full = torch.bfloat16, torch.float32
    assert seen == [low, full, low, full, low, full]
    assert log == ["sent", "thrown", low]
    assert stop.value.value == "done"
    assert inspect.isgeneratorfunction(generate)
    assert generate.__doc__ == "Yield dtypes."


def test_closing_a_decorated_generator_runs_its_finally_in_the_region():
    log: list[Any] = []
    generator = generate(log)
    next(generator)
    generator.close()
    assert log == [torch.bfloat16]
    assert _product() is torch.float32


def test_an_error_in_a_decorated_generator_comes_through():
    @autocast("cpu")
    def fails() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    generator = fails()
    next(generator)
    with pytest.raises(ZeroDivisionError):
        next(generator)
    assert not torch.is_autocast_enabled("cpu")


def test_two_decorated_generators_interleave():
    def kind(dtype: torch.dtype) -> Callable[[], Iterator[torch.dtype]]:
        @autocast("cpu", dtype=dtype)
        def each() -> Iterator[torch.dtype]:
            yield _product()
            yield _product()

        return each

    pairs = list(zip(kind(torch.float16)(), kind(torch.bfloat16)(), strict=True))
    assert pairs == [(torch.float16, torch.bfloat16)] * 2


def test_decorated_coroutines_interleave_and_outsiders_see_nothing():
    def task(dtype: torch.dtype) -> Callable[[], Awaitable[list[torch.dtype]]]:
        @autocast("cpu", dtype=dtype)
        async def run() -> list[torch.dtype]:
            seen = []
            for _ in range(3):
                seen.append(_product())
                await asyncio.sleep(0)
            return seen

        return run

    async def outsider() -> list[torch.dtype]:
        seen = []
        for _ in range(3):
            seen.append(_product())
            await asyncio.sleep(0)
        return seen

    async def main() -> list[list[torch.dtype]]:
        return await asyncio.gather(task(torch.float16)(), outsider(), task(torch.bfloat16)())

    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    assert asyncio.run(main()) == [[dtype] * 3 for dtype in dtypes]


def test_a_cancelled_coroutine_cleans_up_in_its_region():
    seen: list[torch.dtype] = []

    @autocast("cpu")
    async def run() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            seen.append(_product())

    async def main() -> None:
        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == [torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu")


def test_a_decorated_asynchronous_generator_is_in_the_region_only_while_it_runs():
    closed: list[torch.dtype] = []

    @autocast("cpu")
    async def each() -> AsyncIterator[torch.dtype]:
        try:
            yield _product()
            await asyncio.sleep(0)
            yield _product()
        finally:
            closed.append(_product())

    async def main() -> list[torch.dtype]:
        seen = []
        async for dtype in each():
            seen += [dtype, _product()]
        early = each()
        await early.__anext__()
        await early.aclose()
        return seen

    assert asyncio.run(main()) == [torch.bfloat16, torch.float32] * 2
    assert closed == [torch.bfloat16] * 2


@pytest.fixture
def region() -> Iterator[None]:
    with autocast("cpu", dtype=torch.float16):
        yield


def test_a_yield_fixture_may_hold_a_region_for_the_test(region):
    assert _product() is torch.float16


@autocast("cpu")
def two(first: int, second: int) -> Iterator[tuple[int, torch.dtype]]:
    yield first, _product()
    yield second, _product()


@autocast("cpu")
async def slept(seconds: float) -> torch.dtype:
    await asyncio.sleep(seconds)
    return _product()


@autocast("cpu")
async def counted(stop: int) -> AsyncIterator[torch.dtype]:
    for _ in range(stop):
        yield _product()


@pytest.mark.parametrize("fn", [two, slept, counted])
def test_a_decorated_function_binds_its_arguments_when_it_is_called(fn):
    with pytest.raises(TypeError, match="argument"):
        fn(1, wrong=2)


def test_a_decorated_function_is_what_it_was_to_those_who_ask():
    assert inspect.isgeneratorfunction(two)
    assert inspect.iscoroutinefunction(slept)
    assert inspect.isasyncgenfunction(counted)
    assert list(inspect.signature(two).parameters) == ["first", "second"]
    assert pickle.loads(pickle.dumps(two)) is two
    assert copy.deepcopy(two) is two
    assert _run(lambda: two(1, 2)) == [(1, torch.bfloat16), (2, torch.bfloat16)]
    assert asyncio.run(slept(0)) is torch.bfloat16


def test_a_decorated_generator_method_is_bound_to_its_object():
    class Loader:
        size = 2

        @autocast("cpu")
        def batches(self) -> Iterator[torch.dtype]:
            for _ in range(self.size):
                yield _product()

    assert list(Loader().batches()) == [torch.bfloat16] * 2


def test_a_decorated_partial_of_a_generator_function():
    def numbers(stop: int) -> Iterator[torch.dtype]:
        for _ in range(stop):
            yield _product()

    assert list(autocast("cpu")(functools.partial(numbers, 2))()) == [torch.bfloat16] * 2
