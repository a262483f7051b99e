"""clip_grad_norm_: the norm of the whole model, of which every rank may hold a part."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate

from distamp import StepGuard, clip_grad_norm_
from distamp.errors import CallOrderError, ConfigError, GradientError
from tests.collectives import count_collectives
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.scaler.matrix.layouts import LAYOUTS
from tests.scaler.matrix.reference import KINDS
from tests.scaler.steps import INF, backward, cpu_scaler, leaf, sgd

TYPES = (2.0, 1.0, math.inf, 3.0)
IN_GROUPS = sorted(name for name, layout in LAYOUTS.items() if layout.group == "default")


def _norms(name: str) -> Any:
    """Of each type the norm in this layout, and in float64 on the whole model.

    Then what is left once clipped: by this scaler, a disabled one and the function.
    """
    layout, kind = LAYOUTS[name](), KINDS["SGD for-loop"]
    optimizer = layout.optimizer(kind, [p for part in layout.parts() for p in part])
    layout.attach([optimizer])
    group = layout.process_group()
    scaler, disabled = (cpu_scaler(enabled=on, process_group=group) for on in (True, False))
    layout.backward(scaler, 0, 1, [1.0])
    reference = layout.reference(kind, 1)
    reference.backward(0, 1)
    gradients = [p.grad for p in reference.parameters.values() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    expected = [torch.linalg.vector_norm(flat, norm_type).item() for norm_type in TYPES]
    clip = functools.partial(scaler.clip_grad_norm_, optimizer, shard_group_fn=layout.sharded)
    found = [clip(1e30, norm_type) for norm_type in TYPES]
    clip(found[0] / 2)
    by_function = functools.partial(clip_grad_norm_, process_group=group)
    for by in (scaler.clip_grad_norm_, disabled.clip_grad_norm_, by_function):
        found.append(by(optimizer, 1e30, shard_group_fn=layout.sharded))
        expected.append(expected[0] / 2)
    return [norm.item() for norm in found], expected


@pytest.mark.parametrize("name", IN_GROUPS)
def test_the_norm_is_that_of_the_whole_model(ranks4, name):
    results = ranks4.run(_norms, name)
    for found, expected in results:
        assert found == pytest.approx(expected, rel=1e-4)
        assert found == results[0][0] or "two groups" in name, "the same on all ranks"


# -- one process, and a disabled scaler: as torch --------------------------------------------------


GIVEN: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer,
    "parameters": lambda model, optimizer: list(model.parameters()),
    "generator": lambda model, optimizer: model.parameters(),
    "tensor": lambda model, optimizer: next(model.parameters()),
    "nothing": lambda model, optimizer: [],
}
NUMBERS = [
    (0.0, 2.0),
    (1e-3, 2.0),
    (1e3, 2.0),
    (1e-3, 1.0),
    ("1e-3", "inf"),
    (torch.tensor(0.1), 2),
]


def _clipped(by: str, given: str, *numbers: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        cpu_scaler(enabled=by == "ours"),
    )
    loss = model(torch.linspace(-1, 1, 12).view(3, 4)).square().sum()
    scaler.scale(loss).backward()
    scaler.register_optimizers(optimizer)
    if by == "ours" and given == "nothing":
        scaler.unscale_(optimizer)  # which no clip of nothing does
    if by == "torch":
        given = "parameters" if given == "optimizer" else given
    clips = {"torch": nn.utils.clip_grad_norm_, "function": clip_grad_norm_}
    clip = clips.get(by, scaler.clip_grad_norm_)
    norm = clip(GIVEN[given](model, optimizer), *numbers)
    return [norm, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("by", ["ours", "disabled", "function"])
@pytest.mark.parametrize("given", GIVEN)
def test_in_one_process_it_clips_as_torch_does_and_reads_numbers_as_torch_does(given, by):
    for numbers in NUMBERS:
        ours = _clipped(by, given, *numbers)
        torch.testing.assert_close(ours, _clipped("torch", given, *numbers))


def test_what_cannot_be_clipped_is_named():
    (parameter, optimizer), model = sgd(1.0, 2.0), nn.Sequential(nn.Linear(1, 1))
    scaler = cpu_scaler()
    backward(scaler, parameter, [3.0, 4.0])
    for bad in (-1.0, "much", None, math.nan):
        for name, given in {"max_norm": (bad, 2.0), "norm_type": (1.0, bad)}.items():
            with pytest.raises(ConfigError, match=f"{name} must be >=? 0, not"):
                scaler.clip_grad_norm_(optimizer, *given)
    with pytest.raises(ConfigError, match="norm_type must be > 0, not 0"):
        scaler.clip_grad_norm_(optimizer, 1.0, 0.0)
    for given in (model.named_parameters(), model.children()):
        with pytest.raises(TypeError, match=r"such as model\.parameters\(\), not (tuple|Linear)"):
            scaler.clip_grad_norm_(given, 1.0)
    model(torch.ones(1)).backward()
    with pytest.raises(CallOrderError, match="Pass the optimizer to clip_grad_norm_"):
        scaler.clip_grad_norm_(model.parameters(), 1.0)


# -- what counts as a part, and what as a copy -----------------------------------------------------


def _clip(*gradients: float, marks: tuple[str, ...] = (), **declared: Any) -> float | str:
    """The norm of parameters with these gradients on this rank, of 1, 2, ... elements."""
    parameters = [leaf(*[1.0] * (place + 1)) for place in range(len(gradients))]
    scaler = cpu_scaler(4.0)
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient:  # else there is none
            size = parameter.numel()
            parameter.grad = torch.full((size,), 4.0 * gradient / math.sqrt(size))
    for mark in marks:
        setattr(parameters[0], mark, True)
    try:
        norm = scaler.clip_grad_norm_(torch.optim.SGD(parameters), 1e6, **declared).item()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return norm


PARTS: dict[str, Callable[[int], float | str]] = {
    "replicas": lambda rank: _clip(3.0, 4.0),
    "parts, not declared": lambda rank: _clip(3.0 + rank),
    "a part by True": lambda rank: _clip(3.0 + rank, shard_group_fn=lambda _: True),
    "a part over a group": lambda rank: _clip(
        3.0 + rank, shard_group_fn=lambda _: dist.group.WORLD
    ),
    "a part over a mesh": lambda rank: _clip(
        3.0 + rank, shard_group_fn=lambda _: mesh((2,), ("d",))
    ),
    "a replica whose last bits differ": lambda rank: _clip(
        3.0 + 1e-4 * rank, 4.0, is_replicated_fn=lambda _: True
    ),
    "a replica beside a part": lambda rank: _clip(
        3.0,
        0.0 if rank else 4.0,
        is_replicated_fn=lambda p: p.numel() == 1,
        shard_group_fn=lambda p: p.numel() > 1,
    ),
    "tensor_model_parallel": lambda rank: _clip(3.0 + rank, marks=("tensor_model_parallel",)),
    "shared": lambda rank: _clip(5.0, marks=("shared",) * rank, shard_group_fn=lambda _: True),
    "not finite": lambda rank: _clip(INF if rank else 1.0, 1.0),
}


@on_ranks(2)
@pytest.mark.parametrize("name", PARTS)
def test_each_parameter_is_counted_once(name):
    found = PARTS[name](dist.get_rank())
    if name == "parts, not declared":
        assert "ReplicaMismatchError" in str(found)
        assert "shard_group_fn=" in str(found)
    else:
        assert found == pytest.approx(math.inf if name == "not finite" else 5.0, rel=1e-4)


@on_ranks(4)
def test_a_replica_in_both_dimensions_of_a_mesh_counts_once():
    grid, twice = mesh((2, 2), ("a", "b")), [Replicate(), Replicate()]
    weight = nn.Parameter(DTensor.from_local(torch.zeros(3), grid, twice))
    weight.grad = DTensor.from_local(torch.full((3,), 4.0), grid, twice)
    scaler = cpu_scaler(4.0)
    scaler.scale(torch.ones(()))
    norm = scaler.clip_grad_norm_(torch.optim.SGD([weight], lr=1.0), 1.0)
    assert norm.item() == pytest.approx(math.sqrt(3))


@on_ranks(2)
@pytest.mark.parametrize("layout", ["replicas", "parts"])
@pytest.mark.parametrize(("norm_type", "messages"), [(2.0, 1), (3.0, 1), (INF, 2)])
def test_a_clip_of_replicas_that_were_found_alike_is_one_message(norm_type, messages, layout):
    """The norm is in that message, except that a largest magnitude is no sum."""
    share = 1.0 if layout == "replicas" else 1.0 + dist.get_rank()
    whole = [3.0, 4.0] if layout == "replicas" else [3.0, 4.0, 6.0, 8.0]
    declared: Any = {} if layout == "replicas" else {"shard_group_fn": lambda _: True}
    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), cpu_scaler(init_scale=4.0)
    counts = []
    for _ in range(3):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor([3.0, 4.0]) * share * 4.0
        with count_collectives() as seen:
            norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type, **declared)
        counts.append(seen.count)
        expected = torch.linalg.vector_norm(torch.tensor(whole), norm_type)
        torch.testing.assert_close(norm, expected)
        clipped = torch.tensor([3.0, 4.0]) * share / expected
        torch.testing.assert_close(weight.grad, clipped, rtol=1e-5, atol=0.0)
        scaler.step(optimizer)
        scaler.update()
    assert counts[1:] == [messages] * 2


@on_ranks(2)
def test_an_overflow_beside_the_clipped_parameters_skips_the_step_and_leaves_their_norm():
    """Of one optimizer, of which rank 1 has inf in a parameter that is not clipped."""
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizer, guard = torch.optim.SGD(weights, lr=1.0), StepGuard()
    guard.register_optimizers(optimizer)
    for overflows in (False, True):
        weights[0].grad = torch.tensor([4.0])
        weights[1].grad = torch.tensor([INF if overflows and dist.get_rank() else 1.0])
        norm = guard.clip_grad_norm_(weights[0], 1.0)
        assert norm.item() == 4.0
        assert guard.found_inf(optimizer).item() == float(overflows)
        guard.step(optimizer)
        guard.update()
        assert guard.step_was_taken(optimizer) is not overflows


def test_gradients_that_are_unscaled_already_are_clipped_with_those_that_are_not():
    (first, one), (second, other) = sgd(0.0, 0.0), sgd(0.0, 0.0)
    scaler = cpu_scaler(4.0)
    scaler.register_optimizers(one, other)
    scaler.scale(first.sum() + second.sum()).backward()
    scaler.unscale_(one)
    assert scaler.clip_grad_norm_([first, second], 1.0).item() == pytest.approx(2.0)
    for optimizer in (one, other):
        scaler.step(optimizer)
    assert torch.cat([first, second]).tolist() == pytest.approx([-0.5] * 4, abs=1e-5)


@on_ranks(2)
def test_a_norm_that_is_not_finite_changes_nothing_and_once_agreed_on_compares_no_more():
    """Of one rank the second replica overflows, and the third differs."""
    scaler, (parameter, optimizer) = cpu_scaler(), sgd(1.0, 1.0)
    for gradient in (3.0, INF, 4.0):
        optimizer.zero_grad()
        backward(scaler, parameter, [0.25, gradient if dist.get_rank() else 3.0])
        norm = scaler.clip_grad_norm_(optimizer, 1e6)
        scaler.step(optimizer)
        assert (bool(norm.isfinite()), parameter.grad[0].item()) == (gradient != INF, 0.25)
        scaler.update()
    assert scaler.step_counts(optimizer).skipped == 1


@on_ranks(4)
def test_copies_of_shards_are_refused_until_they_are_declared_and_then_counted_once():
    """FSDP1's HYBRID_SHARD on two groups of two; the gradient of all 40 elements is 0.5."""
    grid = mesh((2, 2), ("replicate", "shard"))
    model = FullyShardedDataParallel(
        nn.Linear(8, 5, bias=False),
        device_mesh=grid,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), cpu_scaler()
    scaler.scale(model(torch.full((1, 8), 0.5)).sum()).backward()
    with pytest.raises(GradientError, match="shard_group_fn="):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 8), 0.5)).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0, shard_group_fn=lambda p: grid["shard"])
    assert norm.item() == pytest.approx(math.sqrt(10.0), rel=1e-6)
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    left = torch.cat([torch.zeros(1), *grads]).square().sum()
    dist.all_reduce(left)
    assert left.item() == pytest.approx(2.0, rel=1e-5), (
        "each two ranks hold the model, clipped to 1"
    )
