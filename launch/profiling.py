"""A trace of a few steps, for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Self

from torch.profiler import profile, record_function, schedule

from launch.ranks import Ranks

__all__ = ["FOLDER", "Trace"]

FOLDER = "profile"
# The first steps of a process set up kernels, buckets and caches.
_WAIT, _WARMUP, _ACTIVE = 2, 2, 3
# Above all levels of the log of torch's profiler, which else prints a line for each trace.
_SILENT = "99"


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
        self._trouble = "none: the run ended before the steps to trace"
        self._profile: Any = None

    def __enter__(self) -> Self:
        if self._wanted:
            os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
            steps = schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
            self._profile = profile(schedule=steps, on_trace_ready=self._write)
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Name what is done inside, in the trace."""
        return contextlib.nullcontext() if self._profile is None else record_function(name)

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
        trouble = next(filter(None, self.ranks.gather(self._trouble)), "")
        return {
            "Trace": trouble
            or f"{FOLDER}/rank-*.json, a few steps of each rank, for ui.perfetto.dev"
        }

    def _stop(self) -> None:
        if self._profile is not None:
            ended, self._profile = self._profile, None
            ended.stop()

    def _write(self, traced: Any) -> None:
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(partial))
            _check_whole(partial)
            partial.replace(self.path)
            self._trouble = ""
        except (OSError, RuntimeError) as error:
            system = error.strerror if isinstance(error, OSError) else None
            reason = system or str(error).splitlines()[0]
            self._trouble = f"rank {self.ranks.rank} cannot write {self.path.name} ({reason})"
            with contextlib.suppress(OSError):
                for left in self.path.parent.glob(f"{partial.name}*"):
                    left.unlink()


def _check_whole(path: Path) -> None:
    """Refuse half a file, or none: of a full disk torch's writer says nothing but in its log."""
    end = b""
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            end = file.read()
    if b'"traceName"' not in end or not end.rstrip().endswith(b"}"):
        raise RuntimeError("is the disk full?")
