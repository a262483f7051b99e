"""Activation checkpointing recomputes in the autocast state of the forward pass."""

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
    # The loss is a sum, which saves nothing, so torch's check of recomputed dtypes has no say.
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Tanh())


def region_inside(model: Any, x: Tensor, reentrant: bool = False) -> Tensor:
    def forward(x: Tensor) -> Tensor:
        with autocast("cpu", ops=LISTS):
            return model(x)

    with autocast("cpu", enabled=False):
        return torchs.checkpoint(forward, x, use_reentrant=reentrant)


def plain(model: Any, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def reentrant(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def not_reentrant(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def nested(model: Any, x: Tensor) -> Tensor:
    return checkpoint(not_reentrant, model, x, use_reentrant=False)  # type: ignore[no-any-return]


def with_our_contexts(model: Any, x: Tensor) -> Tensor:
    """Call torch's checkpoint with the contexts of distamp."""
    return torchs.checkpoint(  # type: ignore[no-any-return]
        model, x, use_reentrant=False, context_fn=checkpoint_context_fn
    )


def region_inside_reentrant(model: Any, x: Tensor) -> Tensor:
    return region_inside(model, x, reentrant=True)


def with_options(model: Any, x: Tensor) -> Tensor:
    """Pass an option of torch's checkpoint and a keyword of the function."""

    def scaled(x: Tensor, *, scale: float) -> Tensor:
        return model(x) * scale  # type: ignore[no-any-return]

    options: dict[str, Any] = {"preserve_rng_state": False, "scale": 1.0}
    return checkpoint(scaled, x, use_reentrant=False, **options)  # type: ignore[no-any-return]


def gradients(call: Callable[[Any, Tensor], Tensor]) -> list[Any]:
    """Return the gradients of the input and of all parameters."""
    model, x = block(), X.clone().requires_grad_()
    with autocast("cpu", ops=LISTS):
        out = call(model, x)
    out.float().square().sum().backward()
    return [x.grad, *(param.grad for param in model.parameters())]


@pytest.mark.parametrize(
    "call",
    [
        reentrant,
        not_reentrant,
        nested,
        with_our_contexts,
        region_inside,
        region_inside_reentrant,
        with_options,
    ],
)
def test_gradients_are_bit_identical_to_those_without_checkpointing(call):
    for grad, expected in zip(gradients(call), gradients(plain), strict=True):
        assert torch.equal(grad, expected)


def test_a_graph_with_our_contexts_can_run_backward_twice():
    model, x = block(), X.clone().requires_grad_()
    with autocast("cpu", ops=LISTS):
        loss = with_our_contexts(model, x).float().square().sum()
    expected = gradients(plain)[0]
    (first_grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second_grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(first_grad, expected)
    assert torch.equal(second_grad, expected)


@pytest.mark.parametrize("decorated", [False, True])
def test_torchs_reentrant_checkpoint_is_refused_in_a_region_with_lists(decorated):
    """It would recompute without the lists."""
    model, x = block(), X.clone().requires_grad_()
    function = autocast("cpu")(model) if decorated else model
    with autocast("cpu", ops=LISTS):
        with pytest.raises(ConfigError, match="Call checkpoint of distamp"):
            torchs.checkpoint(function, x, use_reentrant=True)
        with torch.no_grad():
            assert model(x).dtype is FP32, "the refusal must leave the lists in force"


def test_torchs_reentrant_checkpoint_works_in_a_region_without_lists():
    model, x = block(), X.clone().requires_grad_()
    with autocast("cpu"):
        out = torchs.checkpoint(model, x, use_reentrant=True)
        out.float().sum().backward()
    assert x.grad is not None


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ops", [None, pytest.param(LISTS, marks=pytest.mark.slow)])
def test_our_contexts_work_in_a_compiled_function(ops):
    compiled = torch.compile(with_our_contexts, backend="aot_eager", fullgraph=True)
    results = []
    for call in (with_our_contexts, compiled):
        model = block()
        with autocast("cpu", ops=ops):
            out = call(model, X)
        out.float().square().sum().backward()
        grads = [param.grad for param in model.parameters()]
        results.append([out, *grads])
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)
