"""What is asked of a framework's wrapper is answered for the optimizer inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distamp import DistGradScaler
from distamp.errors import StageError
from distamp.scaler import MasterParameters
from tests.scaler.steps import INF, backward, cpu_scaler, leaf, torch_scaler
from tests.scaler.wrappers import Accelerated, Bare, Fabric, Lightning

WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "Lightning": Lightning,
    "Fabric": Fabric,
    "Accelerate": Accelerated,
    "bare": Bare,
    "twice": lambda optimizer: Lightning(Bare(optimizer)),  # type: ignore[arg-type]
}


def _answers(scaler: DistGradScaler, asked: Any) -> tuple[Any, ...]:
    counts = scaler.step_counts(asked)
    return (
        scaler.stepped(asked),
        (counts.taken, counts.skipped),
        scaler.found_inf(asked).item(),
    )


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("gradient", [0.25, INF], ids=["clean", "overflow"])
def test_what_was_stepped_inside_is_answered_for_the_wrapper(name: str, gradient: float) -> None:
    parameter = leaf(1.0)
    inner = torch.optim.SGD([parameter], lr=1.0)
    wrapper, scaler = WRAPPERS[name](inner), cpu_scaler()
    for value in (0.25, gradient):
        inner.zero_grad()
        backward(scaler, parameter, value)
        scaler.step(inner)
        scaler.update()
    overflow = gradient == INF
    expected = (not overflow, (2 - overflow, int(overflow)), overflow)
    assert _answers(scaler, inner) == expected
    assert _answers(scaler, wrapper) == expected


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_was_stepped_through_the_wrapper_is_answered_for_the_one_inside(name: str) -> None:
    parameter = leaf(1.0)
    inner = torch.optim.SGD([parameter], lr=1.0)
    wrapper, scaler = WRAPPERS[name](inner), cpu_scaler()
    for value in (0.25, INF):
        inner.zero_grad()
        backward(scaler, parameter, value)
        scaler.step(wrapper)
        scaler.update()
    assert parameter.item() == 0.75
    assert _answers(scaler, inner) == _answers(scaler, wrapper) == (False, (1, 1), 1.0)


@pytest.mark.parametrize("name", WRAPPERS)
def test_unscale_through_one_and_step_through_the_other_unscales_once(name: str) -> None:
    for first, second in ((0, 1), (1, 0)):
        parameter = leaf(1.0)
        inner = torch.optim.SGD([parameter], lr=1.0)
        both, scaler = (inner, WRAPPERS[name](inner)), cpu_scaler()
        backward(scaler, parameter, 0.25)
        scaler.unscale_(both[first])
        assert parameter.grad.item() == 0.25
        scaler.step(both[second])
        scaler.update()
        assert parameter.item() == 0.75


@pytest.mark.parametrize("name", WRAPPERS)
def test_clip_through_the_wrapper_unscales_the_one_inside(name: str) -> None:
    parameter = leaf(1.0)
    inner = torch.optim.SGD([parameter], lr=1.0)
    wrapper, scaler = WRAPPERS[name](inner), cpu_scaler()
    backward(scaler, parameter, 4.0)
    assert scaler.clip_grad_norm_(wrapper, 1.0).item() == 4.0
    scaler.step(inner)
    scaler.update()
    assert parameter.item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_second_step_through_the_other_is_refused(name: str) -> None:
    parameter = leaf(1.0)
    inner = torch.optim.SGD([parameter], lr=1.0)
    wrapper, scaler = WRAPPERS[name](inner), cpu_scaler()
    backward(scaler, parameter, 0.25)
    scaler.step(inner)
    with pytest.raises(StageError, match="already been called"):
        scaler.step(wrapper)
    assert parameter.item() == 0.75


@pytest.mark.parametrize("name", ["Lightning", "Fabric", "Accelerate"])
def test_masters_are_found_behind_a_wrapper(name: str) -> None:
    parameter = leaf(1.0, dtype=torch.float16)
    inner = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(inner)
    wrapper, scaler = WRAPPERS[name](inner), cpu_scaler(fp16_grads="master")
    backward(scaler, parameter, 0.25)
    scaler.unscale_(wrapper)
    scaler.step(wrapper)
    scaler.update()
    assert parameter.item() == 0.75


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_wrapper_trains_as_under_torchs_class(name: str, fused: bool) -> None:
    results = []
    for scaler in (torch_scaler(), cpu_scaler()):
        parameter = leaf(1.0)
        inner = torch.optim.SGD([parameter], lr=1.0, fused=fused)
        wrapper = WRAPPERS[name](inner)
        for value in (0.25, INF, 0.5):
            inner.zero_grad()
            backward(scaler, parameter, value)
            if fused:
                # A wrapper that hides or shows torch's mark: the one inside must be right.
                scaler.unscale_(inner)
                scaler.step(inner)
            else:
                scaler.step(inner if name in ("bare", "twice") else wrapper)
            scaler.update()
        results.append((parameter.item(), scaler.get_scale()))
    assert results[0] == results[1] == (0.25, 512.0)


class _Forwards:
    """Passes every name on, ``step`` and torch's mark of fused optimizers too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_one_inside_a_wrapper_without_a_step_is_stepped(fused: bool) -> None:
    """torch's class leaves scale and flag on the wrapper, and a fused step is of scaled ones."""
    parameter, scaler = leaf(1.0), cpu_scaler()
    inner = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    for value in (0.25, INF, 0.5):
        inner.zero_grad()
        backward(scaler, parameter, value)
        scaler.step(_Forwards(inner))  # type: ignore[arg-type]
        scaler.update()
    assert (parameter.item(), scaler.get_scale()) == (0.25, 512.0)


# -- never seen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["stepped", "found_inf", "step_counts"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_question_about_an_optimizer_never_seen_is_an_error(question: str, wrapped: bool) -> None:
    parameter = leaf(1.0)
    seen, never = torch.optim.SGD([parameter], lr=1.0), torch.optim.SGD([leaf(1.0)], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    scaler.step(seen)
    scaler.update()
    with pytest.raises(StageError, match=r"SGD|before"):
        getattr(scaler, question)(Lightning(never) if wrapped else never)
