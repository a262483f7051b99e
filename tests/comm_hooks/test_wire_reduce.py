"""Sums by wires on real ranks against float64, and what the headers tell every rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import WIRE_FORMATS, wire_format
from distamp.comm_hooks.wire_reduce import News, _add_up, all_reduce, reduce_scatter
from distamp.errors import LockstepError

# Of twice rounded values.
ERRORS = {"fp16_plain": 4e-4, "bf16": 3e-3, "fp16": 4e-4, "int16": 8e-5, "int8": 0.02}


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm())


def _sums(name: str, dtype: torch.dtype) -> list[float]:
    wire, group = wire_format(name), dist.group.WORLD
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for part in (1, 70, 256, 1000):
        each = [values(r, part * world, dtype) for r in range(world)]
        exact = sum(v.double() for v in each) / 7
        out = torch.empty(part, dtype=torch.float64)
        reduce_scatter(wire, each[rank], out, group, divisor=7, account=Account())
        found.append(error(out, exact.view(world, part)[rank]) if part > 1 else 0.0)
        # Lengths that no number of ranks divides.
        mine = each[rank][: part * world - 1].clone()
        if mine.numel():
            all_reduce(wire, mine, group, divisor=7, account=Account())
            if part > 1 and dtype == torch.float32:
                found.append(error(mine, exact[: part * world - 1]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", list(ERRORS))
def test_sums_are_as_near_as_the_format_allows(ranks4, name, dtype):
    for found in ranks4.run(_sums, name, dtype):
        assert max(found) < ERRORS[name]


def _same_everywhere() -> Tensor:
    mine = values(dist.get_rank(), 1001)
    all_reduce(wire_format("fp16"), mine, dist.group.WORLD, divisor=4, account=Account())
    return mine


def test_all_ranks_read_the_same_bits(ranks4):
    first, *others = ranks4.run(_same_everywhere)
    assert all(torch.equal(first, other) for other in others)


def _news(kind: str) -> list[bool]:
    group, rank = dist.group.WORLD, dist.get_rank()
    flagged, words = torch.ones(()), torch.tensor([5, 9])
    if kind == "inf" and rank == 1:
        flagged = torch.tensor(math.inf)
    if kind == "huge" and rank == 1:
        flagged = torch.tensor(3e38)
    if kind == "apart" and rank == 2:
        words = torch.tensor([5, 8])
    if kind == "silent" and rank == 2:
        words = torch.tensor([0, 8])
    before = News(torch.tensor(kind == "before" and rank == 3), torch.tensor(False))
    answers = []
    for name in WIRE_FORMATS:
        wire = wire_format(name)
        given, out = flagged.repeat(40), torch.empty(10)
        scattered = reduce_scatter(
            wire, given, out, group, divisor=4, account=Account(), words=words
        )
        news = all_reduce(
            wire, given, group, divisor=4, account=Account(), words=words, before=before
        )
        if kind != "before":
            answers += [bool(scattered.nonfinite), bool(scattered.apart)]
        answers += [bool(news.nonfinite), bool(news.apart)]
    return answers


@pytest.mark.parametrize(
    ("kind", "nonfinite", "apart"),
    [
        ("none", False, False),
        ("inf", True, False),
        ("huge", True, False),
        ("before", True, False),
        ("apart", False, True),
        ("silent", False, False),
    ],
)
def test_every_rank_hears_the_same_news(ranks4, kind, nonfinite, apart):
    for answers in ranks4.run(_news, kind):
        assert set(answers[::2]) == {nonfinite}
        assert set(answers[1::2]) == {apart}


def _apart(numel: int, name: str) -> str:
    wire, group = wire_format(name if dist.get_rank() == 1 else "fp16"), dist.group.WORLD
    given = torch.ones(numel if dist.get_rank() == 1 else 256)
    with pytest.raises(LockstepError) as caught:
        all_reduce(wire, given, group, divisor=1, account=Account())
    return str(caught.value)


@pytest.mark.parametrize(("numel", "name"), [(256, "int16"), (250, "fp16")])
def test_a_peer_that_sends_something_else_is_named_on_all_ranks(ranks2, numel, name):
    first, second = ranks2.run(_apart, numel, name)
    assert f"rank 1 {name} and {numel}" in first
    assert "rank 0 fp16 and 256" in second


@pytest.mark.parametrize("numel", [1, 256, 700])
@pytest.mark.parametrize("name", list(WIRE_FORMATS))
def test_a_device_adds_up_at_once_to_the_same(name, numel):
    wire = wire_format(name)
    wires = torch.stack([wire.encode(values(rank, numel)) for rank in range(3)])
    slow, fast = torch.empty(numel), torch.empty(numel)
    _add_up(wire, wires, slow, at_once=False)
    _add_up(wire, wires, fast, at_once=True)
    assert torch.allclose(slow, fast, rtol=1e-6, atol=1e-6)
