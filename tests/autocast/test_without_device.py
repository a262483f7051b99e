"""CUDA autocast looked at in a process that has no CUDA, all ways at once."""

from __future__ import annotations

import subprocess
import sys

# A gradient-requiring fake CUDA tensor ends a CPU-only process with no exception, so the ways of
# looking at CUDA autocast run together in a process whose end is seen here.
LOOK = """
import warnings
import torch
from torch import nn
from distamp.autocast import AutocastState, OpLists, autocast, op_reference, preflight, propagate

# torch says of a region for a device that is not there that it stays off.
warnings.simplefilter("ignore")

def states():
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    captured = AutocastState.capture()
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)
    assert ("cuda", True, torch.bfloat16) in captured.devices
    with captured.apply():
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        weight = torch.ones(2, 2, requires_grad=True)
        torch.mm(weight, weight).sum().backward()
        assert weight.grad.dtype is torch.float32
    assert not torch.is_autocast_enabled("cuda")
    assert propagate(lambda: torch.is_autocast_enabled("cuda"), captured)()
    with autocast("cuda", ops=OpLists(fp32={"linear"}, lower_precision={"prelu"})):
        assert AutocastState.capture().lists is not None

def reference():
    found = op_reference("cuda")
    assert found["matmul"].registered == "lower_precision"
    assert found["softmax"].registered == "fp32"
    assert found["binary_cross_entropy"].registered == "banned"

def look_ahead():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(4, 4, 1))
    x = torch.zeros(2, 4, 8, requires_grad=True)
    result = preflight(model, x, "cuda", torch.float16, loss_fn=lambda y: y.float().mean())
    rows = {(row.phase, row.op): row.outputs for row in result.report.rows}
    assert rows["forward", "addmm"][0] == "float16", rows

for way in (states, look_ahead, states, reference, states, look_ahead):
    way()
print("done")
"""


def test_state_reference_and_preflight_of_cuda_share_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.splitlines()[-1] == "done"
