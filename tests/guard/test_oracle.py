"""Random programs for a guard and a scaler beside plain torch, which skips by what all ranks hold.

Steps alone or together, by their flags or by a norm, of replicas or of a rank's own parameters; on
the CPU, and on simulated devices.
"""

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler, StepGuard
from distamp.errors import RankMismatchError
from tests.on_ranks import on_ranks
from tests.place import device_type, here
from tests.simulated.pools import SCHEDULES

KINDS: list[Callable[..., Any]] = [
    lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    lambda p: torch.optim.SGD(p, 0.05, fused=True),
    lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    lambda p: torch.optim.Adagrad(p, 0.01),
    lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
]
MADE: list[Callable[[], Any]] = [
    StepGuard,
    lambda: DistGradScaler(device_type(), init_scale=1024.0),
]
# How far two roundings apart a clip may be: a fused kernel divides by what another multiplies by.
NEAR = {
    torch.float64: (1e-4, 1e-5),
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (2.0**-5, 2.0**-5),
}
BY_NORM = ("norm", "joint norm", "unscale_, norm")
CALLS = ("step", "step_all", "together", "unscale_, step", *BY_NORM)
SPIKE, LIMIT = 1e6, 1e4
flat = itertools.chain.from_iterable


def drawn(
    rng: random.Random, ranks: int, shapes: list[list[int]], dtype: torch.dtype, sharded: bool
) -> list[list[list[Any]]]:
    """For each rank and optimizer its gradients, of which one may be bad, or None."""
    grads: list[list[list[Any]]] = [
        [[torch.randn(size, dtype=dtype) for size in sizes] for sizes in shapes]
        for _ in range(ranks)
    ]
    if not sharded:
        grads = [copy.deepcopy(grads[0]) for _ in grads]
    what, tensors = rng.choice(["", "", math.nan, math.inf, SPIKE]), rng.choice(rng.choice(grads))
    place = rng.randrange(len(tensors))
    if what == "" and sharded and rng.random() < 0.3:
        tensors[place] = None
    # Replicas that differ otherwise than by what is not finite are no replicas.
    elif what != "" and (sharded or what != SPIKE):
        tensors[place][0] = what
    return grads


def planned(
    call: str, max_norm: float, grads: Sequence[Sequence[Sequence[Tensor | None]]], sharded: bool
) -> tuple[float, bool, float]:
    """The norm of gradients, whether that is a spike, and the factor that clips them."""
    squares = [t.double().square().sum() for t in flat(map(flat, grads)) if t is not None]
    norm = math.sqrt(sum(squares) / (1 if sharded else len(grads)))
    if call not in BY_NORM or not math.isfinite(norm):
        return norm, False, 1.0
    return norm, norm > LIMIT, min(1.0, max_norm / (norm + 1e-6))


def perform(made: Any, optimizers: list[Any], call: str, max_norm: float, sharded: Any) -> None:
    """Make the calls of one iteration."""
    limit = LIMIT if max_norm else torch.full((), LIMIT, device=here())
    by_norm: dict[str, Any] = {
        "max_norm": max_norm,
        "skip_norm_above": limit,
        "shard_group_fn": sharded,
    }
    if call == "together":
        made.step_all(optimizers, all_or_none=True, shard_group_fn=sharded)
    elif call == "joint norm":
        made.step_all(optimizers, **by_norm)
    elif call == "step_all":
        made.step_all(optimizers)
    else:
        for optimizer in optimizers:
            if "unscale_" in call:
                made.unscale_(optimizer)
            if call in BY_NORM:
                made.step_all([optimizer], **by_norm)
            else:
                made.step(optimizer)


