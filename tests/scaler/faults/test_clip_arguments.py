"""Arguments of clip_grad_norm_ as torch takes them; ranks whose arguments differ raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp.errors import SettingError
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


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize(
    ("max_norm", "norm_type"), [(1.0, "inf"), ("1", 2), (torch.tensor(1.0), torch.tensor(2.0))]
)
def test_numbers_are_read_as_torch_reads_them(max_norm: Any, norm_type: Any, enabled: bool) -> None:
    parameter, expected = leaf(1.0, 2.0), leaf(1.0, 2.0)
    scaler = cpu_scaler(enabled=enabled)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    backward(scaler, parameter, [3.0, 4.0])
    expected.grad = torch.tensor([3.0, 4.0])
    norm = scaler.clip_grad_norm_(optimizer, max_norm, norm_type)
    assert norm == nn.utils.clip_grad_norm_([expected], max_norm, norm_type)
    torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("wrong", ["much", None, float("nan"), -1.0])
def test_what_is_no_positive_number_is_named(wrong: Any) -> None:
    parameter, scaler = leaf(1.0), cpu_scaler()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    backward(scaler, parameter, 0.25)
    with pytest.raises(SettingError, match="norm_type must be > 0, not"):
        scaler.clip_grad_norm_(optimizer, 1.0, wrong)


@pytest.mark.parametrize("given", ["named_parameters", "children"])
def test_what_is_no_tensor_is_named(given: str) -> None:
    model, scaler = nn.Sequential(nn.Linear(1, 1)), cpu_scaler()
    scaler.scale(model(torch.ones(1)).sum()).backward()
    with pytest.raises(TypeError, match=r"such as model\.parameters\(\), not (tuple|Linear)"):
        scaler.clip_grad_norm_(getattr(model, given)(), 1.0)
