"""Ranks on hosts whose links have a real rate; root alone can make them."""

import gc
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.netns import Hosts

__all__ = ["run_on_hosts"]


def run_on_hosts(
    module: str,
    hosts: int,
    options: dict[str, Any],
    timeout: float,
    *,
    local: int = 1,
    rate: str | None = None,
    congestion: str | None = None,
) -> list[Any]:
    """Call ``module.rank(**options)`` on ``local`` ranks of each host; return what each returned.

    Options, and what is returned, must be writable as JSON. ``rate`` and ``congestion`` are as of
    `tests.netns.Hosts`; ``timeout`` is in seconds.
    """
    # As torchrun would start them, without waiting for as many more processes to import torch.
    shared = {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it cannot name the peers of a socket
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(hosts * local),
        "LOCAL_WORLD_SIZE": str(local),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(hosts, rate, congestion=congestion) as network,
    ):
        answer = Path(folder) / "answer"
        command = [sys.executable, "-m", "benchmarks.shaped", module, answer, json.dumps(options)]
        shared["MASTER_ADDR"] = network[0].name
        started = []
        for number in range(hosts * local):
            rank = {"RANK": str(number), "LOCAL_RANK": str(number % local)}
            host = network[number // local]
            started.append(host.popen(command, env=os.environ | shared | rank))
        if any(each.wait(timeout) for each in started):
            raise SystemExit("a rank failed")
        returned: list[Any] = json.loads(answer.read_text())
    return returned


def main() -> None:
    """Be one rank: call the module's function in a process group; the first writes all answers."""
    module, answer, options = sys.argv[1:]
    torch.set_num_threads(1)
    # Imported while a group exists, it would keep the group's threads alive for ever.
    importlib.import_module("torch._dynamo")
    measure = importlib.import_module(module).rank
    dist.init_process_group("gloo")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measure(**json.loads(options)))
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps(everyone))
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
