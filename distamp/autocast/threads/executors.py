"""Executors whose workers run each task in the autocast state it was submitted in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from distamp.autocast.threads.state import propagate

__all__ = ["AutocastExecutor", "AutocastThreadPoolExecutor"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class AutocastThreadPoolExecutor(ThreadPoolExecutor):
    """A :class:`~concurrent.futures.ThreadPoolExecutor` that carries over autocast's state.

    Each task runs in the state of the thread that submitted it, as it was then. A task that leaves
    a region open, or sets autocast's state, is put right before the worker's next task. As an
    event loop's default executor it serves ``asyncio.to_thread`` too.
    """

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Schedule ``fn(*args, **kwargs)`` in the calling thread's autocast state."""
        return super().submit(propagate(fn), *args, **kwargs)


class AutocastExecutor(Executor):
    """Any executor, carrying over autocast's state as :class:`AutocastThreadPoolExecutor` does.

    Args:
        executor: The executor that runs the tasks. With processes the functions must be picklable.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Schedule ``fn(*args, **kwargs)`` in the calling thread's autocast state."""
        return self._executor.submit(propagate(fn), *args, **kwargs)

    def map(self, fn: Callable[..., Any], *iterables: Any, **options: Any) -> Any:
        """Map ``fn`` over the iterables, each call in the calling thread's autocast state."""
        return self._executor.map(propagate(fn), *iterables, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut the wrapped executor down."""
        self._executor.shutdown(wait, cancel_futures=cancel_futures)
