"""DataParallel on several devices of one process."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import distamp
from distamp.autocast import DataParallel
from distamp.masters import MasterParameters
from tests.quick_cases import quick_cases

BF16 = torch.bfloat16
FP16 = torch.float16
SLOW_SCHEDULE = pytest.param("random", 3, marks=pytest.mark.slow)
SCHEDULES = [("late", 0), SLOW_SCHEDULE]
# Relative and absolute.
FP32_TOLERANCES = (1e-5, 1e-6)
HALF_PRECISION_TOLERANCES = (2e-2, 2e-3)


class RecordingLinear(nn.Linear):
    """A linear layer that records the device and the dtype of the output of each replica."""

    outputs: set[tuple[str, torch.dtype]]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.outputs.add((str(x.device), y.dtype))
        return y


class Run(NamedTuple):
    """The result of a training.

    Attributes:
        parameters: The parameters after the last step.
        scales: The loss scale after each step.
        outputs: The device and the dtype of the outputs of each replica.
    """

    parameters: list[Tensor]
    scales: list[float]
    outputs: list[tuple[str, torch.dtype]]


def train_region(parallel: bool, dtype: torch.dtype | None) -> Run:
    """Train an fp32 model in an autocast region of this dtype, or without a region.

    Args:
        parallel: Wrap the model in ``DataParallel``.
        dtype: The dtype of the region, or None for no region.
    """
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = distamp.DistGradScaler("sim", init_scale=64.0, fp16_grads="error")
    region = distamp.autocast("sim", dtype=dtype, enabled=dtype is not None)
    return train(net, optimizer, scaler, region, parallel)


def train_with_masters(parallel: bool, dtype: torch.dtype) -> Run:
    """Train a model of this dtype by master parameters, without a region.

    Args:
        parallel: Wrap the model in ``DataParallel``.
        dtype: The dtype of the model.
    """
    net = make_net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    # The masters replace the parameters of the optimizer as long as this object lives.
    _masters = MasterParameters(optimizer)
    scaler = distamp.DistGradScaler("sim", init_scale=64.0, fp16_grads="master")
    region = distamp.autocast("sim", dtype=dtype, enabled=False)
    return train(net, optimizer, scaler, region, parallel)


def make_net() -> nn.Sequential:
    net = nn.Sequential(RecordingLinear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    net[0].outputs = set()
    return net.to("sim:0")


def train(
    net: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    scaler: distamp.DistGradScaler,
    region: distamp.autocast,
    parallel: bool,
) -> Run:
    """Train four steps. The second step overflows."""
    model = DataParallel(net, [0, 1, 2]) if parallel else net
    scales = []
    for step in range(4):
        x = torch.randn(8, 8).to("sim:0", net[0].weight.dtype)
        with region:
            y = model(x)
        optimizer.zero_grad()
        loss = y.float().square().mean()
        if step == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    parameters = [param.detach() for param in net.parameters()]
    return Run(parameters, scales, sorted(net[0].outputs, key=str))


# The function that trains, and the dtype of its region or of its model.
SETUPS = {
    "fp32": (train_region, None),
    "bf16 region": (train_region, BF16),
    "bf16 model with masters": (train_with_masters, BF16),
    "fp16 region": (train_region, FP16),
    "fp16 model with masters": (train_with_masters, FP16),
}
QUICK_SETUPS = ("fp32", "bf16 region", "bf16 model with masters")


@pytest.mark.parametrize("setup", quick_cases(SETUPS, QUICK_SETUPS))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_replicas_compute_in_the_dtype_and_train_as_one_fp32_model(sim, setup, schedule, seed):
    train_in_dtype, dtype = SETUPS[setup]
    reference = sim.one(train_region, False, None)
    run = sim.one(train_in_dtype, True, dtype, schedule=schedule, seed=seed)
    rtol, atol = FP32_TOLERANCES if dtype is None else HALF_PRECISION_TOLERANCES
    parameters = [param.float() for param in run.parameters]
    torch.testing.assert_close(parameters, reference.parameters, rtol=rtol, atol=atol)
    assert run.scales == [64.0, 32.0, 32.0, 32.0]
    output_dtype = dtype or torch.float32
    for device in range(3):
        expected_output = (f"sim:{device}", output_dtype)
        assert run.outputs[device] == expected_output
    assert len(run.outputs) == 3
