"""The package's names as torch spells them, and torch's old modules with their signatures."""

import dataclasses
import importlib
import inspect
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

import distamp
from distamp import AutocastState, autocast


def test_classes_pickle_by_their_module():
    for cls in (autocast, distamp.cpu.amp.autocast, distamp.cpu.amp.GradScaler):
        assert pickle.loads(pickle.dumps(cls)) is cls


def parameters(called: object) -> list[tuple[str, object]]:
    made = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
    found = inspect.signature(made).parameters.values()
    plain = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    return [(p.name, p.default) for p in plain]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_the_old_spellings_have_the_old_signatures_and_warn_of_no_age(device_type, name):
    ours, theirs = (
        getattr(importlib.import_module(f"{package}.{device_type}.amp"), name)
        for package in ("distamp", "torch")
    )
    assert parameters(ours) == parameters(theirs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(ours(), getattr(torch.amp, name))
    # Only that there is no such device, at the caller's line.
    missing = device_type == "cuda" and not torch.cuda.is_available()
    assert [each.category for each in caught] == [UserWarning] * missing
    assert {each.filename for each in caught} <= {__file__}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_old_function_decorators_know_their_device_type(device_type):
    amp = importlib.import_module(f"distamp.{device_type}.amp")
    seen: list[object] = []

    def look(ctx: SimpleNamespace, x: torch.Tensor) -> None:
        seen.append((x.dtype, torch.is_autocast_enabled(device_type)))

    x, ctx = torch.ones(2, dtype=torch.bfloat16), SimpleNamespace()
    with dataclasses.replace(
        AutocastState.capture(), devices=((device_type, True, x.dtype),)
    ).apply():
        amp.custom_fwd(cast_inputs=torch.float32)(look)(ctx, x)
    amp.custom_bwd(look)(ctx, x)
    # Only a tensor of the decorator's own device type is cast, in forward alone.
    cast = torch.float32 if device_type == "cpu" else torch.bfloat16
    assert seen == [(cast, False), (torch.bfloat16, False)]
