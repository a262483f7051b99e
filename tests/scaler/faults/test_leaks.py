"""What is gone is gone: no model, optimizer or group stays alive, or leaves anything, in a scaler.

Objects are counted, never time.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.scaler.steps import backward, cpu_scaler, leaf


def _blocks() -> int:
    gc.collect()
    # Of the names of attributes that C code looks up by a new string each time, CPython keeps up to
    # 4,096, by their addresses: the more memory a process has used, the longer until it is full.
    sys._clear_type_cache()
    return sys.getallocatedblocks()


# -- dead models and optimizers --------------------------------------------------------------------


def _model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _clip_by_optimizer(scaler: DistGradScaler, model: nn.Module, optimizer: Any) -> None:
    scaler.clip_grad_norm_(optimizer, 1.0)


def _clip_by_parameters(scaler: DistGradScaler, model: nn.Module, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(model.parameters(), 1.0)


def _no_clip(scaler: DistGradScaler, model: nn.Module, optimizer: Any) -> None:
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("how", [_clip_by_optimizer, _clip_by_parameters, _no_clip])
@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
def test_a_scaler_keeps_no_dead_model_alive(how: Callable[..., None], masters: bool) -> None:
    scaler = DistGradScaler("cpu", fp16_grads="master") if masters else cpu_scaler()
    models: list[weakref.ref[Any]] = []
    optimizers: list[weakref.ref[Any]] = []

    def train_one() -> None:
        model, optimizer = _model_and_optimizer()
        if masters:
            model.half()
            MasterParameters(optimizer)
        x = torch.ones(2, 4, dtype=torch.float16 if masters else torch.float32)
        scaler.scale(model(x).float().sum()).backward()
        how(scaler, model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        models.extend(map(weakref.ref, model.parameters()))
        optimizers.append(weakref.ref(optimizer))

    for _ in range(200):
        train_one()
    gc.collect()
    assert sum(reference() is not None for reference in models) == 0
    assert sum(reference() is not None for reference in optimizers) == 0


# -- ten thousand optimizers, born and gone --------------------------------------------------------

# Few enough for every run; as many as a long training makes, where there is time.
BORN, ALL_BORN, WARM_UP = 400, 10_000, 200


def _growth(one: Callable[[], None], born: int) -> int:
    """How many more blocks of memory so many leave behind."""
    for _ in range(WARM_UP):
        one()
    before = _blocks()
    for _ in range(born):
        one()
    return _blocks() - before


def _clipped(scaler: DistGradScaler) -> Callable[[], None]:
    def one() -> None:
        parameter = leaf(1.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        backward(scaler, parameter, 0.25)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return one


def _replaced_parameters(scaler: DistGradScaler) -> Callable[[], None]:
    optimizer = torch.optim.SGD([leaf(1.0)], lr=1.0)

    def one() -> None:
        parameter = optimizer.param_groups[0]["params"][0] = leaf(1.0)
        optimizer.state.clear()
        backward(scaler, parameter, 0.25)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return one


KINDS = [_clipped, _replaced_parameters]
MANY = pytest.param(ALL_BORN, marks=pytest.mark.slow)


@pytest.mark.parametrize("born", [BORN, MANY])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_flat_over_optimizers_and_parameters_born_and_gone(kind: Any, born: int) -> None:
    # A block for every fifth would be a leak already.
    assert _growth(kind(cpu_scaler()), born) < born // 5
