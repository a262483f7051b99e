"""The scaler on a real accelerator, compared with torch's scaler and with the CPU."""

from typing import Any

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from tests.scaler.steps import INF, iteration

HAS_CUDA = torch.cuda.is_available()
SIMULATED = HAS_CUDA and torch.cuda.get_device_name() == "simulated"
NEEDS_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, NEEDS_CUDA]

FOR_LOOP = {"foreach": False, "fused": False}
FOREACH = {"foreach": True}
FUSED = {"fused": True}
OPTIONS = pytest.mark.parametrize(
    "options", [FOR_LOOP, FOREACH, FUSED], ids=["for-loop", "foreach", "fused"]
)
UNSCALE = pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])


def train(
    scaler: Any, optimizer_class: Any, options: dict[str, bool], unscale: bool
) -> tuple[list[float], float]:
    """Train eight iterations with one overflow, and return the parameter and the scale."""
    values = torch.linspace(-1, 1, 64, device="cuda")
    parameter = nn.Parameter(values)
    optimizer = optimizer_class([parameter], lr=0.01, **options)
    scalars = [-3.5, -2.5, -1.5, INF, 0.5, 1.5, 2.5, 3.5]
    for scalar in scalars:
        gradient = torch.full_like(parameter, scalar)
        iteration(scaler, optimizer, parameter, gradient, unscale=unscale)
    trained = parameter.tolist()
    return trained, scaler.get_scale()


@UNSCALE
@OPTIONS
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_it_trains_as_torch_does(name: str, options: dict[str, bool], unscale: bool) -> None:
    optimizer_class = getattr(torch.optim, name)
    reference = torch.amp.GradScaler("cuda")
    expected = train(reference, optimizer_class, options, unscale)
    scaler = DistGradScaler()
    result = train(scaler, optimizer_class, options, unscale)
    torch.testing.assert_close(result, expected)


@pytest.mark.skipif(SIMULATED, reason="the simulated accelerator has no set_sync_debug_mode")
def test_a_fused_iteration_never_synchronises() -> None:
    model = nn.Linear(4, 4)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = DistGradScaler("cuda")
    inputs = torch.randn(2, 4, device="cuda")
    for number in range(4):
        # The first iteration constructs state, which may synchronise.
        torch.cuda.set_sync_debug_mode("error" if number > 0 else "default")
        try:
            outputs = model(inputs)
            loss = outputs.pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.step_counts(optimizer).taken == 4
