"""A rank that dies, loses its links, runs out of memory or leaves out a call: every rank raises.

Three ranks train by the programs of `tests.scaler.matrix`. In the second iteration rank 1 fails in
one call. No rank steps after that, and the steps before are equal to float64.
"""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import Died
from tests.scaler.matrix.judge import complaints
from tests.scaler.matrix.programs import Iteration, Outcome, Program
from tests.scaler.matrix.runner import Runner
from tests.scaler.steps import INF, cpu_scaler, error_of, iteration, sgd

FAILING_RANK = 1
NO_MEMORY = "no memory is left on this device"
CALL_ORDER = "already been called|called after step"
# Gloo's messages about a peer that is gone, and the words that the scaler adds.
LOST_PEER = r"Connection (closed|reset)|Broken pipe|[Ss]ocket|lost its peers"

# -- failures --------------------------------------------------------------------------------------


class NoMemory(TorchDispatchMode):
    """Raises OutOfMemoryError in the pass over the gradients, where a device could."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_amp_foreach_non_finite_check_and_unscale_" in func.name():
            raise torch.OutOfMemoryError(NO_MEMORY)
        return func(*args, **(kwargs or {}))


def run_out_of_memory(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with NoMemory():
        return method(*args, **kwargs)


def die(method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_links(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cut_links()
    return method(*args, **kwargs)


def leave_out(method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    pass


def cut_links() -> None:
    """Shut down every connection of this process, as its death would."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            is_internet = link.family in (socket.AF_INET, socket.AF_INET6)
            # Gloo aborts the process if its listening socket is shut down.
            listens = link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_internet and not listens:
                link.shutdown(socket.SHUT_RDWR)


class FailingScaler:
    """A scaler whose second call of one method is replaced by a failure."""

    def __init__(self, scaler: Any, name: str, failure: Callable[..., Any]) -> None:
        self._scaler = scaler
        self._name = name
        self._failure = failure
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._scaler, name)
        if name != self._name:
            return method
        self._calls += 1
        if self._calls != 2:
            return method
        return lambda *args, **kwargs: self._failure(method, *args, **kwargs)


def run_with_failure(program: Program, call: str, failure: Callable[..., Any]) -> list[Outcome]:
    """Run a program on this rank, and return its outcomes up to the first error."""
    runner = Runner(program, "distamp")
    if dist.get_rank() == FAILING_RANK:
        runner.scaler = FailingScaler(runner.scaler, call, failure)
    outcomes = runner.run()
    last_error = outcomes[-1].error
    if last_error is not None and NO_MEMORY not in last_error[1]:
        # The end of this process releases ranks that still wait for it.
        cut_links()
    return outcomes


@dataclass(frozen=True)
class Loss:
    """A failure of rank 1.

    Attributes:
        failure: The function that replaces the call.
        order: The order of calls in an iteration.
        call: The replaced method of the scaler.
        error: Pattern of the error of rank 1. A rank that died has none.
        error_elsewhere: Pattern of the errors of ranks 0 and 2.
    """

    failure: Callable[..., Any]
    order: str
    call: str
    error: str
    error_elsewhere: str


DIES_IN_STEP = Loss(die, "step", "step", "", LOST_PEER)
DIES_IN_UNSCALE = Loss(die, "unscale", "unscale_", "", LOST_PEER)
LOSES_LINKS_IN_STEP = Loss(lose_links, "step", "step", LOST_PEER, LOST_PEER)
LOSES_LINKS_IN_CLIP = Loss(lose_links, "clip", "clip_grad_norm_", LOST_PEER, LOST_PEER)
LEAVES_OUT_UPDATE = Loss(leave_out, "step", "update", CALL_ORDER, CALL_ORDER)
LEAVES_OUT_UPDATE_BEFORE_CLIP = Loss(
    leave_out, "clip", "update", CALL_ORDER, f"{CALL_ORDER}|{LOST_PEER}"
)
NO_MEMORY_IN_STEP = Loss(run_out_of_memory, "step", "step", NO_MEMORY, NO_MEMORY)
NO_MEMORY_IN_UNSCALE = Loss(run_out_of_memory, "unscale", "unscale_", NO_MEMORY, NO_MEMORY)
NO_MEMORY_IN_CLIP = Loss(run_out_of_memory, "clip", "clip_grad_norm_", NO_MEMORY, NO_MEMORY)


def check_outcomes(program: Program, loss: Loss, outcomes_of_ranks: list[Any]) -> None:
    """Check that every surviving rank raised, stepped no more, and was right before."""
    first_iterations = []
    for rank, outcomes in enumerate(outcomes_of_ranks):
        if isinstance(outcomes, Died):
            assert rank == FAILING_RANK
            assert loss.failure is die
            continue
        assert len(outcomes) in (2, 3), "no rank goes on"
        last = outcomes[-1]
        assert last.error is not None
        pattern = loss.error if rank == FAILING_RANK else loss.error_elsewhere
        assert re.search(pattern, ": ".join(last.error)), last.error
        assert last.unchanged_by_error
        first_iterations.append(outcomes[:1])
    assert len(first_iterations) == (2 if loss.failure is die else 3)

    one_iteration = Program(program.layout, "SGD for-loop", program.iterations[:1])
    assert complaints(one_iteration, first_iterations) == []


