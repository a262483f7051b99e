"""Gradients are divided by the scale that they were made with, whatever moved it since.

Random loops of several optimizers, of which each steps in some iterations only, while the scale
changes at every update, and gradients are made and zeroed in every way that loops in the wild do
it; and the flows of trainers by name. The reference is a sum of numbers that float32 holds exactly,
so what a step subtracts is right to the bit or wrong.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.on_ranks import on_ranks
from tests.scaler.masters import local, spread
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, sgd, torch_scaler

DRAWS = 60
MANY = pytest.param(
    range(DRAWS, DRAWS + 20_000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]
)
ZEROED: dict[str, Callable[[torch.optim.Optimizer, list[Tensor]], object]] = {
    "to None": lambda optimizer, grads: optimizer.zero_grad(),
    "in place": lambda optimizer, grads: optimizer.zero_grad(set_to_none=False),
    "data": lambda optimizer, grads: torch._foreach_zero_([grad.data for grad in grads]),
}
MADE = ["scaled", "set", "added"]


class Trained:
    """An optimizer of two parameters, and what they and their gradients should be."""

    def __init__(self, fused: bool) -> None:
        self.parameters = [leaf(0.0), leaf(0.0)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, fused=fused)
        self.values, self.sums, self.used = [0.0, 0.0], [0.0, 0.0], True

    def zero(self, how: str) -> None:
        self.sums, self.used = [0.0, 0.0], False
        if grads := [p.grad for p in self.parameters if p.grad is not None]:
            ZEROED[how](self.optimizer, grads)

    def make(self, scaler: DistGradScaler, how: str, value: float, places: list[int]) -> None:
        """Add ``value``, times the scale, to the gradients at these places, or set them to it."""
        parameters = [self.parameters[i] for i in places]
        for i in places:
            self.sums[i] = value + (0.0 if how == "set" else self.sums[i])
        losses = [(p * value).sum() for p in parameters]
        if how == "scaled":
            torch.autograd.backward(scaler.scale(losses))
            return
        for p, new in zip(
            parameters, torch.autograd.grad(scaler.scale(losses), parameters), strict=True
        ):
            if p.grad is None or how == "set":
                p.grad = new
            else:
                p.grad.add_(new)

    def step(self, scaler: DistGradScaler, unscale: bool) -> None:
        if unscale:
            scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        self.used = True
        self.values = [v - total for v, total in zip(self.values, self.sums, strict=True)]


def _run(seed: int) -> None:
    chance = random.Random(seed)
    scaler = cpu_scaler(growth_interval=1, init_scale=2.0 ** chance.randrange(4, 16))
    fused = chance.random() < 0.3
    trained = [Trained(fused) for _ in range(chance.choice([1, 2, 3]))]
    scaler.register_optimizers(*(each.optimizer for each in trained))
    scaler.scale(torch.zeros(()))
    for _ in range(chance.randrange(3, 10)):
        chosen = [each for each in trained if chance.random() < 0.8]
        for each in chosen:
            if each.used or chance.random() < 0.4:
                each.zero(chance.choice([*ZEROED]))
            for _ in range(chance.choice([1, 1, 2])):
                places = chance.choice([[0, 1], [0, 1], [0], [1]])
                # None cancels another, and two are hardly ever the same scaled.
                value = chance.randrange(1, 2**10, 2) / 8
                each.make(scaler, chance.choice(MADE), value, places)
        waiting = [each for each in trained if not each.used and any(each.sums)]
        stepped = [each for each in waiting if chance.random() < 0.6]
        for each in stepped:
            each.step(scaler, unscale=chance.random() < 0.3)
        for each in trained:
            assert [p.item() for p in each.parameters] == each.values, f"seed {seed}"
        scaler.set_growth_interval(chance.choice([1, 100]))
        by_hand = not stepped or chance.random() < 0.3
        scaler.update(2.0 ** chance.randrange(4, 16) if by_hand else None)


@pytest.mark.parametrize("seeds", [range(DRAWS), MANY], ids=["some", "many"])
def test_random_loops_step_by_the_right_gradients(seeds: range) -> None:
    for seed in seeds:
        _run(seed)


# -- flows of trainers -----------------------------------------------------------------------------


@pytest.mark.parametrize("added", [False, True], ids=["seen late", "added"])
@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
@pytest.mark.parametrize("how", ["step", "fused", "unscale", "unscale both", "clip"])
def test_an_optimizer_stepped_after_anothers_update(how, masters, added):
    """Lightning's manual optimisation: both backward, then step and update of each in turn."""
    (p, a), q = sgd(), leaf(1.0, dtype=torch.float16 if masters else torch.float32)
    b = torch.optim.SGD([q], lr=1.0, fused=how == "fused")
    _kept = masters and MasterParameters(b)
    scaler = cpu_scaler(growth_interval=1, fp16_grads="master" if masters else "error")
    if added:
        scaler.register_optimizers(b)
    for gradient in (0.25, INF):  # one moves the scale up, the other down
        b.zero_grad()
        backward(scaler, q, 0.25)
        if how == "unscale both":  # as Accelerate does where it clips
            scaler.unscale_(b)
        iteration(scaler, a, p, gradient)
        if how == "unscale":
            scaler.unscale_(b)
        elif how == "clip":
            assert scaler.clip_grad_norm_(b, 100.0).item() == 0.25
        scaler.step(b)
        scaler.update()
    assert q.item() == 0.5


