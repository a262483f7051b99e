"""A scaler joined with a hook, where an optimizer has other parameters to train than before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from tests.collectives import count_collectives
from tests.comm_hooks.training import inputs, mlp
from tests.ranks import subgroup

WIDTHS = (20, 24, 24, 3)
LATER = ["trained from now on", "trained from now on, and frozen before the step"]
CHANGE, OVERFLOW, STEPS = 2, 4, 7


class Spoilt(torch.autograd.Function):
    """Its input, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Scaled(nn.Linear):
    """A layer in whose bias alone a gradient can overflow."""

    factor = 1.0

    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.linear(values, self.weight, Spoilt.apply(self.bias, self.factor))


def _train(layout: str, change: str) -> tuple[list[bool], list[int], bool]:
    """Steps taken, messages of each, and whether all parameters are finite in the end."""
    net: Any = mlp(*WIDTHS)
    net[2] = layer = Scaled(*WIDTHS[1:3])
    layer.requires_grad_(change not in LATER)
    if layout == "DDP":
        model: Any = DistributedDataParallel(net, find_unused_parameters=True)
    else:
        for each in net:
            if isinstance(each, nn.Linear):
                fully_shard(each)
        model = fully_shard(net)
    state = comm_hooks.register(model, "fp16")
    stranger = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu", init_scale=16.0)
    scaler.attach(state)
    taken, messages = [], []
    for step in range(STEPS):
        if step == CHANGE and change in LATER:
            layer.requires_grad_(True)
        elif step == CHANGE and change == "another in its place":
            optimizer.param_groups[0]["params"][-1] = stranger
        factor = float("inf") if step == OVERFLOW and dist.get_rank() == 1 else 1.0
        spoilt = change == "another in its place"
        layer.factor = 1.0 if spoilt else factor
        model.zero_grad()
        stranger.grad = None
        loss = model(inputs(step, WIDTHS[0])).square().mean()
        loss = loss + (stranger * (factor if spoilt else 1.0)).sum()
        scaler.scale(loss).backward()
        if change == LATER[1] or (step == OVERFLOW and change == "frozen before the step"):
            layer.requires_grad_(False)
        with count_collectives() as log:
            scaler.step(optimizer)
        scaler.update()
        layer.requires_grad_(change not in LATER or step >= CHANGE)
        taken.append(scaler.stepped(optimizer))
        messages.append(log.count)
    mine = [
        p.to_local() if isinstance(p, DTensor) else p for p in optimizer.param_groups[0]["params"]
    ]
    return taken, messages, all(bool(each.isfinite().all()) for each in mine)


CHANGES = [*LATER, "another in its place", "frozen before the step"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_an_overflow_in_what_is_trained_now_is_seen(ranks2, layout, change):
    for taken, messages, finite in ranks2.run(_train, layout, change):
        assert taken == [step != OVERFLOW for step in range(STEPS)]
        assert finite
        assert messages[1:CHANGE] == [0] * (CHANGE - 1)
        if layout == "FSDP2" and change == "trained from now on":
            # The hook has these gradients too: the ranks say so once, and again after an overflow.
            assert messages[CHANGE:] == [1, 0, 1, 0, 0]


def _with_more_ranks() -> tuple[list[bool], list[int]]:
    """Steps taken, and messages of each, where the scaler is given all ranks in step 2."""
    pair = (subgroup((0, 1)), subgroup((2, 3)))[dist.get_rank() // 2]
    model = DistributedDataParallel(mlp(*WIDTHS), process_group=pair)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu", init_scale=16.0, process_group=pair)
    scaler.attach(comm_hooks.register(model, "fp16"))
    taken, messages = [], []
    for step in range(STEPS):
        if step == CHANGE:
            scaler.process_group = None
        factor = float("inf") if step == OVERFLOW and dist.get_rank() == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale(model(inputs(step, WIDTHS[0])).square().mean() * factor).backward()
        with count_collectives() as log:
            scaler.step(optimizer)
        scaler.update()
        taken.append(scaler.stepped(optimizer))
        messages.append(log.count)
    return taken, messages


def test_ranks_that_the_hook_does_not_reach_are_told_by_a_message(ranks4):
    for taken, messages in ranks4.run(_with_more_ranks):
        assert taken == [step != OVERFLOW for step in range(STEPS)]
        assert messages[1:CHANGE] == [0] * (CHANGE - 1)
        assert all(messages[CHANGE:])
