"""Collectives and bytes of one scaler iteration on a 2-D mesh, counted beside torch's scalers.

    OMP_NUM_THREADS=1 python -m benchmarks.scaler_collectives

Four gloo ranks, FSDP2 over "dp" and tensor parallel over "tp"; each optimizer holds parameters of
two dtypes. Counted are step and update; the optimizers' step does nothing. Bytes are what one rank
hands to the collectives.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from benchmarks.common import environment, markdown
from benchmarks.scaler_round import NoStep
from distamp import DistGradScaler
from tests.collectives import count_collectives
from tests.ranks import RankPool, mesh

OPTIMIZERS = (1, 2, 4)
# The first messages of a group leave room for a gradient norm; this many make it settle.
ITERATIONS = 12


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(environment())
    header = ["scaler", "optimizers", "collectives", "bytes", "first iteration"]
    rows: list[list[str]] = []
    with RankPool(4, timeout=300) as pool:
        for name in ("distamp, step_all", "distamp, step", "GradScaler", "ShardedGradScaler"):
            for optimizers in OPTIMIZERS:
                first, last = pool.run(count, name, optimizers)[0]
                then = f"{first[0]} ({first[1]} bytes)" if first != last else "the same"
                rows.append([name, str(optimizers), str(last[0]), str(last[1]), then])
    print("\nCollectives and bytes of one rank per iteration: 2 dtypes, (dp=2, tp=2) mesh\n")
    print(markdown(header, rows))


def count(name: str, optimizers: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return collectives and bytes of the first and of the last iteration on this rank."""
    device_mesh = mesh((2, 2), ("dp", "tp"))
    opts = []
    for _ in range(optimizers):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
        parallelize_module(model, device_mesh["tp"], {str(i): ColwiseParallel() for i in range(2)})
        for layer in model:
            fully_shard(layer, mesh=device_mesh["dp"])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        opts.append(NoStep(list(model.parameters())))
    # ShardedGradScaler's flag has shape (1,), of which DTensor warns.
    warnings.filterwarnings("ignore", message="Found a non-scalar tensor")
    run = _iteration(name, opts)
    counts = []
    for _ in range(ITERATIONS):
        with count_collectives() as seen:
            run()
        counts.append((seen.count, seen.bytes))
    return counts[0], counts[-1]


def _iteration(name: str, opts: list[torch.optim.Optimizer]) -> Callable[[], None]:
    kinds: dict[str, Any] = {
        "GradScaler": torch.amp.GradScaler,
        "ShardedGradScaler": ShardedGradScaler,
    }
    scaler = kinds.get(name, DistGradScaler)("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))

    def run() -> None:
        if name == "distamp, step_all":
            scaler.step_all(opts)
        else:
            for optimizer in opts:
                scaler.step(optimizer)
        scaler.update()

    return run


if __name__ == "__main__":
    main()
