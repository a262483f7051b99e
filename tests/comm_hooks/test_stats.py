"""What a hook says of itself."""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import comm_hooks
from distamp.comm_hooks import HookStats
from tests.collectives import count_collectives
from tests.comm_hooks.training import inputs, mlp, wrapped


def test_a_value_that_reads_as_a_line():
    stats = HookStats(
        exchanges=12,
        bytes_sent={"fp16": 51_000_000, "bf16": 500},
        bytes_uncompressed=100_000_000,
        seconds_waiting=1.234,
        largest_exponent=-3,
        nonfinite=1,
        fallbacks={"sparse gradient all-reduced as it is": 4},
    )
    assert str(stats) == (
        "12 exchanges sent 51 MB as fp16, 500 B as bf16; 100 MB uncompressed, 49% saved; "
        "waited 1.23 s; largest block below 2^-2; 1 with inf or NaN; "
        "4 x sparse gradient all-reduced as it is"
    )
    with pytest.raises(FrozenInstanceError):
        stats.exchanges = 0
    assert str(HookStats()) == "no gradient was exchanged yet"
    line = str(HookStats(fallbacks={"other way": 2}))
    assert line == "no gradient was sent in a wire format; 2 x other way"


def _counted(numel: int, wire: str) -> tuple[int, int, int]:
    """Bytes that the hook counts, and the parts of its collectives that leave this rank."""
    import torch.distributed as dist

    from distamp.comm_hooks.channel import Channel
    from distamp.comm_hooks.engine import Engine
    from distamp.comm_hooks.headers import lockstep_words
    from distamp.comm_hooks.stats import Account
    from distamp.comm_hooks.wire import wire_format

    account = Account()
    size = dist.get_world_size()
    channel = Channel(dist.group.WORLD, torch.device("cpu"))
    engine = Engine(wire_format(wire), channel, account)
    layout = engine.layout("a tensor", 0, numel, torch.float32)
    words = lockstep_words(0, None, channel.device)
    with count_collectives() as log:
        engine.exchange(torch.ones(numel), layout, words)
    leaving = {"send": size, "recv": 0}
    # The byte by which a row is answered is left out, as gloo's own headers are.
    calls = [(name, nbytes) for name, nbytes in log.calls if nbytes > 1]
    sent = sum(nbytes * leaving.get(name, size - 1) // size for name, nbytes in calls)
    stats = account.stats()
    return stats.bytes_sent[wire], sent, stats.bytes_uncompressed


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("numel", [100, 100_000, 2_500_000])
def test_bytes_are_those_of_the_collectives(ranks4, wire, numel):
    for counted, sent, uncompressed in ranks4.run(_counted, numel, wire):
        assert counted == sent
        assert uncompressed == 6 * 4 * numel // 4


def _largest(scale: float, numel: int) -> tuple[int | None, int | None]:
    state = comm_hooks.CommHookState("fp16")
    parameter = nn.Parameter(torch.zeros(numel))
    before = state.stats().largest_exponent
    state.average(0, torch.full((numel,), 1.5 * scale), [parameter]).wait()
    return before, state.stats().largest_exponent


@pytest.mark.parametrize("exponent", [-20, 0, 24])
def test_the_largest_exponent_is_that_of_the_mean_or_a_share_in_it(ranks4, exponent):
    assert ranks4.run(_largest, 2.0**exponent, 100_000) == [(None, exponent)] * 4
    assert ranks4.run(_largest, 2.0**exponent, 1000) == [(None, exponent - 2)] * 4


def _trained() -> str:
    model, state = wrapped(mlp(20, 50, 3), "fp16")
    model(inputs(0, 20)).sum().backward()
    return str(state.stats())


def _gathered() -> tuple[bool, bool, str]:
    model, state = wrapped(mlp(20, 50, 3), "auto")
    model(inputs(0, 20)).sum().backward()
    mine = state.stats()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    logged = json.loads(json.dumps(asdict(mine)))
    return everyone[dist.get_rank()] == mine, copy.deepcopy(mine) == mine, logged["choice"]["wire"]


def test_they_can_be_gathered_copied_and_logged(ranks2):
    for gathered, copied, chosen in ranks2.run(_gathered):
        assert gathered
        assert copied
        assert chosen in ("fp32", "fp16", "int8")


def test_a_hook_says_what_it_saved(ranks2):
    for line in ranks2.run(_trained):
        assert line.startswith("1 exchanges sent 2.48 kB as fp16; 4.81 kB uncompressed, 48% saved")
