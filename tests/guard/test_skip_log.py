"""Log lines about skipped steps: levels, texts, and the ranks with a line."""

import logging
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

from distamp import StepGuard
from distamp.errors import NonFiniteGradientsError
from tests.on_ranks import on_devices
from tests.place import device_type
from tests.ranks import logged
from tests.scaler.steps import INF, cpu_scaler, iteration, sgd

SPIKE = 812.0
LIMIT = 100.0


def _warnings_of_guard(caplog: pytest.LogCaptureFixture, gradients: Iterable[float]) -> list[int]:
    """Return the numbers of the steps at which a guard logs a warning."""
    parameter, optimizer = sgd()
    guard = StepGuard()
    warned: list[int] = []
    for number, gradient in enumerate(gradients, 1):
        caplog.clear()
        with caplog.at_level(logging.INFO, "distamp.guard"):
            iteration(guard, optimizer, parameter, gradient, skip_norm_above=LIMIT)
        if any(record.levelno == logging.WARNING for record in caplog.records):
            warned.append(number)
    return warned


@pytest.mark.parametrize("bad_gradient", [INF, SPIKE], ids=["inf", "norm"])
def test_a_guard_warns_at_powers_of_two_in_a_row(caplog, bad_gradient):
    assert _warnings_of_guard(caplog, [bad_gradient] * 20) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("bad_gradient", [INF, SPIKE], ids=["inf", "norm"])
def test_a_guard_warns_at_powers_of_two_of_all_single_skips(caplog, bad_gradient):
    """Every second step is skipped: the skips 1, 2, 4 and 8 are the steps 1, 3, 7 and 15."""
    assert _warnings_of_guard(caplog, [bad_gradient, 1.0] * 10) == [1, 3, 7, 15]


@pytest.mark.parametrize("bad_gradient", [INF, SPIKE], ids=["inf", "norm"])
def test_a_run_after_many_single_skips_is_seen(caplog, bad_gradient):
    """The run begins at step 33, with skip 17."""
    gradients = [bad_gradient, 1.0] * 16 + [bad_gradient] * 8
    warned = _warnings_of_guard(caplog, gradients)
    assert [number for number in warned if number > 32] == [34, 36, 40]


def test_a_long_run_is_logged_with_its_length_and_the_tool(caplog):
    parameter, optimizer = sgd()
    guard = StepGuard(named_parameters=[("weight", parameter)])
    for _ in range(8):
        iteration(guard, optimizer, parameter, INF)
    messages = [record.getMessage() for record in caplog.records]
    assert "in a row" not in messages[-2]
    assert messages[-1] == (
        "Skipped step 8 of SGD (1 parameter): inf or NaN in the gradients, first in weight. These "
        "are 8 skips in a row. distamp.find_first_nonfinite finds the operation that made the "
        "first inf or NaN."
    )


def test_a_long_run_of_norms_is_logged_with_its_length(caplog):
    parameter, optimizer = sgd()
    guard = StepGuard()
    for _ in range(8):
        iteration(guard, optimizer, parameter, SPIKE, skip_norm_above=LIMIT)
    assert caplog.records[-1].getMessage() == (
        "Skipped step 8 of SGD (1 parameter): gradient norm 812 exceeds skip_norm_above=100. These "
        "are 8 skips by the norm in a row."
    )


def test_the_limit_of_skips_does_not_begin_another_run(caplog):
    parameter, optimizer = sgd()
    guard = StepGuard(max_consecutive_skips=6)
    for _ in range(5):
        iteration(guard, optimizer, parameter, INF)
    with pytest.raises(NonFiniteGradientsError):
        iteration(guard, optimizer, parameter, INF)
    optimizer.zero_grad()
    guard.update()
    for _ in range(2):
        iteration(guard, optimizer, parameter, INF)
    assert "These are 8 skips in a row." in caplog.records[-1].getMessage()


