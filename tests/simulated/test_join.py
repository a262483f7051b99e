"""Uneven inputs on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from distamp.comm_hooks import register
from tests.comm_hooks.training import inputs, mlp
from tests.scaler.steps import INF


def _hooked(kind: str, wire: str, scaled: str) -> Any:
    """Two epochs of uneven inputs with a hook, in the second of which rank 1 overflows once."""
    rank = dist.get_rank()
    device = torch.device(kind, rank) if kind == "sim" else torch.device(kind)
    model = DistributedDataParallel(mlp(17, 40, 3).to(device), bucket_cap_mb=0.002)
    hook = register(model, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    scaler = DistGradScaler(kind, init_scale=1024.0, enabled=scaled != "unscaled")
    if scaled == "attached":
        scaler.attach(hook)
    for epoch in range(2):
        with Join([model, scaler] if scaler.is_enabled() else [model]):
            for number in range((2, 5)[rank]):
                loss = model(inputs(10 * epoch + number, 17).to(device)).square().mean()
                if scaler.is_enabled() and (epoch, number, rank) == (1, 1, 1):
                    loss = loss * INF
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    values = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    return values, scaler.get_scale()


@pytest.mark.parametrize("scaled", ["attached", "not attached", "unscaled"])
@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_a_hook_with_uneven_inputs_is_as_on_the_cpu(sim2, ranks2, wire, scaled):
    expected = ranks2.run(_hooked, "cpu", wire, scaled)
    for schedule, seed in [("late", 0), ("late_others", 0), ("random", 3)]:
        found = sim2.run(_hooked, "sim", wire, scaled, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
