"""Random programs for a `StepGuard` beside plain torch, which skips by what all ranks hold."""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp import StepGuard
from distamp.errors import LockstepError
from tests.on_ranks import on_ranks

KINDS: list[Callable[..., Any]] = [
    lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    lambda p: torch.optim.SGD(p, 0.05, fused=True),
    lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    lambda p: torch.optim.Adagrad(p, 0.01),
]
# How far two roundings apart a clip may be: a fused kernel divides by what another multiplies by.
NEAR = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2.0**-5, 2.0**-5)}
CALLS = ("step", "step_all", "together", "norm", "joint norm", "unscale_, step", "unscale_, norm")
SPIKE, LIMIT = 1e6, 1e4


@dataclass
class Step:
    """One iteration, the same on all ranks.

    Args:
        call: How optimizers are stepped.
        grads: For each rank and optimizer its gradients; None where a rank has none.
        max_norm: Of calls by a norm.
        odd: Rank 0 is an iteration ahead.
    """

    call: str
    grads: list[list[list[Tensor | None]]]
    max_norm: float
    odd: bool


@dataclass
class Program:
    """Optimizers over some parameters, which are replicas or a rank's own, and what they do."""

    sharded: bool
    dtype: torch.dtype
    kinds: list[int] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def draw(seed: int, ranks: int) -> Program:
    """Return a program; every rank draws the same."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    program = Program(rng.random() < 0.5, rng.choice([torch.float32, torch.bfloat16]))
    program.kinds = [rng.randrange(len(KINDS)) for _ in range(rng.randint(1, 3))]
    program.sizes = [[rng.randint(1, 5) for _ in range(rng.randint(1, 3))] for _ in program.kinds]
    for number in range(rng.randint(2, 5)):
        grads: list[list[list[Tensor | None]]] = []
        for rank in range(ranks):
            mine = [
                [torch.randn(size, generator=generator).to(program.dtype) for size in sizes]
                for sizes in program.sizes
            ]
            if rank and not program.sharded:
                mine = [[tensor.clone() for tensor in tensors] for tensors in grads[0]]  # type: ignore[union-attr]
            grads.append(mine)  # type: ignore[arg-type]
        what, where = rng.choice(["", "", math.nan, math.inf, SPIKE]), rng.randrange(ranks)
        tensors = grads[where][rng.randrange(len(program.kinds))]
        place = rng.randrange(len(tensors))
        if what == "" and program.sharded and rng.random() < 0.3:
            tensors[place] = None
        # Replicas that differ otherwise than by what is not finite are no replicas.
        elif what != "" and (program.sharded or what != SPIKE):
            tensors[place][0] = what  # type: ignore[index]
        odd = number > 0 and rng.random() < 0.1  # ranks count from their first message
        program.steps.append(Step(rng.choice(CALLS), grads, rng.choice([0.5, 1.0, 100.0]), odd))
    return program


def held(grads: Sequence[Sequence[Sequence[Tensor | None]]]) -> list[Tensor]:
    """Return all of some ranks."""
    return [t for rank in grads for tensors in rank for t in tensors if t is not None]


def norm_of(program: Program, grads: Sequence[Sequence[Sequence[Tensor | None]]]) -> float:
    """Return the norm of what the ranks hold together, in float64."""
    apart = program.sharded or not finite(grads)
    total = sum(t.double().square().sum().item() for t in held(grads if apart else grads[:1]))
    return math.sqrt(total) if math.isfinite(total) else math.nan


def finite(grads: Sequence[Sequence[Sequence[Tensor | None]]]) -> bool:
    """Return whether all of them are on every rank."""
    return all(bool(tensor.isfinite().all()) for tensor in held(grads))


def plans(program: Program, step: Step) -> Iterator[tuple[bool, bool, float]]:
    """Say of each optimizer whether it is stepped, whether its norm was a spike, and its clip."""
    count = len(program.kinds)
    for index in range(count):
        joint = step.call in ("together", "joint norm")
        about = range(count) if joint else [index]
        grads = [[rank[each] for each in about] for rank in step.grads]
        if step.call in ("step", "step_all", "unscale_, step"):
            yield finite(grads), False, 1.0
            continue
        norm = norm_of(program, grads)
        clips = step.call != "together"
        spike = clips and norm > LIMIT
        factor = min(1.0, step.max_norm / (norm + 1e-6)) if clips and norm == norm else 1.0
        yield math.isfinite(norm) and not spike, spike, factor


def perform(guard: StepGuard, optimizers: list[Any], step: Step, sharded: Any) -> None:
    """Make the calls of one iteration."""
    by_norm: dict[str, Any] = {"max_norm": step.max_norm, "skip_above": LIMIT, "sharded": sharded}
    if step.call == "together":
        guard.step_all(optimizers, together=True, sharded=sharded)
    elif step.call == "joint norm":
        guard.step_all(optimizers, **by_norm)
    elif step.call == "step_all":
        guard.step_all(optimizers)
    for optimizer in optimizers if "all" not in step.call else ():
        if step.call.startswith("unscale_"):
            guard.unscale_(optimizer)
        if step.call.endswith("step"):
            guard.step(optimizer)
        elif step.call in ("norm", "unscale_, norm"):
            guard.step_all([optimizer], **by_norm)


def trained(program: Program, seed: int) -> tuple[list[list[torch.nn.Parameter]], list[Any]]:
    """Return the parameters of each optimizer, and the optimizers."""
    torch.manual_seed(seed)
    parameters = [
        [torch.nn.Parameter(torch.randn(size).to(program.dtype)) for size in sizes]
        for sizes in program.sizes
    ]
    return parameters, [KINDS[k](p) for k, p in zip(program.kinds, parameters, strict=True)]


def compare(seed: int) -> None:
    """Follow a program on this rank beside the reference."""
    rank, guard = dist.get_rank(), StepGuard()
    program = draw(seed, dist.get_world_size())
    (mine, own), (theirs, reference) = (trained(program, seed) for _ in range(2))
    guard.add_optimizer(*own)
    sharded = (lambda parameter: True) if program.sharded else None
    expected = [[0, 0, 0] for _ in own]
    for number, step in enumerate(program.steps):
        where = f"seed {seed}, step {number} ({step.call})"
        for parameters, grads in zip((*mine, *theirs), step.grads[rank] * 2, strict=True):
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = None if grad is None else grad.clone()
        before = [p.detach().clone() for each in mine for p in each]
        if step.odd and rank == 0:
            guard.update(1.0)  # an iteration ahead: every rank raises, and nothing steps
        with pytest.raises(LockstepError) if step.odd else contextlib.nullcontext():
            perform(guard, own, step, sharded)
        plan = [] if step.odd else list(plans(program, step))
        if not any(steps for steps, *_ in plan):
            assert all(map(torch.equal, before, (p for each in mine for p in each))), where
        if step.odd:
            return
        for index, (steps, spike, factor) in enumerate(plan):
            expected[index][0 if steps else 2 if spike else 1] += 1
            if steps:
                for parameter in theirs[index]:
                    if parameter.grad is not None and factor < 1.0:
                        parameter.grad.mul_(factor)
                reference[index].step()
            counts = guard.step_counts(own[index])
            assert [counts.taken, counts.skipped, counts.spikes] == expected[index], where
            assert guard.stepped(own[index]) is steps, where
            for parameter, right in zip(mine[index], theirs[index], strict=True):
                assert torch.allclose(parameter, right, *NEAR[program.dtype]), where
        guard.update()


@on_ranks(2)
def test_programs_do_what_plain_torch_does() -> None:
    for seed in range(80):
        compare(seed)


@on_ranks("size")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("start", range(1000, 6000, 100))
def test_thousands_of_programs(size: int, start: int) -> None:
    for seed in range(start, start + (100 if size == 2 else 40)):
        compare(seed)
