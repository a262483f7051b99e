"""Gradients are divided by the scale of their loss, although an `update` changed the scale since.

Random loops step each of several optimizers in some iterations only. The scale changes at every
update, and the loops make and zero gradients in every way of public code. Other tests have the
flows of trainers by name. The reference is a sum of numbers that float32 represents exactly.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.on_ranks import on_ranks
from tests.scaler.masters import local, spread
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, sgd, torch_scaler

# -- random loops ----------------------------------------------------------------------------------


def zero_to_none(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    optimizer.zero_grad()


def zero_in_place(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_data(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    torch._foreach_zero_([gradient.data for gradient in gradients])


ZEROING = [zero_to_none, zero_in_place, zero_data]
# Gradients come from backward(), or the loop sets them or adds to them.
MAKING = ["backward", "set", "add"]


class ExpectedTraining:
    """An optimizer of two parameters, and the values that they should have.

    Attributes:
        values: The expected parameters.
        sums: The expected unscaled gradients.
        is_stepped: Whether the gradients were stepped already.
    """

    def __init__(self, fused: bool) -> None:
        self.parameters = [leaf(0.0), leaf(0.0)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, fused=fused)
        self.values = [0.0, 0.0]
        self.sums = [0.0, 0.0]
        self.is_stepped = True

    def zero(self, zeroing: Callable[..., None]) -> None:
        self.sums = [0.0, 0.0]
        self.is_stepped = False
        gradients = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        if gradients:
            zeroing(self.optimizer, gradients)

    def make_gradients(
        self, scaler: DistGradScaler, making: str, value: float, indices: list[int]
    ) -> None:
        """Add a value, times the scale, to the gradients of some parameters, or set them to it."""
        parameters = [self.parameters[index] for index in indices]
        losses = [(parameter * value).sum() for parameter in parameters]
        for index in indices:
            self.sums[index] = value if making == "set" else self.sums[index] + value
        if making == "backward":
            torch.autograd.backward(scaler.scale(losses))
            return
        gradients = torch.autograd.grad(scaler.scale(losses), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None or making == "set":
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def step(self, scaler: DistGradScaler, unscale: bool) -> None:
        if unscale:
            scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        self.is_stepped = True
        for index, gradient in enumerate(self.sums):
            self.values[index] -= gradient

    def awaits_a_step(self) -> bool:
        return not self.is_stepped and any(self.sums)


class RandomLoop:
    """A loop that draws every choice from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.scaler = cpu_scaler(growth_interval=1, init_scale=self.draw_scale())
        fused = self.happens(0.3)
        count = self.random.choice([1, 2, 3])
        self.trainings = [ExpectedTraining(fused) for _ in range(count)]
        optimizers = [training.optimizer for training in self.trainings]
        self.scaler.register_optimizers(*optimizers)
        self.scaler.scale(torch.zeros(()))

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability

    def draw_scale(self) -> float:
        return 2.0 ** self.random.randrange(4, 16)

    def make_gradients(self, training: ExpectedTraining) -> None:
        if training.is_stepped or self.happens(0.4):
            training.zero(self.random.choice(ZEROING))
        for _ in range(self.random.choice([1, 1, 2])):
            indices = self.random.choice([[0, 1], [0, 1], [0], [1]])
            # Odd numerators never cancel to zero within a sum of two, and differ when scaled.
            value = self.random.randrange(1, 2**10, 2) / 8
            making = self.random.choice(MAKING)
            training.make_gradients(self.scaler, making, value, indices)

    def run_iteration(self) -> None:
        chosen = [training for training in self.trainings if self.happens(0.8)]
        for training in chosen:
            self.make_gradients(training)

        waiting = [training for training in self.trainings if training.awaits_a_step()]
        stepped = [training for training in waiting if self.happens(0.6)]
        for training in stepped:
            training.step(self.scaler, unscale=self.happens(0.3))
        for training in self.trainings:
            values = [parameter.item() for parameter in training.parameters]
            assert values == training.values, f"seed {self.seed}"

        self.scaler.set_growth_interval(self.random.choice([1, 100]))
        if not stepped or self.happens(0.3):
            self.scaler.update(self.draw_scale())
        else:
            self.scaler.update()

    def run(self) -> None:
        for _ in range(self.random.randrange(3, 10)):
            self.run_iteration()


def test_random_loops_step_by_the_right_gradients():
    for seed in range(20):
        RandomLoop(seed).run()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_loops_step_by_the_right_gradients():
    for seed in range(20, 20_020):
        RandomLoop(seed).run()


# -- flows of trainers -----------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("registered", [False, True], ids=["seen late", "registered"])
@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
@pytest.mark.parametrize("call", ["step", "fused", "unscale", "unscale both", "clip"])
@pytest.mark.parametrize("other_gradient", [0.25, INF], ids=["growth", "backoff"])
def test_an_optimizer_steps_by_the_right_gradient_after_the_update_of_another(
    other_gradient, call, masters, registered
):
    """Lightning's manual optimisation runs both backward passes, then steps and updates in turn.

    Accelerate unscales all optimizers before a clip ("unscale both").
    """
    other_parameter, other_optimizer = sgd()
    parameter = leaf(1.0, dtype=torch.float16 if masters else torch.float32)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=call == "fused")
    if masters:
        _masters = MasterParameters(optimizer)
    scaler = cpu_scaler(growth_interval=1, fp16_grads="master" if masters else "error")
    if registered:
        scaler.register_optimizers(optimizer)

    backward(scaler, parameter, 0.25)
    if call == "unscale both":
        scaler.unscale_(optimizer)
    iteration(scaler, other_optimizer, other_parameter, other_gradient)
    if call == "unscale":
        scaler.unscale_(optimizer)
    if call == "clip":
        norm = scaler.clip_grad_norm_(optimizer, 100.0)
        assert norm.item() == 0.25
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75


