"""The order of calls: every one that torch refuses is refused with its words."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from distamp import DistGradScaler
from distamp.errors import StageError
from tests.scaler.steps import cpu_scaler, iteration, sgd, torch_scaler

CALLS = ("scale", "unscale_", "step", "update")


def outcome(scaler: torch.amp.GradScaler, calls: tuple[str, ...]) -> list[str]:
    """What each call raised, or how scale and parameter stand after it."""
    parameter, optimizer = sgd(1.0)
    parameter.grad = torch.ones_like(parameter)
    seen = []
    for call in calls:
        try:
            if call == "scale":
                scaler.scale(torch.tensor(1.0))
            elif call == "update":
                scaler.update()
            else:
                getattr(scaler, call)(optimizer)
        except (RuntimeError, AssertionError) as error:
            base = RuntimeError if isinstance(error, RuntimeError) else AssertionError
            text = str(error).replace("step()", "step")
            seen.append(f"{base.__name__}: {text}")
        else:
            seen.append(f"{scaler.get_scale()} {parameter.item()}")
    return seen


def words(entry: str) -> str:
    return entry.split(": ", 1)[-1]


def waits_over_an_update(calls: tuple[str, ...]) -> bool:
    """Whether gradients that were unscaled are used after an update, before another loss."""
    text = " ".join(calls)
    found = re.search(r"unscale_ (?:unscale_ )*update (?:update )*(?:unscale_|step)", text)
    return found is not None and text.startswith("scale ")


def test_gradients_unscaled_before_an_update_stay_so_until_a_loss_is_scaled():
    assert outcome(cpu_scaler(4.0), ("scale", "unscale_", "update", "step"))[-1] == "4.0 0.75"
    assert outcome(torch_scaler(4.0), ("scale", "unscale_", "update", "step"))[-1] == "4.0 0.9375"
    again = ("scale", "unscale_", "update", "unscale_", "step")
    assert outcome(cpu_scaler(4.0), again)[-1] == "4.0 0.75"
    anew = ("scale", "unscale_", "update", "scale", "step")
    assert outcome(cpu_scaler(4.0), anew) == outcome(torch_scaler(4.0), anew)


def test_every_other_order_of_four_calls_ends_as_torchs():
    for calls in itertools.product(CALLS, repeat=4):
        if waits_over_an_update(calls):
            continue
        ours = outcome(cpu_scaler(4.0), calls)
        theirs = outcome(torch_scaler(4.0), calls)
        assert [words(e) for e in ours] == [words(e) for e in theirs], calls


def test_an_order_error_is_both_of_what_torch_raises():
    assert issubclass(StageError, RuntimeError)
    assert issubclass(StageError, AssertionError)


def test_the_words_of_torchs_order_errors():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    with pytest.raises(StageError, match=r"Attempted unscale_ but _scale is None"):
        scaler.unscale_(optimizer)
    with pytest.raises(StageError, match=r"Attempted step but _scale is None"):
        scaler.step(optimizer)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(StageError, match=r"No inf checks were recorded prior to update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(StageError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(StageError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(StageError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.0


def test_unscale_needs_an_optimizer():
    scaler = cpu_scaler()
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"at least one optimizer"):
        scaler.unscale_()


def test_one_optimizer_given_twice_would_be_unscaled_twice_and_is_refused():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    scaler.scale((parameter * 0.25).sum()).backward()
    with pytest.raises(StageError, match=r"one optimizer was given twice"):
        scaler.unscale_(optimizer, optimizer)
    with pytest.raises(StageError, match=r"one optimizer was given twice"):
        scaler.step_all([optimizer, optimizer])
    scaler.step(optimizer)
    assert parameter.item() == 0.75


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_what_is_no_optimizer_is_named(call):
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    scaler.scale(parameter.sum()).backward()
    for wrong in ([optimizer], parameter, None):
        name = type(wrong).__name__
        with pytest.raises(TypeError, match=rf"expected an optimizer, not {name}; several are"):
            getattr(scaler, call)(wrong)


def test_scale_may_first_be_called_in_inference_mode_where_torchs_then_fails():
    for scaler in (cpu_scaler(), torch_scaler()):
        with torch.inference_mode():
            scaler.scale(torch.ones(()))
        parameter, optimizer = sgd(1.0)
        if isinstance(scaler, DistGradScaler):
            iteration(scaler, optimizer, parameter, 0.25)
            assert parameter.item() == 0.75
        else:
            with pytest.raises(RuntimeError, match=r"[Ii]nference"):
                iteration(scaler, optimizer, parameter, 0.25)


def test_an_optimizer_over_something_else_than_tensors_is_refused():
    _, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    scaler.scale(torch.tensor(1.0))
    optimizer.param_groups[0]["params"] = [1.0]
    with pytest.raises(TypeError, match=r"expected param to be torch.Tensor, got float"):
        scaler.step(optimizer)
