"""The number of processes that abort after the last message of a hook.

    python -m benchmarks.comm_hooks_ends --times 50

Each time, two pairs of ranks run. In the first pair the process group exists until the processes
end. The second pair destroys its process group first. A process that aborts ends with SIGABRT, -6.
"""

import multiprocessing
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import run_command
from distamp import comm_hooks


def run_rank(rank: int, port: int, destroy: bool) -> None:
    """Average the gradients of two backward passes, and end."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    comm_hooks.register_comm_hook(model, "int8")
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    if destroy:
        dist.destroy_process_group()


def main(*, times: int = 50) -> None:
    """Print the number of processes with each exit code."""
    context = multiprocessing.get_context("spawn")
    exit_codes: Counter[int | None] = Counter()
    for destroy in [False, True] * times:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = []
        for rank in range(2):
            process = context.Process(target=run_rank, args=(rank, store.port, destroy))
            process.start()
            processes.append(process)
        for process in processes:
            process.join()
            exit_codes[process.exitcode] += 1
    print(f"{exit_codes.total()} processes ended: {dict(exit_codes)}")


if __name__ == "__main__":
    run_command(main)