def compare(seed: int) -> None:
    """Follow a program on this rank beside the reference."""
    rank, rng = dist.get_rank(), random.Random(seed)
    torch.manual_seed(seed)
    sharded, dtype = rng.random() < 0.5, rng.choice([*NEAR])
    kinds = rng.choices(KINDS, k=rng.choice([1, 2, 3, 9]))
    shapes = [[rng.randint(1, 5) for _ in range(rng.randint(1, 3))] for _ in kinds]
    mine = [
        [nn.Parameter(torch.randn(size, dtype=dtype).to(here())) for size in sizes]
        for sizes in shapes
    ]
    theirs = copy.deepcopy(mine)
    own, reference = (
        [kind(of) for kind, of in zip(kinds, each, strict=True)] for each in (mine, theirs)
    )
    made = rng.choice(MADE)()
    made.register_optimizers(*own)
    made.scale(torch.ones((), device=here()))
    scale, expected = made.get_scale(), [[0, 0, 0] for _ in own]
    for number in range(rng.randint(2, 5)):
        call, max_norm = rng.choice(CALLS), rng.choice([0.0, 0.5, 1.0, 100.0])
        grads = drawn(rng, dist.get_world_size(), shapes, dtype, sharded)
        # Ranks count from their first message, and a device raises at the next one.
        odd = number > 0 and rng.random() < 0.1 and device_type() == "cpu"
        where = f"seed {seed}, step {number} ({call})"
        for parameter, right, grad in zip(flat(mine), flat(theirs), flat(grads[rank]), strict=True):
            parameter.grad = None if grad is None else grad.to(here()) * scale
            right.grad = None if grad is None else grad.to(here(), copy=True)
        before = copy.deepcopy(mine)
        if odd and rank == 0:
            made.update(1.0)  # an iteration ahead: every rank raises, and nothing steps
        with pytest.raises(RankMismatchError) if odd else contextlib.nullcontext():
            perform(made, own, call, max_norm, (lambda p: True) if sharded else None)
        if odd:
            assert all(map(torch.equal, flat(before), flat(mine))), where
            return
        made.update()
        backs_off = False
        for index, optimizer in enumerate(own):
            about = grads
            if call not in ("together", "joint norm"):
                about = [[of_rank[index]] for of_rank in grads]
            norm, spike, factor = planned(call, max_norm, about, sharded)
            steps = math.isfinite(norm) and not spike
            backs_off |= not steps and not spike
            expected[index][0 if steps else 2 if spike else 1] += 1
            if steps:
                for right in theirs[index]:
                    if right.grad is not None and factor < 1.0:
                        right.grad.mul_(factor)
                reference[index].step()
            else:
                assert all(map(torch.equal, before[index], mine[index])), where
            counts = made.step_counts(optimizer)
            assert [counts.taken, counts.skipped, counts.norm_skips] == expected[index], where
            assert made.step_was_taken(optimizer) is steps, where
            if call in BY_NORM and math.isfinite(norm):
                assert made.grad_norm(optimizer).item() == pytest.approx(norm, rel=2e-2), where
            for parameter, right in zip(mine[index], theirs[index], strict=True):
                assert torch.allclose(parameter, right, *NEAR[dtype]), where
                if steps and factor < 1.0 and right.grad is not None:
                    # A kernel that clips as it steps leaves the clipped gradients, too.
                    assert torch.allclose(parameter.grad, right.grad, *NEAR[dtype]), where
        scale *= 0.5 if backs_off and isinstance(made, DistGradScaler) else 1.0
        assert made.get_scale() == scale, where


def compare_all(seeds: range) -> None:
    for seed in seeds:
        compare(seed)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_programs_on_devices_do_what_plain_torch_does(sim2, schedule, seed) -> None:
    start = 100 + 8 * SCHEDULES.index((schedule, seed))
    sim2.run(compare_all, range(start, start + 8), schedule=schedule, seed=seed, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_more_programs_on_devices(sim2, schedule, seed) -> None:
    position = SCHEDULES.index((schedule, seed))
    start = 200 + 40 * position
    programs = range(start, start + 40)
    sim2.run(compare_all, programs, schedule=schedule, seed=seed, timeout=400)


@on_ranks(2)
def test_programs_do_what_plain_torch_does() -> None:
    compare_all(range(100))


@on_ranks("size")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("start", range(1000, 6000, 100))
def test_thousands_of_programs(size: int, start: int) -> None:
    compare_all(range(start, start + (100 if size == 2 else 40)))
