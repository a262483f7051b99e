"""Processes with the simulated accelerator in them, waiting for functions to run.

This module is for the pytest process, which never loads the accelerator itself.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests import ranks
from tests.simulated import build, cuda

__all__ = ["DEVICES", "SCHEDULES", "SimPool", "under_schedules"]

DEVICES = 4
SCHEDULES = [("late", 0), ("late_others", 0), ("random", 11)]


def under_schedules(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return each case under every schedule; one schedule is quick and two are slow.

    The quick schedules take turns over the cases.
    """
    parameters = []
    for case_number, case in enumerate(cases):
        for schedule_number, schedule in enumerate(SCHEDULES):
            is_quick = (case_number + schedule_number) % 3 == 0
            marks = [] if is_quick else [pytest.mark.slow]
            parameters.append(pytest.param(*case, *schedule, marks=marks))
    return parameters


class SimPool:
    """``world_size`` processes that each see the same number of devices.

    Each has a `tests.ranks.RankPool`. The current device of rank r is ``sim:r``.

    Args:
        world_size: number of processes.
        name: ``"sim"``, or ``"cuda"`` for the same under CUDA's name (one process).
        options: of `tests.ranks.RankPool`.

    Raises:
        tests.simulated.build.Unavailable: Another torch, or no compiler; a build for CUDA, where
            CUDA's name is asked for.
    """

    def __init__(self, world_size: int, *, name: str = "sim", **options: Any) -> None:
        path = str(build.library())
        self.world_size = world_size
        self._schedule = SCHEDULES[0]
        if name == "cuda":
            if torch.version.cuda is not None:
                raise build.Unavailable("this torch has kernels of its own under CUDA's name")
            target = functools.partial(cuda.serve, path, DEVICES)
            options = {"method": "spawn", **options}
        else:
            target = functools.partial(_serve, path)
            options = {"backend": "cpu:gloo,sim:simccl", **options}
        self.pool = ranks.RankPool(world_size, target=target, **options)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        schedule: str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> list[Any]:
        """Run ``function(*args)`` in every process and return the results.

        Jobs that are pending when the function returns are run, and their errors are errors of the
        call. Device tensors in the result come back on the CPU.

        Args:
            function: importable by name (module level).
            args: picklable.
            schedule: ``"late"``, ``"eager"`` or ``"random"``.
            seed: of the random schedule; each rank adds its number.
            options: Options of `RankPool.run`; in one process the default is no group.
        """
        chosen = (schedule, seed) if schedule else self._schedule
        group = "none" if self.world_size == 1 else "default"
        return self.pool.run(_call, function, args, *chosen, **{"group": group, **options})

    def one(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the result of `run` in the first process, for a pool of one."""
        return self.run(function, *args, **options)[0]

    def under(self, schedule: str, seed: int = 0) -> SimPool:
        """Return the same processes with another default schedule."""
        scheduled = copy.copy(self)
        scheduled._schedule = schedule, seed
        return scheduled

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        self.pool.close()


def _serve(path: str, *args: Any) -> None:
    from tests.simulated import device

    device.load(path, DEVICES)
    ranks.serve(*args)


def _call(function: Callable[..., Any], args: tuple[Any, ...], schedule: str, seed: int) -> Any:
    from tests.simulated import device

    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank % DEVICES)
    device.schedule(schedule, seed + rank)
    device.take_counts()
    value = function(*args)
    device.drain()
    return tree_map_only(Tensor, lambda t: t.cpu(), value)
