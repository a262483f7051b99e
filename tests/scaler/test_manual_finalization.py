"""Steps under FSDP2 with manual finalization of the backward pass, in torch 2.15 and later."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from distamp import DistGradScaler, StepGuard, initialize
from distamp.errors import CallOrderError
from distamp.masters import MasterParameters
from tests.on_ranks import on_ranks
from tests.ranks import mesh

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"),
    reason="FSDP2 has finalize_backward since torch 2.15",
)


def manually_finalized(dtype: torch.dtype = torch.float32) -> Any:
    """Return a sharded linear layer with weights of 1 and manual finalization."""
    layer = nn.Linear(4, 2, bias=False, dtype=dtype)
    nn.init.ones_(layer.weight)
    model = fully_shard(layer, mesh=mesh((dist.get_world_size(),), ("shard",)))
    model.set_manual_backward_finalization(True)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    """Return a loss with a gradient of rank + 1 for each weight."""
    weight: Any = next(model.parameters())
    inputs = torch.full((1, 4), dist.get_rank() + 1.0, dtype=weight.dtype)
    return model(inputs).float().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def weight_of(optimizer: Any) -> float:
    """Return the common value of all weights in the shards, also while the model is gathered."""
    (shard,) = optimizer.param_groups[0]["params"]
    values = shard.full_tensor().unique()
    assert values.numel() == 1
    return values.item()


@on_ranks(2)
@pytest.mark.parametrize("reduces", ["in backward", "at the end"])
@pytest.mark.parametrize("max_norm", [None, 100.0])
def test_guard_refuses_a_step_before_the_backward_pass_is_finalized(max_norm, reduces):
    model = manually_finalized()
    optimizer, guard = sgd(model), StepGuard()
    model.set_requires_gradient_sync(reduces == "in backward")
    loss_of(model).backward()
    with pytest.raises(CallOrderError, match=r"Call finalize_backward\(\) of the root module"):
        guard.step(optimizer, max_norm=max_norm)
    assert weight_of(optimizer) == 1.0


@on_ranks(2)
def test_scaler_refuses_to_unscale_before_the_backward_pass_is_finalized():
    model = manually_finalized()
    optimizer, scaler = sgd(model), DistGradScaler(init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(CallOrderError, match="has not finished the reduction of gradients of 1"):
        scaler.unscale_(optimizer)


@on_ranks(2)
def test_masters_take_no_gradient_before_the_backward_pass_is_finalized():
    model = manually_finalized(torch.float16)
    optimizer = sgd(model)
    MasterParameters(optimizer)
    scaler = DistGradScaler(init_scale=4.0, fp16_grads="master")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(CallOrderError, match="has not finished the reduction"):
        scaler.step(optimizer)


@on_ranks(2)
@pytest.mark.parametrize("level", ["fp32", "fp16"])
def test_amp_refuses_a_step_before_the_backward_pass_is_finalized(level):
    model = manually_finalized()
    optimizer = sgd(model)
    amp = initialize(model, optimizer, level)
    amp.backward(loss_of(model))
    with pytest.raises(CallOrderError, match="has not finished the reduction"):
        amp.step()
    assert weight_of(optimizer) == 1.0


@on_ranks(2)
def test_an_asynchronous_reduction_is_refused_until_it_was_waited_for():
    model = manually_finalized()
    optimizer, guard = sgd(model), StepGuard()
    loss_of(model).backward()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(CallOrderError, match=r"also call wait\(\)"):
        guard.step(optimizer)
    handle.wait()
    guard.update()
    guard.step(optimizer)
    # The mean of 1 and 2.
    assert weight_of(optimizer) == 1.0 - 1.5


@on_ranks(2)
def test_a_rank_that_finalizes_later_stops_every_rank():
    """After its wait() rank 0 still receives the error of rank 1."""
    model = manually_finalized()
    optimizer, guard = sgd(model), StepGuard()
    loss_of(model).backward()
    handle = model.finalize_backward(async_op=True)
    if dist.get_rank() == 0:
        handle.wait()
    with pytest.raises(CallOrderError, match="has not finished the reduction"):
        guard.step(optimizer)


@on_ranks(2)
@pytest.mark.parametrize("micros", [1, 3])
def test_a_finalized_pass_is_stepped(micros):
    model = manually_finalized()
    optimizer, scaler = sgd(model), DistGradScaler(init_scale=4.0)
    model.set_requires_gradient_sync(False)
    for _ in range(micros):
        scaler.scale(loss_of(model)).backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight_of(optimizer) == 1.0 - 1.5 * micros


@on_ranks(2)
def test_another_model_is_stepped_while_one_awaits_its_finalization():
    waiting, other = manually_finalized(), nn.Linear(4, 2, bias=False)
    loss_of(waiting).backward()
    loss_of(other).backward()
    assert StepGuard().step(sgd(other)) is None
    finalized = fully_shard(nn.Linear(4, 2), mesh=mesh((2,), ("shard",)))
    guard = StepGuard()
    optimizer = sgd(finalized)
    loss_of(finalized).backward()
    guard.step(optimizer)
    assert guard.step_was_taken(optimizer)
