"""Ranks on hosts with links of a real rate. Only root can make such hosts."""

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
    """Call ``module.rank(**options)`` on ``local`` ranks of each host, and return all results.

    The options and the results must be JSON. ``rate`` and ``congestion`` are arguments of
    `tests.netns.Hosts`. ``timeout`` is in seconds.
    """
    # torchrun sets these variables too, but its agents would import torch in more processes.
    environment = {
        "OMP_NUM_THREADS": "1",
        # torch warns that it cannot name the peers of a socket.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(hosts * local),
        "LOCAL_WORLD_SIZE": str(local),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(hosts, rate, congestion=congestion) as network,
    ):
        results_path = Path(folder) / "results"
        command = [sys.executable, "-m", "benchmarks.shaped", module, results_path]
        command.append(json.dumps(options))
        environment["MASTER_ADDR"] = network[0].name
        processes = []
        for rank in range(hosts * local):
            host = network[rank // local]
            rank_environment = {"RANK": str(rank), "LOCAL_RANK": str(rank % local)}
            process = host.popen(command, env=os.environ | environment | rank_environment)
            processes.append(process)
        for process in processes:
            if process.wait(timeout) != 0:
                raise SystemExit("a rank failed")
        results: list[Any] = json.loads(results_path.read_text())
    return results


def main() -> None:
    """Call the module's function on one rank. The first rank writes the results of all ranks."""
    module, results_path, options = sys.argv[1:]
    torch.set_num_threads(1)
    # If the first import of this module happens in a process group, the group's threads never end.
    importlib.import_module("torch._dynamo")
    measure = importlib.import_module(module).rank
    dist.init_process_group("gloo")
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, measure(**json.loads(options)))
    if dist.get_rank() == 0:
        Path(results_path).write_text(json.dumps(results))
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
