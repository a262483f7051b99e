"""Regions in functions that are suspended: generators, coroutines and asynchronous generators.

Autocast's state belongs to the thread, so a region that is open while its function is suspended
is open in whatever the thread does meanwhile. A decorated function is therefore left at every
suspension and entered again at every resumption; a ``with`` statement cannot be, and is refused
where its body suspends.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from itertools import pairwise
from types import CodeType, FrameType, MethodType
from typing import Any

from distamp.errors import RegionError

__all__ = ["ENTER_CONTEXT", "SUSPENDABLE", "refuse_if_suspended", "suspendable_kind", "wrap"]

SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# Code that enters a region for the function that called it.
ENTER_CONTEXT: CodeType = contextlib.ExitStack.enter_context.__code__
_CONTEXTMANAGER_ENTER: CodeType = contextlib._GeneratorContextManager.__enter__.__code__
_ASYNC_CONTEXTMANAGER_ENTER: CodeType = contextlib._AsyncGeneratorContextManager.__aenter__.__code__
# What drives pytest's yield fixtures: the region is for the test in between.
_FIXTURES = "_pytest.fixtures"

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


def refuse_if_suspended(frame: FrameType) -> None:
    """Refuse a ``with`` whose body would stay open while the function around it is suspended.

    Args:
        frame: The frame that is entering a region.

    Raises:
        RegionError: The body of the ``with`` statement holds a ``yield`` or an ``await``.
    """
    via_call = False
    while True:
        code, caller = frame.f_code, frame.f_back
        if code is ENTER_CONTEXT and caller is not None:
            frame, via_call = caller, True
        elif caller is not None and caller.f_code is _CONTEXTMANAGER_ENTER:
            # The region belongs to whoever enters the function made by contextlib.contextmanager.
            if caller.f_back is None:
                return
            frame, via_call = caller.f_back, False
        else:
            break
    if caller is not None and caller.f_globals.get("__name__") == _FIXTURES:
        return
    if not code.co_flags & SUSPENDABLE:
        return
    if caller is not None and caller.f_code is _ASYNC_CONTEXTMANAGER_ENTER:
        suspends_at: int | None = frame.f_lineno
    else:
        suspends_at = _suspension_in_body(code, frame.f_lasti, via_call)
    if suspends_at is not None:
        word = "yield" if code.co_flags & inspect.CO_GENERATOR else "await or yield"
        raise RegionError(
            f"{code.co_qualname} enters an autocast region on line {frame.f_lineno} and is "
            f"suspended inside it by the {word} on line {suspends_at} ({code.co_filename}). "
            "The region would leak into whatever this thread runs meanwhile. Decorate the "
            "function with autocast(...), which leaves the region at each suspension; or end the "
            "region before; or run another thread's work under it with propagate(fn)."
        )


@functools.lru_cache(maxsize=1024)
def _suspension_in_body(code: CodeType, entered_at: int, via_call: bool) -> int | None:
    """The line on which the body of a ``with`` suspends its function, or None.

    A with statement's body is what its handler (the code that calls ``__exit__`` with an
    exception) covers, and what is covered by handlers that are themselves so covered.

    Args:
        code: The function that holds the statement.
        entered_at: Offset of the instruction that calls ``__enter__``, or ``enter_context``.
        via_call: The statement is the innermost one around that instruction (an ExitStack's), not
            one that begins after it.
    """
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    names = {each.offset: each.opname for each in instructions}
    following = {each.offset: after.opname for each, after in pairwise(instructions)}
    entries: list[Any] = bytecode.exception_entries  # type: ignore[attr-defined]
    ranges = [(each.start, each.end, each.target) for each in entries]

    def covering(offset: int) -> tuple[int, int, int] | None:
        return next((each for each in ranges if each[0] <= offset < each[1]), None)

    def exits_with(target: int) -> bool:
        return names.get(target) == "PUSH_EXC_INFO" and following[target] == "WITH_EXCEPT_START"

    if via_call:
        around = covering(entered_at)
        while around is not None and not exits_with(around[2]):
            around = covering(around[2])
    else:
        begin = next((each.offset for each in instructions if each.offset > entered_at), -1)
        around = covering(begin)
        if around is not None and (around[0] != begin or not exits_with(around[2])):
            around = None
    if around is None:
        return None

    targets = {around[2]}
    while True:
        body = [each for each in ranges if each[2] in targets]
        inner = {
            each[2] for each in ranges if any(start <= each[2] < end for start, end, _ in body)
        } - targets
        # A handler that runs inside the body protects nothing but parts of the body.
        if not inner:
            break
        targets |= inner
    for each in instructions:
        if each.opname == "YIELD_VALUE" and any(s <= each.offset < e for s, e, _ in body):
            line = each.positions.lineno if each.positions else None
            return line or code.co_firstlineno
    return None