@on_ranks(2)
@pytest.mark.parametrize("layout", ["bucket views", "FSDP2"])
@pytest.mark.parametrize("first_gradient", [0.25, INF], ids=["growth", "backoff"])
def test_optimizers_that_step_and_update_in_turn_from_the_first_iteration_on(
    first_gradient, layout
):
    """Each optimizer is constructed at its step, after updates of the earlier optimizers."""
    scaler = cpu_scaler(growth_interval=1)
    models = [spread(nn.Linear(2, 2, bias=False), layout) for _ in range(3)]
    gradients = [first_gradient, 0.25, 0.5]
    for model, gradient in zip(models, gradients, strict=True):
        loss = model(torch.ones(1, 2)).sum() * gradient
        scaler.scale(loss).backward()

    expected_moves = [0.0 if first_gradient == INF else 0.25, 0.25, 0.5]
    for model, expected_move in zip(models, expected_moves, strict=True):
        (weight,) = model.parameters()
        before = local(weight.detach()).clone()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        move = before - local(weight.detach())
        torch.testing.assert_close(move, torch.full_like(move, expected_move))


def test_gradients_of_a_new_optimizer_that_another_has_unscaled_are_not_carried_over():
    """A new optimizer takes the parameters over between an update and the next loss."""
    parameter, optimizer = sgd()
    scaler = cpu_scaler(growth_interval=1)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    scaler.update()
    new_optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler.register_optimizers(new_optimizer)
    assert parameter.grad is not None
    assert parameter.grad.item() == 0.25


def test_flags_that_a_framework_wrote_down_are_not_followed_by_a_carry_over():
    """DeepSpeed and similar frameworks unscale gradients and fill in torch's records."""
    parameter, optimizer = sgd()
    other_parameter, other_optimizer = sgd()
    scaler = cpu_scaler(growth_interval=1)
    backward(scaler, parameter, 0.25)
    iteration(scaler, other_optimizer, other_parameter, 0.25)
    gradient: Any = parameter.grad
    gradient.copy_(torch.tensor([0.25]))
    record: Any = scaler._per_optimizer_states[id(optimizer)]
    record["stage"] = OptState.UNSCALED
    record["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
    scaler.step(optimizer)
    assert parameter.item() == 0.75


def test_gradients_of_an_optimizer_that_the_scaler_never_saw_are_divided_by_the_current_scale():
    """As in torch. The random loops register their optimizers."""
    parameter, optimizer = sgd()
    other_parameter, other_optimizer = sgd()
    scaler = cpu_scaler(growth_interval=1)
    backward(scaler, parameter, 0.25)
    iteration(scaler, other_optimizer, other_parameter, 0.25)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    # The scale doubled between the two gradients of 0.25.
    assert parameter.item() == 1.0 - (0.125 + 0.25)


# -- wrappers --------------------------------------------------------------------------------------


def train_with_an_iteration_without_a_step(
    scaler: Any, layout: str, zero_last: bool, new_scale: float | None
) -> list[Tensor]:
    """Train three iterations, the second without a step, and return the weights.

    Args:
        scaler: The scaler of the loop.
        layout: The wrapper of the model.
        zero_last: Whether the third iteration zeroes the gradients of the second.
        new_scale: Scale that the second iteration sets by `update`, or None for no update.
    """
    torch.manual_seed(0)
    model = spread(nn.Linear(4, 4, bias=False), layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for number in range(3):
        if number < 2 or zero_last:
            optimizer.zero_grad(set_to_none=False)
        loss = model(torch.ones(2, 4)).square().mean()
        scaler.scale(loss).backward()
        if number != 1:
            scaler.step(optimizer)
            scaler.update()
        elif new_scale is not None:
            scaler.update(new_scale)
    return [local(parameter.detach()) for parameter in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("layout", ["bucket views", "FSDP2"])
def test_a_new_scale_in_an_iteration_without_a_step_counts_for_later_gradients_only(layout):
    weights = train_with_an_iteration_without_a_step(cpu_scaler(64.0), layout, True, 256.0)
    expected = train_with_an_iteration_without_a_step(torch_scaler(64.0), layout, True, 256.0)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["bucket views", "FSDP2"])
def test_gradients_of_an_iteration_without_a_step_are_added_although_the_scale_changed(layout):
    """torch's scaler would be wrong here, so the reference does not change the scale."""
    weights = train_with_an_iteration_without_a_step(cpu_scaler(64.0), layout, False, 256.0)
    expected = train_with_an_iteration_without_a_step(torch_scaler(64.0), layout, False, None)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
