"""A DDP training step of 25 million parameters: each hook beside torch's and beside none.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_step [--ranks 2 4] [--rounds 15]
    torchrun --nproc-per-node N -m benchmarks.comm_hooks_step --device cuda

Every contender has its own copy of the model under DDP; steps are taken in turn on all ranks.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Timings, environment, interleave, markdown, ratio, slowest
from distamp import comm_hooks
from tests.ranks import RankPool

NONE, TORCH = "no hook (fp32)", "torch's fp16_compress_hook"
WIDTH, LAYERS = 1776, 8
WARMUP = 2


def time_steps(
    contenders: Sequence[str],
    rounds: int,
    width: int = WIDTH,
    layers: int = LAYERS,
    ranks_per_host: int | None = None,
    device: str = "cpu",
) -> tuple[Timings, dict[str, float], list[str]]:
    """Time steps of all contenders in turn, on every rank of the default group.

    Args:
        contenders: `NONE`, `TORCH`, wire formats or ``"auto"``.
        rounds: Timed steps of each.
        width: Of the linear layers that the model is made of.
        layers: Their number.
        ranks_per_host: As for `distamp.comm_hooks.register`.
        device: Where this rank computes.

    Returns:
        Seconds and bytes of one step, on this rank, and what ``"auto"`` chose.
    """
    steps: dict[str, Callable[[], None]] = {}
    states: dict[str, Any] = {}
    for name in contenders:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
        wrapped = DistributedDataParallel(model)
        if name == TORCH:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name != NONE:
            states[name] = comm_hooks.register(wrapped, name, ranks_per_host=ranks_per_host)
        steps[name] = _step(wrapped, torch.randn(1, width, device=device))
    timings = interleave(steps, rounds, warmup=WARMUP, before=dist.barrier)
    # By a ring all-reduce, unless a hook has counted.
    size, numel = dist.get_world_size(), (width + 1) * width * layers
    ring = 2 * (size - 1) / size * numel * 4
    sent = {name: ring / 2 if name == TORCH else ring for name in contenders}
    for name, state in states.items():
        if state.stats().exchanges:
            sent[name] = state.stats().total_bytes / (rounds + WARMUP)
    return timings, sent, [str(states["auto"].stats().choice)] if "auto" in states else []


def _step(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step


def _report(ranks: Sequence[Any]) -> None:
    """Print the table of one number of ranks."""
    times = slowest([timings for timings, *_ in ranks])
    _, sent, choices = ranks[0]
    rows = [
        [
            name,
            f"{statistics.median(mine) * 1e3:.0f}",
            ratio(mine, times[TORCH]),
            ratio(mine, times[NONE]),
            f"{sent[name] / 1e6:.1f}",
            f"{sent[name] / sent[NONE]:.3f}" if len(ranks) > 1 else "nothing is sent",
        ]
        for name, mine in times.items()
    ]
    head = ["", "ms", "beside torch's", "beside none", "MB a rank", "of fp32's bytes"]
    print(f"\n{len(ranks)} ranks\n", markdown(head, rows), *choices, sep="\n", flush=True)


def _on_devices(*given: Any) -> list[Any] | None:
    """Time steps on the ranks that torchrun has started, each on an accelerator of its own."""
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, time_steps(*given))
    rank = dist.get_rank()
    dist.destroy_process_group()
    return None if rank else everyone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--wires", nargs="+", default=["fp16", "bf16", "int8", "auto"])
    parser.add_argument("--device", default="cpu", help="cuda: a rank on each GPU, by torchrun")
    given = parser.parse_args()
    steps = ([NONE, TORCH, *given.wires], given.rounds, given.width, given.layers, None)
    if given.device != "cpu":
        if (everyone := _on_devices(*steps, given.device)) is not None:
            print(environment())
            _report(everyone)
        return
    print(environment())
    for size in given.ranks:
        with RankPool(size, timeout=1800) as pool:
            _report(pool.run(time_steps, *steps))


if __name__ == "__main__":
    main()
