"""Regions and op lists on an out-of-tree device, on the CPU next to it, and in threads."""

import concurrent.futures
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import AutocastState, OpLists, autocast
from tests.on_ranks import on_devices

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
# A matrix product in full precision, and tanh in the lower one: the opposite of torch's lists.
REVERSED = OpLists(fp32={"mm"}, lower_precision={"tanh"})


def _dtypes(device: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of a product and of a tanh on a device."""
    x = torch.ones(4, 4, device=device)
    product = torch.mm(x, x)
    tanh = torch.tanh(x)
    return product.dtype, tanh.dtype


@on_devices(1)
@pytest.mark.parametrize(("device", "second_device"), [("sim", "cpu"), ("cpu", "sim")])
def test_op_lists_hold_on_their_device_alone(device, second_device):
    with autocast(device, BF16, ops=REVERSED):
        assert _dtypes(device) == (FULL, BF16)
        assert _dtypes(second_device) == (FULL, FULL)
        with autocast(second_device, HALF):
            assert _dtypes(device) == (FULL, BF16)
            assert _dtypes(second_device) == (HALF, FULL)


@on_devices(1)
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_op_lists_hold_between_the_borders_of_their_region(device):
    with autocast(device, BF16):
        assert _dtypes(device) == (BF16, FULL)
        with autocast(device, BF16, ops=REVERSED):
            assert _dtypes(device) == (FULL, BF16)
            with autocast(device, enabled=False):
                assert _dtypes(device) == (FULL, FULL)
        assert _dtypes(device) == (BF16, FULL)
    assert _dtypes(device) == (FULL, FULL)


@on_devices(1)
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_a_captured_state_has_the_op_lists(device):
    with autocast(device, BF16, ops=REVERSED):
        state = AutocastState.capture()
    with state.apply():
        assert _dtypes(device) == (FULL, BF16)
    assert _dtypes(device) == (FULL, FULL)


def _train_in_threads(device: str) -> Any:
    """Run forward in threads with op lists; return the dtypes of outputs, and the gradient.

    Backward runs in a thread of autograd. On the CPU the function casts to half precision itself,
    because the region is for the device.
    """
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(4, 4).to(device)
    layer.to(device)

    def forward(number: int) -> Tensor:
        y = torch.mm(x + number, layer.weight)
        if device == "cpu":
            y = y.half()
        return torch.tanh(y)

    with autocast("sim", HALF, ops=REVERSED), concurrent.futures.ThreadPoolExecutor(2) as pool:
        bound = AutocastState.wrap(forward)
        outputs = list(pool.map(bound, range(3)))
    dtypes = [output.dtype for output in outputs]
    total = sum(output.float().sum() for output in outputs)
    total.backward()  # type: ignore[union-attr]
    grad = layer.weight.grad
    assert grad is not None
    return dtypes, grad.cpu()


def test_op_lists_reach_threads_and_gradients_equal_those_of_explicit_casts(sim):
    _, expected_grad = sim.one(_train_in_threads, "cpu")
    for schedule, seed in (("late", 0), ("late_others", 0), ("random", 4)):
        dtypes, grad = sim.one(_train_in_threads, "sim", schedule=schedule, seed=seed)
        assert dtypes == [HALF, HALF, HALF]
        torch.testing.assert_close(grad, expected_grad)
