"""Random loops whose optimizers keep their gradients: each steps by the right ones, or is refused.

Several optimizers, of which each steps in some iterations only; the scale changes at every update;
gradients are made and zeroed in every way that loops in the wild do it. The reference is a sum of
numbers that float32 holds exactly, so what a step subtracts is right to the bit or wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from distamp import DistGradScaler
from tests.scaler.faults.tools import error_of
from tests.scaler.steps import cpu_scaler, leaf

DRAWS, ALL_DRAWS = 300, 20_000

TO_NONE = ["to None", "by hand"]
IN_PLACE = ["in place", "zero_", "data", "numpy", "data = "]
# A pass through a scaled loss; something that the scaler does not see.
WATCHED = ["scaled", "scaled list", "grad, set"]
UNSEEN = ["by hand", "backward(g)", "grad, copy_", "grad, data.copy_", "grad, add_"]


@dataclass
class _Trained:
    """An optimizer of two parameters, and what its gradients should be."""

    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    values: list[float]
    # For each parameter what was added since it was zeroed: the number, and the scale of it.
    sums: list[list[tuple[float, float]]] = field(default_factory=lambda: [[], []])
    used: bool = True
    # Whether gradients of an earlier scale were zeroed in place, and then made by what nobody sees.
    zeroed_in_place: bool = False
    may_refuse: bool = False
    # Whether the scaler has seen it.
    seen: bool = False
    # Whether torch counts none of the writes to them: they are stepped before the scale changes.
    uncounted: bool = False

    def scales(self) -> set[float]:
        return {scale for terms in self.sums for _, scale in terms}


def _trained(fused: bool) -> _Trained:
    parameters = [leaf(0.0), leaf(0.0)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=fused)
    return _Trained(optimizer, parameters, [0.0, 0.0])


def _zero(each: _Trained, how: str, now: float) -> None:
    left = not each.used and each.scales() - {now}
    each.zeroed_in_place = how in IN_PLACE and (each.zeroed_in_place or bool(left))
    each.may_refuse = False
    each.sums, each.used, each.uncounted = [[], []], False, False
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
    scale = scaler.get_scale()
    parameters = [each.parameters[i] for i in places]
    for i in places:
        kept = [] if how == "grad, set" else each.sums[i]
        each.sums[i] = [*kept, (value, scale)]
    each.uncounted |= how == "grad, data.copy_"
    each.may_refuse |= each.zeroed_in_place and how in UNSEEN
    loss = sum((p * value).sum() for p in parameters)
    assert isinstance(loss, Tensor)
    if how == "scaled":
        scaler.scale(loss).backward()
    elif how == "scaled list":
        torch.autograd.backward(scaler.scale([(p * value).sum() for p in parameters]))
    elif how == "by hand":
        (loss * scale).backward()
    elif how == "backward(g)":
        (sum(p * 1.0 for p in parameters)).backward(torch.full((1,), value * scale))
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


def _step(scaler: DistGradScaler, each: _Trained, unscale: bool, history: str) -> bool:
    """Return whether it was stepped, and not refused."""
    scales = each.scales()

    def calls() -> None:
        if unscale:
            scaler.unscale_(each.optimizer)
        scaler.step(each.optimizer)

    each.seen = True
    error = error_of(calls)
    each.used = error is None
    if error is not None:
        assert "several loss scales" in error[1], history
        assert len(scales) > 1 or each.may_refuse, f"refused {error}: {history}"
    else:
        assert len(scales) < 2, f"took a step with gradients of scales {scales}: {history}"
        each.values = [
            value - sum(number for number, _ in terms)
            for value, terms in zip(each.values, each.sums, strict=True)
        ]
    found = [p.item() for p in each.parameters]
    assert found == each.values, f"{found}, should be {each.values}: {history}"
    return each.used


def _run(seed: int) -> None:
    chance = random.Random(seed)
    scaler = cpu_scaler(growth_interval=1, init_scale=2.0 ** chance.randrange(4, 16))
    fused = chance.random() < 0.3
    trained = [_trained(fused) for _ in range(chance.choice([1, 2, 3]))]
    history: list[str] = [f"seed {seed}"]
    for number, each in enumerate(trained):
        if number and chance.random() < 0.3:
            continue  # it is first seen later
        _make(scaler, each, "scaled", 1.0, [0, 1])
        each.used = False
        _step(scaler, each, False, "the first step")
    scaler.update()
    zeroing = chance.choice([TO_NONE, IN_PLACE, TO_NONE + IN_PLACE])
    for _ in range(chance.randrange(3, 9)):
        stepped = 0
        for number, each in enumerate(trained):
            if chance.random() < 0.2:
                continue
            if each.used or chance.random() < 0.6:
                how = chance.choice(zeroing)
                history.append(f"{number} zeroed {how}")
                _zero(each, how, scaler.get_scale())
            for _ in range(chance.choice([1, 1, 2])):
                how = chance.choice(WATCHED + UNSEEN if each.seen else WATCHED)
                # Whether gradients are new is asked of those that were there at first.
                places = chance.choice([[0, 1], [0, 1], [0], [1]]) if each.seen else [0, 1]
                history.append(f"{number} {places} made {how} at {scaler.get_scale():g}")
                # None cancels another, and two are hardly ever the same scaled.
                value = chance.randrange(1, 2**14, 2) / 8
                _make(scaler, each, how, value, places)
        for number, each in enumerate(trained):
            left_out = chance.random() < 0.4 and not each.uncounted
            if each.used or not any(each.sums) or left_out:
                continue
            unscale = chance.random() < 0.3
            history.append(f"{number} {'unscaled and ' if unscale else ''}stepped")
            stepped += _step(scaler, each, unscale, "; ".join(history))
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


def test_random_loops_step_by_the_right_gradients_or_are_refused() -> None:
    for seed in range(DRAWS):
        _run(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_loops_step_by_the_right_gradients_or_are_refused() -> None:
    for seed in range(DRAWS, DRAWS + ALL_DRAWS):
        _run(seed)
