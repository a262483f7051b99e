"""The warning of masters that were rebuilt from rounded weights, as after a forgotten state."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distamp import cast_model, initialize
from distamp.levels import Amp

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,  # makes its state before a step
}
LEVELS: dict[str, tuple[str, Any]] = {
    "fp16-O2": ("fp16-O2", None),
    "bf16-O2": ("bf16-O2", None),
    "split": ("bf16-O2", "split"),
}
LEVEL = pytest.mark.parametrize("level", LEVELS)


def _job(level: str, name: str = "AdamW") -> Amp:
    torch.manual_seed(0)
    level, master_weights = LEVELS[level]
    model = cast_model(nn.Linear(4, 4), level)
    return initialize(
        model, OPTIMIZERS[name](model.parameters()), level, master_weights=master_weights
    )


def _step(amp: Amp) -> None:
    amp.zero_grad()
    amp.backward(amp.model(torch.ones(2, 4)).float().square().mean())
    amp.step()


def _resumed(level: str, name: str = "AdamW") -> tuple[Amp, dict[str, Any]]:
    """A job with the state of model and optimizer of another, which took three steps."""
    first, resumed = _job(level, name), _job(level, name)
    for _ in range(3):
        _step(first)
    resumed.model.load_state_dict(first.model.state_dict())
    resumed.optimizers[0].load_state_dict(first.optimizers[0].state_dict())
    return resumed, first.state_dict()


@LEVEL
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_resumes_without_its_masters_warns_once(level, name):
    amp, _ = _resumed(level, name)
    amp.state_dict()  # reads the masters, and says nothing of where they come from
    with pytest.warns(UserWarning, match="rebuilt from") as caught:
        _step(amp)
    _step(amp)
    (message,) = caught
    parts = "1 part in 2,048" if level == "fp16-O2" else "1 part in 256"
    for words in ("masters of 2 parameters were rebuilt", parts, "Save amp.state_dict()"):
        assert words in str(message.message)
    assert message.filename == __file__


@LEVEL
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_begins_does_not_warn(level, name):
    amp = _job(level, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(amp)


@LEVEL
def test_a_run_that_loads_its_masters_does_not_warn(level):
    (amp, state), (other, _) = _resumed(level), _resumed(level)
    amp.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(amp)
        # As load_flat_state_dict writes them.
        with other.masters[0].materialized(), torch.no_grad():
            for number, master in enumerate(other.optimizers[0].param_groups[0]["params"]):
                master.copy_(state["masters"][0]["masters"][number])
        _step(other)
    assert torch.equal(amp.model.weight, other.model.weight)


@LEVEL
def test_a_parameter_that_thaws_does_not_warn(level):
    amp = _job(level)
    amp.model.weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(amp)
        amp.model.weight.requires_grad_(True)
        _step(amp)
