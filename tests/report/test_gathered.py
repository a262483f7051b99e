"""Tests of reports about models with parameters that FSDP2 has gathered.

A forward pass without a backward pass, such as one for a validation loss, leaves the parameters of
a root module gathered. ``model.parameters()`` yields whole parameters without gradients then.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distamp.report import PrecisionContract, find_first_nonfinite, lost_updates
from tests.on_ranks import on_ranks
from tests.ranks import mesh

INF = float("inf")


def _shard_root(**options: Any) -> nn.Module:
    return fully_shard(_model(), **options)


def _shard_layers(**options: Any) -> nn.Module:
    model = _model()
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def _shard_on_mesh_with_copies(**options: Any) -> nn.Module:
    """Return a model that is sharded over one dimension of a mesh and copied over another."""
    grid = mesh((2, 1), ("copies", "shard"))
    return fully_shard(_model(), mesh=grid, **options)


LAYOUTS: dict[str, Callable[..., nn.Module]] = {
    "root": _shard_root,
    "nested": _shard_layers,
    "HSDP": _shard_on_mesh_with_copies,
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 8).view(2, 4)).float().square().sum()


def _validate(model: nn.Module) -> None:
    with torch.no_grad():
        _loss(model)


def _shards(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * INF


@on_ranks(2)
@pytest.mark.parametrize("time_of_validation", ["before", "within"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_validation_loss_does_not_change_lost_updates(layout, time_of_validation):
    """Lost updates are measured on shards, although the validation gathers the parameters."""

    def measure(validates: str) -> dict[str, float]:
        model = LAYOUTS[layout]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            _loss(model).backward()
            optimizer.step()
            if validates == "within":
                _validate(model)

        if validates == "before":
            _loss(model).backward()
            optimizer.zero_grad()
            _validate(model)
        return lost_updates(step, model)

    expected = measure("never")
    assert any(share > 0 for share in expected.values())
    assert measure(time_of_validation) == expected


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_of_a_step_that_ends_with_a_validation_is_found_not_finite(layout):
    """After the search every gradient is None."""
    model = LAYOUTS[layout]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        loss = _loss(model)
        _InfiniteGradient.apply(loss).backward()
        _validate(model)
        return loss.detach()

    origin = find_first_nonfinite(step, model)
    assert origin is not None
    assert "backward pass" in str(origin)
    assert all(param.grad is None for param in _shards(optimizer))


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_shards_count_before_a_replay_and_are_dropped_for_it(layout):
    """An earlier backward pass left infinite gradients, which the replay does not compute."""
    model = LAYOUTS[layout]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (_loss(model) * INF).backward()
    _validate(model)

    def step() -> Tensor:
        loss = _loss(model)
        loss.backward()
        return loss.detach()

    origin = find_first_nonfinite(step, model)
    assert origin is not None
    assert origin.kind == "unseen"
    assert all(param.grad is None for param in _shards(optimizer))


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_after_a_validation_have_the_dtype_of_their_shards(layout):
    """FSDP2 gathers parameters in the dtype of its policy."""
    model = LAYOUTS[layout](mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        _validate(model)

    violations = PrecisionContract(parameters="fp32").check(step, model)
    assert not violations, str(violations)
