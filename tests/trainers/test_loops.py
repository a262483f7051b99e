"""The optimizer steps of public RL trainers with distamp's scaler in the place of torch's.

Written from their public description, with the same calls in the same order: verl's FSDP engine
(``FSDPEngine.optimizer_step``, November 2026), for FSDP1, FSDP2 and plain modules.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, StepGuard
from tests.ranks import RankError
from tests.trainers.common import FAULT, data, digest, model, plant_inf, rank

STEPS, SCALE = 5, 2.0**10


def verl_step(module: nn.Module, optimizer: Any, scaler: Any, max_norm: float) -> float:
    """Unscale, clip each kind of module its own way, step; return the norm before clipping."""
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm: Tensor
    if isinstance(module, FullyShardedDataParallel):
        norm = module.clip_grad_norm_(max_norm)
    elif isinstance(module, FSDPModule):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    else:
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    elif norm.isfinite():
        optimizer.step()
    else:
        optimizer.zero_grad()
    return norm.item()


def guarded_step(optimizer: Any, guard: StepGuard, max_norm: float) -> float:
    """The same in bf16, as docs/frameworks.md has it: one clip for any module, no host check."""
    norm = guard.clip_grad_norm_(optimizer, max_norm)
    guard.step(optimizer)
    guard.update()
    return norm.item()


def wrapped(layout: str) -> nn.Module:
    net = model()
    if layout == "FSDP1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if layout == "FSDP2":
        return fully_shard(net)
    return DistributedDataParallel(net)


MADE: dict[str, Callable[[], Any]] = {
    "ours": lambda: DistGradScaler("cpu", init_scale=SCALE, growth_interval=400),
    "torch's": lambda: ShardedGradScaler("cpu", init_scale=SCALE, growth_interval=400),
    "guard": StepGuard,
    "none": lambda: None,
}


def train(
    layout: str, by: str, fused: bool = True, fault: int | None = FAULT
) -> tuple[list[float], list[float], list[float]]:
    """Weights, loss scale and norm after each step; in one rank 1 alone has an inf, or a NaN."""
    net, scaler, scaled = wrapped(layout), MADE[by](), by in ("ours", "torch's")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    inputs, targets = (each[2 * rank() :].split(2)[::2] for each in data().tensors)
    weights, scales, norms = [], [], []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
            outputs = net(inputs[step])
        loss = (outputs.float() - targets[step]).square().mean()
        (scaler.scale(loss) if scaled else loss).backward()
        plant_inf(net.parameters(), step, fault, value=float("inf" if scaled else "nan"))
        if by == "guard":
            norms.append(guarded_step(optimizer, scaler, max_norm=1.0))
        else:
            norms.append(verl_step(net, optimizer, scaler, max_norm=1.0))
        optimizer.zero_grad()
        weights.append(digest(net))
        scales.append(scaler.get_scale() if scaled else 1.0)
    return weights, scales, norms


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2"])
def test_verls_step_skips_on_all_ranks_and_clips_unscaled_gradients(ranks2, layout, fused):
    one, other = ranks2.run(train, layout, "ours", fused)
    weights, scales, norms = one
    assert other[:2] == one[:2]
    assert scales == [SCALE] * FAULT + [SCALE / 2] * (STEPS - FAULT)
    stayed = [now == before for before, now in itertools.pairwise(weights)]
    assert stayed == [step == FAULT for step in range(1, STEPS)]
    _, _, (first, *_) = ranks2.run(train, "DDP", "ours", fused=False, fault=None)[0]
    assert norms[0] == pytest.approx(first, rel=1e-2)


def test_with_torchs_scaler_and_a_fused_optimizer_the_same_step_raises(ranks2):
    with pytest.raises(RankError, match=r"broadcast shape \[1\]"):
        ranks2.run(train, "FSDP1", "torch's", fault=None)


@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2"])
def test_in_bf16_a_guard_skips_on_all_ranks_by_one_norm(ranks2, layout):
    one, other = ranks2.run(train, layout, "guard")
    assert one[0] == other[0]
    stayed = [now == before for before, now in itertools.pairwise(one[0])]
    assert stayed == [step == FAULT for step in range(1, STEPS)]
    (*_, theirs), _ = ranks2.run(train, layout, "none")
    assert one[2][0] == pytest.approx(theirs[0], rel=1e-5)


def test_a_check_on_the_host_parts_replicas(ranks2):
    (one, *_), (other, *_) = ranks2.run(train, "DDP", "none")
    assert one[FAULT] != other[FAULT]
