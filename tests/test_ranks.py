"""The pool of ranks itself: results, errors, hangs, deaths, and the counting of collectives."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.collectives import count_collectives
from tests.ranks import Died, RankError, mesh, subgroup


def _sum(x: float) -> tuple[int, float]:
    value = torch.tensor(x + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_rank_answers_in_order(ranks, world_size):
    total = sum(10 + rank for rank in range(world_size))
    assert ranks(world_size).run(_sum, 10.0) == [(rank, total) for rank in range(world_size)]


def _pid() -> int:
    return os.getpid()


def test_ranks_are_processes_of_their_own_that_are_kept_between_calls(ranks2):
    pids = ranks2.run(_pid)
    assert ranks2.run(_pid) == pids
    assert len({os.getpid(), *pids}) == 3


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the planted mistake")
    dist.barrier()


def test_an_error_names_its_rank_and_leaves_the_next_call_alone(ranks2):
    with pytest.raises(RankError, match=r"failed on rank 1 of 2(.|\n)*the planted mistake") as e:
        ranks2.run(_raise_on, 1)
    assert e.value.rank == 1
    assert "in _raise_on" in str(e.value)
    assert ranks2.run(_sum, 0.0) == [(0, 1.0), (1, 1.0)]


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def test_hang_is_cut_and_says_what_each_rank_was_doing(new_ranks):
    pool = new_ranks(2)
    pool.run(_pid)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 hung for 0\.5 s") as e:
        pool.run(_sleep_on, 1, timeout=0.5)
    assert "in barrier" in str(e.value)
    assert "in _sleep_on" in str(e.value)
    assert pool.run(_sum, 0.0) == [(0, 1.0), (1, 1.0)]


def _die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "peer lost"
    return "no error"


def test_a_killed_rank_is_an_error_where_it_is_no_part_of_the_test(new_ranks):
    pool = new_ranks(2)
    assert pool.run(_die_on, 1, may_die=[1]) == ["peer lost", Died(1, -signal.SIGKILL)]
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        pool.run(_die_on, 1)


def _pid_and_group() -> tuple[int, bool]:
    return os.getpid(), dist.is_initialized()


def test_a_group_may_be_none_or_fresh_and_comes_with_fresh_processes(ranks2):
    kept = ranks2.run(_pid_and_group)
    assert [group for _, group in ranks2.run(_pid_and_group, group="none")] == [False, False]
    fresh = ranks2.run(_pid_and_group, group="fresh")
    assert not set(fresh) & set(kept)
    assert ranks2.run(_pid_and_group) == fresh
    ranks2.run(dist.destroy_process_group)
    assert ranks2.run(_sum, 0.0) == [(0, 1.0), (1, 1.0)]


def _make_groups() -> int:
    dist.new_group([0])
    mesh((2,), ("dp",))
    subgroup([0, 1])
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_a_call_made_are_dropped_but_for_kept_meshes_and_subgroups(ranks2):
    assert ranks2.run(_make_groups, group="fresh") == ranks2.run(_make_groups)


def _skip() -> None:
    pytest.skip("said by a rank")


def test_a_skip_on_a_rank_skips_the_test(ranks2):
    with pytest.raises(pytest.skip.Exception, match="said by a rank"):
        ranks2.run(_skip)


def _collectives() -> list[tuple[list[tuple[str, int]], int]]:
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    cases = []
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))

    def seen(issue) -> None:
        start = backend._get_sequence_number_for_group()
        with count_collectives() as log:
            issue()
        cases.append((log.calls, backend._get_sequence_number_for_group() - start))

    seen(lambda: dist.all_reduce(torch.zeros(3)))
    seen(lambda: group.allreduce([torch.zeros(3)]).wait())
    seen(lambda: backend.allreduce([torch.zeros(3)]).wait())
    seen(lambda: dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(2)))
    seen(lambda: dist.broadcast(torch.zeros(5, dtype=torch.float16), 0))
    seen(lambda: model(torch.ones(1, 4)).sum().backward())
    seen(lambda: torch.ones(3).sum())
    return cases


def test_collectives_are_counted_whichever_way_they_are_issued(ranks2):
    """As many as the backend counts itself."""
    for cases in ranks2.run(_collectives):
        assert [len(calls) for calls, _ in cases] == [issued for _, issued in cases]
        calls = [calls for calls, _ in cases]
        assert calls[:3] == [[("allreduce", 12)]] * 3
        assert [name for name, _ in calls[3]] == ["allgather"]
        assert calls[4:] == [[("broadcast", 10)], [("allreduce", 64)], []]


def _a_mesh_of_its_own() -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    return True


def test_a_call_that_makes_a_mesh_for_itself_leaves_no_process_to_the_next(new_ranks):
    pool = new_ranks(2)
    assert pool.run(_a_mesh_of_its_own) == [True, True]
    assert pool.run(dist.get_rank) == [0, 1]
    assert pool.starts == 2
