"""After an error in the local pass ``optimizer.zero_grad()`` still drops the model's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distamp.scaler import MasterParameters
from tests.ranks import RankPool
from tests.scaler.faults.tools import RaiseAt, error_of
from tests.scaler.steps import backward, cpu_scaler, leaf

OPS = ["_foreach_copy_", "_amp_foreach_non_finite_check_and_unscale_"]


def _after_an_error(op: str, call: str, set_to_none: bool, here: bool) -> Any:
    parameters = [leaf(1.0, dtype=torch.float16), leaf(2.0, 2.0, dtype=torch.float16)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    MasterParameters(optimizer)
    scaler = cpu_scaler(fp16_grads="master")
    errors = []
    for number in range(3):
        optimizer.zero_grad(set_to_none)
        for parameter in parameters:
            backward(scaler, parameter, [0.125] * parameter.numel())
        error = None
        if number == 1 and here:
            with RaiseAt(op, torch.OutOfMemoryError("no memory is left")) as mode:
                error = error_of(getattr(scaler, call), optimizer)
            assert mode.raised
        elif number == 1:
            error = error_of(getattr(scaler, call), optimizer)
        else:
            scaler.step(optimizer)
        errors.append(error is not None)
        if number != 1 or dist.is_initialized():
            scaler.update()
        else:
            scaler.update(scaler.get_scale())
    return errors, [p[0].item() for p in parameters]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_in_one_process(op: str, call: str, set_to_none: bool) -> None:
    errors, values = _after_an_error(op, call, set_to_none, here=True)
    assert errors == [False, True, False]
    assert values == [0.75, 1.75]


def _on_rank_1(op: str, call: str, set_to_none: bool) -> Any:
    return _after_an_error(op, call, set_to_none, here=dist.get_rank() == 1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_on_one_rank_of_two(pair: RankPool, op: str, call: str) -> None:
    assert pair.run(_on_rank_1, op, call, True) == [([False, True, False], [0.75, 1.75])] * 2
