"""What a hook with error feedback adds to ``scaler.step``, as a ratio of processor time.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_scaler --parameters 580 --buckets 145

Two ranks. Scalers with and without a hook step and update in turn, on gradients that stay.
"""

import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import Timings, command, interleave, ratio
from distamp import DistGradScaler, comm_hooks
from tests.ranks import RankPool

NUMEL = 700


def time_steps(parameters: int, buckets: int, rounds: int) -> Timings:
    """Time `step` and `update` of both, on this rank of the default group."""
    steps: dict[str, Callable[[], object]] = {}
    for name in ("without", "with"):
        made = [nn.Parameter(torch.zeros(NUMEL)) for _ in range(parameters)]
        for each in made:
            each.grad = torch.ones(NUMEL)
        sgd, scaler = torch.optim.SGD(made, lr=0.0), DistGradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        if name == "with":
            state, count = comm_hooks.CommHook("int8"), parameters // buckets
            scaler.attach_comm_hook(state)
            for start in range(0, parameters, count):
                bucket = made[start : start + count]
                state.average(torch.ones(NUMEL * len(bucket)), bucket).wait()
        steps[name] = lambda scaler=scaler, sgd=sgd: (scaler.step(sgd), scaler.update())  # type: ignore[misc]
    return interleave(steps, rounds, warmup=3, clock=time.process_time)


def main(*, parameters: int = 580, buckets: int = 145, rounds: int = 100) -> None:
    """Print the ratio of each rank."""
    with RankPool(2, timeout=600) as pool:
        for rank, times in enumerate(pool.run(time_steps, parameters, buckets, rounds)):
            found = ratio(times["with"], times["without"])
            print(f"rank {rank}: step with a hook is {found} of without")


if __name__ == "__main__":
    command(main)
