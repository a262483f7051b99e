"""Two ranks: fused steps, other orders, random overflows, many optimizers in one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, pairs

MANY = 16  # optimizers, more than share a message


def fused_on_ranks(kind: str, unscale: bool, bad: list[int]) -> Any:
    """A fused step where the ranks in ``bad`` overflow, and a step without scaler or overflow."""
    scaler, alone = cpu_scaler(), cpu_scaler(enabled=False)
    parameter, reference = leaf(1.0), leaf(1.0)
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.5, fused=True)
    value = INF if dist.get_rank() in bad else 0.25
    iteration(scaler, optimizer, parameter, value, unscale=unscale)
    iteration(alone, getattr(torch.optim, kind)([reference], lr=0.5), reference, 0.25)
    return parameter.item(), scaler.get_scale(), reference.item()


@pytest.mark.parametrize("bad", [[], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_step_is_taken_or_skipped_by_all(ranks2, kind, unscale, bad):
    """Where torch's sharded scaler separates the ranks, raises, or steps by -inf."""
    for value, scale, reference in ranks2.run(fused_on_ranks, kind, unscale, bad):
        assert value == (1.0 if bad else pytest.approx(reference, rel=1e-6))
        assert scale == (512.0 if bad else 1024.0)


def swapped_on_ranks() -> str:
    """Two optimizers of other classes, stepped in another order on rank 1."""
    scaler, rank = cpu_scaler(), dist.get_rank()
    first, second = leaf(1.0), leaf(1.0, 1.0)
    optimizers = [torch.optim.SGD([first], lr=1.0), torch.optim.Adam([second], lr=0.5)]
    backward(scaler, first, 0.25)
    backward(scaler, second, INF if rank == 0 else 0.25)
    try:
        for optimizer in optimizers if rank == 0 else optimizers[::-1]:
            scaler.step(optimizer)
    except RuntimeError as error:
        return type(error).__name__
    return "nothing was raised"


def test_optimizers_of_other_classes_in_another_order_are_a_mismatch(ranks2):
    assert ranks2.run(swapped_on_ranks) == ["LockstepError"] * 2


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


def many_on_ranks() -> list[float]:
    scaler = cpu_scaler()
    bad = INF if dist.get_rank() == 1 else 0.25
    both = list(pairs(scaler, *([0.25] * MANY + [bad, 0.25])))
    scaler.step_all([optimizer for _, optimizer in both])
    return [p.item() for p, _ in both]


def test_more_optimizers_than_one_message_holds_on_ranks(ranks2):
    assert ranks2.run(many_on_ranks) == [[0.75] * MANY + [1.0, 0.75]] * 2
