"""Train with the launcher's own functions on the pool's ranks, without starting processes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launch.command_line import read
from launch.errors import UsageError
from launch.job import Job, prepare
from launch.ranks import Ranks
from launch.stopping import Preempted, Stop
from launch.train import train as train_job
from tests import ranks
from tests.launch import jobs

Rows = list[dict[str, Any]]


def here() -> Ranks:
    """This process among the pool's ranks, or alone."""
    if not dist.is_initialized():
        return Ranks(rank=0, local_rank=0, world_size=1)
    return Ranks(rank=dist.get_rank(), local_rank=0, world_size=dist.get_world_size())


def job(*args: object, stop: Stop | None = None) -> Job:
    return prepare(read([*map(str, args)], quiet=True), here(), stop)


def train(folder: Path, *runs: Sequence[object]) -> Rows:
    """Do one run after the other in one folder; return what metrics.jsonl then holds."""
    with contextlib.redirect_stdout(io.StringIO()):
        for args in runs:
            ready = job("--run-dir", folder, *args)
            with ready.report, contextlib.suppress(Preempted):
                train_job(ready)
            del ready
    if here().world_size > 1:
        dist.barrier()
        _keep_groups()
    return jobs.without_speed(jobs.records(folder))


def _keep_groups() -> None:
    """Leave the groups of meshes in place: torch finds a mesh's by its ranks and names again."""
    for group in list(dist.distributed_c10d._world.pg_map):
        ranks._kept[("launch", id(group))] = group


def refusal(*args: object) -> str:
    """The line that a run that cannot be is refused with."""
    try:
        job(*args)
    except UsageError as error:
        return str(error)
    return "was not refused"
