"""Decorated generators, coroutines and asynchronous generators: left at each suspension.

Autocast's state belongs to the thread, so a region that is open while its function is suspended is
open in whatever the thread does meanwhile. A decorated function is therefore left at every
suspension and entered again at every resumption; a ``with`` statement cannot be.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Literal

__all__ = ["Kind", "suspendable_kind", "wrap"]

Kind = Literal["generator", "coroutine", "async generator"]
_Scope = Callable[[], AbstractContextManager[Any]]


def suspendable_kind(fn: Callable[..., Any]) -> Kind | None:
    """What is suspended, or None for a plain callable."""
    for candidate in (fn, type(fn).__call__):
        if inspect.isgeneratorfunction(candidate):
            return "generator"
        if inspect.iscoroutinefunction(candidate):
            return "coroutine"
        if inspect.isasyncgenfunction(candidate):
            return "async generator"
    return None


def wrap(scope: _Scope, fn: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """``fn`` with every stretch between two suspensions inside ``scope()``."""
    wrapped: Callable[..., Any]
    if kind == "generator":

        def wrapped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _drive(scope, fn(*args, **kwargs)))

    elif kind == "coroutine":

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            return await _driven(scope, fn(*args, **kwargs))

    else:

        async def wrapped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            inner = fn(*args, **kwargs)
            step = inner.__anext__()
            while True:
                try:
                    value = await _driven(scope, step)
                except StopAsyncIteration:
                    return
                try:
                    sent = yield value
                except GeneratorExit:
                    await _driven(scope, inner.aclose())
                    raise
                except BaseException as error:
                    step = inner.athrow(error)
                else:
                    step = inner.asend(sent)

    return functools.wraps(fn)(wrapped)


def _drive(scope: _Scope, inner: Any) -> Generator[Any, Any, Any]:
    """What ``yield from inner`` does (PEP 380), with each resumption of it inside ``scope()``."""

    def resume(method: Callable[..., Any], *args: Any) -> Any:
        with scope():
            return method(*args)

    try:
        value = resume(next, inner)
        while True:
            try:
                sent = yield value
            except GeneratorExit:
                resume(inner.close)
                raise
            except BaseException as error:
                value = resume(inner.throw, error)
            else:
                value = resume(inner.send, sent)
    except StopIteration as stop:
        return stop.value


@types.coroutine
def _driven(scope: _Scope, awaitable: Any) -> Generator[Any, Any, Any]:
    """Await ``awaitable`` with each stretch of it inside ``scope()``."""
    return (yield from _drive(scope, awaitable.__await__()))
