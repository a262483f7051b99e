"""A loss that is scaled after ``unscale_``: its backward pass is refused at ``step``, no other."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distamp.errors import StageError
from distamp.scaler import MasterParameters
from tests.scaler.steps import backward, cpu_scaler, iteration, leaf

LATE = r"backward\(\) through a scaled loss added gradients after unscale_\(\)"


class Two:
    """Two parameters of one optimizer, and one of another; the first is unscaled."""

    def __init__(self, kind: str) -> None:
        masters = kind == "masters"
        dtype = torch.float16 if masters else torch.float32
        self.first, self.second = leaf(1.0, dtype=dtype), leaf(1.0, dtype=dtype)
        self.other = leaf(1.0)
        how = {kind: True} if kind in ("fused", "foreach") else {}
        self.optimizer = torch.optim.SGD([self.first, self.second], lr=1.0, **how)
        self.beside = torch.optim.SGD([self.other], lr=1.0, **how)
        self.scaler = cpu_scaler(fp16_grads="master" if masters else "error")
        self.kept = masters and MasterParameters(self.optimizer)
        backward(self.scaler, self.first, 0.25)

    def scaled(self, parameter: Any = None) -> Any:
        return self.scaler.scale(((self.first if parameter is None else parameter) * 0.5).sum())


def another_of_the_graph(two: Two) -> None:
    two.scaled().backward()


def before_a_pass_of_another_optimizer(two: Two) -> None:
    two.scaled().backward()
    two.scaled(two.other).backward()


def where_there_was_no_gradient(two: Two) -> None:
    two.scaled(two.second).backward()


def one_leaf_of_a_structure(two: Two) -> None:
    two.scaler.scale([two.other.sum(), {"b": two.first.sum()}])[1]["b"].backward()


def in_compiled_code(two: Two) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(two.scaled, backend="eager")().backward()
    torch._dynamo.reset()


def with_a_hook_of_the_users(two: Two) -> None:
    loss, calls = two.scaled(), []
    loss.register_hook(lambda gradient: calls.append(gradient.item()))
    loss.register_hook(lambda gradient: calls.append(2.0)).remove()
    loss.backward()
    assert calls == [1.0]


def of_another_optimizer(two: Two) -> None:
    two.scaled(two.other).backward()
    two.scaler.step(two.beside)
    assert two.other.item() == 0.5


def to_another_parameter(two: Two) -> None:
    """A generator's loss through a discriminator whose gradients are not asked for."""
    two.scaler.scale((two.other * two.first.float()).sum()).backward(inputs=[two.other])


def of_a_gradient_alone(two: Two) -> None:
    torch.autograd.grad(two.scaled(), two.first)


def scaled_and_never_backpropagated(two: Two) -> None:
    two.scaled()


LATE_ONES = [
    another_of_the_graph,
    before_a_pass_of_another_optimizer,
    where_there_was_no_gradient,
    one_leaf_of_a_structure,
    in_compiled_code,
    with_a_hook_of_the_users,
]
FINE = [
    of_another_optimizer,
    to_another_parameter,
    of_a_gradient_alone,
    scaled_and_never_backpropagated,
]
KINDS = pytest.mark.parametrize("kind", ["plain", "foreach", "fused", "masters"])


@KINDS
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("what", LATE_ONES, ids=lambda f: f.__name__)
def test_a_late_loss_is_refused_and_the_next_iteration_is_right(
    what: Callable[[Two], None], call: str, kind: str
) -> None:
    two = Two(kind)
    getattr(two.scaler, call)(two.optimizer, *([1.0] if call == "clip_grad_norm_" else []))
    what(two)
    with pytest.raises(StageError, match=LATE):
        two.scaler.step(two.optimizer)
    assert (two.first.item(), two.second.item()) == (1.0, 1.0)
    two.scaler.update()
    iteration(two.scaler, two.optimizer, two.first, 0.25)
    assert (two.first.item(), two.second.item()) == (0.75, 1.0)


@KINDS
@pytest.mark.parametrize("what", FINE, ids=lambda f: f.__name__)
def test_another_loss_is_no_late_one(what: Callable[[Two], None], kind: str) -> None:
    two = Two(kind)
    two.scaler.unscale_(two.optimizer)
    what(two)
    two.scaler.step(two.optimizer)
    assert (two.first.item(), two.second.item()) == (0.75, 1.0)


@KINDS
def test_an_unscaled_loss_after_unscale_is_added_as_with_torch(kind: str) -> None:
    two = Two(kind)
    two.scaler.unscale_(two.optimizer)
    (two.first.float() * 0.5).sum().backward()
    two.scaler.step(two.optimizer)
    assert two.first.item() == 0.25
