"""Optimizers that are first stepped long after others, and gradients of another one's loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from distamp.errors import StageError
from distamp.scaler import guard
from tests.ranks import RankPool
from tests.scaler.steps import backward, cpu_scaler, leaf

INPUTS = torch.ones(2, 4)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def _warmed_up(
    model: nn.Module, iterations: int
) -> tuple[DistGradScaler, torch.optim.Optimizer, float]:
    """A scaler that has stepped one model, its optimizer, and the scale there is then."""
    scaler, optimizer = cpu_scaler(growth_interval=1), torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(iterations):
        _step(scaler, model, optimizer)
    return scaler, optimizer, scaler.get_scale()


def _step(scaler: DistGradScaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler.scale(model(INPUTS).sum()).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.update()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _steps_late(iterations: int, passes: int, through: bool, wrapped: bool) -> list[bool]:
    """The second model's gradients are of a scale before that of its optimizer's first step.

    Args:
        iterations: Of the first model alone.
        passes: Of the second model at that scale.
        through: Whether its loss goes through the first model, as a generator's does.
        wrapped: In DistributedDataParallel.
    """
    first, second = _model(), nn.Sequential(_model(), nn.Linear(1, 4)) if through else _model()
    model = DistributedDataParallel(second) if wrapped else second
    scaler, optimizer, scale = _warmed_up(first, iterations)
    for _ in range(passes):
        output = model(INPUTS)
        scaler.scale((first(output) if through else output).sum()).backward()
    expected = [gradient / scale for gradient in _gradients(second)]
    first.zero_grad()
    _step(scaler, first, optimizer)
    _step(scaler, first, optimizer)
    scaler.step(torch.optim.SGD(second.parameters(), lr=0.0))
    return list(map(torch.equal, _gradients(second), expected))


@pytest.mark.parametrize("through", [False, True], ids=["alone", "through the first"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("iterations", [1, 5])
def test_an_optimizer_first_seen_after_others_is_unscaled_by_its_own_scale(
    iterations: int, passes: int, through: bool
) -> None:
    assert _steps_late(iterations, passes, through, wrapped=False) == [True] * (4 + 2 * through)


def test_the_same_on_ranks(pair: RankPool) -> None:
    assert pair.run(_steps_late, 2, 2, False, True) == [[True] * 4] * 2


def test_gradients_of_two_scales_are_refused_where_the_optimizer_is_first_seen() -> None:
    first, second = _model(), _model()
    scaler, optimizer, _ = _warmed_up(first, 3)
    scaler.scale(second(INPUTS).sum()).backward()
    _step(scaler, first, optimizer)
    scaler.scale(second(INPUTS).sum()).backward()
    with pytest.raises(StageError, match="several loss scales"):
        scaler.step(torch.optim.SGD(second.parameters(), lr=0.0))


def test_a_pass_whose_gradients_were_dropped_does_not_hide_the_next() -> None:
    first, second = _model(), _model()
    scaler, optimizer, _ = _warmed_up(first, 2)
    scaler.scale(second(INPUTS).sum()).backward()
    second.zero_grad()
    _step(scaler, first, optimizer)
    scale = scaler.get_scale()
    scaler.scale(second(INPUTS).sum()).backward()
    expected = [gradient / scale for gradient in _gradients(second)]
    _step(scaler, first, optimizer)
    _step(scaler, first, optimizer)
    scaler.step(torch.optim.SGD(second.parameters(), lr=0.0))
    assert all(map(torch.equal, _gradients(second), expected))


def test_a_loss_that_reaches_only_a_shared_parameter_of_another_optimizer_counts() -> None:
    first, second = _model(), _model()
    second[1].weight = first[1].weight
    scaler, optimizer, _ = _warmed_up(first, 1)
    own = torch.optim.SGD([*second[0].parameters(), second[1].bias], lr=0.0)
    _step(scaler, second, own)  # the shared weight's gradient stays
    scaler.scale(first(INPUTS).sum()).backward()
    with pytest.raises(StageError, match="several loss scales"):
        scaler.step(optimizer)


def test_a_gradient_made_where_a_used_one_was_freed_is_new() -> None:
    """A new gradient often lies in the same place in memory, under the same ``id``."""
    first, second = leaf(1.0), leaf(1.0)
    others = torch.optim.SGD([first], lr=0.0)
    for _ in range(60):
        scaler = cpu_scaler(growth_interval=1, init_scale=4.0)
        optimizer = torch.optim.SGD([second], lr=0.0)
        for parameter in (first, second):
            backward(scaler, parameter, 2.0)
        scaler.step_all([others, optimizer])
        scaler.update()
        others.zero_grad()
        backward(scaler, first, 2.0)
        used = id(second.grad)
        for _ in range(100):
            optimizer.zero_grad()
            backward(scaler, second, 2.0)
            if id(second.grad) == used:
                break
        scaler.step(others)
        scaler.update()
        scaler.step(optimizer)
        assert second.grad is not None
        assert second.grad.item() == 2.0
        for each in (others, optimizer):
            each.zero_grad()


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    reads: list[object] = []
    leaves_of = guard._leaves_of

    def counted(following: Sequence[tuple[Any, int]]) -> Iterator[Tensor]:
        reads.append(following)
        return leaves_of(following)

    monkeypatch.setattr(guard, "_leaves_of", counted)
    return reads


def test_only_the_first_passes_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = _count_reads(monkeypatch)
    model, late = _model(), _model()
    scaler, optimizer, _ = _warmed_up(model, 1)
    reads.clear()
    for _ in range(40):
        _step(scaler, model, optimizer)
    assert len(reads) == guard._FIRST_PASSES
    # Once another is seen, there may be more.
    _step(scaler, late, torch.optim.SGD(late.parameters(), lr=0.0))
    reads.clear()
    for _ in range(40):
        _step(scaler, model, optimizer)
    assert len(reads) == guard._FIRST_PASSES


def test_gradients_of_no_optimizer_are_forgotten_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "_LAST_PASS", 20)
    model = _model()
    for p in model[0].parameters():
        p.grad = torch.zeros_like(p)
    head = torch.optim.SGD(model[1].parameters(), lr=0.0)
    scaler = cpu_scaler(growth_interval=1)
    for iteration in range(30):
        _step(scaler, model, head)
        watch = scaler._watch
        assert bool(watch._orphans) == (iteration <= 20)  # the first step began the count anew
    assert not watch._leaves
    assert isinstance(model[0].weight.grad, Tensor)
