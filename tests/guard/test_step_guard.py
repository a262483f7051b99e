"""StepGuard: a scaler's methods and promises where nothing scales the loss."""

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
from tests.scaler.steps import INF, iteration, sgd


def test_it_is_no_scaler_and_answers_as_one():
    guard, (parameter, optimizer) = StepGuard(), sgd()
    assert not isinstance(guard, torch.amp.GradScaler)
    loss = parameter.sum()
    assert guard.scale(loss) is loss
    assert (guard.get_scale(), guard.is_enabled()) == (1.0, True)
    loss.backward()
    for call in (guard.unscale_, guard.step):
        call(optimizer)
        assert parameter.grad.item() == 1.0
        with pytest.raises(CallOrderError, match="already been called"):
            call(optimizer)
    guard.update()
    with pytest.raises(CallOrderError, match="No inf checks"):
        guard.update()
    assert [n for n in dir(torch.amp.GradScaler) if not (n[0] == "_" or hasattr(guard, n))] == []


@pytest.mark.parametrize("make", [StepGuard, lambda: DistGradScaler("cpu", init_scale=8.0)])
def test_complex_gradients_are_looked_at_and_divided(make):
    """torch's kernel, and so its scaler, knows none."""
    guard, weight = make(), torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for factor, expected in ((INF, [1.0, 1.0]), (1.0, [0.5, -1.0])):
        optimizer.zero_grad()
        guard.scale((weight * torch.tensor([0.5j, factor])).abs().square().sum()).backward()
        guard.step(optimizer)
        guard.update()
        assert weight.tolist() == expected


def test_states_of_guards_and_scalers_are_told_apart():
    guard, scaler = StepGuard(), DistGradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    state = guard.state_dict()
    assert [*state] == ["distamp"]
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 64.0
    guard.load_state_dict(scaler.state_dict())
    guard.load_state_dict(state)
    for bad in (3, {"distamp": {"version": 2}}, {"distamp": 1}):
        with pytest.raises(ConfigError):
            guard.load_state_dict(bad)
    for again in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        parameter, optimizer = sgd()
        iteration(again, optimizer, parameter, 1.0)
        assert parameter.item() == 0.0


def test_a_limit_of_skips_is_a_count_and_its_error_that_of_the_scaler_too():
    for bad in (0, True, 1.5):
        with pytest.raises(ConfigError, match="max_consecutive_skips must be an integer"):
            StepGuard(max_consecutive_skips=bad)
    assert issubclass(LossScaleCollapseError, NonFiniteGradientsError)


class OfAFramework(StepGuard):
    """A guard with attributes of its own, private ones too."""

    def __init__(self) -> None:
        super().__init__(max_consecutive_skips=1)
        self.history, self._limit = [1.0], "theirs"


class ScalerOfAFramework(DistGradScaler):
    """The same of a scaler."""

    def __init__(self) -> None:
        super().__init__("cpu", max_consecutive_skips=1)
        self.history, self._limit = [1.0], "theirs"


def _pickled(given: Any) -> Any:
    return pickle.loads(pickle.dumps(given))


@pytest.mark.parametrize("kind", [OfAFramework, ScalerOfAFramework])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, _pickled])
def test_a_copy_has_what_a_subclass_added_and_counts_its_own_steps(kind, copied):
    """Like a copy of torch's scaler; the limit of skips goes along."""
    (parameter, optimizer), original = sgd(), kind()
    iteration(original, optimizer, parameter, 1.0)
    original.history.append(2.0)
    twin = copied(original)
    assert (type(twin), twin.history, twin._limit) == (kind, [1.0, 2.0], "theirs")
    with pytest.raises(NonFiniteGradientsError):
        iteration(twin, optimizer, parameter, INF)
    assert original.step_counts(optimizer).skipped == 0
