"""Activation checkpointing in the state of the forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn

from distamp import OpLists, autocast
from distamp.autocast import checkpoint, checkpoint_context_fn
from distamp.errors import ConfigError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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
        model, x, use_reentrant=False, context_fn=checkpoint_context_fn
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
        with pytest.raises(ConfigError, match="Call checkpoint of distamp"):
            torchs.checkpoint(around(model), x, use_reentrant=True)
        with torch.no_grad():
            assert model(x).dtype is FP32
    with autocast("cpu"):  # without lists it is right, and stays
        torchs.checkpoint(model, x, use_reentrant=True).float().sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ops", [None, LISTS])
def test_our_contexts_work_in_a_compiled_function(ops):
    outcomes = []
    for compile_it in (False, True):
        model = block()

        def step(x: Tensor, model: nn.Module = model) -> Tensor:
            return torchs.checkpoint(
                model, x, use_reentrant=False, context_fn=checkpoint_context_fn
            )

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if compile_it else step
        with autocast("cpu", ops=ops):
            out = run(X)
        out.float().square().sum().backward()
        outcomes.append([out, *(param.grad for param in model.parameters())])
    torch.testing.assert_close(*outcomes, rtol=1e-6, atol=0)
