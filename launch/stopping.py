"""SIGTERM and Ctrl-C as requests: the step is finished and saved before the run ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Preempted", "Stop"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# torchrun passes a Ctrl-C on to ranks that the terminal has told already.
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
    """What this process was asked for by signals."""

    def __init__(self) -> None:
        self.signal: int = 0
        self._since = 0.0

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal != 0

    @property
    def preempted(self) -> Preempted:
        """What to raise once all ranks have saved; another rank may be the one that was asked."""
        return Preempted(128 + (self.signal or signal.SIGTERM))

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take signals as requests until the end of the block."""
        before: dict[signal.Signals, Any] = {s: signal.signal(s, self._ask) for s in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                # One that is ignored by now stays so: the process is about to end.
                if signal.getsignal(number) == self._ask:
                    signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.asked and now - self._since > _SAME_REQUEST_S
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt  # someone at a terminal will not wait
        if not self.asked:
            self.signal, self._since = number, now
