"""The pool of ranks itself: results, errors, hangs, deaths, and the counting of collectives."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives import count_collectives
from tests.on_ranks import on_ranks
from tests.ranks import Died, RankError


def _sum(x: float) -> tuple[int, float]:
    value = torch.tensor(x + dist.get_rank())
    dist.all_reduce(value)
    return os.getpid(), value.item()


def test_ranks_are_processes_that_are_kept_between_calls_and_answer_in_order(ranks4):
    results = ranks4.run(_sum, 10.0)
    pids = {pid for pid, _ in results}
    assert len(pids - {os.getpid()}) == 4
    for _, total in results:
        assert total == 46.0
    assert ranks4.run(_sum, 10.0) == results
    assert ranks4.run(dist.get_rank) == [0, 1, 2, 3]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank run only briefly after the failure of another rank."""
    monkeypatch.setattr("tests.ranks.GRACE_S", 0.2)


def _goes_wrong(how: str) -> str:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("the planted mistake")
        if how == "skips":
            pytest.skip("said by a rank")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    try:
        dist.barrier()
    except RuntimeError:
        return "peer lost"
    return "no error"


@pytest.mark.parametrize(
    ("how", "match"),
    [
        pytest.param(
            "raises",
            r"failed on rank 1 of 2(.|\n)*in _goes_wrong(.|\n)*the planted mistake",
            marks=pytest.mark.slow,
        ),
        ("dies", "rank 1 died with exit code -9"),
        pytest.param(
            "hangs",
            r"ranks \[0, 1\] of 2 hung for 2 s(.|\n)*in barrier(.|\n)*in _goes_wrong",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.usefixtures("short_grace")
def test_what_goes_wrong_is_said_and_leaves_the_next_call_alone(new_ranks, how, match):
    pool = new_ranks(2)
    pool.run(_sum, 1.0)  # The ranks import this module now, and not within the two seconds below.
    with pytest.raises(RankError, match=match):
        pool.run(_goes_wrong, how, timeout=2)
    assert pool.run(dist.get_rank) == [0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_a_death_may_be_part_of_a_test_and_a_skip_skips_it(new_ranks):
    pool = new_ranks(2)
    assert pool.run(_goes_wrong, "dies", may_die=[1]) == ["peer lost", Died(1, -signal.SIGKILL)]
    with pytest.raises(pytest.skip.Exception, match="said by a rank"):
        pool.run(_goes_wrong, "skips")


class _OnlyOnRanks:
    """A value that this process cannot unpickle."""

    def __reduce__(self) -> Any:
        return _raise_here, (os.getpid(),)


def _raise_here(pid: int) -> None:
    if pid != os.getpid():
        raise ValueError("only the rank has this value")


def test_an_answer_that_cannot_be_unpickled_leaves_the_next_call_alone(new_ranks):
    pool = new_ranks(2)
    with pytest.raises(ValueError, match="only the rank has this value"):
        pool.run(_OnlyOnRanks)
    assert pool.run(dist.get_rank) == [0, 1]


@on_ranks(2)
def _is_rank_0():
    value = dist.get_rank()
    assert value == 0


@pytest.mark.usefixtures("short_grace")
def test_a_body_that_fails_on_a_rank_is_told_with_its_local_names(ranks):
    with pytest.raises(RankError, match=r"rank 1 raised:(.|\n)*assert value == 0(.|\n)*value = 1"):
        _is_rank_0(ranks=ranks)


def _collectives() -> list[list[tuple[str, int]]]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
    recorded = []
    for issue in (
        lambda: dist.all_reduce(torch.zeros(3)),
        lambda: dist.group.WORLD.allreduce([torch.zeros(3)]).wait(),
        lambda: dist.broadcast(torch.zeros(5, dtype=torch.float16), 0),
        lambda: model(torch.ones(1, 4)).sum().backward(),
        lambda: torch.ones(3).sum(),
    ):
        with count_collectives() as log:
            issue()
        recorded.append(log.calls)
    return recorded


def test_collectives_are_counted_whichever_way_they_are_issued(ranks2):
    threes = [[("allreduce", 12)]] * 2
    assert ranks2.run(_collectives) == [[*threes, [("broadcast", 10)], [("allreduce", 64)], []]] * 2
