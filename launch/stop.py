"""SIGTERM, Ctrl-C and a time limit as requests: a step is finished and saved before the end."""

import ctypes
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def listening(minutes: float = math.inf) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether this process was asked to end.

    Args:
        minutes: After which it counts as asked.
    """
    end = time.monotonic() + 60 * minutes
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and heard:
            raise KeyboardInterrupt  # someone at a terminal will not wait
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(heard) or time.monotonic() >= end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent(*_: object) -> None:
    """Have Linux kill this process where its parent dies: torchrun, or the rank of a reader.

    Nobody else would end a rank whose torchrun was killed, and it would go on writing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
