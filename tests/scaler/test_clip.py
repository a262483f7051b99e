"""clip_grad_norm_: the norm of the whole model, in any layout of parameters over ranks."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate

from distamp import StepGuard, clip_grad_norm_
from distamp.errors import CallOrderError, ConfigError, GradientError, ReplicaMismatchError
from tests.collectives import count_collectives
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh
from tests.scaler.matrix.layouts import LAYOUTS
from tests.scaler.matrix.reference import KINDS
from tests.scaler.steps import INF, backward, cpu_scaler, sgd

# -- layouts ---------------------------------------------------------------------------------------

NORM_TYPES = (2.0, 1.0, math.inf, 3.0)
LAYOUTS_IN_THE_DEFAULT_GROUP = sorted(
    name for name, layout in LAYOUTS.items() if layout.group == "default"
)


def measure_norms(name: str) -> dict[str, Any]:
    """Return norms of one model in this layout.

    ``exact`` and ``measured`` have the norm of each type, by float64 and by the scaler. ``clipped``
    has the norms of the gradients after a clip to half of their norm, by every kind of clip.
    """
    layout = LAYOUTS[name]()
    kind = KINDS["SGD for-loop"]
    parameters = [parameter for part in layout.parts() for parameter in part]
    optimizer = layout.optimizer(kind, parameters)
    layout.attach([optimizer])
    group = layout.process_group()
    scaler = cpu_scaler(process_group=group)
    disabled = cpu_scaler(enabled=False, process_group=group)
    layout.backward(scaler, 0, 1, [1.0])

    reference = layout.reference(kind, 1)
    reference.backward(0, 1)
    gradients = []
    for parameter in reference.parameters.values():
        if parameter.grad is not None:
            gradients.append(parameter.grad.flatten())
    gradient = torch.cat(gradients)

    exact = []
    measured = []
    for norm_type in NORM_TYPES:
        exact.append(torch.linalg.vector_norm(gradient, norm_type).item())
        norm = scaler.clip_grad_norm_(optimizer, 1e30, norm_type, shard_group_fn=layout.sharded)
        measured.append(norm.item())

    scaler.clip_grad_norm_(optimizer, measured[0] / 2, shard_group_fn=layout.sharded)
    function = partial(clip_grad_norm_, process_group=group)
    clipped = []
    for clip in (scaler.clip_grad_norm_, disabled.clip_grad_norm_, function):
        norm = clip(optimizer, 1e30, shard_group_fn=layout.sharded)
        clipped.append(norm.item())
    return {"exact": exact, "measured": measured, "clipped": clipped}


@pytest.mark.parametrize(
    "name", quick_cases(LAYOUTS_IN_THE_DEFAULT_GROUP, quick=["DDP", "FSDP1", "FSDP2", "TP"])
)
def test_the_norm_is_that_of_the_whole_model(ranks4, name):
    norms_of_ranks = ranks4.run(measure_norms, name)
    for norms in norms_of_ranks:
        exact = norms["exact"]
        assert norms["measured"] == pytest.approx(exact, rel=1e-4)
        half = exact[0] / 2
        assert norms["clipped"] == pytest.approx([half, half, half], rel=1e-4)

    if "two groups" not in name:
        for norms in norms_of_ranks:
            assert norms["measured"] == norms_of_ranks[0]["measured"], "the same on all ranks"
            assert norms["clipped"] == norms_of_ranks[0]["clipped"]


# -- one process -----------------------------------------------------------------------------------


def backward_pass(scaler: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a small model with gradients of a scaled loss, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.register_optimizers(optimizer)
    inputs = torch.linspace(-1, 1, 12).view(3, 4)
    loss = model(inputs).square().sum()
    scaler.scale(loss).backward()
    return model, optimizer


Selection = Callable[[nn.Sequential, torch.optim.Optimizer], Any]
SELECTIONS: dict[str, Selection] = {
    "optimizer": lambda model, optimizer: optimizer,
    "list": lambda model, optimizer: list(model.parameters()),
    "generator": lambda model, optimizer: model.parameters(),
    "tensor": lambda model, optimizer: model[0].weight,
    "nothing": lambda model, optimizer: [],
}
SELECTION = pytest.mark.parametrize("selection", SELECTIONS)
NUMBERS = pytest.mark.parametrize(
    ("max_norm", "norm_type"),
    [
        (0.0, 2.0),
        (1e-3, 2.0),
        (1e3, 2.0),
        (1e-3, 1.0),
        ("1e-3", "inf"),
        (torch.tensor(0.1), 2),
    ],
    ids=["0", "below the norm", "above the norm", "type 1", "strings", "tensor"],
)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def assert_clipped_as_by_torch(
    norm: Tensor, model: nn.Module, selection: str, max_norm: Any, norm_type: Any
) -> None:
    """Compare a norm, and the clipped gradients of a model, with torch's function."""
    reference, optimizer = backward_pass(cpu_scaler(enabled=False))
    selected = SELECTIONS[selection](reference, optimizer)
    if selection == "optimizer":
        selected = reference.parameters()
    expected = nn.utils.clip_grad_norm_(selected, max_norm, norm_type)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(gradients(model), gradients(reference))