@on_ranks(2)
@pytest.mark.parametrize("layout", ["bucket views", "FSDP2"])
@pytest.mark.parametrize("first", [0.25, INF], ids=["growth", "backoff"])
def test_optimizers_that_step_and_update_in_turn_from_the_first_iteration_on(first, layout):
    """Each is made when it steps, the second and third after updates that changed the scale."""
    models = [spread(nn.Linear(2, 2, bias=False), layout) for _ in range(3)]
    weights = [next(model.parameters()) for model in models]
    before = [local(weight.detach()).clone() for weight in weights]
    scaler = cpu_scaler(growth_interval=1)
    for model, gradient in zip(models, (first, 0.25, 0.5), strict=True):
        scaler.scale(model(torch.ones(1, 2)).sum() * gradient).backward()
    optimizers = []
    for weight in weights:
        optimizers.append(torch.optim.SGD([weight], lr=1.0))
        scaler.step(optimizers[-1])
        scaler.update()
    expected = [0.0 if first == INF else 0.25, 0.25, 0.5]
    for weight, old, value in zip(weights, before, expected, strict=True):
        moved = old - local(weight.detach())
        torch.testing.assert_close(moved, torch.full_like(moved, value))


def test_gradients_of_a_new_optimizer_that_another_has_unscaled_are_not_carried_over():
    """A new optimizer takes the parameters over between an update and the next loss."""
    (parameter, optimizer), scaler = sgd(), cpu_scaler(growth_interval=1)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    scaler.update()
    scaler.register_optimizers(torch.optim.SGD([parameter], lr=0.5))
    assert parameter.grad is not None
    assert parameter.grad.item() == 0.25


def test_flags_that_a_framework_wrote_down_are_not_followed_by_a_carry_over():
    """DeepSpeed and the like unscale by themselves and fill torch's records in."""
    (parameter, optimizer), (other, first) = sgd(), sgd()
    scaler = cpu_scaler(growth_interval=1)
    backward(scaler, parameter, 0.25)
    iteration(scaler, first, other, 0.25)
    assert parameter.grad is not None
    parameter.grad.copy_(torch.tensor([0.25]))
    record = scaler._per_optimizer_states[id(optimizer)]
    record["stage"], record["found_inf_per_device"] = (
        OptState.UNSCALED,
        {torch.device("cpu"): torch.zeros(())},
    )
    scaler.step(optimizer)
    assert parameter.item() == 0.75


def test_what_an_optimizer_holds_that_the_scaler_never_saw_is_divided_by_todays_scale():
    """As in torch; one that was added is in the random loops."""
    (parameter, optimizer), (other, known) = sgd(), sgd()
    scaler = cpu_scaler(growth_interval=1)
    backward(scaler, parameter, 0.25)
    iteration(scaler, known, other, 0.25)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    assert parameter.item() == 0.625


# -- wrappers --------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("zeroed", ["in place", "kept"])
@pytest.mark.parametrize("layout", ["bucket views", "FSDP2"])
def test_a_step_is_left_out_under_a_wrapper(layout, zeroed):
    """The scale is set by hand in an iteration without a step, whose gradients may be kept."""
    weights = []
    for scaler in (cpu_scaler(64.0), torch_scaler(64.0)):
        torch.manual_seed(0)
        model = spread(nn.Linear(4, 4, bias=False), layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for number in range(3):
            if number != 2 or zeroed != "kept":
                optimizer.zero_grad(set_to_none=False)
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            if number != 1:
                scaler.step(optimizer)
                scaler.update()
            elif isinstance(scaler, DistGradScaler) or zeroed != "kept":
                scaler.update(256.0)
        weights.append([local(p.detach()) for p in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)
