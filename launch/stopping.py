"""Signals and a time limit as requests: a step is finished and saved before the end."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Preempted", "Stop"]

_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
# torchrun passes a Ctrl-C on to ranks that have it from the terminal already.
_SAME_REQUEST_S = 2.0


class Preempted(Exception):
    """All ranks have saved and stop here, because some of them were asked to.

    Attributes:
        code: The exit code: 128 and the signal's number, as a shell has it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Stop:
    """What this process was asked for by signals, or by the clock.

    Args:
        max_minutes: After which it counts as asked to stop; None: never.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        self.signal: int = 0
        self._since = 0.0
        self._end = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal != 0 or time.monotonic() >= self._end

    @property
    def preempted(self) -> Preempted:
        """What to raise once all ranks have saved; another rank may be the one that was asked."""
        return Preempted(128 + (self.signal or signal.SIGTERM))

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take signals as requests until the end of the block."""
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        heard = _SIGNALS[:-1] if nohup else _SIGNALS
        before: dict[signal.Signals, Any] = {s: signal.signal(s, self._ask) for s in heard}
        try:
            yield self
        finally:
            for number, handler in before.items():
                # One that is ignored by now stays so: the process is about to end.
                if signal.getsignal(number) == self._ask:
                    signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.signal != 0 and now - self._since > _SAME_REQUEST_S
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt  # someone at a terminal will not wait
        if self.signal == 0:
            self.signal, self._since = number, now
