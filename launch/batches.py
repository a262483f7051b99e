"""Batches that a thread reads ahead of their step, into pinned memory for an accelerator."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

from launch.data import Data

__all__ = ["Batches"]

_AHEAD = 2


class Batches:
    """The microbatches of one rank, one after the other, from a position in the data on.

    Which examples come when is a function of the position alone, so that reading ahead changes
    nothing but who waits.

    Args:
        data: What is trained on.
        device: Where the batches are to be.
        position: Examples taken before, over all ranks.
        count: Examples in one microbatch of one rank.
        rank: This rank among those that read different examples.
        world_size: How many of those there are.
    """

    def __init__(
        self,
        data: Data,
        device: torch.device,
        position: int,
        count: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._data = data
        self._device = device
        self._count = count
        self._positions = itertools.count(position + rank * count, world_size * count)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: deque[Future[tuple[Tensor, Tensor]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets on the device; the copy there is not waited for."""
        while len(self._ahead) <= _AHEAD:
            self._ahead.append(self._thread.submit(self._read, next(self._positions)))
        inputs, targets = self._ahead.popleft().result()
        return (
            inputs.to(self._device, non_blocking=True),
            targets.to(self._device, non_blocking=True),
        )

    def _read(self, position: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._data.take(position, self._count)
        if self._device.type == "cpu":
            return inputs, targets
        return inputs.pin_memory(), targets.pin_memory()
