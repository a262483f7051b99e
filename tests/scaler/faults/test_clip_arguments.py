"""Ranks that clip by another norm than the others raise: their parameters would part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool
from tests.scaler.faults.tools import error_of
from tests.scaler.steps import backward, cpu_scaler, leaf


def _differs(what: str, unscaled: bool) -> Any:
    other = dist.get_rank() == 1
    parameter = leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, [3.0, 4.0])
    if unscaled:
        scaler.unscale_(optimizer)
    max_norm = 2.0 if what == "max_norm" and other else 1.0
    norm_type = 1.0 if what == "norm_type" and other else 2.0
    settings: dict[str, Any] = {}
    if what == "replicated" and other:
        settings["sharded"] = lambda _: True
    error = error_of(scaler.clip_grad_norm_, optimizer, max_norm, norm_type, **settings)
    if error is None:
        error = error_of(scaler.step, optimizer)
    return error, parameter.tolist()


@pytest.mark.parametrize("unscaled", [False, True], ids=["in one message", "after unscale_"])
@pytest.mark.parametrize("what", ["max_norm", "norm_type", "replicated"])
def test_ranks_that_clip_differently_are_stopped(pair: RankPool, what: str, unscaled: bool) -> None:
    for error, values in pair.run(_differs, what, unscaled):
        assert error is not None, "replicas would part"
        assert error[0] in ("LockstepError", "SettingError")
        assert values == [1.0, 2.0]
