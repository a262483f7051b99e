"""Which rank is gone, when a collective fails."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["LostRank", "RankRegistry"]

# How long to look for who is gone. A process that was killed is found at once by those on its own
# machine; the others wait for word from there.
_LOOK_S = 10.0


class LostRank(Exception):
    """A rank is gone, and the others cannot go on without it; says which, and when."""


class RankRegistry:
    """Where each rank writes down its process, and, once a collective failed, what it saw.

    Args:
        store: torchrun's own, which outlives every rank.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def register(self) -> None:
        """Write down this process."""
        self.store.set(f"process/{self.rank}", json.dumps([_machine(), os.getpid()]))

    def explain(self, error: RuntimeError) -> str | None:
        """Say which rank is gone; None if the error is not about that."""
        if not _is_about_peers(error):
            return None
        try:
            return self._look()
        except (RuntimeError, ValueError) as store_error:
            first = str(store_error).splitlines()[0]
            return f"the machine that torchrun's store was on does not answer ({first})"

    def is_first(self) -> bool:
        """Return True on the first rank that asks."""
        with contextlib.suppress(RuntimeError):
            return self.store.add("reported", 1) == 1
        return True

    def _look(self) -> str:
        self.store.set(f"waiting/{self.rank}", "")
        end = time.monotonic() + _LOOK_S
        while True:
            gone = [r for r in range(self.world_size) if self._is_gone(r)]
            if gone:
                return f"{_ranks(gone)} {'was' if len(gone) == 1 else 'were'} killed or crashed"
            silent = [r for r in range(self.world_size) if not self._has(f"waiting/{r}")]
            if time.monotonic() > end or not silent:
                break
            time.sleep(0.1)
        if not silent:
            return "the connection between the ranks broke, and all of them are still there"
        hosts = sorted(
            {self._process(r)[0].split("/")[0] for r in silent if self._has_registered(r)}
        )
        return f"{_ranks(silent)} did not answer (on {', '.join(hosts)})"

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank has ended; those of its machine can tell, and tell the others."""
        if rank == self.rank or not self._has_registered(rank):
            return False
        if self._has(f"gone/{rank}"):
            return True
        machine, pid = self._process(rank)
        if machine != _machine() or _is_running(pid):
            return False
        # One that ended after it had seen a failure itself is not the first.
        if self._has(f"waiting/{rank}"):
            return False
        self.store.set(f"gone/{rank}", "")
        return True

    def _process(self, rank: int) -> tuple[str, int]:
        machine, pid = json.loads(self.store.get(f"process/{rank}"))
        return machine, pid

    def _has_registered(self, rank: int) -> bool:
        return self._has(f"process/{rank}")

    def _has(self, key: str) -> bool:
        found: Any = self.store.check([key])
        return bool(found)


def _machine() -> str:
    """Name where process ids mean the same: a machine, and a container on it."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{namespace}"


def _is_running(pid: int) -> bool:
    """Whether a process still runs; one that has ended stays listed until its parent asks."""
    status = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        # "pid (name) state ..."; the name may hold anything.
        return status.read_text(errors="replace").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def _is_about_peers(error: RuntimeError) -> bool:
    words = (
        "gloo",
        "nccl",
        "closed by peer",
        "reset by peer",
        "timed out",
        "timeout",
        "broken pipe",
    )
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(map(text.__contains__, words))


def _ranks(numbers: list[int]) -> str:
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(map(str, numbers))}"
