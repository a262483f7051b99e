"""On an accelerator nothing is read on the host; here the CPU plays the accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distamp import DistGradScaler


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fused_iteration_on_a_gpu_never_synchronises() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = DistGradScaler("cuda")
    inputs = torch.randn(2, 4, device="cuda")
    for step in range(4):
        if step == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.scale(model(inputs).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.step_counts(optimizer).taken == 4