def test_pythons_default_logging_shows_the_first_skip_of_a_guard(monkeypatch, capsys):
    """A program that has configured no handler sees warnings in its standard error."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    parameter, optimizer = sgd()
    guard = StepGuard(named_parameters=[("weight", parameter)])
    iteration(guard, optimizer, parameter, INF)
    line = "Skipped step 1 of SGD (1 parameter): inf or NaN in the gradients, first in weight."
    assert line in capsys.readouterr().err


# -- a scaler --------------------------------------------------------------------------------------


def test_a_scaler_that_searches_its_first_scale_logs_what_it_found(caplog):
    parameter, optimizer = sgd()
    scaler = cpu_scaler(2.0**30)
    with caplog.at_level(logging.INFO, "distamp.scaler"):
        for _ in range(14):
            iteration(scaler, optimizer, parameter, INF)
        iteration(scaler, optimizer, parameter, 1.0)
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert caplog.records[-1].getMessage() == (
        "SGD (1 parameter) took its first step. Before it, 14 steps were skipped while the loss "
        "scale fell from 2^30 to 2^16."
    )


def test_a_scaler_whose_first_step_is_taken_logs_no_search(caplog):
    parameter, optimizer = sgd()
    with caplog.at_level(logging.INFO, "distamp.scaler"):
        iteration(cpu_scaler(), optimizer, parameter, 1.0)
    assert caplog.records == []


def test_a_search_without_an_end_is_a_warning(caplog):
    parameter, optimizer = sgd()
    scaler = cpu_scaler(2.0**30)
    for _ in range(32):
        iteration(scaler, optimizer, parameter, INF)
    (record,) = caplog.records
    assert "These are 32 skips in a row." in record.getMessage()


def test_a_scaler_warns_at_the_fourth_and_eighth_skip_in_a_row_after_its_first_step(caplog):
    parameter, optimizer = sgd()
    scaler = cpu_scaler(2.0**30)
    warned: list[int] = []
    for number, gradient in enumerate([1.0] + [INF] * 9 + [1.0] + [INF] * 4, 1):
        caplog.clear()
        iteration(scaler, optimizer, parameter, gradient)
        if caplog.records:
            warned.append(number)
    assert warned == [5, 9, 15]


# -- the lines on a device -------------------------------------------------------------------------


def _lines_on_a_device(gradient: float, fused: bool, **step: float) -> list[str]:
    device = device_type()
    parameter = torch.nn.Parameter(torch.ones(1, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    guard = StepGuard(named_parameters=[("weight", parameter)])
    with logged("distamp.guard") as lines:
        for value in (1.0, gradient):
            parameter.grad = torch.full_like(parameter, value)
            guard.step(optimizer, **step)
            guard.update()
        guard.step_counts(optimizer)
    return lines


CASES = [(False, {}), (True, {}), (True, {"max_norm": 1.0})]


@on_devices(2)
@pytest.mark.parametrize(("fused", "step"), CASES)
def test_the_first_rank_writes_for_all_if_all_overflowed_on_a_device(fused, step):
    lines = _lines_on_a_device(INF, fused, **step)
    if dist.get_rank() == 0:
        (line,) = lines
        assert "inf or NaN in the gradients on all 2 ranks" in line
    else:
        assert lines == []


@on_devices(2)
@pytest.mark.parametrize(("fused", "step"), CASES)
def test_the_rank_that_overflowed_writes_on_a_device(fused, step):
    is_bad = dist.get_rank() == 1
    lines = _lines_on_a_device(INF if is_bad else 1.0, fused, **step)
    if is_bad:
        (line,) = lines
        assert "inf or NaN in the gradients on rank 1" in line
    else:
        assert lines == []


@on_devices(2)
def test_the_first_rank_writes_for_more_ranks_than_may_write_on_a_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distamp.guard.step_guard._MAX_LOGGING_RANKS", 0)
        lines = _lines_on_a_device(INF if dist.get_rank() == 1 else 1.0, True)
    if dist.get_rank() == 0:
        (line,) = lines
        assert "inf or NaN in the gradients on 1 of 2 ranks" in line
    else:
        assert lines == []
