"""The processor time that a hook with error feedback adds to ``scaler.step``, as a ratio.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_scaler --parameters 580 --buckets 145

On two ranks, a scaler with a hook and a scaler without one step and update in turn. The gradients
stay the same.
"""

import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import Timings, format_ratio, interleave, run_command
from distamp import DistGradScaler, comm_hooks
from tests.ranks import RankPool

NUMEL = 700


def make_step(num_params: int, buckets: int, with_hook: bool) -> Callable[[], None]:
    """Return a function that steps a scaler and updates its scale."""
    params = [nn.Parameter(torch.zeros(NUMEL)) for _ in range(num_params)]
    for param in params:
        param.grad = torch.ones(NUMEL)
    optimizer = torch.optim.SGD(params, lr=0.0)
    scaler = DistGradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    if with_hook:
        hook = comm_hooks.CommHook("int8")
        scaler.attach_comm_hook(hook)
        bucket_size = num_params // buckets
        for start in range(0, num_params, bucket_size):
            bucket = params[start : start + bucket_size]
            hook.all_reduce_mean(torch.ones(NUMEL * len(bucket)), bucket).wait()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def time_steps(num_params: int, buckets: int, rounds: int) -> Timings:
    """Time a step with a hook and a step without one on this rank."""
    steps = {
        "without": make_step(num_params, buckets, with_hook=False),
        "with": make_step(num_params, buckets, with_hook=True),
    }
    return interleave(steps, rounds, warmup=3, clock=time.process_time)


def main(*, parameters: int = 580, buckets: int = 145, rounds: int = 100) -> None:
    """Print the ratio of each rank."""
    with RankPool(2, timeout=600) as pool:
        ranks = pool.run(time_steps, parameters, buckets, rounds)
    for rank, times in enumerate(ranks):
        ratio = format_ratio(times["with"], times["without"])
        print(f"rank {rank}: a step with a hook takes {ratio} of the time without one")


if __name__ == "__main__":
    run_command(main)
