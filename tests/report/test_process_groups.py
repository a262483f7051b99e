"""Tests of checks and replays in a process group that is a part of the ranks.

The ranks outside of the group must neither be waited for nor be named in a report.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distamp
from distamp import PrecisionContract
from distamp.errors import DistampError, RankMismatchError
from tests.on_ranks import on_ranks

Ranks = tuple[int, ...]


def make_model(group: Any) -> Any:
    """Return a linear layer under DDP over a process group."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    return nn.parallel.DistributedDataParallel(layer, process_group=group)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters of a model."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_inputs(faulty: bool) -> torch.Tensor:
    """Return ones, or NaN on a faulty rank."""
    value = 1.0
    if faulty:
        value = float("nan")
    return torch.full((2, 4), value)


def collect_ranks(violations: Any) -> Ranks:
    """Return the ranks in violations of a declared dtype."""
    ranks: set[int] = set()
    for violation in violations:
        if violation.declared:
            ranks.update(violation.ranks)
    return tuple(sorted(ranks))


def replay_of_a_guard(group: Any, faulty: bool) -> Ranks:
    """Return the ranks that the replay of a step skipped by a guard names."""
    model = make_model(group)
    optimizer = make_optimizer(model)
    guard = distamp.StepGuard(process_group=group)
    step_replay = distamp.report.StepReplay(model).attach(guard)

    def step() -> None:
        loss = model(make_inputs(faulty)).square().mean()
        loss.backward()

    step_replay.record(step)
    step()
    guard.step(optimizer)
    guard.update()
    return step_replay.found.ranks


def replay_of_a_scaler(group: Any, faulty: bool) -> Ranks:
    """Return the ranks that the replay of a step skipped by a scaler names."""
    model = make_model(group)
    optimizer = make_optimizer(model)
    scaler = distamp.DistGradScaler("cpu", process_group=group)
    step_replay = distamp.report.StepReplay(model).attach(scaler)

    def step() -> None:
        loss = model(make_inputs(faulty)).square().mean()
        scaler.scale(loss).backward()

    step_replay.record(step)
    step()
    scaler.step(optimizer)
    scaler.update()
    return step_replay.found.ranks


def find_first_nonfinite(group: Any, faulty: bool) -> Ranks:
    """Return the ranks with the first nonfinite value."""
    model = make_model(group)

    def step() -> None:
        loss = model(make_inputs(faulty)).square().mean()
        loss.backward()

    origin = distamp.find_first_nonfinite(step, model, process_group=group)
    assert origin is not None
    return origin.ranks


def contract(group: Any, faulty: bool) -> Ranks:
    """Return the ranks with parameters in another dtype than the contract declares."""
    dtype = torch.float32
    if faulty:
        dtype = torch.bfloat16
    model = nn.Linear(4, 4, dtype=dtype)
    fp32_contract = PrecisionContract(parameters="fp32")
    return collect_ranks(fp32_contract.check(lambda: None, model, process_group=group))


def amp_check(group: Any, faulty: bool) -> Ranks:
    """Return the ranks that compute in float32, because they open no region."""
    model = make_model(group)
    optimizer = make_optimizer(model)
    amp = distamp.initialize(model, optimizer, "bf16", process_group=group)

    def step() -> None:
        region: Any = amp.autocast()
        if faulty:
            region = contextlib.nullcontext()
        with region:
            logits = amp.model(make_inputs(faulty=False))
        loss = logits.float().square().mean()
        amp.backward(loss)
        amp.step()

    return collect_ranks(amp.check(step))


@on_ranks(4)
@pytest.mark.parametrize(
    "find_ranks",
    [
        pytest.param(replay_of_a_guard, id="replay of a guard", marks=pytest.mark.slow),
        pytest.param(replay_of_a_scaler, id="replay of a scaler", marks=pytest.mark.slow),
        pytest.param(find_first_nonfinite, id="find_first_nonfinite"),
        pytest.param(contract, id="PrecisionContract.check"),
        pytest.param(amp_check, id="Amp.check"),
    ],
)
def test_a_group_waits_for_nobody_else_and_names_its_own_ranks(find_ranks):
    """Ranks 0 and 1 train an actor, and ranks 2 and 3 a critic; each model has a faulty rank.

    While a group works, the other group waits in a collective of all ranks.
    """
    rank = dist.get_rank()
    actor = dist.new_group([0, 1])
    critic = dist.new_group([2, 3])
    if rank in (0, 1):
        assert find_ranks(actor, faulty=rank == 1) == (1,)
    dist.barrier()
    if rank in (2, 3):
        assert find_ranks(critic, faulty=rank == 3) == (3,)
    dist.barrier()


def check_contract(model: nn.Module, guard: Any) -> None:
    """Call PrecisionContract.check()."""
    PrecisionContract(parameters="fp32").check(lambda: None, model)


def search_nonfinite(model: nn.Module, guard: Any) -> None:
    """Call find_first_nonfinite()."""
    distamp.find_first_nonfinite(lambda: None, model)


def step_with_guard(model: nn.Module, guard: Any) -> None:
    """Call StepGuard.step()."""
    optimizer = make_optimizer(model)
    guard.step(optimizer)


CALL_NAMES = {
    check_contract: "PrecisionContract.check()",
    search_nonfinite: "find_first_nonfinite()",
    step_with_guard: "step()",
}


@on_ranks(2)
@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((check_contract, search_nonfinite), id="check and search"),
        pytest.param((search_nonfinite, step_with_guard), id="search and step"),
        pytest.param((step_with_guard, check_contract), id="step and check"),
    ],
)
def test_ranks_that_make_different_calls_raise_on_each_and_name_both(calls: Any):
    model = nn.Linear(4, 4)
    guard = distamp.StepGuard()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    call: Callable[[nn.Module, Any], None] = calls[dist.get_rank()]
    with pytest.raises(RankMismatchError) as raised:
        call(model, guard)
    lines = str(raised.value).splitlines()
    for rank, rank_call in enumerate(calls):
        (line_of_rank,) = [line for line in lines if f"rank {rank}:" in line]
        assert CALL_NAMES[rank_call] in line_of_rank


@on_ranks(2)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(PrecisionContract(parameters="fp32").check, id="PrecisionContract.check"),
        pytest.param(distamp.find_first_nonfinite, id="find_first_nonfinite"),
    ],
)
def test_an_error_before_the_step_is_raised_on_every_rank(call):
    """Rank 1 passes an integer as its model."""
    model: Any = 3
    message = "int"
    if dist.get_rank() == 0:
        model = nn.Linear(4, 4)
        message = "raised on rank 1: TypeError"
    with pytest.raises((DistampError, TypeError), match=message):
        call(lambda: None, model)
