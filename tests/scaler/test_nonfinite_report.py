"""Overflows are explained: by the log of a skip, the report, and the error of a collapsed scale."""

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

# Two infs, one NaN and a largest finite value of 4096 among six elements.
BAD_WEIGHT = torch.tensor([[INF, 2048.0], [-INF, NAN], [0.0, -4096.0]])


def two_layers() -> Any:
    return nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 1)})


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def set_gradients(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Set the gradients of the named parameters, and zeros for other parameters."""
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name, torch.zeros_like(parameter))
        parameter.grad = gradient.clone().to(parameter.dtype)


def step(
    scaler: Any, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]
) -> None:
    """Step a model by gradients of a scaled loss."""
    scaler.scale(torch.ones(()))
    set_gradients(model, gradients)
    scaler.step(optimizer)


def names(report: Any) -> list[str]:
    return [overflow.name for overflow in report.overflows]


def counts(report: Any) -> list[tuple[int, int, int, float]]:
    """Return infs, NaNs, elements and the largest finite magnitude of each row."""
    rows = []
    for row in report.overflows:
        rows.append((row.infs, row.nans, row.elements, row.largest_finite))
    return rows


# -- the report in one process ---------------------------------------------------------------------


def report_of_two_parameters() -> tuple[Any, Any]:
    """Return a scaler after an update, and the report of its skipped step."""
    scaler = cpu_scaler(1024.0)
    model = two_layers()
    optimizer = sgd_of(model)
    gradients = {"first.weight": BAD_WEIGHT, "second.bias": torch.full((1,), NAN)}
    step(scaler, model, optimizer, gradients)
    scaler.update()
    return scaler, scaler.nonfinite_report(model)


def test_a_report_names_and_counts_the_bad_elements():
    """The step unscaled the gradients, so the largest finite value is 4096 / 1024."""
    _scaler, report = report_of_two_parameters()
    assert names(report) == ["first.weight", "second.bias"]
    assert counts(report) == [(2, 1, 6, 4.0), (0, 1, 1, 0.0)]
    assert [overflow.rank for overflow in report.overflows] == [0, 0]


def test_a_report_has_the_scale_of_the_overflow_also_after_update():
    scaler, report = report_of_two_parameters()
    assert scaler.get_scale() == 512.0
    assert report.scale == 1024.0


def test_a_report_prints_as_a_table():
    _scaler, report = report_of_two_parameters()
    title, _header, first, second = str(report).splitlines()
    assert "1024" in title
    assert first.split() == ["first.weight", "0", "2", "1", "6", "4"]
    assert second.split() == ["second.bias", "0", "0", "1", "1", "0"]


class BadStep:
    """A model with an inf in ``second.weight``, in float32 or with masters."""

    def __init__(self, masters: bool) -> None:
        self.model = two_layers()
        self.masters = masters
        self.settings: dict[str, Any] = {}
        if masters:
            self.model.half()
            self.settings["fp16_grads"] = "master"

    def step(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if self.masters:
            MasterParameters(optimizer)
        gradient = torch.full((1, 3), INF)
        step(scaler, self.model, optimizer, {"second.weight": gradient})


MASTERS = pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])


@MASTERS
def test_a_report_takes_names_from_its_model(masters):
    bad_step = BadStep(masters)
    scaler = cpu_scaler(**bad_step.settings)
    optimizer = sgd_of(bad_step.model)
    bad_step.step(scaler, optimizer)
    report = scaler.nonfinite_report(bad_step.model)
    assert names(report) == ["second.weight"]


@MASTERS
def test_a_report_takes_names_from_the_scaler(masters):
    bad_step = BadStep(masters)
    named_parameters = bad_step.model.named_parameters()
    scaler = cpu_scaler(named_parameters=named_parameters, **bad_step.settings)
    optimizer = sgd_of(bad_step.model)
    bad_step.step(scaler, optimizer)
    assert names(scaler.nonfinite_report()) == ["second.weight"]


@MASTERS
def test_a_report_takes_names_from_the_optimizer(masters):
    bad_step = BadStep(masters)
    scaler = cpu_scaler(**bad_step.settings)
    optimizer = torch.optim.SGD(bad_step.model.named_parameters(), lr=1.0)
    bad_step.step(scaler, optimizer)
    assert names(scaler.nonfinite_report()) == ["second.weight"]


@MASTERS
def test_a_report_without_names_has_the_number_of_the_group_and_the_parameter(masters):
    bad_step = BadStep(masters)
    scaler = cpu_scaler(**bad_step.settings)
    groups = []
    for layer in bad_step.model.values():
        groups.append({"params": list(layer.parameters())})
    optimizer = torch.optim.SGD(groups, lr=1.0)
    bad_step.step(scaler, optimizer)
    assert names(scaler.nonfinite_report()) == ["group 1, parameter 0"]


def test_a_report_covers_every_optimizer_and_kind_of_gradient():
    sparse = leaf(1.0, 1.0)
    sparse.grad = torch.sparse_coo_tensor([[1]], [INF], (2,), check_invariants=True)
    half = leaf(1.0, dtype=torch.float16)
    half.grad = torch.tensor([NAN], dtype=torch.float16)
    fused = leaf(1.0, 1.0)
    fused.grad = torch.tensor([INF, 256.0])
    optimizer = torch.optim.SGD([sparse, half], lr=1.0)
    fused_optimizer = torch.optim.SGD([fused], lr=1.0, fused=True)
    scaler = cpu_scaler(fp16_grads="inplace")
    scaler.scale(torch.ones(()))
    scaler.step_all([optimizer, fused_optimizer])
    # A fused step leaves the gradient scaled, so its largest finite value is 256.
    expected = [(1, 0, 1, 0.0), (0, 1, 1, 0.0), (1, 0, 2, 256.0)]
    assert counts(scaler.nonfinite_report()) == expected


def test_the_log_of_a_skip_names_buffers_that_are_not_finite_once(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = cpu_scaler(named_parameters=[*model.named_parameters(), *model.named_buffers()])
    with caplog.at_level("INFO", "distamp.scaler"):
        for _ in range(2):
            optimizer.zero_grad()
            outputs = model(torch.full((2, 2), INF))
            scaler.scale(outputs.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    first, second = (record.getMessage() for record in caplog.records)
    assert "left inf or NaN in 1.running_mean, 1.running_var" in first
    assert "running" not in second


# -- the report on ranks ---------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("bad_ranks", [[1], [0, 1]], ids=["rank 1", "both ranks"])
def test_every_rank_gets_the_report_of_all_ranks(bad_ranks):
    scaler = cpu_scaler()
    model = two_layers()
    optimizer = sgd_of(model)
    gradients = {"first.weight": BAD_WEIGHT} if dist.get_rank() in bad_ranks else {}
    step(scaler, model, optimizer, gradients)
    report = scaler.nonfinite_report()
    assert [overflow.rank for overflow in report.overflows] == bad_ranks
    assert names(report) == ["group 0, parameter 0"] * len(bad_ranks)
    assert counts(report) == [(2, 1, 6, 4.0)] * len(bad_ranks)


@on_ranks(2)
def test_a_report_without_an_overflow_raises_and_explains_when_to_call_it():
    scaler = cpu_scaler()
    model = two_layers()
    optimizer = sgd_of(model)
    step(scaler, model, optimizer, {})
    message = (
        r"no inf or NaN in any gradient of any rank.*"
        r"after a skipped step and before zero_grad\(\)"
    )
    with pytest.raises(CallOrderError, match=message):
        scaler.nonfinite_report()


# -- the log of a skip -----------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_a_skipped_step_is_explained_on_rank_0(unscale):
    """The log has the optimizer, the scale, the rank and the number of the step."""
    parameter = leaf(1.0)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    scaler = cpu_scaler()
    gradients = [0.25, 0.25, INF if dist.get_rank() == 1 else 0.25, 0.25]
    with logged("distamp.scaler") as lines:
        for gradient in gradients:
            iteration(scaler, optimizer, parameter, gradient, unscale=unscale)
    if dist.get_rank() == 1:
        assert lines == []
        return
    (line,) = lines
    for words in ("AdamW", "1024", "rank 1", "3"):
        assert words in line


LOGGER_NAMES = {StepGuard: "distamp.guard", cpu_scaler: "distamp.scaler"}


class TwoOptimizers:
    """A guard or scaler with names of parameters, and two layers with one optimizer per layer."""

    def __init__(self, make: Any, *, fused: bool = False, masters: bool = False) -> None:
        self.model = two_layers()
        settings = {}
        if masters:
            self.model.half()
            if make is cpu_scaler:
                settings["fp16_grads"] = "master"
        self.optimizers = []
        for layer in self.model.values():
            optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused)
            self.optimizers.append(optimizer)
        self.masters = []
        if masters:
            self.masters = [MasterParameters(optimizer) for optimizer in self.optimizers]
        self.guard = make(named_parameters=self.model.named_parameters(), **settings)
        self.logger_name = LOGGER_NAMES[make]


def log_of_steps(make: Any, call: str, gradients: dict[str, Tensor], **settings: bool) -> list[str]:
    """Return the log lines of one step of two optimizers by these gradients.

    Args:
        make: Constructor of a guard or scaler.
        call: The call that steps the optimizers.
        gradients: The gradients of this rank by name. Other gradients are zero.
        settings: Arguments of `TwoOptimizers`.
    """
    trained = TwoOptimizers(make, **settings)
    guard = trained.guard
    guard.scale(torch.ones(()))
    set_gradients(trained.model, gradients)
    with logged(trained.logger_name) as lines:
        if call == "step_all":
            guard.step_all(trained.optimizers)
            return lines
        if call == "step_all or none":
            guard.step_all(trained.optimizers, all_or_none=True)
            return lines
        for optimizer in trained.optimizers:
            if call == "unscale_":
                guard.unscale_(optimizer)
            guard.step(optimizer, max_norm=1.0 if call == "step by norm" else None)
    return lines


MAKE = pytest.mark.parametrize("make", [StepGuard, cpu_scaler], ids=["guard", "scaler"])


def check_log_of_rank_1(lines: list[str], number: int = 1) -> None:
    """Check that rank 0 logs this number of lines, and that one line names the bad parameter."""
    if dist.get_rank() == 1:
        return
    assert len(lines) == number, lines
    naming_lines = [line for line in lines if "on rank 1, first in second.weight" in line]
    assert len(naming_lines) == 1, lines


def bad_second_layer_of_rank_1() -> dict[str, Tensor]:
    if dist.get_rank() == 0:
        return {}
    weight = torch.tensor([[NAN, 1.0, 1.0]])
    bias = torch.tensor([INF])
    return {"second.weight": weight, "second.bias": bias}


@on_ranks(2)
@MAKE
@pytest.mark.parametrize("call", ["step", "unscale_", "step by norm", "step_all"])
def test_the_log_of_a_skip_names_the_first_bad_parameter_of_another_rank(call, make):
    lines = log_of_steps(make, call, bad_second_layer_of_rank_1())
    check_log_of_rank_1(lines)


@on_ranks(2)
@MAKE
def test_the_log_of_steps_that_are_all_skipped_has_a_line_for_each_optimizer(make):
    lines = log_of_steps(make, "step_all or none", bad_second_layer_of_rank_1())
    check_log_of_rank_1(lines, number=2)


@on_ranks(2)
@MAKE
@pytest.mark.parametrize("call", ["step", "step by norm"])
def test_the_log_of_a_skipped_fused_step_names_the_first_bad_parameter(call, make):
    lines = log_of_steps(make, call, bad_second_layer_of_rank_1(), fused=True)
    check_log_of_rank_1(lines)


@on_ranks(2)
@MAKE
def test_the_log_of_a_skip_with_masters_names_the_first_bad_parameter(make):
    lines = log_of_steps(make, "step", bad_second_layer_of_rank_1(), masters=True)
    check_log_of_rank_1(lines)


@on_ranks(4)
def test_the_log_of_a_skip_names_the_parameters_of_each_rank():
    """Ranks 1 and 3 have the same first bad parameter, and rank 2 another; rank 0 has none."""
    weight = {"second.weight": torch.full((1, 3), INF)}
    bias = {"second.bias": torch.tensor([NAN])}
    gradients: list[dict[str, Tensor]] = [{}, weight, bias, weight]
    lines = log_of_steps(StepGuard, "step", gradients[dist.get_rank()])
    if dist.get_rank() != 0:
        assert lines == []
        return
    (line,) = lines
    assert "on ranks 1-3, first in second.weight (ranks 1, 3), second.bias (rank 2)" in line


def raise_error(*_: Any) -> Any:
    raise RuntimeError("no such parameter")


@on_ranks(2)
@pytest.mark.parametrize("call", ["step", "step by norm"])
def test_an_error_while_one_rank_names_a_parameter_is_logged_and_hangs_no_other(call):
    gradients = {}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            gradients = {"second.bias": torch.tensor([INF])}
            patch.setattr(nonfinite_report, "named_grad_tensors", raise_error)
        lines = log_of_steps(StepGuard, call, gradients)
    if dist.get_rank() == 1:
        assert lines == []
        return
    (line,) = lines
    assert "first in a parameter that cannot be named (RuntimeError: no such parameter)" in line


# -- LossScaleCollapseError ------------------------------------------------------------------------


class CollapsingTraining:
    """A training with overflows of rank 1 and a limit of three skips in a row."""

    def __init__(self) -> None:
        self.parameter, self.optimizer = sgd()
        self.scaler = cpu_scaler(1024.0, max_consecutive_skips=3)
        for bad_gradient in (INF, INF, 0.25, INF, INF):
            self.step(bad_gradient)

    def step(self, gradient_of_rank_1: float) -> None:
        gradient = gradient_of_rank_1 if dist.get_rank() == 1 else 0.25
        iteration(self.scaler, self.optimizer, self.parameter, gradient)


@on_ranks(2)
def test_the_skip_in_a_row_that_reaches_the_limit_raises_on_every_rank():
    """A taken step between the skips starts the count again."""
    training = CollapsingTraining()
    with pytest.raises(LossScaleCollapseError) as error:
        training.step(NAN)
    message = str(error.value)
    assert "3 steps in a row were skipped" in message
    assert "at loss scale 64" in message
    assert "nonfinite_report() on every" in message


@on_ranks(2)
def test_after_the_limit_of_skips_the_report_names_the_overflow():
    training = CollapsingTraining()
    with pytest.raises(LossScaleCollapseError):
        training.step(NAN)
    report = training.scaler.nonfinite_report()
    assert names(report) == ["group 0, parameter 0"]
    assert [overflow.rank for overflow in report.overflows] == [1]
    assert counts(report) == [(0, 1, 1, 0.0)]


@on_ranks(2)
def test_after_the_limit_of_skips_the_user_may_go_on():
    training = CollapsingTraining()
    with pytest.raises(LossScaleCollapseError):
        training.step(NAN)
    training.scaler.update(64.0)
    training.step(0.25)
    assert training.parameter.item() == 0.5
    assert training.scaler.step_counts(training.optimizer).skipped == 5
