"""Each way to average a bucket of gradients between a job's own ranks, and the hook to register.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        -m benchmarks.link [--megabytes 25] [--rounds 9]

The ways are torch's all-reduce of fp32 and of bf16, and the formats of `distamp.comm_hooks`, in two
levels where hosts have several ranks, and in one. A time is that of the slowest rank. Nothing is
computed meanwhile: a way that takes less time here takes less, or as much, during a backward pass.
"""

import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import cyclopts
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import describe_environment, format_median, interleave, print_table
from distamp import comm_hooks

NO_HOOK, TORCH_BF16 = "no hook", "torch bf16"
# The ways from the most exact to the least.
FORMATS = ("fp16", "bf16", "int8")
ONE_LEVEL = " in one level"
# A less exact way must be this much faster, so that numbers do not change for nothing.
MARGIN = 1.04


def select_way(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the most exact way with a median of at most 4 % above the fastest.

    Args:
        seconds: Times by way, the most exact way first.
    """
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    fastest = min(medians.values())
    return next(way for way, seconds in medians.items() if seconds <= MARGIN * fastest)


def call_for(way: str) -> str:
    """Return the line of a training script that sends gradients in this way."""
    if way == NO_HOOK:
        return "register no hook"
    if way == TORCH_BF16:
        hook = "comm_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)"
        return f"model.register_comm_hook(None, {hook})"
    name, _, level = way.partition(" ")
    options = ", ranks_per_host=1" if level else ""
    return f'comm_hooks.register_comm_hook(model, "{name}"{options})'


def make_ways(bucket: Tensor) -> dict[str, Callable[[], object]]:
    """Return functions that average ``bucket`` over the ranks, the most exact way first.

    Collective: every rank of the default group must call this.
    """

    def all_reduce(dtype: torch.dtype) -> None:
        sent = bucket.to(dtype).div_(dist.get_world_size())
        dist.all_reduce(sent)
        bucket.copy_(sent)

    ways: dict[str, Callable[[], object]] = {NO_HOOK: lambda: all_reduce(torch.float32)}
    for name in FORMATS:
        if name == "bf16":
            ways[TORCH_BF16] = lambda: all_reduce(torch.bfloat16)
        for level, ranks_per_host in (("", None), (ONE_LEVEL, 1)):
            layer = nn.Linear(bucket.numel(), 1, bias=False, device=bucket.device)
            model = DistributedDataParallel(layer)
            hook = comm_hooks.register_comm_hook(model, name, ranks_per_host=ranks_per_host)
            average = functools.partial(hook.all_reduce_mean, bucket, [layer.weight])
            if not hook.stats().left_off:
                ways[name + level] = lambda average=average: average().wait()
            if hook.stats().levels.startswith("one level"):
                break
    return ways


def time_ways(numel: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Time each way in each round; return the seconds of the slowest rank, by way.

    Collective: every rank of the default group must call this.

    Args:
        numel: Elements of the bucket, which is fp32.
        rounds: Timed rounds.
        device: Where the bucket is.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = torch.randn(numel, generator=generator).to(device)
    bucket = torch.empty_like(gradients)

    def prepare() -> None:
        bucket.copy_(gradients)
        dist.all_reduce(torch.zeros(1, device=device))

    timings = interleave(make_ways(bucket), rounds, setup=prepare)
    slowest = torch.tensor(list(timings.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(timings, slowest.tolist(), strict=True))


def main(*, megabytes: float = 25.0, rounds: int = 9) -> None:
    """Time each way, and print the hook to register.

    Args:
        megabytes: MiB of a bucket, as DDP's ``bucket_cap_mb``.
        rounds: How often each way is timed.
    """
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(torch.accelerator.current_accelerator().type)
    dist.init_process_group()
    if dist.get_rank() == 0:
        print(describe_environment())
    seconds = time_ways(int(megabytes * (1 << 18)), rounds, device)
    if dist.get_rank() == 0:
        fastest = min(statistics.median(times) for times in seconds.values())
        rows = []
        for way, times in seconds.items():
            share = statistics.median(times) / fastest
            rows.append([way, format_median(times), f"{share:.2f}", call_for(way)])
        print_table(["way", "ms a bucket", "of the fastest", "in your script"], rows)
        print(f"\nThe most exact way within 4 % of the fastest: {call_for(select_way(seconds))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cyclopts.run(main)
