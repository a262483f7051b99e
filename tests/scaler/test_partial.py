"""A Partial gradient is one summand: torch's scaler steps it, ours refuses it by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from distamp import DistGradScaler
from distamp.errors import GradientError
from tests.ranks import mesh


def partial_on_one(scaler_class: type, call: str, holder: int | None):
    """Replicated weights; the gradient of rank ``holder`` (of all, when None) is a summand.

    Returns:
        What was raised, whether the weights stayed, and whether the gradient did.
    """
    over = mesh((2,), ("ranks",))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), over))
    bias = nn.Parameter(distribute_tensor(torch.ones(2), over))
    optimizer = torch.optim.SGD([bias, weight], 0.5, foreach=False)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    bias.grad = distribute_tensor(torch.full((2,), 4.0), over)
    # The summands cancel: alone, each would move the weights.
    summand = torch.full((4,), 4.0 if dist.get_rank() else -4.0)
    partial = holder is None or dist.get_rank() == holder
    weight.grad = DTensor.from_local(
        summand if partial else torch.zeros(4), over, [Partial()] if partial else None
    )
    before = weight.grad.to_local().clone()
    raised = ""
    try:
        if call != "step":
            getattr(scaler, call)(optimizer, *([1.0] if call == "clip_grad_norm_" else []))
        scaler.step(optimizer)
    except GradientError as error:
        raised = str(error)
    weights = torch.cat([weight.to_local(), bias.to_local()])
    stayed = torch.equal(weights, torch.ones(6))
    return raised, stayed, torch.equal(weight.grad.to_local(), before)


@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("holder", [None, 1])
def test_a_partial_gradient_is_refused_by_name_on_every_rank(ranks2, call, holder):
    for raised, stayed, untouched in ranks2.run(partial_on_one, DistGradScaler, call, holder):
        assert "group 0, parameter 1 " in raised
        assert "Partial gradient is one summand" in raised
        assert stayed
        assert untouched
