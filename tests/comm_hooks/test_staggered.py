"""A staggered all-to-all: everything arrives, and one stream at a time is on a link."""

from __future__ import annotations

import threading
from collections import defaultdict
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp.comm_hooks.channel import Channel, staggered_all_to_all


def _exchanged(numel: int) -> bool:
    """Whether each rank's row arrives at the rank it is for, twice over one channel."""
    rank, size = dist.get_rank(), dist.get_world_size()
    channel = Channel(dist.group.WORLD, torch.device("cpu"))

    def row(source: int, target: int) -> Tensor:
        generator = torch.Generator().manual_seed(source * size + target)
        return torch.randint(256, (numel,), generator=generator, dtype=torch.uint8)

    sent = torch.cat([row(rank, target) for target in range(size)])
    due = torch.cat([row(source, rank) for source in range(size)])
    all_received = [torch.zeros_like(sent) for _ in range(2)]
    works = [channel.all_to_all(received, sent) for received in all_received]
    for work in works:
        work.wait()
    return all(torch.equal(received, due) for received in all_received)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("numel", [1, 4096, 70_000])
def test_every_row_arrives(ranks, size, numel):
    assert ranks(size).run(_exchanged, numel) == [True] * size


class _Post:
    """Messages between threads. As gloo's, a send is over at once; it arrives when it is read."""

    def __init__(self, size: int) -> None:
        self.boxes: dict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self.lock = threading.Lock()
        self.unread = [0] * size
        self.most = [0] * size

    def box(self, source: int, target: int, tag: int) -> SimpleQueue[Tensor]:
        with self.lock:
            return self.boxes[source, target, tag]

    def change(self, source: int, data: Tensor, by: int) -> None:
        """Count the rows, not the answers, that are on their way from a rank."""
        if data.numel() > 1:
            with self.lock:
                self.unread[source] += by
                self.most[source] = max(self.most[source], self.unread[source])


class _Reading:
    def __init__(self, post: _Post, received: Tensor, source: int, target: int, tag: int) -> None:
        self._given = (post, received, source, target, tag)

    def wait(self) -> None:
        post, received, source, target, tag = self._given
        # A slow receiver: another rank is well ahead of it.
        threading.Event().wait(0.002 * target)
        data = post.box(source, target, tag).get(timeout=60)
        post.change(source, data, -1)
        received.copy_(data)


def _most_under_way(size: int, numel: int) -> list[int]:
    """For each rank, the most rows that it had sent and nobody had read."""
    post = _Post(size)

    def rank(me: int) -> None:
        def receive(received: Tensor, source: int, tag: int) -> Any:
            return _Reading(post, received, source, me, tag)

        def send(data: Tensor, target: int, tag: int) -> None:
            post.change(me, data, 1)
            post.box(me, target, tag).put(data.clone())

        sent = torch.zeros(size, numel, dtype=torch.uint8)
        staggered_all_to_all(torch.zeros_like(sent), sent, me, receive=receive, send=send)

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return post.most


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_a_rank_has_one_row_on_its_way_at_a_time(size):
    assert _most_under_way(size, 70_000) == [1] * size


def test_rows_too_short_to_fill_a_link_go_at_once():
    assert max(_most_under_way(4, 100)) == 3
