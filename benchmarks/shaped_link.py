"""A step of a 25 M-parameter transformer between hosts: no hook, torch's hook, distamp's formats.

    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link [--wrapper ddp] [--rate 100mbit]
        [--hosts 4] [--local 1] [--rounds 5] [--only fp32 "torch fp16" fp16]
    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link --wrapper fsdp2 --hosts 2 --local 2

Hosts are network namespaces joined by links of the given rate (tests/netns.py), with one rank or
several on each. Every contender has a copy of the model, and the contenders take their steps in
turn. A step takes as long as its slowest rank. The bytes come from the host's interface, without
packet headers. ``compute`` is the same step without messages. Under FSDP2 ``bf16 policy`` is
torch's, with weights and gradients in bf16, and ``int8 both`` gathers weights in int8 too.
"""

import ast
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's name for it)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm_hooks_step import FP32, TORCH, WARMUP, register
from benchmarks.common import (
    Timings,
    format_median,
    format_ratio,
    interleave,
    print_table,
    run_command,
    slowest_times,
)
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
    """Compare steps with each hook, with torch's hook and without a hook between hosts.

    Args:
        wrapper: Wrapper of the model.
        rate: Rate of each link, as tc writes it.
        hosts: Number of hosts.
        local: Number of ranks on each host.
        congestion: TCP's congestion control, one of net.ipv4.tcp_allowed_congestion_control.
        rounds: Number of timed steps of each contender.
        only: Contenders to measure. The default is all of them.
    """
    options = {"wrapper": wrapper, "names": only or CONTENDERS[wrapper], "rounds": rounds}
    ranks = run_on_hosts(
        "benchmarks.shaped_link",
        hosts,
        options,
        7200,
        local=local,
        rate=rate,
        congestion=congestion,
    )
    millions = ranks[0]["parameters"] / 1e6
    slowest_link = min(rank["link"] for rank in ranks)
    title = (
        f"{wrapper}, {millions:.1f} M parameters, {hosts} hosts of {local} ranks, {rate}, "
        f"congestion control {congestion}; the slowest link carries {slowest_link:.0f} Mbit/s of "
        "payload"
    )
    times = slowest_times([rank["times"] for rank in ranks])
    peers = [peer for peer in (FP32, TORCH, POLICY) if peer in times]
    columns = ["step with", "seconds", *(f"ratio to {peer}" for peer in peers), "MB sent"]
    if peers:
        columns.append(f"bytes of {peers[-1]}")
    print_table(columns, make_rows(times, ranks[0]["sent"], peers), title)


def make_rows(times: Timings, sent: dict[str, int], peers: list[str]) -> Iterator[list[str]]:
    """Yield the row of each contender: its time, its bytes, and their ratios to the peers."""
    for name, seconds in times.items():
        row = [name, format_median(seconds, 1)]
        row += [format_ratio(seconds, times[peer]) for peer in peers]
        row.append(f"{sent[name] / 1e6:.2f}")
        if peers:
            row.append(f"{sent[name] / sent[peers[-1]]:.2f}")
        yield row


def rank(wrapper: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Measure the seconds of each step on this rank, and the bytes that leave its host in one."""
    inputs, targets = read_tokens()
    wrap = wrap_in_ddp if wrapper == "ddp" else shard_by_fsdp2
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        torch.manual_seed(0)
        model = GPT(SIZE, 256)
        numel = sum(p.numel() for p in model.parameters())
        wrapped = wrap(model, name)
        steps[name] = functools.partial(run_step, wrapped, inputs, targets, name != COMPUTE)
    speed = measure_link()
    times = interleave(steps, rounds, warmup=WARMUP, setup=dist.barrier)
    sent = {name: count_sent_bytes(step) for name, step in steps.items()}
    return {"link": speed, "parameters": numel, "times": times, "sent": sent}


def run_step(model: Any, inputs: Tensor, targets: Tensor, synchronizes: bool) -> None:
    """Run a forward and a backward pass, which sends gradients unless told otherwise."""
    model.zero_grad()
    with contextlib.nullcontext() if synchronizes else model.no_sync():
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


def count_sent_bytes(step: Callable[[], object]) -> int:
    """Return the bytes that leave this host in one more step."""
    dist.barrier()
    bytes_before = netns.sent()
    step()
    dist.barrier()
    return netns.sent() - bytes_before


def wrap_in_ddp(model: nn.Module, name: str) -> nn.Module:
    """Wrap a model in DDP with the hook of a contender."""
    # The ranks have the same weights, and sending them would take longer than a step.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    register(wrapped, name)
    return wrapped


def shard_by_fsdp2(model: GPT, name: str) -> nn.Module:
    """Shard a model by FSDP2 with the policy and the hook of a contender."""
    policy = MixedPrecisionPolicy()
    if name == POLICY:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    elif name == BOTH:
        # The weights are gathered in int8, and the model computes in bf16.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    if name == BOTH:
        comm_hooks.register_comm_hook(model, "int8", param_format="int8")
    elif name not in (FP32, POLICY):
        comm_hooks.register_comm_hook(model, name)
    return model


def read_tokens() -> tuple[Tensor, Tensor]:
    """Return inputs and targets from the source of Python, which differ between ranks."""
    source = Path(ast.__file__).read_bytes()
    start = dist.get_rank() * 1000
    text = bytearray(source[start : start + SIZE.seq_len + 1])
    row = torch.frombuffer(text, dtype=torch.uint8).long()[None]
    return row[:, :-1], row[:, 1:]


def measure_link(megabytes: int = 8) -> float:
    """Return the Mbit/s of payload that each rank sends to the next one, while all ranks send.

    This is the best of three, and no rank computes meanwhile.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data, received = torch.zeros(2, megabytes << 20, dtype=torch.uint8)
    best = 0.0
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        receive = dist.irecv(received, (rank - 1) % world_size)
        send = dist.isend(data, (rank + 1) % world_size)
        for work in (receive, send):
            assert work is not None
            work.wait()
        seconds = time.perf_counter() - start
        best = max(best, data.numel() * 8e-6 / seconds)
    return best


if __name__ == "__main__":
    run_command(main)
