"""Refusals, copies, retries, stand-ins: small things that torch's class does and this one must."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RankPool, subgroup
from tests.scaler.faults.tools import error_of
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, sgd, torch_scaler

# -- copies ----------------------------------------------------------------------------------------


def _copied_with_a_group() -> Any:
    groups = [subgroup([0, 1]), subgroup([2, 3])]
    mine = groups[dist.get_rank() // 2]
    scaler = copy.deepcopy(cpu_scaler(process_group=mine))
    same = scaler.process_group is mine
    parameter, optimizer = sgd(1.0)
    # An overflow of ranks 2 and 3's group is no business of ranks 0 and 1.
    backward(scaler, parameter, INF if dist.get_rank() == 2 else 0.25)
    scaler.step(optimizer)
    scaler.update()
    return same, parameter.item(), scaler.get_scale()


def test_a_deep_copy_keeps_the_group_it_was_given(four: RankPool) -> None:
    assert four.run(_copied_with_a_group) == [(True, 0.75, 1024.0)] * 2 + [(True, 1.0, 512.0)] * 2


def test_a_deep_copy_of_a_used_scaler_goes_on_by_itself() -> None:
    results = []
    for scaler in (torch_scaler(growth_interval=3), cpu_scaler(growth_interval=3)):
        parameter, optimizer = sgd(1.0)
        iteration(scaler, optimizer, parameter, 0.25)
        copied = copy.deepcopy(scaler)
        iteration(copied, optimizer, parameter, INF)
        iteration(scaler, optimizer, parameter, 0.25)
        iteration(scaler, optimizer, parameter, 0.25)
        results.append((scaler.get_scale(), copied.get_scale(), parameter.item()))
    assert results[0] == results[1] == (2048.0, 512.0, 0.25)


# -- a retry after an error ------------------------------------------------------------------------


def _retries(how: str) -> list[Any]:
    """A float16 gradient on rank 1 is refused on every rank; the user tries again."""
    parameter = leaf(1.0, dtype=torch.float16 if dist.get_rank() == 1 else torch.float32)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    call = getattr(scaler, how)
    return [error_of(call, optimizer), error_of(call, optimizer), error_of(scaler.step, optimizer)]


@pytest.mark.parametrize("how", ["step", "unscale_"])
def test_there_is_no_retry_after_an_error(pair: RankPool, how: str) -> None:
    for first, *again in pair.run(_retries, how):
        assert first is not None
        assert "FP16" in first[1]
        assert [error and error[0] for error in again] == ["StageError"] * 2


# -- a skipped step is explained -------------------------------------------------------------------


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def _log_of_a_run(named: bool, how: str = "step") -> list[tuple[str, str]]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    handler = _Records()
    logger = logging.getLogger("distamp.scaler")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        settings = {"named_parameters": model.named_parameters()} if named else {}
        scaler = cpu_scaler(**settings)
        for number in range(4):
            optimizer.zero_grad()
            overflow = number == 2 and rank == (1 if dist.is_initialized() else 0)
            loss = model.bias.sum() * 0.25 + model.weight.sum() * (INF if overflow else 0.25)
            scaler.scale(loss).backward()
            if how == "unscale":
                scaler.unscale_(optimizer)
            if how == "clip":
                scaler.clip_grad_norm_(optimizer, 1.0)
            if how == "step_all":
                scaler.step_all([optimizer])
            else:
                scaler.step(optimizer)
            scaler.update()
    finally:
        logger.removeHandler(handler)
    return handler.lines


@pytest.mark.parametrize("how", ["step", "unscale", "clip", "step_all"])
def test_a_skipped_step_is_explained_on_rank_0(pair: RankPool, how: str) -> None:
    first, second = pair.run(_log_of_a_run, True, how)
    assert second == []
    assert len(first) == 1
    level, line = first[0]
    assert level == "INFO"
    assert "AdamW" in line
    assert "1024" in line, "the scale of the step that was skipped"
    assert "rank 1" in line
    assert "2" in line or "3" in line, "which step"


def test_nothing_is_said_where_nothing_was_skipped_or_nobody_listens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    for gradient in (0.25, INF, 0.25):
        iteration(scaler, optimizer, parameter, gradient)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
