"""The steps of public trainers with distamp's scaler, or guard, in the place of torch's.

Written from their public description, with the same calls in the same order: verl's FSDP engine
(``FSDPEngine.optimizer_step``, November 2026), for FSDP1, FSDP2 and plain modules.
"""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import DistGradScaler, StepGuard
from tests.trainers.common import FAULT, data, digest, faulty, model, plant_inf, rank

STEPS, SCALE = 5, 2.0**10


def verl_step(module: nn.Module, optimizer: Any, scaler: Any, max_norm: float) -> float:
    """Unscale, clip each kind of module its own way, step; return the norm before clipping."""
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
    scaler.step(optimizer)
    scaler.update()
    return norm.item()


def wrapped(layout: str) -> nn.Module:
    net = model()
    if layout == "FSDP1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if layout == "FSDP2":
        return fully_shard(net)
    return DistributedDataParallel(net)


def train(layout: str, by: str, fault: int | None = FAULT) -> Any:
    """Weights, loss scale and norm after each step; in one rank 1 alone has an inf, or a NaN."""
    net, scaled = wrapped(layout), by == "scaler"
    scaler: Any = DistGradScaler("cpu", init_scale=SCALE) if scaled else StepGuard()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    inputs, targets = (each[2 * rank() :].split(2)[::2] for each in data().tensors)
    weights, scales, norms = [], [], []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
            outputs = net(inputs[step])
        scaler.scale((outputs.float() - targets[step]).square().mean()).backward()
        plant_inf(net.parameters(), step, fault, value=float("inf" if scaled else "nan"))
        if scaled:
            norms.append(verl_step(net, optimizer, scaler, max_norm=1.0))
        else:  # as docs/frameworks.md has it: one clip for any module, no check on the host
            norms.append(scaler.clip_grad_norm_(optimizer, 1.0).item())
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        weights.append(digest(net))
        scales.append(scaler.get_scale())
    return weights, scales, norms


@pytest.mark.parametrize("by", ["scaler", "guard"])
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2"])
def test_verls_step_skips_on_all_ranks_and_clips_unscaled_gradients(ranks2, layout, by):
    (weights, scales, norms), other = ranks2.run(train, layout, by)
    assert other[:2] == (weights, scales)
    after = SCALE / 2 if by == "scaler" else 1.0
    assert scales[FAULT:] == [after] * (STEPS - FAULT)
    stayed = [now == before for before, now in itertools.pairwise(weights)]
    assert stayed == [step == FAULT for step in range(1, STEPS)]
    _, _, (first, *_) = ranks2.run(train, "DDP", "scaler", fault=None)[0]
    assert norms[0] == pytest.approx(first, rel=2e-2)


def nano_gpt(guard: bool) -> list[float]:
    """karpathy/nanoGPT, train.py: at bf16 its scaler is disabled, and there all the same."""
    net = faulty(model(), value=float("nan"))
    wrapped = DistributedDataParallel(net)
    inputs, targets = (each[4 * rank() :].split(4)[::2] for each in data().tensors)
    weights = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with distamp.install(guard=guard, max_consecutive_skips=3):
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
            for batch in zip(inputs, targets, strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = wrapped(batch[0])
                scaler.scale((outputs.float() - batch[1]).square().mean()).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                weights.append(digest(net))
    return weights


def test_a_scaler_that_is_disabled_at_bf16_guards_where_that_was_asked_for(ranks2):
    one, other = ranks2.run(nano_gpt, guard=True)
    assert one == other
    assert one[FAULT] == one[FAULT - 1] != one[-1]
    _, spoilt = ranks2.run(nano_gpt, guard=False)
    assert math.isnan(spoilt[-1]), "as with torch's, which is disabled"
