"""Whether all ranks that torchrun started are there, alike, and reach each other.

Every wait has a timeout: a rank that is missing is named, and nothing hangs.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["Ranks", "compared_ranks", "under_torchrun"]

Facts = Mapping[str, Mapping[str, str]]
# A difference in one of these is a mistake; in anything else it may be meant.
_MUST_AGREE = ("distamp", "torch", "python", "cuda", "nccl", "device", "triton")


@dataclass(frozen=True)
class Ranks:
    """What was found out about the ranks.

    Args:
        rank: This one.
        size: How many torchrun started.
        missing: Ranks that did not answer in time.
        differ: For each fact that is not the same everywhere, the ranks by what they have.
        errors: What does not work: a missing rank, versions that differ, a group that fails.
        notes: Settings that differ, which may be meant.
    """

    rank: int
    size: int
    missing: tuple[int, ...] = ()
    differ: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def under_torchrun() -> bool:
    """Whether this process is one of several, or of one, that a launcher started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def compared_ranks(facts: Facts, device: str, timeout: float) -> Ranks:
    """Compare ``facts`` with those of every other rank; every rank calls this.

    Args:
        facts: ``"versions"`` and ``"settings"`` of this rank, as text.
        device: The type of device it computes on.
        timeout: Seconds for each of three things: to meet, to compare, to reduce a number.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    mine = json.dumps({**facts, "versions": {**facts["versions"], "device": device}})
    try:
        store = PrefixStore("distamp/doctor", _store(rank, size, timeout))
        store.set(f"facts/{rank}", mine)
        answers = _answers(store, size, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0][:200]
        lost = f"rank {rank} could not meet the others at {where} in {timeout:g} s: {reason}"
        return Ranks(rank, size, errors=(lost,))
    missing = tuple(other for other in range(size) if other not in answers)
    differ = _differences(answers)
    errors, notes = _judged(differ)
    if missing:
        errors.insert(0, f"{_named(missing)} of {size} did not answer in {timeout:g} s")
    elif not dist.is_initialized():
        errors += _group_faults(store, rank, size, device, timeout)
    _leave(store, rank, answers, timeout)
    return Ranks(rank, size, missing, differ, tuple(errors), tuple(notes))


def _store(rank: int, size: int, timeout: float) -> Store:
    """Return torchrun's own store; or one of rank 0's, where another launcher set the variables."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,  # a rank that never comes is to be named
    )


def _answers(store: Store, size: int, timeout: float) -> dict[int, dict[str, dict[str, str]]]:
    """Return the facts of each rank that wrote them in time."""
    end = time.monotonic() + timeout
    found = {}
    for rank in range(size):
        try:
            left = max(end - time.monotonic(), 0.05)
            store.wait([f"facts/{rank}"], timedelta(seconds=left))
        except RuntimeError:
            continue
        found[rank] = json.loads(store.get(f"facts/{rank}"))
    return found


def _differences(
    answers: Mapping[int, Mapping[str, Mapping[str, str]]],
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each fact on which ranks differ, the ranks by what they have."""
    by_fact: dict[str, dict[str, tuple[int, ...]]] = {}
    everything = {rank: {**each["versions"], **each["settings"]} for rank, each in answers.items()}
    for name in sorted({name for each in everything.values() for name in each}):
        values: dict[str, tuple[int, ...]] = {}
        for rank, each in everything.items():
            value = each.get(name, "not set")
            values[value] = (*values.get(value, ()), rank)
        if len(values) > 1:
            by_fact[name] = values
    return by_fact


def _judged(differ: Mapping[str, Mapping[str, tuple[int, ...]]]) -> tuple[list[str], list[str]]:
    errors: list[str] = []
    notes: list[str] = []
    for name, values in differ.items():
        have = ", ".join(f"{value} on {_named(ranks)}" for value, ranks in values.items())
        (errors if name in _MUST_AGREE else notes).append(f"{name} differs: {have}")
    return errors, notes


def _named(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _group_faults(store: Store, rank: int, size: int, device: str, timeout: float) -> list[str]:
    """Make a process group of each backend that is here, and add up one number of each rank."""
    faults = []
    for backend, place in (("gloo", "cpu"), ("nccl", "cuda")):
        if backend == "nccl" and (device != "cuda" or not dist.is_nccl_available()):
            continue
        found: list[str] = []

        def reduce(backend: str = backend, place: str = place, found: list[str] = found) -> None:
            found.append(_reduce(store, rank, size, backend, place, timeout))

        # In a thread, as a backend that waits for ever cannot be interrupted.
        thread = threading.Thread(target=reduce, daemon=True)
        thread.start()
        thread.join(2 * timeout + 5)
        reason = found[0] if found else f"no answer in {2 * timeout + 5:g} s"
        if reason:
            faults.append(
                f"{backend} does not connect the ranks: {reason}. Name the network interface: "
                f"{backend.upper()}_SOCKET_IFNAME=eth0 (`ip -brief address` lists them)"
            )
    return faults


def _reduce(store: Store, rank: int, size: int, backend: str, place: str, timeout: float) -> str:
    """Return what went wrong; empty if nothing did."""
    try:
        if place == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            backend,
            store=PrefixStore(backend, store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        number = torch.full((1,), rank + 1, dtype=torch.int32, device=place)
        dist.all_reduce(number)
        total = int(number.item())
        dist.destroy_process_group()
    except Exception as error:
        return str(error).splitlines()[0][:200]
    return "" if total == size * (size + 1) // 2 else f"the sum of {size} numbers came to {total}"


def _leave(store: Store, rank: int, answers: Mapping[int, object], timeout: float) -> None:
    """Let rank 0, which may hold the store, go last."""
    try:
        store.set(f"left/{rank}", "")
        if rank == 0:
            store.wait([f"left/{other}" for other in answers], timedelta(seconds=timeout))
    except RuntimeError:
        pass
