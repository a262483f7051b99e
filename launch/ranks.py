"""The ranks of one run: who this process is, and how all of them stop together."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launch.errors import UsageError
from launch.lost_rank import LostRank, RankRegistry

__all__ = ["Ranks"]

T = TypeVar("T")


def _print_error(error: Exception) -> None:
    with suppress(OSError):  # nobody may be there to read it
        print(f"error: {error}", file=sys.stderr, flush=True)


def _store(rank: int, world_size: int, timeout: timedelta) -> Store:
    if world_size == 1:
        return HashStore()
    store: Store = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))[0]
    return store


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. One process alone needs no process group and makes none.

    Attributes:
        restarts: How often torchrun has started this group of processes anew.
        registry: Where ranks look for each other when one does not answer; None: nowhere.
    """

    rank: int
    local_rank: int
    world_size: int
    restarts: int = 0
    registry: RankRegistry | None = None

    @classmethod
    @contextmanager
    def join(
        cls, backend: str | None = None, timeout: float = 600.0, *, always: bool = False
    ) -> Iterator[Ranks]:
        """Join the peers that torchrun started, and leave them at the end.

        Objects and losses travel over gloo, gradients over the backend of the device they lie on.

        Args:
            backend: What gradients travel over, ``"gloo"`` or ``"nccl"``; None chooses by the
                devices there are.
            timeout: Seconds to wait for the others in one collective.
            always: Whether a process that is alone makes a group too.
        """
        rank = int(os.environ.get("RANK", "0"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if world_size == 1 and not always:
            yield cls(rank, local_rank, world_size, restarts)
            return
        # DDP and torch's optimizers import torch._dynamo on the way. Imported while a group exists
        # it keeps that group for ever; gloo's threads then outlive destroy_process_group(), and
        # one still giving back a tensor while the interpreter ends takes the process with it
        # ("terminate called without an active exception").
        importlib.import_module("torch._dynamo")
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        if backend == "nccl" or (backend is None and cuda):
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"  # prepare() refuses what is not here
        backend = backend or "gloo"
        wait = timedelta(seconds=timeout)
        # torchrun's store outlives a group of processes, and so do the addresses they left there.
        shared = _store(rank, world_size, wait)
        store = PrefixStore(f"attempt {restarts} of {world_size}", shared)
        registry = RankRegistry(PrefixStore("ranks", store), rank, world_size)
        registry.register()
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=wait
        )
        try:
            yield cls(rank, local_rank, world_size, restarts, registry)
        finally:
            gc.collect()  # DDP's reducer, which holds the group too, lies in a cycle
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints and writes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sum(self, *values: float | torch.Tensor) -> tuple[float, ...]:
        """Add each value over the ranks, in float64."""
        packed = torch.tensor([float(v) for v in values], dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(packed)
        return tuple(packed.tolist())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that may raise ``UsageError``; if any rank does, all of them do.

        Without this a rank that finds a fault leaves its peers waiting for it in the next
        collective. Every rank must enter the same blocks in the same order.
        """
        mine = ""
        try:
            yield
        except UsageError as error:
            mine = str(error)
        first = next(filter(None, self.gather(mine)), "")
        if first:
            raise UsageError(first) from None

    @contextmanager
    def watching(self, where: Callable[[], str]) -> Iterator[None]:
        """Run a block of collectives; if one fails because a rank is gone, say which.

        Args:
            where: Says what the ranks were doing when it failed.

        Raises:
            LostRank: In the place of torch's error, which names a socket.
        """
        try:
            yield
        except RuntimeError as error:
            lost = None if self.registry is None else self.registry.explain(error)
            if lost is None:
                raise
            raise LostRank(f"{lost} {where()}") from error

    def report_lost_rank(self, lost: LostRank) -> int:
        """Print, on the first rank that comes here, who is gone; return the exit code."""
        self.leave()
        if self.registry is None or self.registry.is_first():
            _print_error(lost)
        return 1

    def leave(self) -> None:
        """Be about to exit, with a code of this rank's own."""
        # torchrun sends SIGTERM to the others as soon as one rank has exited; all of them are
        # about to, and should do so with the same code.
        if self.world_size > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def fail(self, error: UsageError) -> int:
        """Print an error that every rank holds, once, and return the exit code."""
        self.leave()
        if self.is_main:
            _print_error(error)
        self.gather(True)
        return 2
