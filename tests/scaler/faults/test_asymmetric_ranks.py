"""One rank does something that the others do not: it works, or every rank raises; nobody waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from tests.ranks import RankPool
from tests.scaler.faults.tools import RaiseAt, error_of, value_of
from tests.scaler.steps import INF, backward, cpu_scaler, leaf

Error = tuple[str, str] | None


def _one() -> tuple[nn.Parameter, torch.optim.SGD, DistGradScaler]:
    """The same parameter, optimizer and scaler on every rank, after one whole iteration."""
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()
    _iterate(scaler, optimizer, parameter)
    return parameter, optimizer, scaler


def _iterate(scaler: DistGradScaler, optimizer: Any, parameter: Tensor, g: float = 0.25) -> None:
    optimizer.zero_grad()
    backward(scaler, parameter, g)
    scaler.step(optimizer)
    scaler.update()


# -- unscale_ on one rank alone --------------------------------------------------------------------


def _unscale_for_logging(gradient: float, overflow_on: int | None) -> Any:
    parameter, optimizer, scaler = _one()
    logged = None
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, parameter, INF if dist.get_rank() == overflow_on else gradient)
        if dist.get_rank() == 0:
            scaler.unscale_(optimizer)
            logged = parameter.grad.item()
        scaler.step(optimizer)
        scaler.update()
    return parameter.item(), scaler.get_scale(), scaler.stepped(optimizer), logged


def test_unscale_on_rank_0_alone_for_logging_then_step_everywhere(pair: RankPool) -> None:
    assert pair.run(_unscale_for_logging, 0.25, None) == [
        (0.25, 1024.0, True, 0.25),
        (0.25, 1024.0, True, None),
    ]


def test_the_same_where_the_other_rank_overflows(pair: RankPool) -> None:
    results = pair.run(_unscale_for_logging, 0.25, 1)
    assert [result[:3] for result in results] == [(0.75, 256.0, False)] * 2


def _unscale_some_on_one() -> Any:
    """unscale_ of two optimizers on rank 0, then a step of each; the others only step."""
    parameters = [leaf(1.0), leaf(2.0, 2.0)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in parameters]
    scaler = cpu_scaler()
    for _ in range(2):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            optimizer.zero_grad()
            backward(scaler, parameter, [0.25] * parameter.numel())
        for optimizer in optimizers:
            if dist.get_rank() == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    return [value_of(p) for p in parameters]


def test_unscale_of_each_of_two_optimizers_on_rank_0_alone(pair: RankPool) -> None:
    assert pair.run(_unscale_some_on_one) == [[[0.5], [1.5, 1.5]]] * 2


# -- errors of one rank alone ----------------------------------------------------------------------


MISTAKES = [
    "unscale_ twice",
    "step of no optimizer",
    "step_all of one twice",
    "clip by a negative norm",
    "clip what nobody holds",
    "step with a closure after unscale_",
]


def _wrong_where_a_message_is_due(what: str) -> tuple[list[Error], float]:
    parameter, optimizer, scaler = _one()
    optimizer.zero_grad()
    backward(scaler, parameter, 0.25)
    if what == "clip by a negative norm":
        call: Callable[[], Any] = lambda: scaler.clip_grad_norm_(  # noqa: E731
            optimizer, -1.0 if dist.get_rank() == 1 else 1.0
        )
    elif what == "clip what nobody holds":
        given = [leaf(1.0)] if dist.get_rank() == 1 else [parameter]
        call = lambda: scaler.clip_grad_norm_(given, 1.0)  # noqa: E731
    elif what == "step of no optimizer":
        stepped: Any = object() if dist.get_rank() == 1 else optimizer
        call = lambda: scaler.step(stepped)  # noqa: E731
    elif what == "step_all of one twice":
        twice = [optimizer] * (1 + dist.get_rank())
        call = lambda: scaler.step_all(twice)  # noqa: E731
    else:
        raise AssertionError(what)
    return [error_of(call)], parameter.item()


@pytest.mark.parametrize("what", MISTAKES[1:5])
def test_an_error_where_a_message_is_due_travels_in_it(pair: RankPool, what: str) -> None:
    for errors, value in pair.run(_wrong_where_a_message_is_due, what):
        assert errors[0] is not None
        assert "Timed out" not in errors[0][1]
        assert "closed" not in errors[0][1]
        assert value == 0.75


def _out_of_memory(op: str, call: str) -> tuple[list[Error], float]:
    parameter, optimizer, scaler = _one()
    errors: list[Error] = []

    def iterate() -> None:
        optimizer.zero_grad()
        backward(scaler, parameter, 0.25)
        if call == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)

    error = torch.OutOfMemoryError("no memory is left on this device")
    if dist.get_rank() == 1:
        optimizer.zero_grad()
        backward(scaler, parameter, 0.25)
        with RaiseAt(op, error) as mode:
            if call == "clip":
                errors.append(error_of(scaler.clip_grad_norm_, optimizer, 1.0))
            else:
                errors.append(error_of(scaler.step, optimizer))
        assert mode.raised
    else:
        errors.append(error_of(iterate))
    value = parameter.item()
    scaler.update()
    errors.append(error_of(iterate))
    return errors, value


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("_foreach_norm", "clip"),
        ("_amp_foreach_non_finite_check_and_unscale_", "clip"),
        ("_amp_foreach_non_finite_check_and_unscale_", "step"),
    ],
)
def test_a_rank_that_runs_out_of_memory_before_the_message_stops_every_rank(
    pair: RankPool, op: str, call: str
) -> None:
    for errors, value in pair.run(_out_of_memory, op, call):
        assert errors[0] is not None
        assert "no memory is left" in errors[0][1]
        assert value == 0.75
        assert errors[1] is None, "after update() all go on"


# -- an elastic restart ----------------------------------------------------------------------------


def _restarted(folder: str, new_group: bool) -> tuple[Any, ...]:
    """Rank 1 is replaced after three iterations and loads what rank 0 has."""
    parameter, optimizer, scaler = _one()
    for _ in range(2):
        _iterate(scaler, optimizer, parameter)
    state = scaler.state_dict()
    if new_group:
        rank = dist.get_rank()
        dist.destroy_process_group()
        store = dist.FileStore(str(Path(folder) / "store"), 2)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10)
        )
    if int(os.environ["RANK"]) == 1:
        value = parameter.item()
        parameter = leaf(value)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = cpu_scaler()
        scaler.load_state_dict(state)
    error = error_of(_iterate, scaler, optimizer, parameter)
    return error, parameter.item(), scaler.get_scale(), scaler.state_dict()["_growth_tracker"]


def test_a_replaced_rank_that_loads_a_survivors_state_goes_on_with_it(
    pair: RankPool, tmp_path: Path
) -> None:
    assert pair.run(_restarted, str(tmp_path), True) == [(None, 0.0, 1024.0, 4)] * 2


# -- the same optimizers, in other company ---------------------------------------------------------


def _some_then_all(stages: bool) -> Any:
    """step_all of one optimizer, and later of two; stages of a pipeline hold other shapes."""
    rank = dist.get_rank()
    size = 1 + rank if stages else 1
    parameters = [leaf(*[1.0] * size), leaf(*[2.0] * (size + 2))]
    a, b = (torch.optim.SGD([p], lr=1.0) for p in parameters)
    scaler = cpu_scaler()
    for chosen in ([a], [a, b], [b], [a, b]):
        for parameter in parameters:
            parameter.grad = None
            backward(scaler, parameter, [0.25] * parameter.numel())
        scaler.step_all(chosen)
        scaler.update()
    return [p[0].item() for p in parameters]


@pytest.mark.parametrize("stages", [True, False], ids=["pipeline", "replicas"])
def test_an_optimizer_may_come_later_into_the_same_call(pair: RankPool, stages: bool) -> None:
    assert pair.run(_some_then_all, stages) == [[0.25, 1.25]] * 2


def _one_more_with_two_used(order: str) -> Any:
    """Two optimizers are stepped; rank 0 also holds a probe's, of the shape of the first."""
    rank = dist.get_rank()
    probe = torch.optim.SGD([leaf(5.0)], lr=1.0) if rank == 0 else None
    parameters = [leaf(1.0), leaf(2.0, 2.0)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in parameters]
    scaler = cpu_scaler()
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
            backward(scaler, parameter, [0.25] * parameter.numel())
        if order == "step_all":
            scaler.step_all(optimizers)
        else:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
    assert probe is None or probe.param_groups[0]["params"][0].item() == 5.0
    return [p[0].item() for p in parameters]


