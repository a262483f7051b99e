"""A DDP training step of 25 million parameters: each hook beside torch's and beside none.

Every contender has its own copy of the model under DDP; steps are taken in turn on all ranks.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Timings, environment, interleave, markdown, ratio, slowest
from distamp import comm_hooks

__all__ = ["NONE", "TORCH", "bytes_of_a_step", "model_of", "step_of", "time_steps"]

NONE, TORCH = "no hook (fp32)", "torch's fp16_compress_hook"
WIDTH, LAYERS = 1776, 8


def model_of(width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    """Return ``layers`` square linear layers: 25 M parameters by default."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def step_of(
    contender: str,
    width: int = WIDTH,
    layers: int = LAYERS,
    rows: int = 1,
    device: str = "cpu",
    ranks_per_host: int | None = None,
) -> tuple[Callable[[], None], Any]:
    """Return one forward and backward pass under DDP with a hook, and the hook's state.

    To be called on every rank of the default group, with the same arguments.

    Args:
        contender: `NONE`, `TORCH`, a wire format or ``"auto"``.
        width: Of the layers.
        layers: Their number.
        rows: Of the batch on each rank; few, so that the step is communication.
        device: Where this rank computes.
        ranks_per_host: As for `distamp.comm_hooks.register`.
    """
    model = DistributedDataParallel(model_of(width, layers).to(device))
    state: Any = None
    if contender == TORCH:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif contender != NONE:
        state = comm_hooks.register(model, contender, ranks_per_host=ranks_per_host)
    batch = torch.randn(rows, width, device=device)

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step, state


def time_steps(
    contenders: Sequence[str],
    rounds: int,
    width: int = WIDTH,
    layers: int = LAYERS,
    device: str = "cpu",
    ranks_per_host: int | None = None,
) -> tuple[Timings, dict[str, float], list[str]]:
    """Time steps of all contenders in turn.

    Returns:
        Seconds and bytes of one step, on this rank, and what ``"auto"`` chose.
    """
    steps = {
        name: step_of(name, width, layers, device=device, ranks_per_host=ranks_per_host)
        for name in contenders
    }
    warmup = 2
    timings = interleave(
        {name: _waited_for(step, device) for name, (step, _) in steps.items()},
        rounds,
        warmup=warmup,
        before=dist.barrier,
    )
    numel = sum(p.numel() for p in model_of(width, layers).parameters())
    sent = {
        name: bytes_of_a_step(name, numel, state, rounds + warmup)
        for name, (_, state) in steps.items()
    }
    choices = [str(state.stats().choice) for name, (_, state) in steps.items() if name == "auto"]
    return timings, sent, choices


def _waited_for(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Return a step that ends when its device is done."""
    if device == "cpu":
        return step

    def whole() -> None:
        step()
        torch.accelerator.synchronize()

    return whole


def bytes_of_a_step(contender: str, numel: int, state: Any, steps: int) -> float:
    """Return what this rank gives to the network in a step: counted, or by a ring all-reduce."""
    if state is not None and state.stats().exchanges:
        return state.stats().total_bytes / steps
    size = dist.get_world_size()
    return 2 * (size - 1) / size * numel * (2 if contender == TORCH else 4)


def _report(size: int, contenders: Sequence[str], rounds: int, ranks: Any) -> None:
    """Print the table of one number of ranks."""
    times = slowest([timings for timings, *_ in ranks])
    _, sent, choices = ranks[0]
    rows = [
        [
            name,
            f"{sorted(times[name])[rounds // 2] * 1e3:.0f}",
            str(ratio(times[name], times[TORCH])),
            str(ratio(times[name], times[NONE])),
            f"{sent[name] / 1e6:.1f}",
            f"{sent[name] / sent[NONE]:.3f}" if size > 1 else "nothing is sent",
        ]
        for name in contenders
    ]
    print(f"\n{size} ranks {rounds} rounds in turn\n")
    head = ["", "ms", "beside torch's", "beside none", "MB a rank", "of fp32's bytes"]
    print(markdown(head, rows))
    for choice in choices:
        print(f"\n{choice}")


def _on_devices(contenders: Sequence[str], given: argparse.Namespace) -> None:
    """Time steps on the ranks that torchrun has started, each on an accelerator of its own."""
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    found = time_steps(contenders, given.rounds, given.width, given.layers, given.device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(environment())
        _report(dist.get_world_size(), contenders, given.rounds, everyone)
    dist.destroy_process_group()


def main() -> None:
    from tests.ranks import RankPool

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--wires", nargs="+", default=["fp16", "bf16", "int8", "auto"])
    parser.add_argument("--device", default="cpu", help="cuda: a rank on each GPU, by torchrun")
    given = parser.parse_args()
    contenders = [NONE, TORCH, *given.wires]
    if given.device != "cpu":
        _on_devices(contenders, given)
        return
    print(environment())
    for size in given.ranks:
        with RankPool(size, timeout=1800) as pool:
            ranks = pool.run(time_steps, contenders, given.rounds, given.width, given.layers)
        _report(size, contenders, given.rounds, ranks)


if __name__ == "__main__":
    main()
