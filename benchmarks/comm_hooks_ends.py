"""Processes that end right after a hook's last exchange: how many abort.

    python -m benchmarks.comm_hooks_ends --times 50

Each time two pairs of ranks: of one the ranks destroy their group first, of the other they do not.
A process that aborts ends with SIGABRT, -6.
"""

import argparse
import subprocess
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks


def rank(number: int, port: int, destroy: bool) -> None:
    """Average two backward passes' gradients, and end."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    comm_hooks.register(model, "int8")
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    if destroy:
        dist.destroy_process_group()


def main() -> None:
    """Print how many processes ended with which code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--rank", type=int, nargs=3)
    given = parser.parse_args()
    if given.rank:
        rank(given.rank[0], given.rank[1], bool(given.rank[2]))
        return
    codes: Counter[int] = Counter()
    for turn in range(2 * given.times):
        command = [sys.executable, "-m", __spec__.name, "--rank"]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = str(store.port)
        pair = [
            subprocess.Popen([*command, str(each), port, str(turn % 2)], stderr=subprocess.PIPE)
            for each in range(2)
        ]
        for each in pair:
            each.communicate()
            codes[each.returncode] += 1
    print(f"{sum(codes.values())} processes ended: {dict(codes)}")


if __name__ == "__main__":
    main()
