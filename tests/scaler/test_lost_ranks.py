"""A rank is lost, its links, its memory or its place in the loop: every other rank says so.

Three ranks train by the programs of `tests.scaler.matrix`; in the second iteration rank 1 does
something else in one call. Nothing is stepped after that, and what came before is as in float64.
"""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import Died
from tests.scaler.matrix.judge import complaints
from tests.scaler.matrix.programs import Iteration, Outcome, Program
from tests.scaler.matrix.runner import Runner
from tests.scaler.steps import cpu_scaler, error_of, iteration, sgd

ODD = 1
NO_MEMORY = "no memory is left on this device"
ALREADY = "already been called|called after step"
# What gloo says where a peer is gone, and what the scaler adds.
GONE = r"Connection (closed|reset)|Broken pipe|[Ss]ocket|lost its peers"


class _NoMemory(TorchDispatchMode):
    """Raises where a device would: in the pass over the gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_amp_foreach_non_finite_check_and_unscale_" in func.name():
            raise torch.OutOfMemoryError(NO_MEMORY)
        return func(*args, **(kwargs or {}))


def _without_memory(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _NoMemory():
        return method(*args, **kwargs)


def _killed(method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _cut_off(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _cut_links()
    return method(*args, **kwargs)


def _left_out(method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    pass


def _cut_links() -> None:
    """Shut every connection of this process to another, as its end would."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            # Of a socket that listens gloo makes an end of the process.
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if one.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                one.shutdown(socket.SHUT_RDWR)


class _Odd:
    """A scaler whose second call of one name goes another way."""

    def __init__(self, scaler: Any, name: str, way: Callable[..., Any]) -> None:
        self._scaler, self._name, self._way, self._calls = scaler, name, way, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._scaler, name)
        self._calls += name == self._name
        if name != self._name or self._calls != 2:
            return method
        return lambda *args, **kwargs: self._way(method, *args, **kwargs)


def _run(program: Program, call: str, way: Callable[..., Any]) -> list[Outcome]:
    runner = Runner(program, "distamp")
    if dist.get_rank() == ODD:
        runner.scaler = _Odd(runner.scaler, call, way)
    outcomes = runner.run()
    if outcomes[-1].error is not None and NO_MEMORY not in outcomes[-1].error[1]:
        _cut_links()
    return outcomes


# What rank 1 does, in which order of calls and in which of them, and what it and the others say.
LOST: list[tuple[Any, str, str, str, str]] = [
    (_killed, "step", "step", "", GONE),
    (_killed, "unscale", "unscale_", "", GONE),
    (_cut_off, "step", "step", GONE, GONE),
    (_cut_off, "clip", "clip_grad_norm_", GONE, GONE),
    (_left_out, "step", "update", ALREADY, ALREADY),
    (_left_out, "clip", "update", ALREADY, f"{ALREADY}|{GONE}"),
    (_without_memory, "step", "step", NO_MEMORY, NO_MEMORY),
    (_without_memory, "unscale", "unscale_", NO_MEMORY, NO_MEMORY),
    (_without_memory, "clip", "clip_grad_norm_", NO_MEMORY, NO_MEMORY),
]


@pytest.mark.parametrize(
    ("layout", "lost"),
    [*(("DDP", lost) for lost in LOST), ("FSDP2", LOST[0]), ("FSDP2", LOST[-1])],
    ids=lambda each: each if isinstance(each, str) else f"{each[0].__name__[1:]} in {each[2]}",
)
def test_what_is_lost_on_one_rank_is_told_by_every_rank(new_ranks, layout, lost):
    way, order, call, own, others = lost
    program = Program(layout, "SGD for-loop", (Iteration(order),) * 3)
    pool = new_ranks(3, group_timeout=10.0)
    seen = pool.run(_run, program, call, way, may_die=[ODD] if way is _killed else [])
    left = [outcomes for outcomes in seen if not isinstance(outcomes, Died)]
    assert len(left) == (2 if way is _killed else 3)
    for rank, outcomes in enumerate(seen):
        if outcomes in left:
            last = outcomes[-1]
            assert len(outcomes) in (2, 3), "no rank goes on"
            assert last.error is not None
            assert re.search(own if rank == ODD else others, ": ".join(last.error)), last.error
            assert last.unchanged_by_error
    before = Program(layout, "SGD for-loop", (Iteration(order),))
    assert complaints(before, [outcomes[:1] for outcomes in left]) == []


def _goes_on_without(path: str) -> Any:
    """Of three ranks one dies, and of the two that are left one is another process, which loads."""
    (parameter, optimizer), (second, other), scaler = sgd(), sgd(), cpu_scaler()
    iteration(scaler, optimizer, parameter, 0.25)
    rank = dist.get_rank()
    if rank == ODD:
        _killed(print)
    lost = error_of(iteration, scaler, optimizer, parameter, 0.25)
    value = parameter.item()
    scaler.update()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank // 2, world_size=2)
    if rank:
        (parameter, optimizer), state, scaler = sgd(value), scaler.state_dict(), cpu_scaler()
        scaler.load_state_dict(state)
    iteration(scaler, other, second, 0.25)  # which comes first on one rank alone
    iteration(scaler, optimizer, parameter, float("inf") if rank else 0.25)
    iteration(scaler, optimizer, parameter, 0.25)
    return lost and lost[0], value, parameter.item(), second.item(), scaler.state_dict()


def test_the_ranks_that_are_left_go_on_in_a_new_group(new_ranks, tmp_path):
    first, _, third = new_ranks(3, group_timeout=10.0).run(
        _goes_on_without, str(tmp_path / "store"), may_die=[ODD]
    )
    assert first == third
    assert first[:4] == ("RankMismatchError", 0.75, 0.5, 0.75)
