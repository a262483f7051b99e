"""Processes that end right after a hook's last exchange: how many abort.

    python -m benchmarks.comm_hooks_ends --times 50

Each time two pairs of ranks: of one the ranks destroy their group first, of the other they do not.
A process that aborts ends with SIGABRT, -6.
"""

import multiprocessing
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import command
from distamp import comm_hooks


def rank(number: int, port: int, destroy: bool) -> None:
    """Average two backward passes' gradients, and end."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    comm_hooks.register_comm_hook(model, "int8")
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    if destroy:
        dist.destroy_process_group()


def main(*, times: int = 50) -> None:
    """Print how many processes ended with which code."""
    processes = multiprocessing.get_context("spawn")
    codes: Counter[int | None] = Counter()
    for destroy in [False, True] * times:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given = [(number, store.port, destroy) for number in range(2)]
        pair = [processes.Process(target=rank, args=each) for each in given]
        for each in pair:
            each.start()
        for each in pair:
            each.join()
            codes[each.exitcode] += 1
    print(f"{codes.total()} processes ended: {dict(codes)}")


if __name__ == "__main__":
    command(main)
