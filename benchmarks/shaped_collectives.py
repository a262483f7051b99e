"""What gloo's collectives send and how long they take between hosts, beside the least possible.

    sudo python -m benchmarks.shaped_collectives [--rate 100mbit] [--hosts 4] [--mtu 1500]
        [--megabytes 25] [--rounds 5]

Hosts are network namespaces joined by links of the given rate (tests/netns.py). Bytes come from the
hosts' interfaces, without packet headers. The least possible: (W - 1) / W of the buffer for
reduce-scatter, all-gather and all-to-all, twice that for all-reduce.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import environment, markdown
from benchmarks.shaped import headers, link_speed, measured_in_turn, mib, run_on_hosts, slowest
from distamp.comm_hooks.channel import staggered_all_to_all

STEP = "step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="of each link, as tc writes it")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--megabytes", type=int, default=25, help="of each rank's buffer (MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    hosts, size = arguments.hosts, arguments.megabytes << 20
    options = {"size": size, "rounds": arguments.rounds}
    print(environment())
    ranks = run_on_hosts(
        "benchmarks.shaped_collectives", hosts, arguments.rate, arguments.mtu, options, 3600
    )
    speed = min(rank["link"] for rank in ranks)
    print(
        f"{hosts} hosts, {arguments.rate}, packets of {arguments.mtu} bytes (headers"
        f" {headers(arguments.mtu)}); the slowest link carries {speed:.1f} Mbit/s of payload\n"
    )
    rows = []
    share = (hosts - 1) / hosts
    for name, steps in ranks[0]["rounds"].items():
        least = size * share * (2 if "all_reduce" in name or "then" in name else 1)
        sent = statistics.median(each[STEP]["payload"] for each in steps)
        seconds = statistics.median(slowest([rank["rounds"] for rank in ranks], name, STEP))
        ideal = least * 8e-6 / speed
        rows.append(
            [name, mib(sent), f"{sent / least:.2f}", f"{seconds:.2f}", f"{seconds / ideal:.2f}"]
        )
    head = ["collective", "MiB sent by rank 0", "of the least", "seconds", "of the least"]
    print(markdown(head, rows))


def rank(size: int, rounds: int) -> dict[str, Any]:
    """Run each collective on a buffer of ``size`` bytes; return the link's speed and the rounds."""
    world = dist.get_world_size()
    whole32 = torch.zeros(size // 4 // world * world)
    whole16 = torch.zeros(size // 2 // world * world, dtype=torch.float16)
    bytes8 = torch.zeros(size // (16 * world) * 16 * world, dtype=torch.uint8)
    part32, part8 = whole32[: len(whole32) // world].clone(), bytes8[: len(bytes8) // world].clone()
    room8 = torch.empty_like(bytes8)
    works = {
        "all_reduce, fp32": lambda: dist.all_reduce(whole32),
        "all_reduce, fp16": lambda: dist.all_reduce(whole16),
        "reduce_scatter_tensor, fp32": lambda: dist.reduce_scatter_tensor(part32, whole32),
        "all_gather_into_tensor, uint8": lambda: dist.all_gather_into_tensor(bytes8, part8),
        "all_to_all_single, uint8": lambda: dist.all_to_all_single(room8, bytes8),
        "isend and irecv, all peers at once, uint8": lambda: _by_peers(room8, bytes8, world),
        "isend and irecv, one peer after the other, uint8": lambda: _by_peers(room8, bytes8, 1),
        "the same, each row answered, uint8": lambda: _answered(room8, bytes8),
        "all_to_all_single, then all_gather, uint8": lambda: _all_reduce(room8, bytes8, _at_once),
        **{
            f"one peer after the other, then all_gather, {pieces} pieces, uint8": (
                lambda n=pieces: _all_reduce(room8, bytes8, _in_turn, n)
            )
            for pieces in (1, 4, 16)
        },
        **{
            f"each row answered, then all_gather, {pieces} pieces in turn, uint8": (
                lambda n=pieces: _all_reduce(room8, bytes8, _answered, n, overlap=False)
            )
            for pieces in (1, 4, 16)
        },
    }
    contenders = {n: (lambda clock, w=work: clock(STEP, w)) for n, work in works.items()}
    return {"link": link_speed(), "rounds": measured_in_turn(contenders, rounds, warmup=1)}


def _by_peers(received: torch.Tensor, data: torch.Tensor, in_flight: int) -> None:
    """Do an all-to-all by messages: to the next rank, from the one before, then one further.

    With one peer in flight a link carries one stream in each direction at a time.
    """
    me, world = dist.get_rank(), dist.get_world_size()
    to, from_ = data.chunk(world), received.chunk(world)
    from_[me].copy_(to[me])
    works: list[Any] = []
    for distance in range(1, world):
        source, target = (me - distance) % world, (me + distance) % world
        works += [dist.irecv(from_[source], source), dist.isend(to[target], target)]
        if len(works) == 2 * in_flight:
            for work in works:
                work.wait()
            works.clear()
    for work in works:
        work.wait()


def _at_once(received: torch.Tensor, data: torch.Tensor) -> None:
    dist.all_to_all_single(received, data)


def _in_turn(received: torch.Tensor, data: torch.Tensor) -> None:
    _by_peers(received, data, 1)


def _answered(received: torch.Tensor, data: torch.Tensor) -> None:
    """As distamp's hooks do it: the next row is sent when the last one was received."""
    world = dist.get_world_size()
    staggered_all_to_all(
        received.view(world, -1),
        data.view(world, -1),
        dist.get_rank(),
        receive=lambda row, source, tag: dist.irecv(row, source, tag=tag),
        send=lambda row, target, tag: dist.isend(row, target, tag=tag),
    )


def _all_reduce(
    received: torch.Tensor,
    data: torch.Tensor,
    all_to_all: Callable[[torch.Tensor, torch.Tensor], None],
    pieces: int = 1,
    overlap: bool = True,
) -> None:
    """Send what an all-reduce of wire bytes must; the sums in between are left out.

    A piece is gathered while the next one is exchanged, or with no ``overlap`` before.
    """
    me, world = dist.get_rank(), dist.get_world_size()
    gathers = []
    for out, piece in zip(received.chunk(pieces), data.chunk(pieces), strict=True):
        all_to_all(out, piece)
        part = piece.chunk(world)[me].clone()
        gather = dist.all_gather_into_tensor(piece, part, async_op=True)
        if overlap:
            gathers.append(gather)
        else:
            gather.wait()
    for gather in gathers:
        gather.wait()


if __name__ == "__main__":
    main()
