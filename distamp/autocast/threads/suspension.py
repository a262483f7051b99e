"""Regions in functions that are suspended: generators, coroutines and asynchronous generators.

Autocast's state belongs to the thread, so a region that is open while its function is suspended
is open in whatever the thread does meanwhile. A decorated function is therefore left at every
suspension and entered again at every resumption; a ``with`` statement cannot be.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

__all__ = ["suspendable_kind", "wrap"]

_Scope = Callable[[], AbstractContextManager[Any]]


def suspendable_kind(fn: Callable[..., Any]) -> str | None:
    """``"generator"``, ``"coroutine"``, ``"async generator"``, or None for a plain callable."""
    for candidate in (fn, type(fn).__call__):
        if inspect.isgeneratorfunction(candidate):
            return "generator"
        if inspect.iscoroutinefunction(candidate):
            return "coroutine"
        if inspect.isasyncgenfunction(candidate):
            return "async generator"
    return None


def wrap(scope: _Scope, fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """``fn`` with every stretch between two suspensions inside ``scope()``."""
    drive = {"generator": _drive, "coroutine": _coroutine, "async generator": _async_generator}
    return _Suspendable(scope, fn, drive[kind])


class _Suspendable:
    """A function that calls another at once, binding its arguments, and drives what it returns.

    A function that does so is no generator function, and one that is binds its arguments late.
    With the attributes of a function, ``inspect`` takes this for what it wraps.
    """

    __qualname__: str

    def __init__(self, scope: _Scope, fn: Callable[..., Any], drive: Callable[..., Any]) -> None:
        function: Any = fn
        while isinstance(function, functools.partial):
            function = function.func
        function = function if inspect.isroutine(function) else type(function).__call__
        for name in ("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__name__"):
            setattr(self, name, getattr(function, name))
        functools.update_wrapper(self, fn)
        self._scope = scope
        self._fn = fn
        self._drive = drive

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._drive(self._scope, self._fn(*args, **kwargs))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__


async def _coroutine(scope: _Scope, inner: Any) -> Any:
    return await _Driven(scope, inner)


async def _async_generator(scope: _Scope, inner: Any) -> AsyncGenerator[Any, Any]:
    step = inner.__anext__()
    while True:
        try:
            value = await _Driven(scope, step)
        except StopAsyncIteration:
            return
        try:
            sent = yield value
        except GeneratorExit:
            await _Driven(scope, inner.aclose())
            raise
        except BaseException as error:
            step = inner.athrow(error)
        else:
            step = inner.asend(sent)


def _resume(scope: _Scope, method: Callable[..., Any], *args: Any) -> Any:
    with scope():
        return method(*args)


def _drive(scope: _Scope, inner: Any) -> Generator[Any, Any, Any]:
    """What ``yield from inner`` does (PEP 380), with each resumption of it inside ``scope()``."""
    try:
        value = _resume(scope, next, inner)
        while True:
            try:
                sent = yield value
            except GeneratorExit:
                _resume(scope, inner.close)
                raise
            except BaseException as error:
                value = _resume(scope, inner.throw, error)
            else:
                value = _resume(scope, inner.send, sent)
    except StopIteration as stop:
        return stop.value


class _Driven:
    """An awaitable that runs another one, each stretch of it inside ``scope()``."""

    def __init__(self, scope: _Scope, awaitable: Any) -> None:
        self._scope = scope
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        return _drive(self._scope, self._awaitable.__await__())
