"""A trace of a few steps, for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

from torch.profiler import profile, record_function, schedule

from launch.ranks import Ranks

__all__ = ["FOLDER", "Trace", "span"]

FOLDER = "profile"
# The first steps of a process set up kernels, buckets and caches.
_WAIT, _WARMUP, _ACTIVE = 2, 2, 3

span = record_function


class Trace:
    """Traces a few steps of this rank, once it has warmed up, where that is wanted.

    Args:
        folder: The run's.
        ranks: Each writes its own file.
        wanted: Whether to trace at all.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, wanted: bool) -> None:
        self.path = folder / FOLDER / f"rank-{ranks.rank}.json"
        self.ranks = ranks
        self._wanted = wanted
        self._said = "none: the run ended before the steps to trace"
        self._profile: Any = None

    def __enter__(self) -> Self:
        if self._wanted:
            steps = schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
            self._profile = profile(schedule=steps, on_trace_ready=self._write)
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def step(self) -> None:
        """Say that a step has ended."""
        if self._profile is not None:
            self._profile.step()
            if self._profile.step_num >= _WAIT + _WARMUP + _ACTIVE:
                self._stop()

    def outcome(self) -> dict[str, str]:
        """Say where the traces are, or why there are none; every rank calls this."""
        if not self._wanted:
            return {}
        said = self.ranks.gather(self._said)
        trouble = next((s for s in said if s != _WRITTEN), None)
        return {"Trace": trouble or f"{FOLDER}/, {_ACTIVE} steps of each rank, for perfetto.dev"}

    def _stop(self) -> None:
        if self._profile is not None:
            ended, self._profile = self._profile, None
            ended.stop()

    def _write(self, traced: Any) -> None:
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(partial))
            partial.replace(self.path)
            self._said = _WRITTEN
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            reason = str(error).splitlines()[0]
            self._said = f"rank {self.ranks.rank} cannot write {self.path.name}: {reason}"
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


_WRITTEN = ""
