"""Checks and replays of a model that a part of the ranks trains: they gather over these alone."""

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

NAN = float("nan")


def groups() -> list[Any]:
    """Ranks 0 and 1 train an actor, ranks 2 and 3 a critic."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


def net(group: Any) -> Any:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=group)


def inputs(bad: bool) -> torch.Tensor:
    return torch.full((2, 4), NAN if bad else 1.0)


def replay(group: Any, bad: bool, stepper: Any) -> tuple[int, ...]:
    """Skip a step, whose replay is over the group of the guard or scaler."""
    model = net(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_replay = distamp.report.StepReplay(model).attach(stepper)

    def step() -> None:
        loss = model(inputs(bad)).square().mean()
        getattr(stepper, "scale", lambda loss: loss)(loss).backward()

    step_replay.record(step)
    step()
    stepper.step(optimizer)
    stepper.update()
    return step_replay.found.ranks


def replay_of_a_guard(group: Any, bad: bool) -> tuple[int, ...]:
    return replay(group, bad, distamp.StepGuard(process_group=group))


def replay_of_a_scaler(group: Any, bad: bool) -> tuple[int, ...]:
    return replay(group, bad, distamp.DistGradScaler("cpu", process_group=group))


def find_first_nonfinite(group: Any, bad: bool) -> tuple[int, ...]:
    model = net(group)
    found = distamp.find_first_nonfinite(
        lambda: model(inputs(bad)).square().mean().backward(), model, process_group=group
    )
    assert found is not None
    return found.ranks


def contract(group: Any, bad: bool) -> tuple[int, ...]:
    """Of a rank whose parameters are in another precision than was declared."""
    model = nn.Linear(4, 4, dtype=torch.bfloat16 if bad else torch.float32)
    found = PrecisionContract(parameters="fp32").check(lambda: None, model, process_group=group)
    return tuple(sorted({rank for each in found if each.declared for rank in each.ranks}))


def amp_check(group: Any, bad: bool) -> tuple[int, ...]:
    model = net(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = distamp.initialize(model, optimizer, "bf16", process_group=group)

    def step() -> None:
        # In no region the layer computes in float32.
        with contextlib.nullcontext() if bad else amp.autocast():
            loss = amp.model(inputs(False)).float().square().mean()
        amp.backward(loss)
        amp.step()

    found = [each for each in amp.check(step) if each.declared]
    return tuple(sorted({rank for each in found for rank in each.ranks}))


TOOLS: dict[str, Callable[[Any, bool], tuple[int, ...]]] = {
    each.__name__: each
    for each in (replay_of_a_guard, replay_of_a_scaler, find_first_nonfinite, contract, amp_check)
}


@on_ranks(4)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_group_waits_for_nobody_else_and_names_its_own_ranks(tool):
    """One group works while the other waits for it in a collective of all ranks; then in turn."""
    for turn, group in enumerate(groups()):
        mine = dist.get_rank() // 2 == turn
        bad = dist.get_rank() == 2 * turn + 1
        if mine:
            assert TOOLS[tool](group, bad) == (2 * turn + 1,)
        dist.barrier()


def checks(model: nn.Module, guard: Any) -> None:
    PrecisionContract(parameters="fp32").check(lambda: None, model)


def searches(model: nn.Module, guard: Any) -> None:
    distamp.find_first_nonfinite(lambda: None, model)


def updates(model: nn.Module, guard: Any) -> None:
    guard.step(torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ((checks, searches), ("PrecisionContract.check()", "find_first_nonfinite()")),
        ((searches, updates), ("find_first_nonfinite()", "step")),
        ((updates, checks), ("step()", "PrecisionContract.check()")),
    ],
)
def test_ranks_that_make_different_calls_raise_on_each_and_name_both(calls, says):
    model, guard = nn.Linear(4, 4), distamp.StepGuard()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RankMismatchError) as raised:
        calls[dist.get_rank()](model, guard)
    for rank, name in enumerate(says):
        (line,) = [each for each in str(raised.value).splitlines() if f"rank {rank}:" in each]
        assert name in line


@on_ranks(2)
@pytest.mark.parametrize(
    "call", [PrecisionContract(parameters="fp32").check, distamp.find_first_nonfinite]
)
def test_an_error_before_the_step_is_raised_on_every_rank(call):
    model: Any = nn.Linear(4, 4) if dist.get_rank() == 0 else 3
    says = "raised on rank 1: TypeError" if dist.get_rank() == 0 else "int"
    with pytest.raises((DistampError, TypeError), match=says):
        call(lambda: None, model)
