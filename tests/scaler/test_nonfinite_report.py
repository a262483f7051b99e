"""Who overflowed: the log of a skip, the report after it, the end of a run that skips for ever."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import StepGuard
from distamp.errors import CallOrderError, LossScaleCollapseError
from distamp.guard import nonfinite_report
from distamp.scaler import MasterParameters
from tests.on_ranks import on_ranks
from tests.ranks import logged
from tests.scaler.steps import INF, NAN, cpu_scaler, iteration, leaf, sgd

WEIGHT = torch.tensor([[INF, 2048.0], [-INF, NAN], [0.0, -4096.0]])


def net() -> Any:
    """Two layers with names."""
    return nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 1)})


def by_its_parameters(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def step(
    scaler: Any, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]
) -> None:
    """A step of a model with these gradients by name, and others of 0."""
    scaler.scale(torch.ones(()))
    for name, parameter in model.named_parameters():
        given = gradients.get(name, torch.zeros_like(parameter))
        parameter.grad = given.clone().to(parameter.dtype)
    scaler.step(optimizer)


def rows(report: Any) -> list[tuple[Any, ...]]:
    return [
        (o.name, o.rank, o.infs, o.nans, o.elements, o.largest_finite) for o in report.overflows
    ]


def test_a_report_counts_and_names_and_is_a_table_for_people():
    scaler, model = cpu_scaler(), net()
    optimizer = by_its_parameters(model)
    step(scaler, model, optimizer, {"first.weight": WEIGHT, "second.bias": torch.full((1,), NAN)})
    scaler.update()
    report = scaler.nonfinite_report(model)
    assert scaler.get_scale() == 512.0, "and the report names that of the overflow"
    # The step unscaled the gradients: 4096 / 1024.
    assert rows(report) == [("first.weight", 0, 2, 1, 6, 4.0), ("second.bias", 0, 0, 1, 1, 0.0)]
    lines = str(report).splitlines()
    assert (report.scale, "1024" in lines[0]) == (1024.0, True)
    assert [line.split() for line in lines[2:]] == [
        ["first.weight", "0", "2", "1", "6", "4"],
        ["second.bias", "0", "0", "1", "1", "0"],
    ]


NAMED: dict[str, Callable[[Any], Any]] = {
    "report": by_its_parameters,
    "scaler": by_its_parameters,
    "optimizer": lambda model: torch.optim.SGD(model.named_parameters(), lr=1.0),
    "nothing": lambda model: torch.optim.SGD(
        [{"params": [*part.parameters()]} for part in model.values()], lr=1.0
    ),
}


@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
@pytest.mark.parametrize("by", NAMED)
def test_names_come_from_the_model_the_scaler_or_the_optimizer(by, masters):
    model = net().half() if masters else net()
    named = model.named_parameters() if by == "scaler" else None
    scaler = cpu_scaler(named_parameters=named, fp16_grads="master" if masters else "error")
    optimizer = NAMED[by](model)
    _kept = masters and MasterParameters(optimizer)
    step(scaler, model, optimizer, {"second.weight": torch.full((1, 3), INF)})
    report = scaler.nonfinite_report(model if by == "report" else None)
    expected = "group 1, parameter 0" if by == "nothing" else "second.weight"
    assert [row[0] for row in rows(report)] == [expected]


def test_a_report_covers_every_optimizer_and_kind_of_gradient():
    table, narrow, fused = leaf(1.0, 1.0), leaf(1.0, dtype=torch.float16), leaf(1.0, 1.0)
    table.grad = torch.sparse_coo_tensor([[1]], [INF], (2,), check_invariants=True)
    narrow.grad = torch.tensor([NAN], dtype=torch.float16)
    fused.grad = torch.tensor([INF, 256.0])
    scaler = cpu_scaler(fp16_grads="inplace")
    scaler.scale(torch.ones(()))
    optimizers = [
        torch.optim.SGD([table, narrow], lr=1.0),
        torch.optim.SGD([fused], lr=1.0, fused=True),
    ]
    scaler.step_all(optimizers)
    # A fused step leaves the gradient scaled.
    assert [row[2:] for row in rows(scaler.nonfinite_report())] == [
        (1, 0, 1, 0.0),
        (0, 1, 1, 0.0),
        (1, 0, 2, 256.0),
    ]


def test_the_log_of_a_skip_names_buffers_that_are_not_finite_once(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = cpu_scaler(named_parameters=[*model.named_parameters(), *model.named_buffers()])
    with caplog.at_level("INFO", "distamp.scaler"):
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 2), INF)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    first, second = (record.getMessage() for record in caplog.records)
    assert "left inf or NaN in 1.running_mean, 1.running_var" in first
    assert "running" not in second


# -- ranks -----------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("bad", [[1], [0, 1], []])
def test_every_rank_gets_the_report_of_all_ranks_or_an_error_that_says_when_to_call(bad):
    scaler, model = cpu_scaler(), net()
    optimizer = by_its_parameters(model)
    step(scaler, model, optimizer, {"first.weight": WEIGHT} if dist.get_rank() in bad else {})
    if bad:
        found = rows(scaler.nonfinite_report())
        assert found == [("group 0, parameter 0", rank, 2, 1, 6, 4.0) for rank in bad]
        return
    with pytest.raises(
        CallOrderError,
        match=r"no inf or NaN in any gradient of any rank.*"
        r"after a skipped step and before zero_grad\(\)",
    ):
        scaler.nonfinite_report()


@on_ranks(2)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_a_skipped_step_is_explained_on_rank_0(unscale):
    parameter, scaler = leaf(1.0), cpu_scaler()
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    with logged("distamp.scaler") as lines:
        for gradient in (0.25, 0.25, INF if dist.get_rank() else 0.25, 0.25):
            iteration(scaler, optimizer, parameter, gradient, unscale=unscale)
    assert len(lines) == (dist.get_rank() == 0)
    for words in ("AdamW", "1024", "rank 1", "3"):
        assert all(words in line for line in lines), words


def _skip(way: str, make: Any, gradients: dict[str, Tensor]) -> list[str]:
    """Return the log lines of a step of two optimizers, each over one layer, with these gradients.

    Those of the layer ``first`` come first.
    """
    model = net()
    if way == "masters":
        model.half()
    fused = way.startswith("fused")
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=1.0, fused=fused) for each in model.values()
    ]
    settings = {"fp16_grads": "master"} if way == "masters" and make is cpu_scaler else {}
    _kept = [MasterParameters(each) for each in optimizers if way == "masters"]
    made = make(named_parameters=model.named_parameters(), **settings)
    made.scale(torch.ones(()))
    for name, parameter in model.named_parameters():
        given = gradients.get(name, torch.zeros_like(parameter))
        parameter.grad = given.clone().to(parameter.dtype)
    with logged("distamp.scaler" if make is cpu_scaler else "distamp.guard") as lines:
        if "together" in way:
            made.step_all(optimizers, all_or_none=True)
        elif way == "step_all":
            made.step_all(optimizers)
        else:
            for optimizer in optimizers:
                if way == "unscale_":
                    made.unscale_(optimizer)
                made.step(optimizer, max_norm=1.0 if "norm" in way else None)
    return lines


WAYS = ["step", "unscale_", "norm", "fused", "fused norm", "masters", "step_all", "together"]


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_the_log_of_a_skip_names_the_first_bad_parameter_of_another_rank(make, way):
    """Rank 1 is bad, and rank 0 logs."""
    bad = {"second.weight": torch.tensor([[NAN, 1.0, 1.0]]), "second.bias": torch.tensor([INF])}
    lines = _skip(way, make, bad if dist.get_rank() else {})
    if dist.get_rank() == 0:
        named = [line for line in lines if "on rank 1, first in second.weight" in line]
        assert len(named) == 1, lines
        assert len(lines) == 1 + (way == "together"), lines


@on_ranks(4)
def test_the_log_of_a_skip_names_the_parameters_of_each_rank():
    """Ranks 1 and 3 have the same first bad parameter, and rank 2 another; rank 0 has none."""
    weight, bias = {"second.weight": torch.full((1, 3), INF)}, {"second.bias": torch.tensor([NAN])}
    gradients: list[dict[str, Tensor]] = [{}, weight, bias, weight]
    lines = _skip("step", StepGuard, gradients[dist.get_rank()])
    expected = "on ranks 1-3, first in second.weight (ranks 1, 3), second.bias (rank 2)"
    assert all(expected in line for line in lines)
    assert len(lines) == (dist.get_rank() == 0)


@on_ranks(2)
@pytest.mark.parametrize("way", ["step", "norm"])
def test_an_error_while_one_rank_names_a_parameter_is_logged_and_hangs_no_other(way):
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such parameter")

    bad = {"second.bias": torch.tensor([INF])} if dist.get_rank() else {}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(nonfinite_report, "named_grad_tensors", fail)
        lines = _skip(way, StepGuard, bad)
    expected = "first in a parameter that cannot be named (RuntimeError: no such parameter)"
    assert all(expected in line for line in lines)
    assert len(lines) == (dist.get_rank() == 0)


# -- LossScaleCollapseError ------------------------------------------------------------------------


@on_ranks(2)
def test_the_skip_in_a_row_that_reaches_the_limit_raises_and_the_user_may_go_on():
    """Three skipped steps in a row, which rank 1 overflowed; and on after it."""
    (parameter, optimizer), scaler = sgd(), cpu_scaler(max_consecutive_skips=3)
    for bad in (INF, INF, 0.25, INF, INF):
        iteration(scaler, optimizer, parameter, bad if dist.get_rank() == 1 else 0.25)
    with pytest.raises(LossScaleCollapseError) as error:
        iteration(scaler, optimizer, parameter, NAN if dist.get_rank() == 1 else 0.25)
    for words in (
        "3 steps in a row were skipped",
        "at loss scale 64",
        "nonfinite_report() on every",
    ):
        assert words in str(error.value)
    assert rows(scaler.nonfinite_report()) == [("group 0, parameter 0", 1, 0, 1, 1, 0.0)]
    scaler.update(64.0)
    iteration(scaler, optimizer, parameter, 0.25)
    assert (parameter.item(), scaler.step_counts(optimizer).skipped) == (0.5, 5)
