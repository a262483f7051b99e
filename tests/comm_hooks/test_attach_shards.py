"""A scaler joined with a hook where a rank holds, or steps, a part of the model only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from tests.comm_hooks.training import inputs, mlp

WIDTHS = (20, 64, 48, 3)
STEPS = 4


def _spread(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = mlp(*WIDTHS)
    model: Any = fully_shard(net) if layout == "FSDP2" else DistributedDataParallel(net)
    if layout == "ZeRO":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def _train(layout: str, hooked: bool, call: str) -> list[tuple[float, float]]:
    """Norm, or 0, and scale of each step."""
    model, optimizer = _spread(layout)
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    if hooked:
        scaler.attach(comm_hooks.register(model, "fp16"))
    seen = []
    for step in range(STEPS):
        factor = float("inf") if step == 2 and dist.get_rank() == 1 else 1.0
        loss = model(inputs(step, WIDTHS[0])).square().mean()
        scaler.scale(loss * factor).backward()
        norm = 0.0
        if call == "clip":
            norm = float(scaler.clip_grad_norm_(optimizer, 0.1))
        elif call == "unscale, clip parameters":
            scaler.unscale_(optimizer)
            norm = float(scaler.clip_grad_norm_(list(model.parameters()), 0.1))
        scaler.step(optimizer)
        assert scaler.stepped(optimizer) == (step != 2)
        scaler.update()
        seen.append((norm, scaler.get_scale()))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("call", ["clip", "unscale, clip parameters"])
@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "ZeRO"])
def test_the_norm_is_that_of_the_whole_model(ranks2, layout, call):
    without = ranks2.run(_train, layout, False, call)
    hooked = ranks2.run(_train, layout, True, call)
    for one, other in zip(without, hooked, strict=True):
        for (norm, scale), (expected, expected_scale) in zip(other, one, strict=True):
            assert scale == expected_scale
            assert norm == pytest.approx(expected, rel=1e-3, nan_ok=True)
    assert repr(hooked[0]) == repr(hooked[1])  # with NaN where a step was skipped