@pytest.mark.sampled
@SELECTION
@NUMBERS
def test_in_one_process_a_scaler_unscales_and_clips_as_torch(selection, max_norm, norm_type):
    scaler = cpu_scaler()
    model, optimizer = backward_pass(scaler)
    if selection == "nothing":
        scaler.unscale_(optimizer)  # A clip of no parameters unscales none.
    selected = SELECTIONS[selection](model, optimizer)
    norm = scaler.clip_grad_norm_(selected, max_norm, norm_type)
    assert_clipped_as_by_torch(norm, model, selection, max_norm, norm_type)


@pytest.mark.sampled
@SELECTION
@NUMBERS
def test_in_one_process_a_disabled_scaler_clips_as_torch(selection, max_norm, norm_type):
    scaler = cpu_scaler(enabled=False)
    model, optimizer = backward_pass(scaler)
    selected = SELECTIONS[selection](model, optimizer)
    norm = scaler.clip_grad_norm_(selected, max_norm, norm_type)
    assert_clipped_as_by_torch(norm, model, selection, max_norm, norm_type)


@pytest.mark.sampled
@SELECTION
@NUMBERS
def test_in_one_process_the_function_clips_as_torch(selection, max_norm, norm_type):
    model, optimizer = backward_pass(cpu_scaler(enabled=False))
    selected = SELECTIONS[selection](model, optimizer)
    norm = clip_grad_norm_(selected, max_norm, norm_type)
    assert_clipped_as_by_torch(norm, model, selection, max_norm, norm_type)


# -- refusals --------------------------------------------------------------------------------------


def scaler_with_gradients() -> tuple[Any, torch.optim.Optimizer]:
    """Return a scaler, and an optimizer with scaled gradients of 3 and 4."""
    parameter, optimizer = sgd(1.0, 2.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, [3.0, 4.0])
    return scaler, optimizer


@pytest.mark.parametrize("max_norm", [-1.0, "much", None, math.nan], ids=repr)
def test_a_max_norm_that_is_no_norm_is_refused_by_name(max_norm):
    scaler, optimizer = scaler_with_gradients()
    with pytest.raises(ConfigError, match="max_norm must be >= 0, not"):
        scaler.clip_grad_norm_(optimizer, max_norm, 2.0)


@pytest.mark.parametrize("norm_type", [-1.0, "much", None, math.nan, 0.0], ids=repr)
def test_a_norm_type_that_is_no_norm_is_refused_by_name(norm_type):
    scaler, optimizer = scaler_with_gradients()
    with pytest.raises(ConfigError, match="norm_type must be > 0, not"):
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type)


def test_a_clip_of_named_parameters_is_refused_with_the_right_call():
    scaler, _ = scaler_with_gradients()
    model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"such as model\.parameters\(\), not tuple"):
        scaler.clip_grad_norm_(model.named_parameters(), 1.0)


def test_a_clip_of_modules_is_refused_with_the_right_call():
    scaler, _ = scaler_with_gradients()
    model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"such as model\.parameters\(\), not Linear"):
        scaler.clip_grad_norm_(model.children(), 1.0)


def test_a_clip_of_parameters_of_an_unknown_optimizer_is_refused_with_the_right_call():
    scaler, _ = scaler_with_gradients()
    model = nn.Linear(1, 1)
    model(torch.ones(1)).backward()
    with pytest.raises(CallOrderError, match="Pass the optimizer to clip_grad_norm_"):
        scaler.clip_grad_norm_(model.parameters(), 1.0)


# -- shards and replicas ---------------------------------------------------------------------------


def parameters_with_gradients(*values: float) -> list[nn.Parameter]:
    """Return parameters of 1, 2, ... elements with scaled gradients of these norms.

    A parameter for which the value is 0 has no gradient.
    """
    parameters = []
    for index, value in enumerate(values):
        size = index + 1
        parameter = nn.Parameter(torch.ones(size))
        if value:
            element = 4.0 * value / math.sqrt(size)
            parameter.grad = torch.full((size,), element)
        parameters.append(parameter)
    return parameters