def lose(new_ranks: Any, layout: str, loss: Loss) -> None:
    """Run three iterations with a failure of rank 1 on three new ranks, and check them."""
    program = Program(layout, "SGD for-loop", (Iteration(loss.order),) * 3)
    pool = new_ranks(3, group_timeout=10.0)
    may_die = [FAILING_RANK] if loss.failure is die else []
    outcomes = pool.run(run_with_failure, program, loss.call, loss.failure, may_die=may_die)
    check_outcomes(program, loss, outcomes)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(DIES_IN_STEP, id="step"),
        pytest.param(DIES_IN_UNSCALE, id="unscale_", marks=pytest.mark.slow),
    ],
)
def test_every_rank_raises_if_a_rank_dies(new_ranks, loss):
    lose(new_ranks, "DDP", loss)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(LOSES_LINKS_IN_STEP, id="step", marks=pytest.mark.slow),
        pytest.param(LOSES_LINKS_IN_CLIP, id="clip"),
    ],
)
def test_every_rank_raises_if_a_rank_loses_its_links(new_ranks, loss):
    lose(new_ranks, "DDP", loss)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(LEAVES_OUT_UPDATE, id="step"),
        pytest.param(LEAVES_OUT_UPDATE_BEFORE_CLIP, id="clip", marks=pytest.mark.slow),
    ],
)
def test_every_rank_raises_if_a_rank_leaves_out_update(new_ranks, loss):
    lose(new_ranks, "DDP", loss)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(NO_MEMORY_IN_STEP, id="step", marks=pytest.mark.slow),
        pytest.param(NO_MEMORY_IN_UNSCALE, id="unscale_"),
        pytest.param(NO_MEMORY_IN_CLIP, id="clip", marks=pytest.mark.slow),
    ],
)
def test_every_rank_raises_if_a_rank_runs_out_of_memory(new_ranks, loss):
    lose(new_ranks, "DDP", loss)


@pytest.mark.slow
def test_every_rank_of_fsdp2_raises_if_a_rank_dies(new_ranks):
    lose(new_ranks, "FSDP2", DIES_IN_STEP)


@pytest.mark.slow
def test_every_rank_of_fsdp2_raises_if_a_rank_runs_out_of_memory(new_ranks):
    lose(new_ranks, "FSDP2", NO_MEMORY_IN_CLIP)


# -- a new group -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AfterTheLoss:
    """Results of a rank that goes on in a new group.

    Attributes:
        error: The class of the error after the loss of rank 1.
        value_at_error: The parameter after the error.
        values: Two parameters after the steps in the new group.
        state: The state of the scaler at the end.
    """

    error: str
    value_at_error: float
    values: tuple[float, float]
    state: dict[str, Any]


def go_on_without_rank_1(path: str) -> AfterTheLoss:
    """Lose rank 1, make a group of ranks 0 and 2, and train on.

    The second rank of the new group has a new scaler that loads the state, as in a new process.
    """
    parameter, optimizer = sgd()
    late_parameter, late_optimizer = sgd()
    scaler = cpu_scaler()
    iteration(scaler, optimizer, parameter, 0.25)
    rank = dist.get_rank()
    if rank == FAILING_RANK:
        die(iteration)
    error = error_of(iteration, scaler, optimizer, parameter, 0.25)
    assert error is not None
    value_at_error = parameter.item()
    scaler.update()

    dist.destroy_process_group()
    new_rank = rank // 2
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=new_rank, world_size=2)
    if new_rank == 1:
        state = scaler.state_dict()
        parameter, optimizer = sgd(value_at_error)
        scaler = cpu_scaler()
        scaler.load_state_dict(state)
    # The new scaler has not seen `optimizer` yet, and the old one has.
    iteration(scaler, late_optimizer, late_parameter, 0.25)
    iteration(scaler, optimizer, parameter, INF if new_rank == 1 else 0.25)
    iteration(scaler, optimizer, parameter, 0.25)
    values = (parameter.item(), late_parameter.item())
    return AfterTheLoss(error[0], value_at_error, values, scaler.state_dict())


def test_the_ranks_that_are_left_go_on_in_a_new_group(new_ranks, tmp_path):
    """The step with the inf of one rank is skipped on both."""
    path = str(tmp_path / "store")
    pool = new_ranks(3, group_timeout=10.0)
    first, _, third = pool.run(go_on_without_rank_1, path, may_die=[FAILING_RANK])
    assert first == third
    assert first.error == "RankMismatchError"
    assert first.value_at_error == 0.75
    assert first.values == (0.5, 0.75)
