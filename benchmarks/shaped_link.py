"""A step of a 25 M-parameter transformer between hosts: no hook, torch's hook, distamp's formats.

    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link [--wrapper ddp] [--rate 100mbit]
        [--hosts 4] [--local 1] [--rounds 5] [--only fp32 "torch fp16" fp16 auto]
    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link --wrapper fsdp2 --hosts 2 --local 2

Hosts are network namespaces joined by links of the given rate (tests/netns.py), with one rank or
several on each. Every contender wraps a model of its own, and takes its step in turn with the
others. A step takes as long as its slowest rank. Bytes come from the host's interface, without
packet headers. ``compute`` is the same step with nothing sent; ``auto`` is what
``register(model, "auto")`` chose, which is printed. Under FSDP2 ``bf16 policy`` is torch's own with
weights and gradients in bf16, and ``int8 both`` gathers weights in int8, too.
"""

import argparse
import ast
import contextlib
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import environment, interleave, markdown, ratio, slowest
from benchmarks.shaped import run_on_hosts
from distamp import comm_hooks
from launch.config import Config
from launch.model import GPT
from tests.netns import Traffic

COMPUTE, FP32, TORCH = "compute", "fp32", "torch fp16"
POLICY, BOTH = "bf16 policy", "int8 both"
CONTENDERS = (COMPUTE, FP32, TORCH, *comm_hooks.WIRE_FORMATS)
SIZE = Config(layers=8, heads=8, width=512, block=32)
WARMUP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--rate", default="100mbit", help="of each link, as tc writes it")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--local", type=int, default=1, help="ranks of each host")
    parser.add_argument("--congestion", help="TCP's congestion control, if not the machine's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="of the contenders, and auto")
    given = parser.parse_args()
    names = given.only or (
        CONTENDERS if given.wrapper == "ddp" else (FP32, POLICY, "fp16", "int8", BOTH)
    )
    print(environment(), flush=True)
    ranks = run_on_hosts(
        "benchmarks.shaped_link",
        given.hosts,
        {"wrapper": given.wrapper, "names": names, "rounds": given.rounds},
        7200,
        local=given.local,
        rate=given.rate,
        congestion=given.congestion,
    )
    speed = min(rank["link"] for rank in ranks)
    print(
        f"{given.wrapper}, {ranks[0]['parameters'] / 1e6:.1f} M parameters, {given.hosts} hosts of"
        f" {given.local} ranks, {given.rate}, congestion control {given.congestion or 'as it is'};"
        f" the slowest link carries {speed:.0f} Mbit/s of payload\n"
    )
    times = slowest([rank["times"] for rank in ranks])
    rows = []
    for name, mine in times.items():
        peer = TORCH if given.wrapper == "ddp" else POLICY
        beside = [ratio(mine, times[each]) if each in times else "-" for each in (FP32, peer)]
        sent = ranks[0]["sent"][name]
        share = f"{sent / ranks[0]['sent'][peer]:.2f}" if peer in times else "-"
        rows.append([name, f"{statistics.median(mine):.2f}", *beside, f"{sent / 1e6:.2f}", share])
    bytes_ = ["MB sent", f"of {peer}'s"]
    print(markdown(["step with", "seconds", "of fp32's", f"of {peer}'s", *bytes_], rows))
    if choice := ranks[0]["choice"]:
        print(f"\n{choice}")


def rank(wrapper: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Measure on this rank: seconds of each step, and the bytes that left its host in one."""
    tokens = _tokens()
    steps: dict[str, Callable[[], object]] = {}
    begun: list[tuple[str, Traffic]] = []
    states: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        model: Any = GPT(SIZE, 256)
        numel = sum(p.numel() for p in model.parameters())
        model, states[name] = (_ddp if wrapper == "ddp" else _fsdp2)(model, name)
        steps[name] = _step(model, name, tokens, begun)
    speed = link_speed()
    times = interleave(steps, rounds, warmup=WARMUP, before=dist.barrier)
    # What a step sends has been received when all ranks begin the next.
    dist.barrier()
    begun.append(("", Traffic.sent()))
    sent: dict[str, list[int]] = {name: [] for name in names}
    for (name, before), (_, after) in pairwise(begun):
        sent[name].append((after - before).payload)
    auto = states.get("auto")
    return {
        "link": speed,
        "parameters": numel,
        "times": times,
        "sent": {name: statistics.median(each) for name, each in sent.items()},
        "choice": str(auto.stats().choice) if auto else None,
    }


def _step(
    model: Any, name: str, tokens: tuple[Tensor, Tensor], begun: list[tuple[str, Traffic]]
) -> Callable[[], None]:
    """Return a step that notes what had left the host when it began."""

    def step() -> None:
        begun.append((name, Traffic.sent()))
        model.zero_grad()
        with model.no_sync() if name == COMPUTE else contextlib.nullcontext():
            F.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten()).backward()

    return step


def _ddp(model: nn.Module, name: str) -> tuple[nn.Module, Any]:
    # Every rank has drawn the same weights: sending them would take longer than a step.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    if name == TORCH:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name not in (COMPUTE, FP32):
        return wrapped, comm_hooks.register(wrapped, name)
    return wrapped, None


def _fsdp2(model: nn.Module, name: str) -> tuple[nn.Module, Any]:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    # In bf16 weights are computed with, whatever they are gathered in.
    policy = {POLICY: half, BOTH: MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    settings = {"mp_policy": policy[name]} if name in policy else {}
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **settings)  # type: ignore[arg-type]
    fully_shard(model, **settings)
    if name in (FP32, POLICY):
        return model, None
    both = name == BOTH
    wire = "int8" if both else name
    return model, comm_hooks.register(model, wire, gather="int8" if both else None)


def _tokens() -> tuple[Tensor, Tensor]:
    """Some of Python's own source, other bytes on each rank."""
    text = Path(ast.__file__).read_bytes()[dist.get_rank() * 1000 :][: SIZE.block + 1]
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
            if each is not None:
                each.wait()
        best = max(best, data.numel() * 8e-6 / (time.perf_counter() - began))
    return best


if __name__ == "__main__":
    main()
