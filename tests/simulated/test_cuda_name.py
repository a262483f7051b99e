"""The simulated device with the name "cuda", for code that reads that name, in one process."""

import os
from unittest import mock

import pytest
import torch
from torch import nn

import distamp
from distamp.autocast import OpLists

# The start of their process takes most of their time.
pytestmark = pytest.mark.slow


def _check_devices() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 4
    tensor = torch.ones(3, device="cuda:1").mul(2)
    assert str(tensor.device) == "cuda:1"
    on_host = torch.empty(3, pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    assert on_host.isnan().all(), "the copy runs later"
    torch.cuda.synchronize(1)
    assert on_host.tolist() == [2.0, 2.0, 2.0]


def test_torch_has_cuda_devices(sim_cuda):
    sim_cuda.one(_check_devices)


def _check_launcher() -> None:
    from launch.config import Config
    from launch.parallel import pick_device

    with mock.patch.dict(os.environ, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}):
        device = pick_device(Config())
    assert str(device) == "cuda:2"
    assert torch.cuda.current_device() == 2


def test_the_launcher_takes_the_device_of_its_rank(sim_cuda):
    sim_cuda.one(_check_launcher)


def _check_old_names() -> None:
    from distamp.cuda.amp import GradScaler, autocast

    linear, x = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    with autocast():
        assert linear(x).dtype is torch.float16
    assert GradScaler().is_enabled()


def test_the_old_names_are_for_cuda(sim_cuda):
    sim_cuda.one(_check_old_names)


def _check_op_lists() -> None:
    linear, x = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    with distamp.autocast("cuda", dtype=torch.float16, ops=OpLists(fp32={"linear"})):
        assert linear(x).dtype is torch.float32


def test_op_lists_hold_on_cuda(sim_cuda):
    sim_cuda.one(_check_op_lists)


def _check_default_device() -> None:
    scaled = distamp.DistGradScaler().scale(torch.ones(1, device="cuda"))
    assert scaled.device.type == "cuda"


def test_the_default_device_of_a_scaler_is_cuda(sim_cuda):
    sim_cuda.one(_check_default_device)
