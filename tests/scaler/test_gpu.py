"""The scaler on a real accelerator, beside torch's own and beside the CPU."""

from typing import Any

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from tests.scaler.steps import INF, iteration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIMULATED = torch.cuda.is_available() and torch.cuda.get_device_name() == "simulated"
HOW = [{"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}]


def _train(scaler: Any, cls: Any, how: dict[str, bool], unscale: bool) -> Any:
    parameter = nn.Parameter(torch.linspace(-1, 1, 64, device="cuda"))
    optimizer = cls([parameter], lr=0.01, **how)
    for step in range(8):
        gradient = torch.full((64,), INF if step == 3 else step - 3.5, device="cuda")
        iteration(scaler, optimizer, parameter, gradient, unscale=unscale)
    return parameter.tolist(), scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("how", HOW, ids=["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_it_trains_as_torch_does(name: str, how: dict[str, bool], unscale: bool) -> None:
    cls = getattr(torch.optim, name)
    expected = _train(torch.amp.GradScaler("cuda"), cls, how, unscale)
    torch.testing.assert_close(_train(DistGradScaler(), cls, how, unscale), expected)


@pytest.mark.skipif(SIMULATED, reason="the simulated accelerator has no set_sync_debug_mode")
def test_a_fused_iteration_never_synchronises() -> None:
    model, scaler = nn.Linear(4, 4).cuda(), DistGradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(2, 4, device="cuda")
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            scaler.scale(model(inputs).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.step_counts(optimizer).taken == 4
