"""distamp has the names and signatures of torch's old amp modules."""

import dataclasses
import importlib
import inspect
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distamp
from distamp import AutocastState, autocast


@pytest.mark.parametrize("cls", [autocast, distamp.cpu.amp.autocast, distamp.cpu.amp.GradScaler])
def test_a_class_can_be_pickled(cls):
    assert pickle.loads(pickle.dumps(cls)) is cls


def old_spelling(package: str, device_type: str, name: str) -> Any:
    """Return the class, or the function, with a name in the old module of a device type."""
    module = importlib.import_module(f"{package}.{device_type}.amp")
    return getattr(module, name)


def parameters(spelling: Any) -> list[tuple[str, object]]:
    """Return the name and the default of each positional parameter of a class or function."""
    function = spelling.__init__ if isinstance(spelling, type) else spelling
    signature = inspect.signature(function)
    names_and_defaults = []
    for parameter in signature.parameters.values():
        is_positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_positional and parameter.name != "self":
            names_and_defaults.append((parameter.name, parameter.default))
    return names_and_defaults


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_an_old_spelling_has_torchs_signature(device_type, name):
    distamp_spelling = old_spelling("distamp", device_type, name)
    torch_spelling = old_spelling("torch", device_type, name)
    assert parameters(distamp_spelling) == parameters(torch_spelling)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_an_old_spelling_warns_only_that_its_device_is_missing(device_type, name):
    """torch's own old spellings warn that they are deprecated."""
    make = old_spelling("distamp", device_type, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(make(), getattr(torch.amp, name))
    if device_type == "cpu" or torch.cuda.is_available():
        assert caught == []
    else:
        (warning,) = caught
        assert warning.category is UserWarning
        assert warning.filename == __file__


def _record_call(calls: list[object], device_type: str) -> Callable[..., None]:
    """Return a function that records the dtype of its input, and whether autocast is on."""

    def function(ctx: SimpleNamespace, x: torch.Tensor) -> None:
        calls.append((x.dtype, torch.is_autocast_enabled(device_type)))

    return function


@pytest.mark.parametrize(
    ("device_type", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)]
)
def test_the_old_custom_fwd_casts_tensors_of_its_device_type_alone(device_type, dtype):
    amp = importlib.import_module(f"distamp.{device_type}.amp")
    calls: list[object] = []
    forward = amp.custom_fwd(cast_inputs=torch.float32)(_record_call(calls, device_type))
    enabled = ((device_type, True, torch.bfloat16),)
    state = dataclasses.replace(AutocastState.capture(), devices=enabled)
    with state.apply():
        forward(SimpleNamespace(), torch.ones(2, dtype=torch.bfloat16))
    assert calls == [(dtype, False)]


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_the_old_custom_bwd_casts_nothing(device_type):
    amp = importlib.import_module(f"distamp.{device_type}.amp")
    calls: list[object] = []
    context = SimpleNamespace()
    x = torch.ones(2, dtype=torch.bfloat16)
    enabled = ((device_type, True, torch.bfloat16),)
    state = dataclasses.replace(AutocastState.capture(), devices=enabled)
    record = _record_call(calls, device_type)
    with state.apply():
        amp.custom_fwd(cast_inputs=torch.float32)(record)(context, x)
    amp.custom_bwd(record)(context, x)
    assert calls[1] == (torch.bfloat16, False)
