"""StepGuard: the methods and promises of a scaler for a loss that is not scaled."""

import copy
import pickle
from typing import Any

import pytest
import torch

from distamp import DistGradScaler, StepGuard
from distamp.errors import (
    CallOrderError,
    ConfigError,
    LossScaleCollapseError,
    NonFiniteGradientsError,
)
from tests.on_ranks import on_devices
from tests.place import device_type
from tests.scaler.steps import INF, iteration, sgd


def test_a_guard_is_no_scaler_and_has_its_public_methods():
    guard = StepGuard()
    assert not isinstance(guard, torch.amp.GradScaler)
    missing: list[str] = []
    for name in dir(torch.amp.GradScaler):
        if not name.startswith("_") and not hasattr(guard, name):
            missing.append(name)
    assert missing == []


def test_a_guard_scales_nothing():
    guard = StepGuard()
    parameter, optimizer = sgd()
    loss = parameter.sum()
    assert guard.scale(loss) is loss
    assert guard.get_scale() == 1.0
    assert guard.is_enabled()
    loss.backward()
    guard.unscale_(optimizer)
    assert parameter.grad.item() == 1.0
    guard.step(optimizer)
    assert parameter.grad.item() == 1.0


def test_a_guard_refuses_calls_in_the_order_that_torchs_scaler_refuses():
    guard = StepGuard()
    parameter, optimizer = sgd()
    parameter.sum().backward()
    for call in (guard.unscale_, guard.step):
        call(optimizer)
        with pytest.raises(CallOrderError, match="already been called"):
            call(optimizer)
    guard.update()
    with pytest.raises(CallOrderError, match="No inf checks"):
        guard.update()


def scaler_with_scale_8() -> DistGradScaler:
    return DistGradScaler("cpu", init_scale=8.0)


@pytest.mark.parametrize("make", [StepGuard, scaler_with_scale_8])
def test_complex_gradients_are_checked_and_unscaled(make):
    """torch's scaler refuses complex gradients, because its kernel has no complex dtype."""
    guard = make()
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        product = weight * torch.tensor([0.5j, factor])
        guard.scale(product.abs().square().sum()).backward()
        guard.step(optimizer)
        guard.update()

    step(INF)
    assert weight.tolist() == [1.0, 1.0]
    step(1.0)
    assert weight.tolist() == [0.5, -1.0]


@on_devices(2)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_guard_on_a_device_skips_a_step_with_inf(fused):
    parameter = torch.nn.Parameter(torch.ones(1, device=device_type()))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    guard = StepGuard()
    parameter.grad = torch.full_like(parameter, INF)
    guard.step(optimizer)
    guard.update()
    assert parameter.item() == 1.0
    assert guard.step_counts(optimizer).skipped == 1


# -- states and copies -----------------------------------------------------------------------------


def scaler_with_a_loss() -> DistGradScaler:
    scaler = DistGradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    return scaler


def test_a_scaler_loads_the_state_of_a_guard_and_keeps_its_scale():
    scaler = scaler_with_a_loss()
    state = StepGuard().state_dict()
    assert list(state) == ["distamp"]
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 64.0


def test_a_guard_loads_the_state_of_a_scaler_and_of_a_guard():
    guard = StepGuard()
    guard.load_state_dict(scaler_with_a_loss().state_dict())
    guard.load_state_dict(StepGuard().state_dict())
    assert guard.get_scale() == 1.0


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(3, id="a number"),
        pytest.param({"distamp": {"version": 2}}, id="another version"),
        pytest.param({"distamp": 1}, id="no dict"),
    ],
)
def test_a_guard_refuses_another_state(state):
    with pytest.raises(ConfigError):
        StepGuard().load_state_dict(state)


def pickled_and_unpickled(guard: Any) -> Any:
    return pickle.loads(pickle.dumps(guard))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled_and_unpickled])
def test_a_copy_of_a_guard_steps(make_copy):
    parameter, optimizer = sgd()
    guard = make_copy(StepGuard())
    iteration(guard, optimizer, parameter, 1.0)
    assert parameter.item() == 0.0


@pytest.mark.parametrize("limit", [0, True, 1.5])
def test_a_limit_of_skips_is_a_count(limit):
    with pytest.raises(ConfigError, match="max_consecutive_skips must be an integer"):
        StepGuard(max_consecutive_skips=limit)


def test_an_except_for_the_error_of_a_guard_catches_the_error_of_a_scaler():
    assert issubclass(LossScaleCollapseError, NonFiniteGradientsError)


class FrameworkGuard(StepGuard):
    """A guard with a public attribute and a private attribute of a framework."""

    def __init__(self) -> None:
        super().__init__(max_consecutive_skips=1)
        self.history = [1.0]
        self._limit = "of the framework"


class FrameworkScaler(DistGradScaler):
    """A scaler with the same attributes."""

    def __init__(self) -> None:
        super().__init__("cpu", max_consecutive_skips=1)
        self.history = [1.0]
        self._limit = "of the framework"


@pytest.mark.parametrize("cls", [FrameworkGuard, FrameworkScaler])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy, pickled_and_unpickled])
def test_a_copy_has_the_attributes_of_a_subclass_and_counts_only_its_steps(cls, make_copy):
    """Like a copy of torch's scaler. The copy also has the limit of skips."""
    parameter, optimizer = sgd()
    original = cls()
    iteration(original, optimizer, parameter, 1.0)
    original.history.append(2.0)
    twin = make_copy(original)
    assert type(twin) is cls
    assert twin.history == [1.0, 2.0]
    assert twin._limit == "of the framework"
    with pytest.raises(NonFiniteGradientsError):
        iteration(twin, optimizer, parameter, INF)
    assert original.step_counts(optimizer).skipped == 0
