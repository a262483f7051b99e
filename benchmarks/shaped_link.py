"""A step of a 25 M-parameter transformer between hosts: no hook, torch's hook, distamp's formats.

    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link [--wrapper ddp] [--rate 100mbit]
        [--hosts 4] [--local 1] [--rounds 5] [--only fp32 "torch fp16" fp16]
    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link --wrapper fsdp2 --hosts 2 --local 2

Hosts are network namespaces joined by links of the given rate (tests/netns.py), with one rank or
several on each. Every contender wraps a model of its own, and takes its step in turn with the
others. A step takes as long as its slowest rank. Bytes come from the host's interface, without
packet headers. ``compute`` is the same step with nothing sent. Under FSDP2 ``bf16 policy`` is
torch's own with weights and gradients in bf16, and ``int8 both`` gathers weights in int8, too.
"""

import ast
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm_hooks_step import FP32, TORCH, WARMUP, register
from benchmarks.common import command, interleave, median, ratio, slowest, table
from benchmarks.shaped import run_on_hosts
from distamp import comm_hooks
from launch.config import Config
from launch.model import GPT
from tests import netns

COMPUTE, POLICY, BOTH = "compute", "bf16 policy", "int8 both"
CONTENDERS = {
    "ddp": (COMPUTE, FP32, TORCH, *comm_hooks.COMM_FORMATS),
    "fsdp2": (FP32, POLICY, "fp16", "int8", BOTH),
}
SIZE = Config(layers=8, heads=8, d_model=512, seq_len=32)


def main(
    *,
    wrapper: Literal["ddp", "fsdp2"] = "ddp",
    rate: str = "100mbit",
    hosts: int = 4,
    local: int = 1,
    congestion: str = "cubic",
    rounds: int = 5,
    only: Sequence[str] = (),
) -> None:
    """Compare a step with each hook with torch's hook and with none, between hosts.

    Args:
        wrapper: What the model is wrapped in.
        rate: Of each link, as tc writes it.
        hosts: How many.
        local: Ranks of each host.
        congestion: TCP's congestion control, one of net.ipv4.tcp_allowed_congestion_control.
        rounds: Timed steps of each.
        only: Of the contenders; all of them, if not given.
    """
    options = {"wrapper": wrapper, "names": only or CONTENDERS[wrapper], "rounds": rounds}
    where: Any = {"local": local, "rate": rate, "congestion": congestion}
    ranks = run_on_hosts("benchmarks.shaped_link", hosts, options, 7200, **where)
    title = (
        f"{wrapper}, {ranks[0]['parameters'] / 1e6:.1f} M parameters, {hosts} hosts of {local} "
        f"ranks, {rate}, congestion control {congestion}; the slowest link carries "
        f"{min(rank['link'] for rank in ranks):.0f} Mbit/s of payload"
    )
    times, sent = slowest([rank["times"] for rank in ranks]), ranks[0]["sent"]
    peers = [each for each in (FP32, TORCH, POLICY) if each in times]
    rows = (
        [
            name,
            median(mine, 1),
            *(ratio(mine, times[peer]) for peer in peers),
            f"{sent[name] / 1e6:.2f}",
            *(f"{sent[name] / sent[peer]:.2f}" for peer in peers[-1:]),
        ]
        for name, mine in times.items()
    )
    beside = [f"of {peer}'s" for peer in peers]
    table(["step with", "seconds", *beside, "MB sent", *beside[-1:]], rows, title)


def rank(wrapper: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Measure on this rank: seconds of each step, and the bytes that left its host in one."""
    tokens = _tokens()
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        torch.manual_seed(0)
        model = GPT(SIZE, 256)
        numel = sum(p.numel() for p in model.parameters())
        wrapped = (_ddp if wrapper == "ddp" else _fsdp2)(model, name)
        steps[name] = functools.partial(_step, wrapped, tokens, name != COMPUTE)
    speed = link_speed()
    times = interleave(steps, rounds, warmup=WARMUP, before=dist.barrier)
    sent = {name: _sent_by(step) for name, step in steps.items()}
    return {"link": speed, "parameters": numel, "times": times, "sent": sent}


def _step(model: Any, tokens: tuple[Tensor, Tensor], sends: bool) -> None:
    model.zero_grad()
    with contextlib.nullcontext() if sends else model.no_sync():
        F.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten()).backward()


def _sent_by(step: Callable[[], object]) -> int:
    """Return the bytes that leave this host in one more step."""
    dist.barrier()
    before = netns.sent()
    step()
    dist.barrier()
    return netns.sent() - before


def _ddp(model: nn.Module, name: str) -> nn.Module:
    # Every rank has drawn the same weights: sending them would take longer than a step.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    register(wrapped, name)
    return wrapped


def _fsdp2(model: GPT, name: str) -> nn.Module:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    # In bf16 weights are computed with, whatever they are gathered in.
    policy = {POLICY: half, BOTH: MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    settings: Any = {"mp_policy": policy[name]} if name in policy else {}
    for part in (*model.blocks, model):
        fully_shard(part, **settings)
    if name not in (FP32, POLICY):
        gather = "int8" if name == BOTH else None
        comm_hooks.register_comm_hook(model, gather or name, param_format=gather)
    return model


def _tokens() -> tuple[Tensor, Tensor]:
    """Some of Python's own source, other bytes on each rank."""
    text = Path(ast.__file__).read_bytes()[dist.get_rank() * 1000 :][: SIZE.seq_len + 1]
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
    return row[:, :-1], row[:, 1:]


def link_speed(megabytes: int = 8) -> float:
    """Return how many Mbit/s of payload each rank sends to its neighbour, all at once.

    The best of three: what the links carry when nothing is computed.
    """
    number, size = dist.get_rank(), dist.get_world_size()
    data, received = torch.zeros(2, megabytes << 20, dtype=torch.uint8)
    best = 0.0
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        work = [dist.irecv(received, (number - 1) % size), dist.isend(data, (number + 1) % size)]
        for each in work:
            each.wait()  # type: ignore[union-attr]
        best = max(best, data.numel() * 8e-6 / (time.perf_counter() - began))
    return best


if __name__ == "__main__":
    command(main)
