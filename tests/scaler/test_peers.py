"""Two ranks: what torch's sharded scaler does wrong there and ours does not; messages counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives import count_collectives
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, pairs

FLAG_SLOTS = 16  # optimizers whose flags share the first message of two ranks


def sharded() -> Any:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler("cpu", init_scale=1024.0)


def fused_on_ranks(which: str, kind: str, unscale: bool, bad: list[int]) -> Any:
    """A fused step where the ranks in ``bad`` overflow."""
    scaler = sharded() if which == "sharded" else cpu_scaler()
    parameter = leaf(1.0)
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.5, fused=True)
    try:
        value = INF if dist.get_rank() in bad else 0.25
        iteration(scaler, optimizer, parameter, value, unscale=unscale)
    except RuntimeError as error:
        return str(error)
    return parameter.item(), scaler.get_scale()


def test_the_sharded_scaler_parts_ranks_with_a_fused_optimizer_and_ours_does_not(ranks2):
    first, second = ranks2.run(fused_on_ranks, "sharded", "SGD", False, [1])
    assert first[0] == 0.875
    assert second[0] == 1.0
    assert ranks2.run(fused_on_ranks, "ours", "SGD", False, [1]) == [(1.0, 512.0)] * 2


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad"])
def test_the_sharded_scaler_fails_on_clean_fused_steps_after_unscale_and_ours_does_not(
    ranks2, kind
):
    if kind != "Adagrad" or torch.__version__ >= "2.13":  # 2.11 takes a flag of any shape there
        for message in ranks2.run(fused_on_ranks, "sharded", kind, True, []):
            assert isinstance(message, str)
    alone = cpu_scaler(enabled=False)
    parameter = leaf(1.0)
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.5)
    iteration(alone, optimizer, parameter, 0.25)
    for value, scale in ranks2.run(fused_on_ranks, "ours", kind, True, []):
        assert value == pytest.approx(parameter.item(), rel=1e-6)
        assert scale == 1024.0


def test_the_sharded_scaler_breaks_parameters_where_two_ranks_overflow_and_ours_does_not(ranks2):
    broken = ranks2.run(fused_on_ranks, "sharded", "SGD", True, [0, 1])
    assert [value for value, _ in broken] == [-INF, -INF]
    assert ranks2.run(fused_on_ranks, "ours", "SGD", True, [0, 1]) == [(1.0, 512.0)] * 2


def swapped_on_ranks(which: str) -> Any:
    """Two optimizers, stepped in another order on rank 1; the second overflows on rank 0."""
    scaler = sharded() if which == "sharded" else cpu_scaler()
    rank = dist.get_rank()
    first, second = leaf(1.0), leaf(1.0, 1.0)
    optimizers = [torch.optim.SGD([first], lr=1.0), torch.optim.Adam([second], lr=0.5)]
    backward(scaler, first, 0.25)
    backward(scaler, second, INF if rank == 0 else 0.25)
    try:
        for optimizer in optimizers if rank == 0 else optimizers[::-1]:
            scaler.step(optimizer)
    except RuntimeError as error:
        return type(error).__name__
    return first.item(), second[0].item()


def test_the_sharded_scaler_uses_the_wrong_flags_in_another_order_and_ours_names_it(ranks2):
    first, second = ranks2.run(swapped_on_ranks, "sharded")
    assert first == (0.75, 1.0)
    assert second != first, "rank 1 stepped what rank 0 skipped, or the other way round"
    assert ranks2.run(swapped_on_ranks, "ours") == ["LockstepError"] * 2


def random_run(seed: int) -> list[tuple[float, float, bool]]:
    """Random overflows on random ranks, random orders of calls."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    scaler = cpu_scaler(growth_interval=2)
    parameter = leaf(1.0, 1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=bool(seed % 2))
    trace = []
    for bad, unscale in itertools.islice(draws(generator), 12):
        iteration(scaler, optimizer, parameter, INF if bad == rank else 0.25, unscale=unscale)
        trace.append((parameter[0].item(), scaler.get_scale(), scaler.stepped(optimizer)))
    return trace


def draws(generator: torch.Generator) -> Iterator[tuple[int, bool]]:
    while True:
        bad, unscale = torch.randint(4, (2,), generator=generator).tolist()
        yield bad, unscale < 2


@pytest.mark.parametrize("seed", range(4))
def test_ranks_agree_on_parameters_scale_and_skips_whatever_happens(ranks2, seed):
    first, second = ranks2.run(random_run, seed)
    assert first == second
    assert {stepped for _, _, stepped in first} == {True, False}


def many_on_ranks() -> tuple[list[float], int]:
    scaler = cpu_scaler()
    bad = INF if dist.get_rank() == 1 else 0.25
    both = list(pairs(scaler, *([0.25] * FLAG_SLOTS + [bad, 0.25])))
    with count_collectives() as counted:
        scaler.step_all([optimizer for _, optimizer in both])
    return [p.item() for p, _ in both], counted.count


def test_more_optimizers_than_one_message_holds_on_ranks(ranks2):
    expected = [0.75] * FLAG_SLOTS + [1.0, 0.75]
    for values, messages in ranks2.run(many_on_ranks):
        assert values == expected
        assert messages == 2
