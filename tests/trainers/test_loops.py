"""The step of a public trainer with distamp's scaler in the place of torch's.

Written from its public description, with the same calls in the same order: verl's FSDP engine
(``FSDPEngine.optimizer_step``, November 2026), for FSDP1, FSDP2 and plain modules.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from tests.trainers.common import FAULT, batches, digest, model, plant_inf

STEPS, SCALE = 5, 2.0**10
LAYOUTS = {
    "DDP": DistributedDataParallel,
    "FSDP1": lambda net: FullyShardedDataParallel(
        net, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "FSDP2": fully_shard,
}


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


def train(layout: str) -> Any:
    """Weights and loss scale after each step, in one of which rank 1 overflows; the first norm."""
    net, scaler = LAYOUTS[layout](model()), DistGradScaler("cpu", init_scale=SCALE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    weights, scales, norms = [], [], []
    for step, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = net(inputs)
        scaler.scale((outputs.float() - targets).square().mean()).backward()
        plant_inf(net.parameters(), step)
        norms.append(verl_step(net, optimizer, scaler, max_norm=1.0))
        optimizer.zero_grad()
        weights.append(digest(net))
        scales.append(scaler.get_scale())
    return weights, scales, norms[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verls_step_skips_on_all_ranks_and_clips_unscaled_gradients(ranks2, layout):
    (weights, scales, norm), other = ranks2.run(train, layout)
    assert other[:2] == (weights, scales)
    assert scales[FAULT:] == [SCALE / 2] * (STEPS - FAULT)
    stayed = [now == before for before, now in itertools.pairwise(weights)]
    assert stayed == [step == FAULT for step in range(1, STEPS)]
    assert norm == pytest.approx(ranks2.run(train, "DDP")[0][2], rel=2e-2)
