"""Who overflowed: the report after a skip, and the end of a run that skips for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp.errors import LossScaleCollapse, StageError
from tests.scaler.steps import INF, NAN, cpu_scaler, iteration, leaf, sgd


class Net(nn.Module):
    """Two layers with names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)


def overflowing(scaler: Any, **gradients: Tensor) -> tuple[Net, torch.optim.Optimizer]:
    """A skipped step of a model with these gradients, by name with ``_`` for ``.``; others 0."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(torch.ones(()))
    for name, parameter in model.named_parameters():
        given = gradients.get(name.replace(".", "_"))
        parameter.grad = torch.zeros_like(parameter) if given is None else given.clone()
    scaler.step(optimizer)
    return model, optimizer


WEIGHT = torch.tensor([[INF, 2048.0], [-INF, NAN], [0.0, -4096.0]])
BIAS = torch.full((1,), NAN)


def rows(report: Any) -> list[tuple[Any, ...]]:
    return [
        (o.name, o.rank, o.infs, o.nans, o.elements, o.largest_finite) for o in report.overflows
    ]


def test_a_report_counts_infs_and_nans_and_names_the_largest_finite_value():
    scaler = cpu_scaler()
    model, _ = overflowing(scaler, first_weight=WEIGHT, second_bias=BIAS)
    report = scaler.overflow_report(model)
    # The step unscaled the gradients: 4096 / 1024.
    assert rows(report) == [("first.weight", 0, 2, 1, 6, 4.0), ("second.bias", 0, 0, 1, 1, 0.0)]
    assert report.scale == 1024.0


def test_a_report_is_a_table_for_people():
    scaler = cpu_scaler()
    model, _ = overflowing(scaler, first_weight=WEIGHT, second_bias=BIAS)
    lines = str(scaler.overflow_report(model)).splitlines()
    assert lines[0] == "overflow at loss scale 1024"
    assert lines[1].split("  ")[0] == "parameter"
    assert [line.split() for line in lines[2:]] == [
        ["first.weight", "0", "2", "1", "6", "4"],
        ["second.bias", "0", "0", "1", "1", "0"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1, "the columns stand under each other"


def names_of(scaler: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    return [o.name for o in scaler.overflow_report().overflows]


def filled(model: nn.Module, name: str) -> nn.Module:
    for each, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, INF if each == name else 0.0)
    return model


def test_names_come_from_named_parameters_where_there_is_no_model():
    model = filled(Net(), "second.weight")
    scaler = cpu_scaler(named_parameters=model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert names_of(scaler, optimizer) == ["second.weight"]


def test_names_come_from_the_optimizer_where_it_has_them():
    model = filled(Net(), "second.weight")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0)
    assert names_of(cpu_scaler(), optimizer) == ["second.weight"]


def test_without_names_group_and_index_stand_in():
    model = filled(Net(), "second.weight")
    groups = [{"params": [*part.parameters()]} for part in (model.first, model.second)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    assert names_of(cpu_scaler(), optimizer) == ["group 1, parameter 0"]


def test_a_report_covers_every_optimizer_seen():
    models = [filled(Net(), "first.bias"), filled(Net(), "second.bias")]
    scaler = cpu_scaler()
    scaler.scale(torch.ones(()))
    optimizers = [torch.optim.SGD(m.named_parameters(), lr=1.0) for m in models]
    scaler.step_all(optimizers)
    assert len(scaler.overflow_report().overflows) == 2


def test_a_sparse_and_an_fp16_gradient_are_reported_too():
    table, narrow = leaf(1.0, 1.0), leaf(1.0, dtype=torch.float16)
    table.grad = torch.sparse_coo_tensor([[1]], [INF], (2,), check_invariants=True)
    narrow.grad = torch.tensor([NAN], dtype=torch.float16)
    scaler = cpu_scaler(fp16_grads="inplace")
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([table, narrow], lr=1.0)
    scaler.step(optimizer)
    assert [row[2:5] for row in rows(scaler.overflow_report())] == [(1, 0, 1), (0, 1, 1)]


@pytest.mark.parametrize("unscale", [False, True])
def test_a_report_of_a_fused_step_says_what_lies_in_the_gradient(unscale):
    parameter = leaf(1.0, 1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler = cpu_scaler()
    iteration(scaler, optimizer, parameter, [INF, 0.25], unscale=unscale)
    (overflow,) = scaler.overflow_report().overflows
    assert overflow.largest_finite == (0.25 if unscale else 256.0)


def test_a_report_where_nothing_overflowed_is_an_error_that_says_when_to_call():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    iteration(scaler, optimizer, parameter, 0.25)
    with pytest.raises(StageError, match=r"after a skipped step and before zero_grad\(\)"):
        scaler.overflow_report()


# -- ranks -----------------------------------------------------------------------------------------


def reported_on_ranks(bad: list[int]) -> tuple[list[tuple[Any, ...]], str]:
    scaler = cpu_scaler()
    weight = WEIGHT if dist.get_rank() in bad else torch.zeros(3, 2)
    model, _ = overflowing(scaler, first_weight=weight)
    report = scaler.overflow_report(model)
    return rows(report), str(report)


@pytest.mark.parametrize("bad", [[1], [0, 1]], ids=str)
def test_every_rank_gets_the_report_of_all_ranks(ranks2, bad):
    first, second = ranks2.run(reported_on_ranks, bad)
    assert first == second
    assert first[0] == [("first.weight", rank, 2, 1, 6, 4.0) for rank in bad]


def no_overflow_on_ranks() -> str:
    scaler = cpu_scaler()
    overflowing(scaler)
    try:
        scaler.overflow_report()
    except StageError as error:
        return str(error)
    return "a report"


def test_a_report_without_an_overflow_is_an_error_on_every_rank(ranks2):
    for message in ranks2.run(no_overflow_on_ranks):
        assert "no inf or NaN in any gradient of any rank" in message


# -- LossScaleCollapse -----------------------------------------------------------------------------


def test_the_skip_that_reaches_the_limit_raises_with_its_report():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(max_consecutive_skips=3)
    for _ in range(2):
        iteration(scaler, optimizer, parameter, INF)
    with pytest.raises(LossScaleCollapse, match=r"3 steps in a row were skipped") as caught:
        iteration(scaler, optimizer, parameter, NAN)
    assert rows(caught.value.report) == [("group 0, parameter 0", 0, 0, 1, 1, 0.0)]
    assert "group 0, parameter 0" in str(caught.value)
    assert "256" in str(caught.value)
    assert parameter.item() == 1.0


def test_a_step_taken_starts_the_count_of_skips_anew():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(max_consecutive_skips=2)
    for gradient in (INF, 0.25, INF, 0.25, INF):
        iteration(scaler, optimizer, parameter, gradient)
    with pytest.raises(LossScaleCollapse):
        iteration(scaler, optimizer, parameter, INF)
    assert parameter.item() == 0.5


def test_after_a_collapse_the_user_may_go_on():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(max_consecutive_skips=1)
    with pytest.raises(LossScaleCollapse):
        iteration(scaler, optimizer, parameter, INF)
    scaler.update(64.0)
    iteration(scaler, optimizer, parameter, 0.25)
    assert (parameter.item(), scaler.get_scale()) == (0.75, 64.0)
    assert scaler.step_counts(optimizer).skipped == 1


def collapse_on_ranks(bad: int) -> tuple[str, Any, float]:
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(max_consecutive_skips=2)
    try:
        for _ in range(2):
            iteration(scaler, optimizer, parameter, INF if dist.get_rank() == bad else 0.25)
    except LossScaleCollapse as error:
        return str(error), rows(error.report), parameter.item()
    return "nothing was raised", None, parameter.item()


def test_a_collapse_is_raised_on_every_rank_and_names_the_rank(ranks2):
    first, second = ranks2.run(collapse_on_ranks, 1)
    assert first == second
    message, report, value = first
    assert message.startswith("2 steps in a row were skipped")
    assert report == [("group 0, parameter 0", 1, 1, 0, 1, 0.0)]
    assert value == 1.0


def limits_that_differ() -> str:
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(max_consecutive_skips=1 if dist.get_rank() else None)
    try:
        iteration(scaler, optimizer, parameter, INF)
    except RuntimeError as error:
        return type(error).__name__
    return "nothing was raised"


def test_limits_that_differ_between_ranks_are_told_before_one_reports_alone(ranks2):
    assert ranks2.run(limits_that_differ) == ["LockstepError"] * 2
