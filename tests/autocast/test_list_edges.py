"""Op lists beside what else is in force: another device's lists, a dtype that was asked for."""

from __future__ import annotations

import torch

from distamp import autocast
from distamp.autocast import AutocastState, OpLists, custom_bwd, custom_fwd

X = torch.tensor([[1.0, 2.0], [3.0, 4.1]])


def test_lists_of_another_device_type_leave_those_of_this_one():
    for inner in ("cuda", "xpu"):
        with autocast("cpu", ops=OpLists(fp32={"mm"})):
            with autocast(inner, enabled=False, ops=OpLists(fp32={"relu"})):
                assert (X @ X).dtype is torch.float32
            assert [device for device, _ in AutocastState.capture().lists] == ["cpu"]


def test_a_call_with_a_dtype_is_as_it_would_be_without_lists():
    expected = torch.softmax(X, 0, dtype=torch.float64)
    with autocast("cpu", ops=OpLists(lower_precision={"softmax"})):
        assert torch.equal(torch.softmax(X, 0, dtype=torch.float64), expected)


def test_an_op_that_was_listed_before_leaves_the_cache_off():
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        torch.mm(X, X)
    with autocast("cpu", cache_enabled=False):
        assert torch.mm(X, X).dtype is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()


class _Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        product = gradient.to(x.dtype) @ x.T
        assert product.dtype is torch.float32
        return product


def test_backward_follows_the_lists_of_forward_and_leaves_them():
    x = X.clone().requires_grad_()
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        out = _Square.apply(x)
    out.sum().backward()
    assert AutocastState.capture().lists == ()
    with autocast("cpu"):
        assert torch.mm(X, X).dtype is torch.bfloat16
