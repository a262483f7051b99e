"""custom_fwd and custom_bwd: backward computes as forward did, in whatever thread it runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from distamp import autocast, custom_bwd, custom_fwd
from distamp.autocast import OpLists


def _note() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _function(fwd: Any, bwd: Any, cast: torch.dtype | None) -> tuple[Any, list[Any]]:
    seen: list[Any] = []

    class Matmul(torch.autograd.Function):
        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            out = a.mm(b)
            seen.append((*_note(), a.dtype, out.dtype))
            return out

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            seen.append((*_note(), grad.dtype, grad.mm(b.t()).dtype))
            return grad.mm(b.t()), a.t().mm(grad)

    return Matmul, seen


@pytest.mark.parametrize("cast", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("region", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("around_backward", [None, torch.bfloat16])
def test_the_same_as_torchs_in_every_combination(cast, region, around_backward):
    results = []
    for fwd, bwd in ((custom_fwd, custom_bwd), (torch.amp.custom_fwd, torch.amp.custom_bwd)):
        function, seen = _function(fwd, bwd, cast)
        torch.manual_seed(0)
        a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with autocast("cpu", region, enabled=region is not None):
            loss = function.apply(a, b).float().sum()
        with autocast("cpu", around_backward, enabled=around_backward is not None):
            loss.backward()
        results.append((seen, a.grad, b.grad))
    ours, theirs = results
    assert ours[0] == theirs[0]
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])


def test_backward_sees_forwards_state_in_autograds_own_threads():
    """Reentrant backward nested deeper than autograd allows moves to a thread of its pool."""
    threads: set[int] = set()
    low = torch.float16

    class Nested(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            states.add(_note())
            if ctx.depth:
                with torch.enable_grad(), autocast("cpu", low):
                    x = torch.ones(2, 2, requires_grad=True)
                    Nested.apply(x, ctx.depth - 1).sum().backward()
            return grad, None

    states: set[tuple[bool, torch.dtype]] = set()
    with autocast("cpu", low):
        out = Nested.apply(torch.ones(2, 2, requires_grad=True), 70).sum()
    out.backward()
    assert len(threads) > 1
    assert states == {(True, low)}


def test_backward_follows_the_op_lists_of_forward():
    function, seen = _function(custom_fwd, custom_bwd, None)
    a = torch.randn(4, 4, requires_grad=True)
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        loss = function.apply(a, a).sum()
    loss.backward()
    assert [each[3] for each in seen] == [torch.float32] * 2


@pytest.mark.parametrize("decorate", [custom_fwd, custom_bwd])
def test_a_device_type_that_is_no_string_is_refused(decorate):
    with pytest.raises(ValueError, match="device_type"):
        decorate(device_type=torch.device("cpu"))


def test_the_decorated_function_keeps_its_name():
    @custom_fwd(device_type="cpu")
    def forward(ctx, x):
        """Take x."""

    assert (forward.__name__, forward.__doc__) == ("forward", "Take x.")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_backward_on_the_devices_own_thread_sees_forwards_dtype():
    """autograd runs CUDA's backward in a thread of its own, in the default dtype."""
    seen: list[torch.dtype] = []

    class Matmul(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cuda")
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.mm(a)

        @staticmethod
        @custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            seen.append(a.mm(a).dtype)
            return a

    a = torch.ones(2, 2, device="cuda", requires_grad=True)
    with autocast("cuda", torch.bfloat16):
        Matmul.apply(a).float().sum().backward()
    assert seen == [torch.bfloat16]
