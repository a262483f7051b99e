"""Random programs for a guard or scaler, compared with plain torch that gets every gradient.

Optimizers step alone or together, by their flags or by a norm, and hold replicas or parameters of
one rank; on the CPU, and on simulated devices.
"""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler, StepGuard
from distamp.errors import RankMismatchError
from tests.on_ranks import on_ranks
from tests.place import device_type, rank_device
from tests.simulated.pools import SCHEDULES

KINDS: list[Callable[..., Any]] = [
    partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    partial(torch.optim.SGD, lr=0.05, fused=True),
    partial(torch.optim.AdamW, lr=0.01, foreach=True),
    partial(torch.optim.AdamW, lr=0.01, fused=True),
    partial(torch.optim.Adagrad, lr=0.01),
    partial(torch.optim.Adagrad, lr=0.01, fused=True),
]


def make_scaler() -> DistGradScaler:
    return DistGradScaler(device_type(), init_scale=1024.0)


GUARDS: list[Callable[[], Any]] = [StepGuard, make_scaler]
# The relative and absolute tolerance of a clip that is rounded twice, because one kernel divides by
# a value and another multiplies by its inverse.
TOLERANCES = {
    torch.float64: (1e-4, 1e-5),
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (2.0**-5, 2.0**-5),
}
DTYPES = list(TOLERANCES)
CALLS_BY_NORM = ("norm", "joint norm", "unscale_, norm")
CALLS = ("step", "step_all", "together", "unscale_, step", *CALLS_BY_NORM)
# These calls decide for all optimizers at once.
JOINT_CALLS = ("together", "joint norm")
SPIKE = 1e6
SKIP_NORM_ABOVE = 1e4

# The gradients of a rank for each optimizer and parameter; None for a parameter without gradient.
RankGradients = list[list[Any]]


# -- gradients -------------------------------------------------------------------------------------


def draw_gradients(
    rng: random.Random, shapes: list[list[int]], dtype: torch.dtype, is_sharded: bool
) -> list[RankGradients]:
    """Return the gradients of every rank, equal on all ranks.

    Replicas have equal gradients. One element may be inf, NaN or a spike. One gradient of a shard
    may be missing.
    """
    grads: list[RankGradients] = []
    for _ in range(dist.get_world_size()):
        of_rank = [[torch.randn(size, dtype=dtype) for size in sizes] for sizes in shapes]
        grads.append(of_rank)
    if not is_sharded:
        grads = [copy.deepcopy(grads[0]) for _ in grads]
    bad_value = rng.choice([None, None, math.nan, math.inf, SPIKE])
    bad_rank = rng.choice(grads)
    tensors = rng.choice(bad_rank)
    position = rng.randrange(len(tensors))
    if bad_value is None:
        if is_sharded and rng.random() < 0.3:
            tensors[position] = None
    elif is_sharded or bad_value != SPIKE:
        # Finite gradients of replicas must be equal on all ranks, so that a spike of one is wrong.
        tensors[position][0] = bad_value
    return grads


@dataclass
class Expectation:
    """The norm of gradients, and the right outcome of a step.

    Args:
        norm: The norm of the gradients of all ranks.
        is_spike: Whether the step is skipped for this norm.
        clip_factor: The factor that clips the gradients.
    """

    norm: float
    is_spike: bool = False
    clip_factor: float = 1.0

    @property
    def is_overflow(self) -> bool:
        return not math.isfinite(self.norm)

    @property
    def steps(self) -> bool:
        return not self.is_overflow and not self.is_spike


