"""Do one exchange after another beside the backward pass, in the order they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

__all__ = ["InOrder", "Staged", "in_order", "through"]

R = TypeVar("R")
# Yields twice: when its first message is on the way, and when it only waits for its last ones.
Staged = Generator[None, None, R]
Job = Callable[[], Tensor | Staged[Tensor]]


class InOrder(Protocol):
    """Runs jobs one after another while the caller goes on."""

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Return the future of what ``job`` returns; errors are raised by whoever waits for it.

        Args:
            job: What to do.
            uses: Tensors made by the caller that the job reads or writes.
        """


def through(staged: Staged[R]) -> R:
    """Run to the end and return what comes of it."""
    while True:
        try:
            next(staged)
        except StopIteration as end:
            value: R = end.value
            return value


def in_order(device: torch.device) -> InOrder:
    """Return how exchanges of gradients on ``device`` run beside the backward pass."""
    return _Thread() if device.type == "cpu" else _Stream(device)


class _Task:
    """A job and the future of what comes of it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._staged: Staged[Tensor] | None = None
        self._stages = 0
        self._outcome: tuple[Tensor | None, Exception | None] | None = None
        self._done: Future[tuple[Tensor | None, Exception | None]] = Future()
        # An error set on a future from Python reaches C++, where DDP waits, as a value. Raised in
        # a callback, which starts no collective, it arrives as an error.
        self.result = self._done.then(_value_or_raise)

    def advance(self, stages: int) -> None:
        """Run until it has yielded so often, or is over."""
        try:
            if self._staged is None and self._outcome is None:
                begun = self._job()
                if isinstance(begun, Tensor):
                    self._outcome = (begun, None)
                else:
                    self._staged = begun
            while self._staged is not None and self._outcome is None and self._stages < stages:
                next(self._staged)
                self._stages += 1
        except StopIteration as end:
            self._outcome = (end.value, None)
        except Exception as error:
            self._outcome = (None, error)

    @property
    def over(self) -> bool:
        """Whether nothing of it is left but to set its result."""
        return self._outcome is not None

    def finish(self) -> None:
        """Run to the end and set its result."""
        self.advance(3)
        assert self._outcome is not None
        self._done.set_result(self._outcome)


class _Thread:
    """A thread that lives only while there are jobs.

    So none is left when a process group or the process ends: once a backward pass is over, so is
    the thread. While a job only waits for its last messages, the next one is begun: its first
    message then follows them at once. What is asked of a channel, and in which order, does not
    depend on whether it came in time for that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[_Task] = deque()
        self._running = False

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """See `InOrder.submit`."""
        task = _Task(job)
        with self._lock:
            self._tasks.append(task)
            start = not self._running
            self._running = True
        if start:
            threading.Thread(target=self._drain, name="distamp-comm-hook").start()
        return task.result

    def _drain(self) -> None:
        following: _Task | None = None
        with torch.no_grad():
            while True:
                task = following or self._next(last=True)
                if task is None:
                    return
                task.advance(2)
                following = None if task.over else self._next()
                if following is not None:
                    following.advance(1)
                task.finish()

    def _next(self, *, last: bool = False) -> _Task | None:
        """Return the next task; None if there is none, and then the thread is no more if last."""
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._running = self._running and not last
            return None


def _value_or_raise(done: Future[tuple[Tensor | None, Exception | None]]) -> Tensor:
    value, error = done.value()
    if error is not None:
        raise error
    assert value is not None
    return value


class _Stream:
    """A stream of its own, on which everything is put by the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """See `InOrder.submit`."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        result: Future[Tensor] = Future(devices=[self._device])
        with self._stream, torch.no_grad():
            for each in uses:
                if each.device.type != "cpu":
                    each.record_stream(self._stream)
            begun = job()
            value = begun if isinstance(begun, Tensor) else through(begun)
            result.set_result(value)
        return result