def norm_of(parameters: Iterable[nn.Parameter], **declarations: Any) -> float:
    """Return the norm of parameters with gradients at a loss scale of 4."""
    scaler = cpu_scaler(4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(parameters)
    return scaler.clip_grad_norm_(optimizer, 1e6, **declarations).item()


def replicas(rank: int) -> float:
    return norm_of(parameters_with_gradients(3.0, 4.0))


def a_part_by_true(rank: int) -> float:
    return norm_of(parameters_with_gradients(3.0 + rank), shard_group_fn=lambda _: True)


def a_part_over_a_group(rank: int) -> float:
    group = dist.group.WORLD
    return norm_of(parameters_with_gradients(3.0 + rank), shard_group_fn=lambda _: group)


def a_part_over_a_mesh(rank: int) -> float:
    device_mesh = mesh((2,), ("d",))
    return norm_of(parameters_with_gradients(3.0 + rank), shard_group_fn=lambda _: device_mesh)


def a_replica_whose_last_bits_differ(rank: int) -> float:
    parameters = parameters_with_gradients(3.0 + 1e-4 * rank, 4.0)
    return norm_of(parameters, is_replicated_fn=lambda _: True)


def a_replica_beside_a_part(rank: int) -> float:
    parameters = parameters_with_gradients(3.0, 4.0 if rank == 0 else 0.0)
    return norm_of(
        parameters,
        is_replicated_fn=lambda parameter: parameter.numel() == 1,
        shard_group_fn=lambda parameter: parameter.numel() > 1,
    )


def tensor_model_parallel(rank: int) -> float:
    """Megatron sets this attribute on shards."""
    parameters: Any = parameters_with_gradients(3.0 + rank)
    parameters[0].tensor_model_parallel = True
    return norm_of(parameters)


def shared(rank: int) -> float:
    """Megatron sets this attribute on a second copy, such as that of tied embeddings."""
    parameters: Any = parameters_with_gradients(5.0)
    if rank == 1:
        parameters[0].shared = True
    return norm_of(parameters, shard_group_fn=lambda _: True)


PARTS = [
    replicas,
    a_part_by_true,
    a_part_over_a_group,
    a_part_over_a_mesh,
    a_replica_whose_last_bits_differ,
    a_replica_beside_a_part,
    tensor_model_parallel,
    shared,
]


@on_ranks(2)
@pytest.mark.parametrize("measure", PARTS, ids=lambda measure: measure.__name__)
def test_each_parameter_is_counted_once(measure):
    """Norms of 3 and 4 make 5, on one rank or on two."""
    norm = measure(dist.get_rank())
    assert norm == pytest.approx(5.0, rel=1e-4)


@on_ranks(2)
def test_the_norm_is_infinite_on_every_rank_if_one_rank_overflowed():
    value = INF if dist.get_rank() == 1 else 1.0
    assert norm_of(parameters_with_gradients(value, 1.0)) == math.inf


@on_ranks(2)
def test_parts_that_are_not_declared_are_refused_with_the_argument_that_declares_them():
    parameters = parameters_with_gradients(3.0 + dist.get_rank())
    with pytest.raises(ReplicaMismatchError, match="shard_group_fn="):
        norm_of(parameters)


@on_ranks(4)
def test_a_replica_in_both_dimensions_of_a_mesh_counts_once():
    grid = mesh((2, 2), ("a", "b"))
    placements = [Replicate(), Replicate()]
    values = torch.zeros(3)
    weight = nn.Parameter(DTensor.from_local(values, grid, placements))
    gradient = torch.full((3,), 4.0)
    weight.grad = DTensor.from_local(gradient, grid, placements)
    scaler = cpu_scaler(4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(3))


# -- messages --------------------------------------------------------------------------------------

MESSAGES = pytest.mark.parametrize(("norm_type", "messages"), [(2.0, 1), (3.0, 1), (INF, 2)])


def assert_messages_of_clips(
    gradient: Tensor, whole: Tensor, norm_type: float, messages: int, **declarations: Any
) -> None:
    """Clip the gradient of this rank in three iterations, and check norm, result and messages.

    The first clip also compares the replicas, so its messages are not counted.
    """
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = cpu_scaler(init_scale=4.0)
    for iteration in range(3):
        scaler.scale(torch.ones(()))
        weight.grad = gradient * 4.0
        with count_collectives() as collectives:
            norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type, **declarations)
        if iteration > 0:
            assert collectives.count == messages
        expected_norm = torch.linalg.vector_norm(whole, norm_type)
        torch.testing.assert_close(norm, expected_norm)
        clipped = gradient / expected_norm
        torch.testing.assert_close(weight.grad, clipped, rtol=1e-5, atol=0.0)
        scaler.step(optimizer)
        scaler.update()


