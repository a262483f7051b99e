"""Random loops whose optimizers keep their gradients: each steps by the right ones.

Several optimizers, of which each steps in some iterations only; the scale changes at every update;
gradients accumulate over changes, and are made and zeroed in every way that loops in the wild do
it. The reference is a sum of numbers that float32 holds exactly, so what a step subtracts is right
to the bit or wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from distamp import DistGradScaler
from tests.scaler.steps import cpu_scaler, leaf

DRAWS, ALL_DRAWS = 300, 20_000

ZEROED = ["to None", "by hand", "in place", "zero_", "data", "numpy", "data = "]
MADE = ["scaled", "scaled list", "grad, set", "grad, copy_", "grad, data.copy_", "grad, add_"]


@dataclass
class _Trained:
    """An optimizer of two parameters, and what its gradients should be."""

    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    values: list[float]
    # For each parameter what was added since it was zeroed.
    sums: list[list[float]] = field(default_factory=lambda: [[], []])
    used: bool = True


def _trained(fused: bool) -> _Trained:
    parameters = [leaf(0.0), leaf(0.0)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=fused)
    return _Trained(optimizer, parameters, [0.0, 0.0])


def _zero(each: _Trained, how: str) -> None:
    each.sums, each.used = [[], []], False
    if how == "to None":
        each.optimizer.zero_grad()
    elif how == "in place":
        each.optimizer.zero_grad(set_to_none=False)
    for p in each.parameters:
        if p.grad is None or how in ("to None", "in place"):
            continue
        if how == "by hand":
            p.grad = torch.zeros_like(p)
        elif how == "zero_":
            p.grad.zero_()
        elif how == "data":
            p.grad.data.zero_()
        elif how == "numpy":
            p.grad.numpy().fill(0.0)
        else:
            p.grad.data = torch.zeros_like(p)


def _make(
    scaler: DistGradScaler, each: _Trained, how: str, value: float, places: list[int]
) -> None:
    """Add ``value``, times the scale, to the gradients at these places."""
    parameters = [each.parameters[i] for i in places]
    for i in places:
        each.sums[i] = [*([] if how == "grad, set" else each.sums[i]), value]
    loss = sum((p * value).sum() for p in parameters)
    assert isinstance(loss, Tensor)
    if how == "scaled":
        scaler.scale(loss).backward()
    elif how == "scaled list":
        torch.autograd.backward(scaler.scale([(p * value).sum() for p in parameters]))
    else:
        found = torch.autograd.grad(scaler.scale(loss), parameters)
        for p, new in zip(parameters, found, strict=True):
            if p.grad is None or how == "grad, set":
                p.grad = new
            elif how == "grad, copy_":
                p.grad.copy_(p.grad + new)
            elif how == "grad, data.copy_":
                p.grad.data.copy_(p.grad + new)
            else:
                p.grad.add_(new)


def _step(scaler: DistGradScaler, each: _Trained, unscale: bool, history: list[str]) -> None:
    if unscale:
        scaler.unscale_(each.optimizer)
    scaler.step(each.optimizer)
    each.used = True
    each.values = [
        value - sum(numbers) for value, numbers in zip(each.values, each.sums, strict=True)
    ]
    found = [p.item() for p in each.parameters]
    assert found == each.values, f"{found}, should be {each.values}: {'; '.join(history)}"


def _run(seed: int) -> None:
    chance = random.Random(seed)
    scaler = cpu_scaler(growth_interval=1, init_scale=2.0 ** chance.randrange(4, 16))
    fused = chance.random() < 0.3
    trained = [_trained(fused) for _ in range(chance.choice([1, 2, 3]))]
    scaler.add_optimizer(*(each.optimizer for each in trained))
    scaler.scale(torch.zeros(()))
    history = [f"seed {seed}"]
    zeroing = chance.choice([ZEROED[:2], ZEROED[2:], ZEROED])
    for _ in range(chance.randrange(3, 10)):
        stepped = 0
        for number, each in enumerate(trained):
            if chance.random() < 0.2:
                continue
            if each.used or chance.random() < 0.4:
                how = chance.choice(zeroing)
                history.append(f"{number} zeroed {how}")
                _zero(each, how)
            for _ in range(chance.choice([1, 1, 2])):
                how = chance.choice(MADE)
                places = chance.choice([[0, 1], [0, 1], [0], [1]])
                history.append(f"{number} {places} made {how} at {scaler.get_scale():g}")
                # None cancels another, and two are hardly ever the same scaled.
                _make(scaler, each, how, chance.randrange(1, 2**10, 2) / 8, places)
        for number, each in enumerate(trained):
            if each.used or not any(each.sums) or chance.random() < 0.4:
                continue
            unscale = chance.random() < 0.3
            history.append(f"{number} {'unscaled and ' if unscale else ''}stepped")
            _step(scaler, each, unscale, history)
            stepped += 1
        how = chance.choice(["grows", "stays", "by hand"]) if stepped else "by hand"
        history.append(f"the scale {how}")
        if how == "by hand":
            scaler.update(2.0 ** chance.randrange(4, 16))
        else:
            scaler.set_growth_interval(1 if how == "grows" else 100)
            scaler.update()


def test_gradients_are_kept_of_another_part_than_before():
    """Of the two parts of one optimizer each is trained while the other one is frozen."""
    first, second, third = leaf(0.0), leaf(0.0), leaf(0.0)
    both = torch.optim.SGD([first, second], lr=1.0)
    other = torch.optim.SGD([third], lr=1.0)
    scaler = cpu_scaler(8.0)
    for trained in (first, second, second):
        scaler.scale((trained + third).sum()).backward()
        for each in (both, other):
            scaler.step(each)
            each.zero_grad()
        scaler.update(8.0)
    scaler.scale((second + third).sum()).backward()
    scaler.step(other)
    scaler.update(4.0)
    scaler.step(both)
    assert (first.item(), second.item()) == (-1.0, -3.0)


def test_random_loops_step_by_the_right_gradients() -> None:
    for seed in range(DRAWS):
        _run(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_loops_step_by_the_right_gradients() -> None:
    for seed in range(DRAWS, DRAWS + ALL_DRAWS):
        _run(seed)
