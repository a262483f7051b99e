"""The arithmetic of a cluster: the bytes that hooks really send, and who is the faster."""

import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks.foretell import foretell, main


def _sent(wire: str) -> int:
    model = DistributedDataParallel(nn.Linear(1 << 18, 1, bias=False), bucket_cap_mb=100)
    state = comm_hooks.register(model, wire, ranks_per_host=2)
    model(torch.ones(1, 1 << 18)).sum().backward()
    return state.stats().total_bytes


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_the_bytes_are_those_that_a_hook_sends(ranks4, wire):
    found = sum(ranks4.run(_sent, wire)) / 2  # of one of two hosts
    assert foretell(2, 2, 10.0, 1.0)[wire].megabytes * 1e6 == pytest.approx(found)


def test_on_a_slow_link_int8_wins_and_on_a_fast_one_nothing_beats_torch():
    slow, fast = foretell(4, 1, 1.0), foretell(2, 8, 3200.0)
    assert min(slow, key=lambda name: slow[name].beside) == "int8"
    assert min(fast, key=lambda name: fast[name].beside) in ("fp32", "torch bf16")


def test_torchs_own_bf16_equals_fp16_on_one_card_of_100_gbit():
    ways = foretell(16, 8, 100.0)
    assert ways["fp16"].beside == pytest.approx(ways["torch bf16"].beside, rel=0.1)


def test_one_host_has_nothing_to_foretell():
    with pytest.raises(ValueError, match="give at least two hosts"):
        foretell(1, 8, 100.0)


def test_the_command_prints_a_line_for_each_way(monkeypatch, capsys):
    given = ["foretell", "--hosts", "16", "--ranks", "8", "--gbit", "100", "--bucket-mb", "25"]
    monkeypatch.setattr(sys, "argv", given)
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["fp32", "torch", "fp16", "bf16", "int8"]
    assert lines[-1].startswith("by arithmetic int8 is the fastest")
