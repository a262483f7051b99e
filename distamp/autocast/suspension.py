"""Decorated generators and coroutines: left at each suspension.

Autocast's state belongs to the thread, so a region that is open while its function is suspended is
open in whatever the thread does meanwhile. A decorated function is therefore left at every
suspension and entered again at every resumption; a ``with`` statement cannot be.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["suspends", "wrap"]

_Scope = Callable[[], AbstractContextManager[Any]]


def suspends(fn: Callable[..., Any]) -> bool:
    """Whether a callable is a generator or coroutine function, for `wrap`.

    Raises:
        TypeError: It is an asynchronous generator function.
    """
    if _is(inspect.isasyncgenfunction, fn):
        raise TypeError(
            "an asynchronous generator cannot be decorated: decorate the coroutine that it awaits "
            "for each value, or open a region around each computation inside"
        )
    return _is(inspect.isgeneratorfunction, fn) or _is(inspect.iscoroutinefunction, fn)


def _is(kind: Callable[[object], bool], fn: Callable[..., Any]) -> bool:
    return kind(fn) or kind(type(fn).__call__)


def wrap(scope: _Scope, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with every stretch between two suspensions inside ``scope()``."""
    wrapped: Callable[..., Any]
    if _is(inspect.isgeneratorfunction, fn):

        def wrapped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _drive(scope, fn(*args, **kwargs)))

    else:

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            return await _driven(scope, fn(*args, **kwargs))

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
