"""Decorated generators and coroutines, which leave their autocast context at each suspension.

Autocast's state belongs to the thread, so a context that is open while its function is suspended
would be open in all code that the thread runs meanwhile. A decorated function leaves the context at
every suspension and enters it again at every resumption, which a ``with`` statement cannot do.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["is_generator_like", "wrap_generator_like"]

_ContextFactory = Callable[[], AbstractContextManager[Any]]


def is_generator_like(function: Callable[..., Any]) -> bool:
    """Return whether a callable is a generator or coroutine function.

    Raises:
        TypeError: It is an asynchronous generator function.
    """
    if _has_kind(inspect.isasyncgenfunction, function):
        raise TypeError(
            "An asynchronous generator cannot be decorated. Decorate the coroutine that it awaits "
            "for each value, or open a region around each computation inside."
        )
    is_generator = _has_kind(inspect.isgeneratorfunction, function)
    return is_generator or _has_kind(inspect.iscoroutinefunction, function)


def _has_kind(has_kind: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Return whether a function, or the ``__call__`` of an object, is of a kind."""
    return has_kind(function) or has_kind(type(function).__call__)


def wrap_generator_like(
    context_factory: _ContextFactory, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that runs a generator or coroutine inside a context between suspensions."""
    wrapped: Callable[..., Any]
    if _has_kind(inspect.isgeneratorfunction, function):

        def wrapped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _resume_inside(context_factory, function(*args, **kwargs)))

    else:

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            return await _await_inside(context_factory, function(*args, **kwargs))

    return functools.wraps(function)(wrapped)


def _resume_inside(context_factory: _ContextFactory, generator: Any) -> Generator[Any, Any, Any]:
    """Yield from a generator, and enter a new context for each resumption.

    torch's private `_wrap_generator` does the same for `torch.no_grad`. It throws into a generator
    with three arguments, which Python 3.12 deprecates, so with warnings as errors the cancellation
    of a coroutine would arrive as a DeprecationWarning.
    """
    try:
        with context_factory():
            response = next(generator)
        while True:
            try:
                request = yield response
            except GeneratorExit:
                with context_factory():
                    generator.close()
                raise
            except BaseException as error:
                with context_factory():
                    response = generator.throw(error)
            else:
                with context_factory():
                    response = generator.send(request)
    except StopIteration as stop:
        return stop.value


@types.coroutine
def _await_inside(context_factory: _ContextFactory, awaitable: Any) -> Generator[Any, Any, Any]:
    """Await an awaitable, and enter a new context for each resumption."""
    return (yield from _resume_inside(context_factory, awaitable.__await__()))
