"""Which ranks are on which hosts, and whether all ask for the same: one table, gathered once."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from distamp.error_text import lines_by_rank
from distamp.errors import RankMismatchError

__all__ = ["Hosts", "Row", "agreed", "hosts_of"]


@dataclass(frozen=True)
class Row:
    """What one rank says of itself.

    Args:
        rank: Its number in the default group.
        host: Its host name.
        local_world_size: What its launcher says, 0 without.
        ranks_per_host: What the user says; None to find out.
        what: The format and the model, in words; None where it raises an error of its own.
        name: Nobody else's: the first rank's names connections.
    """

    rank: int
    host: str
    local_world_size: int
    ranks_per_host: int | None
    what: str | None
    name: str


def agreed(what: str | None, group: ProcessGroup, ranks_per_host: int | None = None) -> Hosts:
    """Return which ranks of a group are on which hosts, who must ask for the same. Collective.

    Args:
        what: The format and the model, in words; None where this rank raises an error of its own.
        group: The ranks.
        ranks_per_host: What the user says; None to find out.

    Raises:
        RankMismatchError: A rank has another format or model, or raises an error of its own.
        ValueError: There are no hosts of as many ranks as the user says.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    local, name = int(given) if given.isdigit() else 0, secrets.token_hex(8)
    row = Row(dist.get_rank(), socket.gethostname(), local, ranks_per_host, what, name)
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, row, group=group)
    text_by_rank: list[tuple[int, str]] = []
    for row in rows:
        text = row.what or "no hook, because it raised another error"
        if row.ranks_per_host is not None:
            text += f", ranks_per_host={row.ranks_per_host}"
        text_by_rank.append((row.rank, text))
    if len({text for _, text in text_by_rank}) > 1 or rows[0].what is None:
        head = "The ranks register different communication hooks, and none was registered:"
        fix = "Pass the same model, format and ranks_per_host= on every rank."
        raise RankMismatchError("\n".join([head, *lines_by_rank(text_by_rank), fix]))
    return hosts_of(rows)


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group by host, by their numbers in the group; as many on each.

    Args:
        names: Of connections between them, no other's; each is for one exchange.
        ranks: Of each host; one rank each where all exchange with all; none where no hook should
            be: in one level a host of several ranks sends several times what a ring does.
        text: The same in words, for `HookStats`.
        on_one: Whether all are on one host.
    """

    names: Iterator[str]
    ranks: Sequence[list[int]]
    text: str
    on_one: bool = False


def hosts_of(rows: Sequence[Row]) -> Hosts:
    """Return which ranks are on which hosts; the same on all ranks, from the same rows.

    Hosts of the same number of ranks exchange in two levels, in whichever order ranks are on them.
    Ranks that are all on one host, or each on its own, exchange in one.

    Raises:
        ValueError: There are no hosts of as many ranks as the user says.
    """
    count, given, local = len(rows), rows[0].ranks_per_host, rows[0].local_world_size
    if given is not None and (given < 1 or count % given):
        raise ValueError(
            f"ranks_per_host is {given}, and a group has {count} ranks: give a number that divides "
            "it, or leave it out"
        )
    # Containers may all have one name. Launchers number the ranks of a host in succession.
    known = local > 0 and all(row.local_world_size == local for row in rows)
    by_host: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        key = (row.host, row.rank // local if known else 0) if given is None else index // given
        by_host.setdefault(key, []).append(index)
    ranks, names = list(by_host.values()), map(f"{rows[0].name}/{{}}".format, itertools.count())
    sizes = sorted({len(each) for each in ranks})
    if len(ranks) in (1, count):
        flat, text = [[index] for index in range(count)], f"one level of {count} ranks"
        return Hosts(names, flat, text, on_one=len(ranks) == 1)
    if len(sizes) > 1:
        text = f"hosts have from {sizes[0]} to {sizes[-1]} ranks"
        return Hosts(names, [], text)
    return Hosts(names, ranks, f"two levels: {len(ranks)} hosts of {sizes[0]} ranks")