@on_ranks(2)
@MESSAGES
def test_a_clip_of_replicas_is_one_message_except_for_a_largest_magnitude(norm_type, messages):
    """The message with the overflow flag also has the norm, which must be a sum."""
    gradient = torch.tensor([3.0, 4.0])
    assert_messages_of_clips(gradient, gradient, norm_type, messages)


@on_ranks(2)
@MESSAGES
def test_a_clip_of_parts_is_one_message_except_for_a_largest_magnitude(norm_type, messages):
    gradient = torch.tensor([3.0, 4.0]) * (1.0 + dist.get_rank())
    whole = torch.tensor([3.0, 4.0, 6.0, 8.0])
    assert_messages_of_clips(gradient, whole, norm_type, messages, shard_group_fn=lambda _: True)


# -- overflows and several optimizers --------------------------------------------------------------


@on_ranks(2)
def test_an_overflow_beside_the_clipped_parameters_skips_the_step_and_leaves_their_norm():
    """Rank 1 has the inf, in a parameter of the same optimizer that is not clipped."""
    clipped = torch.ones(1, requires_grad=True)
    unclipped = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([clipped, unclipped], lr=1.0)
    guard = StepGuard()
    guard.register_optimizers(optimizer)
    for overflow in (False, True):
        clipped.grad = torch.tensor([4.0])
        bad_rank = overflow and dist.get_rank() == 1
        unclipped.grad = torch.tensor([INF if bad_rank else 1.0])
        norm = guard.clip_grad_norm_(clipped, 1.0)
        assert norm.item() == 4.0
        assert guard.found_inf(optimizer).item() == float(overflow)
        guard.step(optimizer)
        guard.update()
        assert guard.step_was_taken(optimizer) is not overflow


def test_gradients_that_are_unscaled_already_are_clipped_with_those_that_are_not():
    first, first_optimizer = sgd(0.0, 0.0)
    second, second_optimizer = sgd(0.0, 0.0)
    scaler = cpu_scaler(4.0)
    scaler.register_optimizers(first_optimizer, second_optimizer)
    loss = first.sum() + second.sum()
    scaler.scale(loss).backward()
    scaler.unscale_(first_optimizer)
    norm = scaler.clip_grad_norm_([first, second], 1.0)
    assert norm.item() == pytest.approx(2.0)
    scaler.step(first_optimizer)
    scaler.step(second_optimizer)
    assert first.tolist() == pytest.approx([-0.5, -0.5], abs=1e-5)
    assert second.tolist() == pytest.approx([-0.5, -0.5], abs=1e-5)


@on_ranks(2)
def test_a_norm_that_is_not_finite_changes_nothing_and_once_agreed_on_compares_no_more():
    """The second gradient of rank 1 overflows, and the third differs from that of rank 0."""
    parameter, optimizer = sgd(1.0, 1.0)
    scaler = cpu_scaler()
    for gradient_of_rank_1 in (3.0, INF, 4.0):
        optimizer.zero_grad()
        gradient = gradient_of_rank_1 if dist.get_rank() == 1 else 3.0
        backward(scaler, parameter, [0.25, gradient])
        norm = scaler.clip_grad_norm_(optimizer, 1e6)
        scaler.step(optimizer)
        assert bool(norm.isfinite()) is (gradient_of_rank_1 != INF)
        assert parameter.grad[0].item() == 0.25
        scaler.update()
    assert scaler.step_counts(optimizer).skipped == 1


# -- FSDP1 with HYBRID_SHARD -----------------------------------------------------------------------


def hybrid_shard() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model of 40 weights on two groups of two ranks, its optimizer and the mesh."""
    grid = mesh((2, 2), ("replicate", "shard"))
    layer = nn.Linear(8, 5, bias=False)
    model = FullyShardedDataParallel(
        layer,
        device_mesh=grid,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, grid


def backward_of_halves(model: nn.Module, scaler: Any) -> None:
    """Give all 40 weights a gradient of 0.5, which makes a norm of sqrt(10)."""
    inputs = torch.full((1, 8), 0.5)
    scaler.scale(model(inputs).sum()).backward()


@on_ranks(4)
def test_copies_of_shards_are_refused_until_they_are_declared_and_then_counted_once():
    model, optimizer, grid = hybrid_shard()
    scaler = cpu_scaler()
    backward_of_halves(model, scaler)
    with pytest.raises(GradientError, match="shard_group_fn="):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.update()
    optimizer.zero_grad()

    backward_of_halves(model, scaler)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, shard_group_fn=lambda _: grid["shard"])
    assert norm.item() == pytest.approx(math.sqrt(10.0), rel=1e-6)

    squares = torch.zeros(1)
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares += parameter.grad.square().sum()
    dist.all_reduce(squares)
    # Two groups of ranks have the whole model, clipped to 1.
    assert squares.item() == pytest.approx(2.0, rel=1e-5)
