"""How a process ends: its exit code, signals and a time limit, and the end of its torchrun."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from launch.usage import UsageError, place_of_user


def exit_code_of(program: Callable[[], None]) -> int:
    """Run a program; return its exit code, which is 2 if the user asked for what cannot be.

    Every rank finds the same fault. The first of each machine prints it and ends, upon which
    torchrun sends the others SIGTERM; they wait for that, so that nobody is cut off. An error of
    the user's own code keeps its traceback, below the line of it that went wrong.
    """
    try:
        program()
        return 0
    except UsageError as error:
        message, code = f"error: {error}", 2
    except KeyboardInterrupt:
        message, code = "stopped before there was anything to save", 130
    except Exception as error:
        if place := place_of_user(error):
            print(f"error in {place}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
        return code
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    time.sleep(10)
    return code


# Whether a process is asked to end: by SIGTERM or Ctrl-C, and by the clock.
Asked = Callable[[], tuple[bool, bool]]


@contextmanager
def listening(minutes: float) -> Iterator[Asked]:
    """Listen to signals, and watch the clock.

    Args:
        minutes: After which the process is asked to end.
    """
    end = time.monotonic() + 60 * minutes
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and heard:
            raise KeyboardInterrupt  # someone at a terminal will not wait
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: (bool(heard), time.monotonic() >= end)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent(*_: object) -> None:
    """Have Linux kill this process where its parent dies: torchrun, or the rank of a reader.

    Nobody else would end a rank whose torchrun was killed, and it would go on writing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
