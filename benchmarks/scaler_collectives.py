"""Collectives and bytes of one scaler iteration on a 2-D mesh, counted beside torch's scalers.

    OMP_NUM_THREADS=1 python -m benchmarks.scaler_collectives

Four gloo ranks, FSDP2 over "dp" and tensor parallel over "tp"; each optimizer holds parameters of
two dtypes. Counted are step and update; the optimizers' step does nothing. Bytes are what one rank
hands to the collectives.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from benchmarks.common import command, table
from benchmarks.scaler_round import SCALERS, NoStep, take
from tests.collectives import count_collectives
from tests.ranks import RankPool, mesh

STEP_ALL = "distamp, step_all"


def count(name: str, optimizers: int) -> tuple[int, int]:
    """Return collectives and bytes of an iteration on this rank."""
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
    scaler: Any = SCALERS[name.split(",")[0]]("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    with count_collectives() as seen:
        take(scaler, opts, name == STEP_ALL)
    return seen.count, seen.bytes


def main() -> None:
    """Count the collectives and bytes of one rank in an iteration."""
    with RankPool(4, timeout=300) as pool:
        rows = (
            [name, number, *pool.run(count, name, number)[0]]
            for name in (STEP_ALL, *SCALERS)
            for number in (1, 2, 4)
        )
        table(["scaler", "optimizers", "collectives", "bytes"], rows)


if __name__ == "__main__":
    command(main)
