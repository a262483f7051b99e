"""``"auto"`` between hosts: a slow link is sent fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shaped import run_on_hosts
from distamp import comm_hooks
from tests import netns

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("netns")]


def rank() -> dict[str, Any]:
    """Choose on this host's rank, and train a step."""
    model = DistributedDataParallel(nn.Linear(500, 500))
    state = comm_hooks.register(model, "auto")
    model(torch.ones(2, 500)).sum().backward()
    stats = state.stats()
    return {"line": str(stats.choice), "wire": state.wire.name, "sent": dict(stats.bytes_sent)}


def test_a_slow_link_is_sent_fewer_bytes():
    if reason := netns.missing():
        pytest.skip(reason)
    first, second = run_on_hosts(
        "tests.comm_hooks.test_auto_link", 2, "20mbit", 1500, {}, 240, netns.own_congestion()
    )
    assert first == second
    assert first["wire"] in ("fp16", "int8"), first["line"]
    assert "the link is the bottleneck" in first["line"]
    assert list(first["sent"]) == [first["wire"]]
