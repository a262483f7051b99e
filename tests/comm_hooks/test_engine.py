"""Shards and averages on real ranks against float64, and what headers tell every rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp.comm_hooks.channel import Channel
from distamp.comm_hooks.engine import Engine
from distamp.comm_hooks.headers import ReduceResult, lockstep_words
from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import WIRE_FORMATS, wire_format
from distamp.errors import LockstepError

# Of twice rounded values.
ERRORS = {"fp16_plain": 4e-4, "bf16": 3e-3, "fp16": 4e-4, "int16": 8e-5, "int8": 0.02}
WORDS = lockstep_words(0, None, torch.device("cpu"))


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm())


def engine_of(name: str) -> Engine:
    return Engine(wire_format(name), Channel(dist.group.WORLD, torch.device("cpu")), Account())


def _sums(name: str, dtype: torch.dtype) -> list[float]:
    engine = engine_of(name)
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for part in (1, 70, 256, 1000, 60_000):
        each = [values(r, part * world, dtype) for r in range(world)]
        exact = sum(v.double() for v in each) / 7
        out = torch.empty(part, dtype=torch.float64)
        edges = [part // 3, part // 2, part + part // 5]
        layout = engine.layout("shards", 0, part * world, dtype, edges, shards=True)
        engine.exchange(each[rank], layout, WORDS, out=out, divisor=7, terms=world)
        found.append(error(out, exact.view(world, part)[rank]) if part > 1 else 0.0)
        # Lengths that no number of ranks divides.
        mine = each[rank][: part * world - 1].clone()
        if mine.numel():
            layout = engine.layout("all", 1, mine.numel(), dtype, edges)
            engine.exchange(mine, layout, WORDS, divisor=7)
            if part > 1 and dtype == torch.float32:
                found.append(error(mine, exact[: part * world - 1]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", list(ERRORS))
def test_sums_are_as_near_as_the_format_allows(ranks4, name, dtype):
    for found in ranks4.run(_sums, name, dtype):
        assert max(found) < ERRORS[name]


def _told(kind: str) -> list[bool]:
    rank = dist.get_rank()
    flagged, words = torch.ones(()), torch.tensor([5, 9])
    if kind == "inf" and rank == 1:
        flagged = torch.tensor(math.inf)
    if kind == "huge" and rank == 1:
        flagged = torch.tensor(3e38)
    if kind == "mismatch" and rank == 2:
        words = torch.tensor([5, 8])
    if kind == "silent" and rank == 2:
        words = torch.tensor([0, 8])
    no = torch.tensor(False)
    before = ReduceResult(torch.tensor(kind == "before" and rank == 3), torch.tensor(0), no, no)
    answers = []
    for name in WIRE_FORMATS:
        engine = engine_of(name)
        given, out = flagged.repeat(40), torch.empty(10)
        shards = engine.layout("shards", 0, 40, torch.float32, shards=True)
        scattered = engine.exchange(given, shards, words, out=out, divisor=4, terms=4)
        whole = engine.layout("all", 1, 40, torch.float32)
        result = engine.exchange(given, whole, words, divisor=4, terms=4, before=before)
        if kind != "before":
            answers += [bool(scattered.nonfinite), bool(scattered.mismatched)]
        answers += [bool(result.nonfinite), bool(result.mismatched)]
    return answers


@pytest.mark.parametrize(
    ("kind", "nonfinite", "mismatched"),
    [
        ("none", False, False),
        ("inf", True, False),
        ("huge", True, False),
        ("before", True, False),
        ("mismatch", False, True),
        ("silent", False, False),
    ],
)
def test_every_rank_hears_the_same(ranks4, kind, nonfinite, mismatched):
    for answers in ranks4.run(_told, kind):
        assert set(answers[::2]) == {nonfinite}
        assert set(answers[1::2]) == {mismatched}


def _out_of_step(what: str) -> str:
    engine = engine_of("fp16")
    layouts = [engine.layout(f"bucket {n}", n, 9000, torch.float32) for n in range(2)]
    given = torch.ones(9000)
    engine.exchange(given, layouts[0], WORDS)
    if what == "count" and dist.get_rank() == 1:
        engine.number()  # as if it had been through one more
    other = what == "layout" and dist.get_rank() == 1
    with pytest.raises(LockstepError) as caught:
        engine.exchange(given, layouts[int(other)], WORDS)
    return str(caught.value)


@pytest.mark.parametrize("what", ["count", "layout"])
def test_a_rank_in_another_exchange_is_named_on_all_ranks(ranks4, what):
    message = ranks4.run(_out_of_step, what)
    for rank in (0, 2, 3):
        assert message[rank].startswith("this rank exchanges bucket 0, and rank 1 something else")
    assert "and rank 0, 2, 3 something else" in message[1]


def _unlike(what: str) -> str:
    engine = engine_of("int16" if what == "format" and dist.get_rank() == 1 else "fp16")
    numel = 250 if what == "length" and dist.get_rank() == 1 else 256
    edges = [10] if what == "parameters" and dist.get_rank() == 1 else [20]
    layout = engine.layout("bucket 3", 3, numel, torch.float32, edges)
    with pytest.raises(LockstepError) as caught:
        engine.check(layout, engine.facts_of_all(layout))
    assert not engine.agreed(layout)
    return str(caught.value)


@pytest.mark.parametrize("what", ["format", "length", "parameters"])
def test_what_is_new_is_compared_before_it_is_sent(ranks4, what):
    message = set(ranks4.run(_unlike, what))
    if what != "parameters":
        assert len(message) == 1
        assert "rank 0, 2, 3: bucket 3 of 256 torch.float32 elements as fp16" in message.pop()
    else:
        assert all("with other parameters in it" in each for each in message)
