"""Regions and op lists where an out-of-tree device is loaded: on it, on the CPU, in threads."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import torch
from torch import Tensor, nn

from distamp import OpLists, autocast
from distamp.autocast import AutocastState, propagate

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
# A matrix product in full precision, and tanh in the lower one: the opposite of torch's lists.
TURNED = OpLists(fp32={"mm"}, lower_precision={"tanh"})


def _dtypes(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    return torch.mm(x, x).dtype, torch.tanh(x).dtype


def _regions(device: str) -> Any:
    x = torch.ones(4, 4, device=device)
    with autocast(device, BF16):
        plain = _dtypes(x)
        with autocast(device, BF16, ops=TURNED):
            inner = _dtypes(x)
        after = _dtypes(x)
    with autocast(device, BF16, ops=TURNED):
        outer = _dtypes(x)
        state = AutocastState.capture()
        with autocast(device, enabled=False):
            off = _dtypes(x)
    with state.apply():
        again = _dtypes(x)
    return plain, inner, after, outer, off, again, _dtypes(x)


def test_op_lists_hold_on_the_device_and_on_the_cpu_beside_it(sim):
    plain, turned, off = (BF16, FULL), (FULL, BF16), (FULL, FULL)
    for device in ("sim", "cpu"):
        assert sim.one(_regions, device) == (plain, turned, plain, turned, off, turned, off)


def _both_devices() -> Any:
    here, there = torch.ones(4, 4), torch.ones(4, 4, device="sim")
    with autocast("sim", HALF, ops=TURNED):
        sim_alone = _dtypes(there), _dtypes(here)
        with autocast("cpu", BF16):
            both = _dtypes(there), _dtypes(here)
    return sim_alone, both


def test_lists_of_one_device_leave_the_other_alone(sim):
    assert sim.one(_both_devices) == (
        ((FULL, HALF), (FULL, FULL)),
        ((FULL, HALF), (BF16, FULL)),
    )


def _trained(ops: OpLists | None, threads: int) -> Any:
    """Forward in threads that take the region along, backward in autograd's own thread."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False).to("sim")
    x = torch.randn(4, 4).to("sim")

    def forward(number: int) -> Tensor:
        return torch.tanh(torch.mm(x + number, layer.weight))

    with autocast("sim", HALF, ops=ops), concurrent.futures.ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(propagate(forward), range(threads)))
    torch.stack([y.float() for y in outputs]).sum().backward()
    assert layer.weight.grad is not None
    return [y.dtype for y in outputs], layer.weight.grad.cpu()


def _by_hand(threads: int) -> Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(4, 4)
    outputs = [torch.tanh(torch.mm(x + n, layer.weight).half()).float() for n in range(threads)]
    torch.stack(outputs).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


def test_threads_take_lists_along_and_gradients_are_those_of_the_casts_by_hand(sim):
    expected = _by_hand(3)
    for schedule, seed in (("late", 0), ("late_others", 0), ("random", 4)):
        dtypes, gradient = sim.one(_trained, TURNED, 3, schedule=schedule, seed=seed)
        assert dtypes == [HALF] * 3
        torch.testing.assert_close(gradient, expected)
