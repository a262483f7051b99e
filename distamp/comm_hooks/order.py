"""Do one exchange after another beside the backward pass, in the order they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

__all__ = ["InOrder", "in_order"]

Job = Callable[[], Tensor]


class InOrder(Protocol):
    """Runs jobs one after another while the caller goes on."""

    def submit(self, job: Job) -> Future[Tensor]:
        """Return the future of what ``job`` returns; errors are raised by whoever waits for it."""


def in_order(device: torch.device) -> InOrder:
    """Return how exchanges of gradients on ``device`` run beside the backward pass."""
    return _Thread() if device.type == "cpu" else _Stream(device)


class _Thread:
    """A thread that lives only while there are jobs.

    So none is left when a process group or the process ends: once a backward pass is over, so is
    the thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Job, Future[tuple[Tensor | None, Exception | None]]]] = deque()
        self._running = False

    def submit(self, job: Job) -> Future[Tensor]:
        """See `InOrder.submit`."""
        done: Future[tuple[Tensor | None, Exception | None]] = Future()
        # An error set on a future from Python reaches C++, where DDP waits, as a value. Raised in
        # a callback, which starts no collective, it arrives as an error.
        result = done.then(_value_or_raise)
        with self._lock:
            self._jobs.append((job, done))
            start = not self._running
            self._running = True
        if start:
            threading.Thread(target=self._drain, name="distamp-comm-hook").start()
        return result

    def _drain(self) -> None:
        with torch.no_grad():
            while True:
                with self._lock:
                    if not self._jobs:
                        self._running = False
                        return
                    job, done = self._jobs.popleft()
                outcome: tuple[Tensor | None, Exception | None]
                try:
                    outcome = (job(), None)
                except Exception as error:
                    outcome = (None, error)
                done.set_result(outcome)


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

    def submit(self, job: Job) -> Future[Tensor]:
        """See `InOrder.submit`."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        result: Future[Tensor] = Future(devices=[self._device])
        with self._stream, torch.no_grad():
            value = job()
            value.record_stream(self._stream)
            result.set_result(value)
        return result
