"""Several devices in one process: DataParallel."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distamp
from distamp.autocast import DataParallel
from distamp.masters import MasterParameters

SCHEDULES = [("late", 0), ("random", 3)]


class Watched(nn.Linear):
    """Notes where each of its replicas ran and what came out."""

    seen: set[tuple[str, torch.dtype]]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.add((str(x.device), y.dtype))
        return y


def _replicas(parallel: bool, dtype: torch.dtype | None, masters: bool = False) -> Any:
    """Four steps, of which the second overflows: parameters, scales, and where what ran.

    In a region of this dtype; with masters the model itself is of it.
    """
    net = nn.Sequential(Watched(8, 16), nn.Tanh(), nn.Linear(16, 4)).to("sim:0")
    net.to(dtype if masters else torch.float32)
    net[0].seen = set()
    model = DataParallel(net, [0, 1, 2]) if parallel else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    _kept = masters and MasterParameters(optimizer)
    fp16_grads = "master" if masters else "error"
    scaler, scales = distamp.DistGradScaler("sim", init_scale=64.0, fp16_grads=fp16_grads), []
    for step in range(4):
        x = torch.randn(8, 8).to("sim:0", net[0].weight.dtype)
        with distamp.autocast("sim", dtype=dtype, enabled=dtype is not None and not masters):
            y = model(x)
        optimizer.zero_grad()
        loss = y.float().square().mean() * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach() for p in net.parameters()], scales, sorted(net[0].seen, key=str)


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(None, False), *itertools.product([torch.bfloat16, torch.float16], [False, True])],
    ids=str,
)
def test_replicas_compute_in_the_region_and_train_as_one_model(sim, dtype, masters):
    alone = sim.one(_replicas, False, None)[0]  # In fp32.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    for schedule, seed in SCHEDULES:
        given = (True, dtype, masters)
        parameters, scales, seen = sim.one(_replicas, *given, schedule=schedule, seed=seed)
        torch.testing.assert_close([p.float() for p in parameters], alone, **tolerance)
        assert scales == [64.0, 32.0, 32.0, 32.0]
        assert seen == [(f"sim:{i}", dtype or torch.float32) for i in range(3)]
