"""Decorated generators, coroutines and async generators: outside the region while suspended."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from distamp import OpLists, autocast

REGION = autocast("cpu", dtype=torch.float16)
X = torch.ones(2, 2)


def product() -> torch.dtype:
    return torch.mm(X, X).dtype


@REGION
def generate(log: list[Any]) -> Iterator[torch.dtype]:
    """Echo what is sent."""
    try:
        sent = yield product()
        log.append((sent, product()))
        yield product()
    except KeyError as error:
        log.append((type(error), product()))
        yield product()
    finally:
        log.append(product())
    return "done"


def test_a_generator_is_in_the_region_between_suspensions_alone():
    log: list[Any] = []
    generator = generate(log)
    assert (next(generator), product()) == (torch.float16, torch.float32)
    assert (generator.send("x"), product()) == (torch.float16, torch.float32)
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "done"
    assert log == [("x", torch.float16), torch.float16]


@pytest.mark.parametrize("how", ["throw", "close"])
def test_a_generator_that_is_ended_early_cleans_up_in_the_region(how):
    log: list[Any] = []
    generator = generate(log)
    next(generator)
    if how == "throw":
        assert generator.throw(KeyError()) is torch.float16
        assert log.pop(0) == (KeyError, torch.float16)
    generator.close()
    assert log == [torch.float16]
    assert product() is torch.float32


def test_decorated_functions_stay_what_they_are():
    assert inspect.isgeneratorfunction(generate)
    assert (generate.__name__, generate.__doc__) == ("generate", "Echo what is sent.")

    class Model:
        @REGION
        def rows(self, n: int) -> Iterator[torch.dtype]:
            for _ in range(n):
                yield product()

    assert list(Model().rows(2)) == [torch.float16] * 2


@REGION
async def task(own: asyncio.Event, other: asyncio.Event) -> list[torch.dtype]:
    seen = [product()]
    own.set()
    await other.wait()
    return [*seen, product()]


def test_coroutines_of_one_loop_do_not_meet_each_others_region():
    async def plain(own: asyncio.Event, other: asyncio.Event) -> list[torch.dtype]:
        await other.wait()
        seen = [product()]
        own.set()
        return seen

    async def main() -> list[list[torch.dtype]]:
        one, two = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(task(one, two), plain(two, one)))

    assert asyncio.run(main()) == [[torch.float16] * 2, [torch.float32]]


def test_an_asynchronous_generator_is_outside_at_each_yield_and_await():
    @REGION
    async def rows() -> AsyncIterator[torch.dtype]:
        try:
            while True:
                await asyncio.sleep(0)
                yield product()
        finally:
            ended.append(product())

    async def main() -> None:
        async for dtype in (source := rows()):
            seen.append((dtype, product()))
            if len(seen) == 2:
                break
        await source.aclose()  # type: ignore[attr-defined]

    seen: list[Any] = []
    ended: list[torch.dtype] = []
    asyncio.run(main())
    assert seen == [(torch.float16, torch.float32)] * 2
    assert ended == [torch.float16]


def test_lists_are_left_at_each_suspension_too():
    @autocast("cpu", ops=OpLists(fp32={"mm"}))
    def rows() -> Iterator[torch.dtype]:
        yield product()

    with autocast("cpu"):
        for dtype in rows():
            assert (dtype, product()) == (torch.float32, torch.bfloat16)
