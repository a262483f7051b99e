"""Backward passes in forward's state: custom_fwd and custom_bwd, activation checkpointing."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn

from distamp import (
    AutocastState,
    OpLists,
    autocast,
    checkpoint,
    checkpoint_contexts,
    custom_bwd,
    custom_fwd,
)
from distamp.errors import SettingError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OURS, TORCHS = (custom_fwd, custom_bwd), (torch.amp.custom_fwd, torch.amp.custom_bwd)


def matmul(decorators: Any, seen: list[Any], cast: Any = None, device: str = "cpu") -> Any:
    """A product that notes in what it computes; its device type's autocast state with it."""
    fwd, bwd = decorators

    def noted(a: Tensor, b: Tensor) -> Tensor:
        state = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        seen.append((*state, a.dtype, a.mm(b).dtype))
        return a.mm(b)

    class Matmul(torch.autograd.Function):
        @staticmethod
        @fwd(device_type=device, cast_inputs=cast)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            """Multiply."""
            ctx.save_for_backward(a, b)
            return noted(a, b)

        @staticmethod
        @bwd(device_type=device)
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            return noted(grad, b.t()), a.t().mm(grad)

    return Matmul


def test_custom_functions_are_as_torchs_in_every_combination():
    """Inputs cast or not, in a region of each dtype or none, backward in another one or none."""
    for cast, region, around in itertools.product((None, FP32, FP16), (None, FP16, BF16), (0, 1)):
        found = []
        for decorators in (OURS, TORCHS):
            torch.manual_seed(0)
            seen: list[Any] = []
            a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
            with autocast("cpu", region, enabled=region is not None):
                loss = matmul(decorators, seen, cast).apply(a, b).float().sum()
            with autocast("cpu", BF16, enabled=bool(around)):
                loss.backward()
            found.append((seen, a.grad.tolist(), b.grad.tolist()))
        assert found[0] == found[1], (cast, region, around)


def test_backward_follows_the_op_lists_of_forward_and_leaves_them():
    seen: list[Any] = []
    a = torch.randn(4, 4, requires_grad=True)
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        loss = matmul(OURS, seen).apply(a, a).sum()
    loss.backward()
    assert [each[3] for each in seen] == [FP32] * 2
    assert AutocastState.capture().lists == ()
    with autocast("cpu"):
        assert torch.mm(a, a).dtype is BF16


def test_backward_called_by_hand_leaves_the_callers_lists():
    """As from another function's backward: autograd puts nothing back in between."""
    seen: list[Any] = []
    function, a = matmul(OURS, seen), torch.randn(4, 4, requires_grad=True)
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        node = function.apply(a, a).grad_fn
    with autocast("cpu"):
        function.backward(node, a)
        assert (seen[-1][3], a.mm(a).dtype) == (FP32, BF16)
        with pytest.raises(RuntimeError, match="shape"):
            function.backward(node, torch.ones(3, 3))
        assert a.mm(a).dtype is BF16


LISTS = OpLists(fp32={"linear"}, lower_precision={"softmax"})
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def block() -> nn.Sequential:
    torch.manual_seed(0)
    # A sum saves nothing: were it recomputed in another dtype, torch's check would not see it.
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Tanh())


def region_inside(model: Any, x: Tensor, reentrant: bool = False) -> Tensor:
    def forward(x: Tensor) -> Tensor:
        with autocast("cpu", ops=LISTS):
            return model(x)

    with autocast("cpu", enabled=False):
        return torchs.checkpoint(forward, x, use_reentrant=reentrant)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda model, x: model(x),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "not reentrant": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "nested": lambda model, x: checkpoint(WAYS["not reentrant"], model, x, use_reentrant=False),
    "torch's with our contexts": lambda model, x: torchs.checkpoint(
        model, x, use_reentrant=False, context_fn=checkpoint_contexts
    ),
    "a region inside": region_inside,
    "a region inside a reentrant one": lambda model, x: region_inside(model, x, True),
    "torch's options": lambda model, x: checkpoint(
        lambda x, *, scale: model(x) * scale,
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        scale=1.0,
    ),
}


def gradients(way: str) -> list[Any]:
    model, x = block(), X.clone().requires_grad_()
    with autocast("cpu", ops=LISTS):
        out = WAYS[way](model, x)
    out.float().square().sum().backward()
    return [x.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_bit_for_bit_those_without_checkpointing(way):
    assert all(map(torch.equal, gradients(way), gradients("plain")))


def test_a_graph_with_our_contexts_can_be_gone_through_again():
    model, x = block(), X.clone().requires_grad_()
    with autocast("cpu", ops=LISTS):
        out = WAYS["torch's with our contexts"](model, x).float().square().sum()
    for retain in (True, False):
        (found,) = torch.autograd.grad(out, x, retain_graph=retain)
        assert torch.equal(found, gradients("plain")[0])


@pytest.mark.parametrize("around", [lambda model: model, lambda model: autocast("cpu")(model)])
def test_a_reentrant_one_of_torchs_that_would_recompute_without_the_lists_is_refused(around):
    model, x = block(), X.clone().requires_grad_()
    with autocast("cpu", ops=LISTS):
        with pytest.raises(SettingError, match=r"call distamp\.checkpoint"):
            torchs.checkpoint(around(model), x, use_reentrant=True)
        with torch.no_grad():
            assert model(x).dtype is FP32
    with autocast("cpu"):  # without lists it is right, and stays
        torchs.checkpoint(model, x, use_reentrant=True).float().sum().backward()
