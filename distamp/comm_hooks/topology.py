"""The hosts of a group's ranks, from one table that every rank gathers once."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from distamp.error_text import lines_by_rank
from distamp.errors import RankMismatchError

__all__ = ["RankInfo", "Topology", "gather_topology", "group_by_host"]


@dataclass(frozen=True)
class RankInfo:
    """The row of one rank in the table.

    Attributes:
        rank: The number in the default group.
        host_name: The name of the host.
        local_world_size: The launcher's number of ranks on the host, or 0 without a launcher.
        ranks_per_host: The user's number of ranks on a host, or None to find it out.
        request: The format and the model in words, or None if the rank raises an error.
        token: A random word. That of the first rank is a prefix for connections.
    """

    rank: int
    host_name: str
    local_world_size: int
    ranks_per_host: int | None
    request: str | None
    token: str


@dataclass(frozen=True)
class Topology:
    """The ranks of a group by host, by their numbers in the group.

    Attributes:
        rank: The number of this rank.
        hosts: The ranks of each host, all of one length. There is a host for each rank if all ranks
            send to all. There is none if the hosts have different numbers of ranks, because then a
            host would send several times the bytes of a ring.
        description: The same in words, for `HookStats`.
        store_prefixes: Prefixes for the connections of one `CompressedCollectives` after another.
        is_single_host: Whether all ranks are on one host.
    """

    rank: int
    hosts: Sequence[list[int]]
    description: str
    store_prefixes: Iterator[str]
    is_single_host: bool = False

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self.hosts)

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each host."""
        return len(self.hosts[0])

    @property
    def host_index(self) -> int:
        """The number of this rank's host."""
        for index, ranks in enumerate(self.hosts):
            if self.rank in ranks:
                return index
        raise ValueError(f"Rank {self.rank} is on none of the hosts {self.hosts}.")

    @property
    def host_ranks(self) -> list[int]:
        """The ranks of this rank's host."""
        return self.hosts[self.host_index]

    @property
    def local_rank(self) -> int:
        """The place of this rank among the ranks of its host."""
        return self.host_ranks.index(self.rank)

    @property
    def peer_ranks(self) -> list[int]:
        """The ranks of all hosts that have the local rank of this rank."""
        return [ranks[self.local_rank] for ranks in self.hosts]

    @property
    def gather_order(self) -> list[int]:
        """All ranks: the first rank of each host, then the second rank of each host, and so on."""
        order: list[int] = []
        for local_rank in range(self.ranks_per_host):
            order.extend(ranks[local_rank] for ranks in self.hosts)
        return order


def gather_topology(
    request: str | None, group: ProcessGroup, ranks_per_host: int | None = None
) -> Topology:
    """Group the ranks by host, and check that all ranks request the same hook.

    Collective: every rank of ``group`` must call this.

    Args:
        request: The format and the model in words, or None if this rank raises an error.
        group: The ranks.
        ranks_per_host: The user's number of ranks on a host, or None to find it out.

    Raises:
        RankMismatchError: A rank has another format or model, or raises an error.
        ValueError: The ranks cannot be divided into hosts of ``ranks_per_host`` ranks.
    """
    variable = os.environ.get("LOCAL_WORLD_SIZE", "")
    info = RankInfo(
        rank=dist.get_rank(),
        host_name=socket.gethostname(),
        local_world_size=int(variable) if variable.isdigit() else 0,
        ranks_per_host=ranks_per_host,
        request=request,
        token=secrets.token_hex(8),
    )
    gathered: list[RankInfo] = [info] * group.size()
    dist.all_gather_object(gathered, info, group=group)
    text_by_rank: list[tuple[int, str]] = []
    for info in gathered:
        text = info.request or "no hook, because it raised another error"
        if info.ranks_per_host is not None:
            text += f", ranks_per_host={info.ranks_per_host}"
        text_by_rank.append((info.rank, text))
    texts = {text for _, text in text_by_rank}
    if len(texts) > 1 or gathered[0].request is None:
        head = "The ranks register different communication hooks, and none was registered:"
        fix = "Pass the same model, format and ranks_per_host= on every rank."
        raise RankMismatchError("\n".join([head, *lines_by_rank(text_by_rank), fix]))
    return group_by_host(gathered, group.rank())


def group_by_host(table: Sequence[RankInfo], rank: int) -> Topology:
    """Return the topology, which is the same on all ranks because it follows from one table.

    Hosts with the same number of ranks communicate in two levels, in any order of their ranks. If
    all ranks are on one host, or each rank is on its own host, there is one level.

    Args:
        table: The row of each rank.
        rank: The number of this rank in the group.

    Raises:
        ValueError: The ranks cannot be divided into hosts of ``ranks_per_host`` ranks.
    """
    count = len(table)
    ranks_per_host = table[0].ranks_per_host
    if ranks_per_host is not None and (ranks_per_host < 1 or count % ranks_per_host):
        raise ValueError(
            f"ranks_per_host is {ranks_per_host}, and a group has {count} ranks: give a number "
            "that divides it, or leave it out"
        )
    # Containers may all have one host name. Launchers number the ranks of a host in succession.
    local_world_size = table[0].local_world_size
    sizes_agree = all(info.local_world_size == local_world_size for info in table)
    is_launched = local_world_size > 0 and sizes_agree
    ranks_by_host: dict[object, list[int]] = {}
    for index, info in enumerate(table):
        key: object
        if ranks_per_host is not None:
            key = index // ranks_per_host
        elif is_launched:
            key = info.host_name, info.rank // local_world_size
        else:
            key = info.host_name
        ranks_by_host.setdefault(key, []).append(index)

    hosts = list(ranks_by_host.values())
    prefixes = (f"{table[0].token}/{number}" for number in itertools.count())
    if len(hosts) in (1, count):
        every_rank = [[index] for index in range(count)]
        description = f"one level of {count} ranks"
        return Topology(rank, every_rank, description, prefixes, is_single_host=len(hosts) == 1)
    sizes = sorted({len(ranks) for ranks in hosts})
    if len(sizes) > 1:
        description = f"hosts have from {sizes[0]} to {sizes[-1]} ranks"
        return Topology(rank, [], description, prefixes)
    description = f"two levels: {len(hosts)} hosts of {sizes[0]} ranks"
    return Topology(rank, hosts, description, prefixes)