@pytest.mark.parametrize("order", ["step_all", "step"])
def test_a_probe_on_rank_0_beside_two_optimizers_is_no_mismatch(pair: RankPool, order: str) -> None:
    assert pair.run(_one_more_with_two_used, order) == [[0.5, 1.5]] * 2


# -- Join: uneven inputs ---------------------------------------------------------------------------


class _Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = leaf(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _uneven(
    batches: tuple[int, int], overflow_at: int | None, zero: bool, with_scaler: bool
) -> Any:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(_Line())
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = cpu_scaler()
    joined = [model, *([optimizer] if zero else []), *([scaler] if with_scaler else [])]

    def train() -> None:
        with Join(joined):
            for number in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                factor = INF if number == overflow_at else 0.25
                scaler.scale((model(torch.ones(1)) * factor).sum()).backward()
                scaler.step(optimizer)
                scaler.update()

    error = error_of(train)
    return error, model.module.weight.item(), scaler.get_scale(), scaler.state_dict()


# DDP divides by the ranks that there were at first: a batch of one rank alone moves by half.
def _right(batches: tuple[int, int], overflows: int = 0) -> tuple[None, float, float]:
    both, alone = min(batches), max(batches) - min(batches) - overflows
    return None, 1.0 - 0.25 * both - 0.125 * alone, 1024.0 / 2**overflows


@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (2, 2), (0, 2)])
def test_join_of_model_and_scaler_trains_on_uneven_inputs(
    pair: RankPool, batches: tuple[int, int]
) -> None:
    results = pair.run(_uneven, batches, None, False, True)
    assert [r[:3] for r in results] == [_right(batches)] * 2
    assert results[0][3] == results[1][3], "the scalers of both ranks go on alike"


def test_an_overflow_after_another_rank_has_joined_is_skipped(pair: RankPool) -> None:
    results = pair.run(_uneven, (1, 3), 1, False, True)
    assert [r[:3] for r in results] == [_right((1, 3), 1)] * 2
    assert results[0][3] == results[1][3]
