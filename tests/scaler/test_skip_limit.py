"""The limit of skips in a row is raised from the count, and what is read late never sends."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from tests.scaler.steps import INF, cpu_scaler, error_of, iteration, sgd


def _inside_join() -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = cpu_scaler(max_consecutive_skips=2)
    error = None
    with Join([model, scaler]):
        for number in range(2):
            scaler.scale(model(torch.full((2,), INF)).sum()).backward()
            error = error_of(scaler.step, optimizer)
            if number == 0:
                scaler.update()
    return error and error[0]


def test_inside_join_every_rank_raises(ranks2):
    assert ranks2.run(_inside_join, timeout=30) == ["LossScaleCollapse"] * 2


def _one_rank_asks(device: str) -> Any:
    """Rank 0 reads late what others read at their next message."""
    weight = torch.ones(1, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = DistGradScaler(torch.device(device).type, max_consecutive_skips=2)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((weight * INF).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    asks = dist.get_rank() == 0
    error = error_of(scaler.step_counts, optimizer) if asks else None
    scaler.scale((weight * 0.25).sum()).backward()
    error = error or error_of(scaler.step, optimizer)
    return error and error[0]


def _of_a_device() -> Any:
    return _one_rank_asks(f"sim:{torch.accelerator.current_device_index()}")


def test_one_rank_may_ask_for_the_counts_of_fused_steps(sim2):
    assert sim2.run(_of_a_device, schedule="late") == ["LossScaleCollapse"] * 2


def test_a_report_after_update_names_the_scale_of_the_overflow():
    (parameter, optimizer), scaler = sgd(), cpu_scaler(1024.0)
    iteration(scaler, optimizer, parameter, INF)
    assert scaler.get_scale() == 512.0
    assert scaler.overflow_report().scale == 1024.0


class Slots:
    """An optimizer that cannot be referred to weakly."""

    __slots__ = ("param_groups", "state")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.param_groups = [{"params": [parameter]}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        """As SGD with a rate of 1."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad

    def zero_grad(self) -> None:
        """Clear them."""
        self.param_groups[0]["params"][0].grad = None


class Unhashable(torch.optim.SGD):
    """An optimizer that compares by value."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)


@pytest.mark.parametrize(
    "make", [Slots, lambda p: Unhashable([p], lr=1.0)], ids=["slots", "unhashable"]
)
def test_an_optimizer_is_known_by_what_it_is(make):
    (parameter, _), scaler = sgd(), cpu_scaler(growth_interval=1)
    optimizer = make(parameter)
    for bad in (0.25, INF, 0.25):
        iteration(scaler, optimizer, parameter, bad)
        assert scaler.stepped(optimizer) is (bad != INF)
    counts = scaler.step_counts(optimizer)
    assert (parameter.item(), counts.taken, counts.skipped) == (0.5, 2, 1)


def test_unscale_takes_torchs_name_of_its_argument():
    (parameter, optimizer), scaler = sgd(), cpu_scaler(4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer=optimizer)
    assert parameter.grad.item() == 1.0


def test_float16_gradients_are_refused_in_torchs_words_and_with_a_way_out():
    parameter = torch.ones(1, dtype=torch.float16, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([parameter]), cpu_scaler(4.0)
    scaler.scale(parameter.sum()).backward()
    words = r"^Attempting to unscale FP16 gradients\. .*fp16_grads='master'.*fp16_grads='inplace'"
    with pytest.raises(ValueError, match=words):
        scaler.unscale_(optimizer)


def test_the_log_of_a_skip_names_buffers_that_are_not_finite_once(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
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
