"""The same device called "cuda", for what looks at that name: one process."""

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


def _dtypes() -> Any:
    from distamp.cuda.amp import GradScaler, autocast

    linear, x = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    with autocast():
        old = linear(x).dtype
    with distamp.autocast("cuda", dtype=torch.float16, ops=OpLists(fp32={"linear"})):
        return (
            old,
            linear(x).dtype,
            distamp.DistGradScaler().scale(x).device.type,
            GradScaler().is_enabled(),
        )


def test_old_names_op_lists_and_the_scalers_default_device_hold_on_cuda(sim_cuda):
    assert sim_cuda.one(_dtypes) == (torch.float16, torch.float32, "cuda", True)
