"""The same device called "cuda", for what looks at that name: one process."""

import contextlib
import os
from typing import Any
from unittest import mock

import torch
from torch import nn

import distamp
from distamp.autocast import OpLists


def _seen() -> Any:
    from launch.config import Config
    from launch.parallel import pick_device

    there = torch.ones(3, device="cuda:1").mul(2)
    host = torch.empty(3, pin_memory=True)
    host.copy_(there, non_blocking=True)
    pending = host.isnan().all().item()
    torch.cuda.synchronize(1)
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}):
        device = pick_device(Config())
    seen = torch.cuda.is_available(), torch.cuda.device_count(), str(there.device)
    return *seen, pending, host.tolist(), str(device), torch.cuda.current_device()


def test_torch_sees_cuda_devices_and_the_launcher_takes_its_own(sim_cuda):
    assert sim_cuda.one(_seen) == (True, 4, "cuda:1", True, [2.0] * 3, "cuda:2", 2)


def _step(ours: bool) -> Any:
    from tests.simulated.device import refuse

    torch.manual_seed(0)
    made = distamp.DistGradScaler(init_scale=1024.0), torch.amp.GradScaler(init_scale=1024.0)
    scaler = made[0] if ours else made[1]
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(2, 8, pin_memory=True)
    for number in range(4):
        # The scaler reads its new state once, in the first step.
        with refuse() if number else contextlib.nullcontext():
            with distamp.autocast("cuda", dtype=torch.float16):
                loss = model(x.to("cuda", non_blocking=True)).float().square().mean()
            scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return scaler.get_scale(), [p.detach().cpu() for p in model.parameters()]


def test_the_scalers_default_device_is_cuda_and_nothing_is_read(sim_cuda):
    (scale, weights), (theirs, wanted) = (sim_cuda.one(_step, ours) for ours in (True, False))
    assert scale == theirs == 512.0
    assert all(map(torch.equal, weights, wanted))


def _dtypes() -> Any:
    from distamp.cuda.amp import GradScaler, autocast

    linear, x = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    with autocast():
        old = linear(x).dtype
    with distamp.autocast("cuda", dtype=torch.float16, ops=OpLists(fp32={"linear"})):
        return old, linear(x).dtype, GradScaler().is_enabled()


def test_the_old_names_and_op_lists_hold_on_cuda(sim_cuda):
    assert sim_cuda.one(_dtypes) == (torch.float16, torch.float32, True)
