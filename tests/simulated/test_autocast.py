"""Regions and op lists where an out-of-tree device is loaded: on it, on the CPU, in threads."""

import concurrent.futures
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import AutocastState, OpLists, autocast
from tests.on_ranks import on_devices

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
# A matrix product in full precision, and tanh in the lower one: the opposite of torch's lists.
TURNED = OpLists(fp32={"mm"}, lower_precision={"tanh"})


def _dtypes(device: str) -> tuple[torch.dtype, torch.dtype]:
    x = torch.ones(4, 4, device=device)
    return torch.mm(x, x).dtype, torch.tanh(x).dtype


@on_devices(1)
@pytest.mark.parametrize(("device", "other"), [("sim", "cpu"), ("cpu", "sim")])
def test_op_lists_hold_on_their_device_and_leave_the_other_alone(device, other):
    with autocast(device, BF16):
        found = [_dtypes(device)]
        with autocast(device, BF16, ops=TURNED):
            found += [_dtypes(device), _dtypes(other)]
            state = AutocastState.capture()
            with autocast(other, HALF):
                found += [_dtypes(device), _dtypes(other)]
            with autocast(device, enabled=False):
                found.append(_dtypes(device))
        found.append(_dtypes(device))
    with state.apply():
        found.append(_dtypes(device))
    found.append(_dtypes(device))
    plain, turned, off = (BF16, FULL), (FULL, BF16), (FULL, FULL)
    assert found == [plain, turned, off, turned, (HALF, FULL), off, plain, turned, off]


def _trained(by_hand: bool) -> Any:
    """Forward in threads that take the region along, backward in autograd's own thread."""
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(4, 4)
    if not by_hand:
        layer, x = layer.to("sim"), x.to("sim")

    def forward(number: int) -> Tensor:
        y = torch.mm(x + number, layer.weight)
        return torch.tanh(y.half() if by_hand else y)

    with autocast("sim", HALF, ops=TURNED), concurrent.futures.ThreadPoolExecutor(2) as pool:
        bound = AutocastState.wrap(forward)
        outputs = list(pool.map(bound, range(3)))
    torch.stack([y.float() for y in outputs]).sum().backward()
    return [y.dtype for y in outputs], layer.weight.grad.cpu()  # type: ignore[union-attr]


def test_threads_take_lists_along_and_gradients_are_those_of_the_casts_by_hand(sim):
    _, expected = sim.one(_trained, True)
    for schedule, seed in (("late", 0), ("late_others", 0), ("random", 4)):
        dtypes, gradient = sim.one(_trained, False, schedule=schedule, seed=seed)
        assert dtypes == [HALF] * 3
        torch.testing.assert_close(gradient, expected)
