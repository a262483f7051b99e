"""The same device called "cuda", for what looks at that name: one process, no group."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import torch
from torch import nn

import distamp
from distamp.autocast import OpLists


def _seen() -> Any:
    there = torch.ones(3, device="cuda:1").mul(2)
    host = torch.empty(3, pin_memory=True)
    host.copy_(there, non_blocking=True)
    pending = host.isnan().all().item()
    torch.cuda.synchronize(1)
    return (
        torch.cuda.is_available(),
        torch.cuda.device_count(),
        str(there.device),
        pending,
        host.tolist(),
    )


def test_torch_sees_cuda_devices(sim_cuda):
    assert sim_cuda.one(_seen) == (True, 4, "cuda:1", True, [2.0] * 3)


def _step(scaler: Any) -> Any:
    from tests.simulated.device import counted, refuse

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(2, 8, pin_memory=True)
    for number in range(4):
        # The scaler reads its new state once, in the first step.
        with counted() as counts, refuse() if number else contextlib.nullcontext():
            with distamp.autocast("cuda", dtype=torch.float16):
                loss = model(x.to("cuda", non_blocking=True)).float().square().mean()
            scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return counts, scaler.get_scale(), [p.detach().cpu() for p in model.parameters()]


def _default_scaler() -> Any:
    return _step(distamp.DistGradScaler(init_scale=1024.0))


def _torch_s_scaler() -> Any:
    return _step(torch.amp.GradScaler("cuda", init_scale=1024.0))


def test_the_scaler_s_default_device_is_cuda_and_nothing_is_read(sim_cuda):
    counts, scale, weights = sim_cuda.one(_default_scaler)
    _, torch_scale, torch_weights = sim_cuda.one(_torch_s_scaler)
    assert counts == {}
    assert scale == torch_scale == 512.0
    assert all(map(torch.equal, weights, torch_weights))


def _op_lists() -> Any:
    linear, x = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    lists = OpLists(fp32={"linear"})
    with distamp.autocast("cuda", dtype=torch.float16):
        plain = linear(x).dtype
    with distamp.autocast("cuda", dtype=torch.float16, ops=lists):
        return plain, linear(x).dtype


def test_op_lists_hold_on_cuda(sim_cuda):
    assert sim_cuda.one(_op_lists) == (torch.float16, torch.float32)


def _old_names() -> Any:
    linear, x = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    from distamp.cuda.amp import GradScaler, autocast

    with autocast():
        dtype = linear(x).dtype
    return dtype, GradScaler().is_enabled()


def test_the_old_cuda_names(sim_cuda):
    assert sim_cuda.one(_old_names) == (torch.float16, True)


def _launcher_s_choice() -> Any:
    from launch.config import Config
    from launch.parallel import pick_device

    with mock.patch.dict(os.environ, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}):
        return str(pick_device(Config())), torch.cuda.current_device()


def test_the_launcher_takes_the_device_of_its_local_rank(sim_cuda):
    assert sim_cuda.one(_launcher_s_choice) == ("cuda:2", 2)
