"""A DDP training step of 25 million parameters: each hook beside torch's and beside none.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_step [--ranks 2 4] [--rounds 15]
    python -m benchmarks.comm_hooks_step --device cuda --ranks N

Every contender has its own copy of the model under DDP; steps are taken in turn on all ranks. On
a device each rank has one of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Timings, command, interleave, median, ratio, slowest, table
from distamp import comm_hooks
from tests.ranks import RankPool

FP32, TORCH = "fp32", "torch fp16"
WIDTH, LAYERS, WARMUP = 1776, 8, 2


def register(model: DistributedDataParallel, name: str, **settings: Any) -> Any:
    """Register torch's hook, or distamp's for a wire format; return the state of the latter."""
    if name == TORCH:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name in comm_hooks.COMM_FORMATS:
        return comm_hooks.register_comm_hook(model, name, **settings)
    return None


def time_steps(
    wires: Sequence[str],
    rounds: int,
    width: int = WIDTH,
    layers: int = LAYERS,
    ranks_per_host: int | None = None,
    device: str = "cpu",
) -> tuple[Timings, dict[str, float]]:
    """Time steps without a hook, with torch's and with ours in turn, on every rank.

    Args:
        wires: Formats of ours.
        rounds: Timed steps of each.
        width: Of the linear layers that the model is made of.
        layers: Their number.
        ranks_per_host: As for `distamp.comm_hooks.register_comm_hook`.
        device: Where this rank computes.

    Returns:
        Seconds and bytes of one step, on this rank: those of a ring, or what a hook counted.
    """
    if device != "cpu":
        torch.accelerator.set_device_index(dist.get_rank())
    steps: dict[str, Callable[[], None]] = {}
    states: dict[str, Any] = {}
    for name in (FP32, TORCH, *wires):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
        model = DistributedDataParallel(net)
        states[name] = register(model, name, ranks_per_host=ranks_per_host)
        steps[name] = _step(model, torch.randn(1, width, device=device))
    timings = interleave(steps, rounds, warmup=WARMUP, before=dist.barrier)
    size, numel = dist.get_world_size(), (width + 1) * width * layers
    ring = 2 * (size - 1) / size * numel
    sent = {FP32: 4 * ring, TORCH: 2 * ring}
    sent |= {name: states[name].stats().total_bytes / (rounds + WARMUP) for name in wires}
    return timings, sent


def _step(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step


def main(
    *,
    ranks: Sequence[int] = (2, 4),
    rounds: int = 15,
    width: int = WIDTH,
    wires: Sequence[str] = ("fp16", "bf16", "int8"),
    device: str = "cpu",
) -> None:
    """Compare a training step with each hook with torch's hook and with none.

    Args:
        ranks: How many; one number or several.
        rounds: Timed steps of each.
        width: Of each layer.
        wires: Formats of distamp's hooks.
        device: cpu, or cuda, with a rank on each GPU.
    """
    for size in ranks:
        backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
        with RankPool(size, timeout=1800, backend=backend) as pool:
            found = pool.run(time_steps, wires, rounds, width, LAYERS, None, device)
        times, sent = slowest([each for each, _ in found]), found[0][1]
        rows = (
            [
                name,
                median(mine),
                ratio(mine, times[TORCH]),
                ratio(mine, times[FP32]),
                f"{sent[name] / 1e6:.1f}",
            ]
            for name, mine in times.items()
        )
        header = ["", "ms", "beside torch's", "beside none", "MB a rank"]
        table(header, rows, f"{size} ranks")


if __name__ == "__main__":
    command(main)
