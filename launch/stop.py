"""SIGTERM, Ctrl-C and a time limit as requests: a step is finished and saved before the end."""

import math
import signal
import time
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether this process was asked to end.

    Args:
        minutes: After which it counts as asked.
    """

    def __init__(self, minutes: float = math.inf) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._signalled = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal has come, or the time is over."""
        return self._signalled or time.monotonic() >= self._end

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signalled:
            raise KeyboardInterrupt  # someone at a terminal will not wait
        self._signalled = True
