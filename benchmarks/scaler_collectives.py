"""The collectives and bytes of one scaler iteration on a 2-D mesh, compared with torch's scalers.

    OMP_NUM_THREADS=1 python -m benchmarks.scaler_collectives

Four gloo ranks run FSDP2 over "dp" and tensor parallel over "tp". Each optimizer holds parameters
of two dtypes. The counts cover step and update, and the step of the optimizers does nothing. The
counted bytes are in the tensors that one rank passes to the collectives.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from benchmarks.common import print_table, run_command
from benchmarks.scaler_round import DISTAMP, SCALERS, NoStep, step_optimizers
from tests.collectives import count_collectives
from tests.ranks import RankPool, mesh

STEP_ALL = f"{DISTAMP}, step_all"


def count_iteration(name: str, num_optimizers: int) -> tuple[int, int]:
    """Return the collectives and bytes of an iteration on this rank."""
    device_mesh = mesh((2, 2), ("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": ColwiseParallel()}
    optimizers = []
    for _ in range(num_optimizers):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
        parallelize_module(model, device_mesh["tp"], plan)
        for layer in model:
            fully_shard(layer, mesh=device_mesh["dp"])
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizers.append(NoStep(list(model.parameters())))
    # DTensor warns about the shape (1,) of ShardedGradScaler's flag.
    warnings.filterwarnings("ignore", message="Found a non-scalar tensor")
    scaler_class = SCALERS[DISTAMP if name == STEP_ALL else name]
    scaler: Any = scaler_class("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    with count_collectives() as counts:
        step_optimizers(scaler, optimizers, name == STEP_ALL)
    return counts.count, counts.bytes


def main() -> None:
    """Count the collectives and bytes of one rank in an iteration."""
    with RankPool(4, timeout=300) as pool:

        def count_all() -> Iterator[list[object]]:
            for name in (STEP_ALL, *SCALERS):
                for num_optimizers in (1, 2, 4):
                    collectives, nbytes = pool.run(count_iteration, name, num_optimizers)[0]
                    yield [name, num_optimizers, collectives, nbytes]

        print_table(["scaler", "optimizers", "collectives", "bytes"], count_all())


if __name__ == "__main__":
    run_command(main)
