"""The ranks of one run: who this process is, and how all of them stop together."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from launch.errors import UsageError

__all__ = ["Ranks"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. One process alone needs no process group and makes none."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    @contextmanager
    def join(cls) -> Iterator[Ranks]:
        """Join the peers that torchrun started, and leave them at the end.

        Objects and losses travel over gloo, gradients over the backend of the device they lie on.
        """
        ranks = cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
        )
        if ranks.world_size == 1:
            yield ranks
            return
        # DDP and torch's optimizers import torch._dynamo on the way. Imported while a group exists
        # it keeps that group for ever; gloo's threads then outlive destroy_process_group(), and
        # one still giving back a tensor while the interpreter ends takes the process with it
        # ("terminate called without an active exception").
        importlib.import_module("torch._dynamo")
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        try:
            yield ranks
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

    def fail(self, error: UsageError) -> int:
        """Print an error that every rank holds, once, and return the exit code."""
        # torchrun sends SIGTERM to the others as soon as one rank has exited; all of them are
        # about to, and should do so with the same code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        self.gather(True)
        return 2
