"""A DDP training step of 25 million parameters with each hook, with torch's, and without a hook.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_step [--ranks 2 4] [--rounds 15]
    python -m benchmarks.comm_hooks_step --device cuda --ranks N

Every contender has a copy of the model under DDP, and the contenders take their steps in turn on
all ranks. On an accelerator each rank has a separate device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import (
    Timings,
    format_median,
    format_ratio,
    interleave,
    print_table,
    run_command,
    slowest_times,
)
from distamp import comm_hooks
from tests.ranks import RankPool

FP32 = "fp32"
TORCH = "torch fp16"
WIDTH = 1776
LAYERS = 8
WARMUP = 2


def register(model: DistributedDataParallel, name: str, **settings: Any) -> Any:
    """Register torch's hook, or a format of distamp. Return the hook of distamp, or None."""
    if name == TORCH:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name in comm_hooks.COMM_FORMATS:
        return comm_hooks.register_comm_hook(model, name, **settings)
    return None


def time_steps(
    formats: Sequence[str],
    rounds: int,
    width: int = WIDTH,
    layers: int = LAYERS,
    ranks_per_host: int | None = None,
    device: str = "cpu",
) -> tuple[Timings, dict[str, float]]:
    """Time steps without a hook, with torch's and with distamp's in turn.

    Collective: every rank must call this.

    Args:
        formats: Formats of distamp.
        rounds: Number of timed steps of each.
        width: Width of the linear layers of the model.
        layers: Number of the linear layers.
        ranks_per_host: As for `distamp.comm_hooks.register_comm_hook`.
        device: Device type of this rank.

    Returns:
        The seconds of the steps and the bytes of one step on this rank. The bytes come from the
        formula of a ring all-reduce, or from the counts of a hook.
    """
    if device != "cpu":
        torch.accelerator.set_device_index(dist.get_rank())
    steps: dict[str, Callable[[], None]] = {}
    hooks: dict[str, Any] = {}
    for name in (FP32, TORCH, *formats):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
        model = DistributedDataParallel(net)
        hooks[name] = register(model, name, ranks_per_host=ranks_per_host)
        steps[name] = make_step(model, torch.randn(1, width, device=device))
    times = interleave(steps, rounds, warmup=WARMUP, setup=dist.barrier)
    world_size = dist.get_world_size()
    numel = (width + 1) * width * layers
    ring_numel = 2 * (world_size - 1) / world_size * numel
    sent = {FP32: 4 * ring_numel, TORCH: 2 * ring_numel}
    for name in formats:
        sent[name] = hooks[name].stats().total_bytes / (rounds + WARMUP)
    return times, sent


def make_step(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass."""

    def step() -> None:
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()

    return step


def main(
    *,
    ranks: Sequence[int] = (2, 4),
    rounds: int = 15,
    width: int = WIDTH,
    wires: Sequence[str] = ("fp16", "bf16", "int8"),
    device: str = "cpu",
) -> None:
    """Compare a training step with each hook, with torch's hook and without a hook.

    Args:
        ranks: Numbers of ranks.
        rounds: Number of timed steps of each contender.
        width: Width of each layer.
        wires: Formats of distamp's hooks.
        device: cpu, or cuda with a rank on each GPU.
    """
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
    for world_size in ranks:
        with RankPool(world_size, timeout=1800, backend=backend) as pool:
            results = pool.run(time_steps, wires, rounds, width, LAYERS, None, device)
        times = slowest_times([rank_times for rank_times, _ in results])
        _, sent = results[0]
        header = ["", "ms", "ratio to torch's hook", "ratio to no hook", "MB a rank"]
        print_table(header, make_rows(times, sent), f"{world_size} ranks")


def make_rows(times: Timings, sent: Mapping[str, float]) -> Iterator[list[str]]:
    """Yield the row of each contender."""
    for name, seconds in times.items():
        to_torch = format_ratio(seconds, times[TORCH])
        to_fp32 = format_ratio(seconds, times[FP32])
        megabytes = sent[name] / 1e6
        yield [name, format_median(seconds), to_torch, to_fp32, f"{megabytes:.1f}"]


if __name__ == "__main__":
    run_command(main)
