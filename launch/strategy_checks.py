"""Which strategies cannot be: with so many ranks, on this device, with these other flags."""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
import torch.distributed as dist

from launch.config import Config
from launch.errors import UsageError
from launch.ranks import Ranks
from launch.strategies import STRATEGIES, chosen, data_parallel_size, shards_of

__all__ = ["check_strategy"]

# The flags of some strategies alone.
_OWNERS = {
    "replicas": ("dp",),
    "shards": ("hsdp",),
    "tp": ("fsdp2+tp",),
    "gather_fp32": ("fsdp2", "hsdp", "fsdp2+tp"),
}


def check_strategy(config: Config, ranks: Ranks, device: torch.device) -> None:
    """Refuse combinations that cannot be, before anything is built.

    Raises:
        UsageError: Naming what was given and what is allowed.
    """
    name, strategy = chosen(config, ranks)
    world, flag = ranks.world_size, f"--strategy {name}"
    alone = strategy.one_too and dist.is_initialized()
    if strategy.several and world == 1 and not alone:
        raise UsageError(f"{flag}: it needs several ranks; torchrun --nproc-per-node 2 starts two")
    if not strategy.several and world > 1:
        raise UsageError(f"{flag}: it is for one process, and there are {world} ranks; take ddp")
    if strategy.device is not None and device.type != strategy.device:
        raise UsageError(f"{flag}: it needs {strategy.device} and this is {device.type}")
    if strategy.package is not None and find_spec(strategy.package) is None:
        raise UsageError(f"{flag}: no fairscale here; pip install -e '.[fairscale]' brings it")
    if config.adamw is not None and config.adamw not in strategy.adamw:
        raise UsageError(
            f"--adamw {config.adamw}: {name} has parameters of two meshes in one optimizer, and"
            f" needs --adamw {strategy.adamw[0]}"
        )
    if config.comm_hook is not None and not strategy.hooked:
        fit = ", ".join(name for name, each in STRATEGIES.items() if each.hooked)
        raise UsageError(f"--comm-hook {config.comm_hook}: it is for {fit}, and this is {name}")
    wire = config.wire
    if wire is not None and wire.needs_error_feedback and strategy.sharded:
        raise UsageError(
            f"--comm-hook {wire.name}: it needs error feedback, which sharded gradients have not;"
            f" it is for ddp and zero1, and this is {name}"
        )
    shards = shards_of(config, ranks)
    if name == "hsdp" and (world % shards or shards < 2 or shards == world):
        raise UsageError(
            f"--shards {shards}: {world} ranks must be two or more groups of two or more,"
            f" all of that size{_divisors(world)}"
        )
    if name == "fsdp2+tp":
        _check_tp(config, world)
    for setting, owners in _OWNERS.items():
        if getattr(config, setting) != getattr(Config, setting) and name not in owners:
            raise UsageError(
                f"--{setting.replace('_', '-')}: it is for --strategy {' or '.join(owners)}, and"
                f" this is {name}"
            )
    config.check_batch(data_parallel_size(config, ranks))
    if name == "dp" and config.replicas is not None and config.replicas < 1:
        raise UsageError(f"--replicas {config.replicas}: it must be 1 or more")


def _divisors(world: int) -> str:
    fit = [n for n in range(2, world) if world % n == 0]
    return f" (say {fit[0]})" if fit else "; this many ranks cannot be; take fsdp2"


def _check_tp(config: Config, world: int) -> None:
    tp, heads = config.tp, config.shape.heads
    if tp < 2 or world % tp or world == tp:
        raise UsageError(
            f"--tp {tp}: {world} ranks must be two or more groups of that many, each of two or"
            f" more{_divisors(world)}"
        )
    if heads % tp:
        raise UsageError(
            f"--tp {tp}: it must divide --heads {heads} (say --heads {math.lcm(heads, tp)})"
        )
