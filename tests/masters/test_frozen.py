"""Masters of an optimizer that trains no half precision yet: frozen stages, later groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import StepGuard, cast_model, initialize
from distamp.errors import ConfigError
from distamp.scaler import MasterParameters
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.scaler.masters import ByHand, adamw, half_mlp, local, loss_of, master_scaler, spread
from tests.scaler.steps import INF

F16, BF16 = torch.float16, torch.bfloat16
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])


def _train_beside_by_hand(layout: str, split: bool) -> None:
    """Train a head over a frozen backbone, thaw the backbone, and compare with fp32 by hand."""
    rank = dist.get_rank() if layout else 0
    dtype = BF16 if split else F16
    models = [half_mlp(dtype=dtype), half_mlp(dtype=dtype)]
    for model in models:
        model[0].requires_grad_(False)
    wrapped = [spread(model, layout) for model in models]
    model, model_by_hand = models
    optimizers = [adamw(model[0].parameters()), adamw(model[2:].parameters())]
    hands = []
    for part in (model_by_hand[0], model_by_hand[2:]):
        hands.append(ByHand(part.parameters(), adamw, split))
    for optimizer in optimizers:
        MasterParameters(optimizer, split=split)
    scaler = master_scaler()
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            model_by_hand[0].requires_grad_(True)
            if layout == "buckets":  # DDP reduces parameters that were trained at its start
                wrapped = [DistributedDataParallel(module) for module in models]
        for optimizer, hand in zip(optimizers, hands, strict=True):
            optimizer.zero_grad()
            hand.zero_grad()
        scale = scaler.get_scale()
        batch = 10 * step + rank
        scaler.scale(loss_of(wrapped[0], batch)).backward()
        (loss_of(wrapped[1], batch) * scale).backward()
        scaler.step_all(optimizers)
        scaler.update()
        for hand in hands:
            assert hand.unscale(scale)
            hand.step()
    for param, expected in zip(model.parameters(), model_by_hand.parameters(), strict=True):
        assert torch.equal(local(param), local(expected))


@SPLIT
def test_a_backbone_that_thaws_gets_masters(split):
    _train_beside_by_hand("", split)


@pytest.mark.parametrize(
    ("layout", "split"),
    [
        pytest.param("buckets", False, id="buckets-whole"),
        pytest.param("FSDP2", True, id="FSDP2-split", marks=pytest.mark.slow),
        pytest.param("buckets", True, id="buckets-split", marks=pytest.mark.slow),
        pytest.param("FSDP2", False, id="FSDP2-whole", marks=pytest.mark.slow),
    ],
)
def test_a_backbone_that_thaws_gets_masters_under_ddp_and_fsdp2(ranks2, layout, split):
    ranks2.run(_train_beside_by_hand, layout, split)


@SPLIT
def test_an_optimizer_of_frozen_parameters_and_fp32_norms_steps_the_norms(split):
    frozen = nn.Linear(4, 4).to(BF16).requires_grad_(False)
    norm = nn.LayerNorm(4)
    model = nn.Sequential(frozen, norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = MasterParameters(optimizer, split=split)
    norm.weight.grad = torch.ones(4)
    optimizer.step()
    assert norm.weight.tolist() == [0.0] * 4
    assert masters.state_dict()["masters"] == {}


@on_ranks(2)
@SPLIT
def test_a_frozen_stage_of_a_pipeline_steps_and_skips_with_the_others(split):
    """Rank 0 trains nothing before its stage thaws; rank 1 finds an overflow in the second step."""
    rank = dist.get_rank()
    stage = nn.Linear(4, 1, bias=False).to(BF16 if split else F16).requires_grad_(rank == 1)
    nn.init.zeros_(stage.weight)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
    MasterParameters(optimizer, split=split)
    scaler = master_scaler()
    steps = []
    for step in range(4):
        if step == 3:
            stage.requires_grad_(True)
        optimizer.zero_grad()
        inputs = torch.ones(1, 4, dtype=stage.weight.dtype, requires_grad=True)
        loss = stage(inputs).float().sum()
        if step == 1 and rank == 1:
            loss = loss * INF
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append(scaler.step_was_taken(optimizer))
    assert steps == [True, False, True, True]
    assert stage.weight.tolist() == [[-3.0 if rank == 1 else -1.0] * 4]


@pytest.mark.parametrize("level", quick_cases(["fp16-O2", "bf16-O2"], quick=["bf16-O2"]))
def test_a_group_of_half_precision_that_comes_to_an_optimizer_of_fp32_norms_gets_masters(level):
    """As gradual unfreezing does by add_param_group; SGD in half precision would lose 1e-4."""
    norm = nn.BatchNorm1d(4)
    layer = nn.Linear(4, 1, bias=False)
    model = cast_model(nn.Sequential(norm, layer), level)
    nn.init.ones_(layer.requires_grad_(False).weight)
    optimizer = torch.optim.SGD(norm.parameters(), lr=1e-4)
    amp = initialize(model, optimizer, level)
    layer.requires_grad_(True)
    optimizer.add_param_group({"params": [layer.weight]})
    for _ in range(100):
        amp.zero_grad()
        amp.backward(layer.weight.float().sum())
        amp.step()
    master = amp.masters[0].master_of(layer.weight)
    assert master.mean().item() == pytest.approx(0.99, abs=5e-4)
    assert layer.weight.float().mean().item() == pytest.approx(0.99, abs=4e-3)


def test_masters_without_a_half_precision_parameter_are_refused_unless_that_is_allowed():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="cast the model"):
        MasterParameters(optimizer)
    masters = MasterParameters(optimizer, split=True, allow_empty=True)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=F16))]})
    with pytest.raises(ConfigError, match="Use bf16-O2, or whole masters"):
        StepGuard().unscale_(optimizer)
    assert masters.nbytes == 0
