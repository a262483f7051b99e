"""DataParallel on several devices of one process."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import distamp
from distamp.autocast import DataParallel
from distamp.masters import MasterParameters

BF16, FP16 = torch.bfloat16, torch.float16
SCHEDULES = [("late", 0), ("random", 3)]


class RecordingLinear(nn.Linear):
    """A linear layer that records the device and the dtype of the output of each replica."""

    outputs: set[tuple[str, torch.dtype]]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.outputs.add((str(x.device), y.dtype))
        return y


class Run(NamedTuple):
    """The parameters, the scale after each step, and the device and dtype of each replica."""

    parameters: list[Tensor]
    scales: list[float]
    outputs: list[tuple[str, torch.dtype]]


def train(parallel: bool, dtype: torch.dtype | None, masters: bool = False) -> Run:
    """Train four steps, of which the second overflows.

    Args:
        parallel: Wrap the model in ``DataParallel``.
        dtype: The dtype of the region, or of the model if it has masters.
        masters: Give the optimizer master parameters.
    """
    net = nn.Sequential(RecordingLinear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to("sim:0")
    net.to(dtype if masters else torch.float32)
    net[0].outputs = set()
    model = DataParallel(net, [0, 1, 2]) if parallel else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    _masters = MasterParameters(optimizer) if masters else None
    fp16_grads = "master" if masters else "error"
    scaler = distamp.DistGradScaler("sim", init_scale=64.0, fp16_grads=fp16_grads)
    scales = []
    for step in range(4):
        x = torch.randn(8, 8).to("sim:0", net[0].weight.dtype)
        with distamp.autocast("sim", dtype=dtype, enabled=dtype is not None and not masters):
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


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [
        pytest.param(None, False, id="fp32"),
        pytest.param(BF16, False, id="bf16 region"),
        pytest.param(BF16, True, id="bf16 model with masters"),
        pytest.param(FP16, False, id="fp16 region"),
        pytest.param(FP16, True, id="fp16 model with masters"),
    ],
)
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_replicas_compute_in_the_dtype_and_train_as_one_fp32_model(
    sim, dtype, masters, schedule, seed
):
    reference = sim.one(train, False, None)
    run = sim.one(train, True, dtype, masters, schedule=schedule, seed=seed)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    parameters = [param.float() for param in run.parameters]
    torch.testing.assert_close(parameters, reference.parameters, **tolerance)
    assert run.scales == [64.0, 32.0, 32.0, 32.0]
    output_dtype = dtype or torch.float32
    assert run.outputs == [(f"sim:{device}", output_dtype) for device in range(3)]