def expect(call: str, max_norm: float, grads: list[RankGradients], is_sharded: bool) -> Expectation:
    """Compute the outcome of a call in float64, from the gradients of all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for of_rank in grads:
        for of_optimizer in of_rank:
            for grad in of_optimizer:
                if grad is not None:
                    total += grad.double().square().sum()
    replicas = 1 if is_sharded else len(grads)
    norm = math.sqrt(total / replicas)
    if call not in CALLS_BY_NORM or not math.isfinite(norm):
        return Expectation(norm)
    clip_factor = min(1.0, max_norm / (norm + 1e-6))
    return Expectation(norm, norm > SKIP_NORM_ABOVE, clip_factor)


# -- one program -----------------------------------------------------------------------------------


def flatten(lists: list[list[Any]]) -> list[Any]:
    return [item for inner in lists for item in inner]


def are_equal(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, tensors, expected))


class Comparison:
    """A program on this rank: optimizers under a guard, and plain torch as the reference.

    Args:
        seed: The seed of the program, equal on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.is_sharded = self.rng.random() < 0.5
        self.dtype = self.rng.choice(DTYPES)
        number_of_optimizers = self.rng.choice([1, 2, 3, 9])
        kinds = self.rng.choices(KINDS, k=number_of_optimizers)
        self.shapes = [self.draw_sizes() for _ in kinds]
        self.params = [[self.draw_param(size) for size in sizes] for sizes in self.shapes]
        self.reference_params = copy.deepcopy(self.params)
        self.optimizers: list[Any] = []
        self.reference: list[Any] = []
        for index, kind in enumerate(kinds):
            self.optimizers.append(kind(self.params[index]))
            self.reference.append(kind(self.reference_params[index]))
        self.guard = self.rng.choice(GUARDS)()
        self.guard.register_optimizers(*self.optimizers)
        self.guard.scale(torch.ones((), device=rank_device()))
        self.scale = self.guard.get_scale()
        # For each optimizer the steps that were taken, skipped, and skipped for their norm.
        self.counts = [[0, 0, 0] for _ in kinds]
        self.place = ""

    def draw_sizes(self) -> list[int]:
        """Return the sizes of the parameters of an optimizer."""
        number = self.rng.randint(1, 3)
        return [self.rng.randint(1, 5) for _ in range(number)]

    def draw_param(self, size: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(size, dtype=self.dtype).to(rank_device()))

    def run(self) -> None:
        """Make the iterations; end after an iteration in which a rank is ahead."""
        for number in range(self.rng.randint(2, 5)):
            call = self.rng.choice(CALLS)
            max_norm = self.rng.choice([0.0, 0.5, 1.0, 100.0])
            grads = draw_gradients(self.rng, self.shapes, self.dtype, self.is_sharded)
            # Ranks count from their first message, and a device raises at the next one.
            is_apart = number > 0 and self.rng.random() < 0.1 and device_type() == "cpu"
            self.place = f"seed {self.seed}, step {number} ({call})"
            self.set_gradients(grads[dist.get_rank()])
            if is_apart:
                self.check_rank_ahead(call, max_norm)
                return
            self.check_iteration(call, max_norm, grads)

    def set_gradients(self, grads: RankGradients) -> None:
        """Set scaled gradients under the guard, and the same gradients in the reference."""
        pairs = zip(flatten(self.params), flatten(self.reference_params), strict=True)
        for (param, reference_param), grad in zip(pairs, flatten(grads), strict=True):
            param.grad = None
            reference_param.grad = None
            if grad is not None:
                param.grad = grad.to(rank_device()) * self.scale
                reference_param.grad = grad.to(rank_device(), copy=True)

    def call_guard(self, call: str, max_norm: float) -> None:
        """Unscale and step all optimizers."""
        shard_group_fn = (lambda param: True) if self.is_sharded else None
        limit: Any = SKIP_NORM_ABOVE
        if not max_norm:
            limit = torch.full((), SKIP_NORM_ABOVE, device=rank_device())
        limits: dict[str, Any] = {
            "max_norm": max_norm,
            "skip_norm_above": limit,
            "shard_group_fn": shard_group_fn,
        }
        if call == "together":
            options = {"all_or_none": True, "shard_group_fn": shard_group_fn}
            self.guard.step_all(self.optimizers, **options)
        elif call == "joint norm":
            self.guard.step_all(self.optimizers, **limits)
        elif call == "step_all":
            self.guard.step_all(self.optimizers)
        else:
            for optimizer in self.optimizers:
                if "unscale_" in call:
                    self.guard.unscale_(optimizer)
                if call in CALLS_BY_NORM:
                    self.guard.step_all([optimizer], **limits)
                else:
                    self.guard.step(optimizer)

    def check_rank_ahead(self, call: str, max_norm: float) -> None:
        """Let rank 0 be an iteration ahead: every rank raises, and nothing steps."""
        params_before = copy.deepcopy(flatten(self.params))
        if dist.get_rank() == 0:
            self.guard.update(1.0)
        with pytest.raises(RankMismatchError):
            self.call_guard(call, max_norm)
        assert are_equal(flatten(self.params), params_before), self.place

    def check_iteration(self, call: str, max_norm: float, grads: list[RankGradients]) -> None:
        params_before = copy.deepcopy(self.params)
        self.call_guard(call, max_norm)
        self.guard.update()
        has_overflow = False
        for index in range(len(self.optimizers)):
            relevant_grads = grads
            if call not in JOINT_CALLS:
                relevant_grads = [[of_rank[index]] for of_rank in grads]
            expectation = expect(call, max_norm, relevant_grads, self.is_sharded)
            has_overflow |= expectation.is_overflow
            self.check_counts(index, expectation)
            if call in CALLS_BY_NORM and not expectation.is_overflow:
                norm = self.guard.grad_norm(self.optimizers[index]).item()
                assert norm == pytest.approx(expectation.norm, rel=2e-2), self.place
            if expectation.steps:
                self.step_reference(index, expectation.clip_factor)
                self.check_step(index, expectation.clip_factor)
            else:
                assert are_equal(self.params[index], params_before[index]), self.place
        if has_overflow and isinstance(self.guard, DistGradScaler):
            self.scale *= 0.5
        assert self.guard.get_scale() == self.scale, self.place

    def check_counts(self, index: int, expectation: Expectation) -> None:
        """Assert that the guard has counted the step, and that it reports it."""
        taken_skipped_norm_skips = self.counts[index]
        if expectation.steps:
            taken_skipped_norm_skips[0] += 1
        elif expectation.is_spike:
            taken_skipped_norm_skips[2] += 1
        else:
            taken_skipped_norm_skips[1] += 1
        optimizer = self.optimizers[index]
        counts = self.guard.step_counts(optimizer)
        counted = [counts.taken, counts.skipped, counts.norm_skips]
        assert counted == taken_skipped_norm_skips, self.place
        assert self.guard.step_was_taken(optimizer) is expectation.steps, self.place

    def step_reference(self, index: int, clip_factor: float) -> None:
        for param in self.reference_params[index]:
            if param.grad is not None and clip_factor < 1.0:
                param.grad.mul_(clip_factor)
        self.reference[index].step()

    def check_step(self, index: int, clip_factor: float) -> None:
        """Assert that parameters, and gradients that were clipped, equal the reference."""
        tolerance = TOLERANCES[self.dtype]
        pairs = zip(self.params[index], self.reference_params[index], strict=True)
        for param, reference_param in pairs:
            assert torch.allclose(param, reference_param, *tolerance), self.place
            # A kernel that clips as it steps leaves the clipped gradients, too.
            if clip_factor < 1.0 and reference_param.grad is not None:
                assert torch.allclose(param.grad, reference_param.grad, *tolerance), self.place


def compare_programs(seeds: range) -> None:
    """Compare one program after another. Every rank must call this."""
    for seed in seeds:
        Comparison(seed).run()


# -- the programs ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_programs_on_devices_do_what_plain_torch_does(sim2, schedule, seed) -> None:
    position = SCHEDULES.index((schedule, seed))
    start = 100 + 8 * position
    programs = range(start, start + 3)
    sim2.run(compare_programs, programs, schedule=schedule, seed=seed, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_more_programs_on_devices(sim2, schedule, seed) -> None:
    position = SCHEDULES.index((schedule, seed))
    start = 200 + 40 * position
    programs = range(start, start + 40)
    sim2.run(compare_programs, programs, schedule=schedule, seed=seed, timeout=400)


@on_ranks(2)
def test_programs_do_what_plain_torch_does() -> None:
    compare_programs(range(8))


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 6000, 100))
def test_five_thousand_programs_on_two_ranks(start: int) -> None:
    compare_programs(range(start, start + 100))


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 6000, 100))
def test_two_thousand_programs_on_four_ranks(start: int) -> None:
    compare_programs(range(start, start + 40))
