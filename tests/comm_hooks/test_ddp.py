"""Hooks under DDP beside DDP without one, and beside torch's own hooks."""

import copy
import inspect
import os
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import COMM_FORMATS
from tests.comm_hooks.training import (
    BOUNDS,
    WIDTHS,
    Given,
    errors,
    full_gradients,
    gradients,
    inputs,
    mlp,
    relative,
    spread,
    train_layouts,
    wrapped,
)
from tests.on_ranks import on_ranks

# -- every format, every way DDP works -------------------------------------------------------------


@on_ranks("size")
@pytest.mark.parametrize("wire", list(COMM_FORMATS))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_those_of_plain_ddp(size, wire):
    assert max(errors(mlp(*WIDTHS), wire, WIDTHS[0])) <= BOUNDS[wire]


class _Branches(nn.Module):
    """Two branches: rank 0 goes left and the others right; after the first time nobody left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.left, self.right = (nn.Linear(20, 20) for _ in range(3))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = torch.tanh(self.stem(x))
        return self.left(x) if dist.get_rank() == 0 and self.passes != 2 else self.right(x)


@on_ranks(4)
def test_parameters_that_a_rank_does_not_use():
    assert max(errors(_Branches(), "fp16", 20, find_unused_parameters=True)) <= BOUNDS["fp16"]


@on_ranks(2)
def test_accumulation_under_no_sync():
    assert max(errors(mlp(*WIDTHS), "fp16", WIDTHS[0], micro_batches=3)) <= BOUNDS["fp16"]


@on_ranks(2)
def test_sparse_gradients_are_passed_by():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 300, bias=False))
    (plain, _), (hooked, state) = wrapped(net, None), wrapped(net, "fp16")
    for model in (plain, hooked):
        model(torch.arange(3) + 7 * dist.get_rank()).square().sum().backward()
    (sparse, dense), (mine, mine_dense) = (
        [p.grad for p in model.parameters()] for model in (plain, hooked)
    )
    assert mine.is_sparse
    assert torch.equal(mine.to_dense(), sparse.to_dense())
    assert relative(mine_dense, dense) <= BOUNDS["fp16"]
    assert state.stats().fallbacks == {"gradients reduced uncompressed: sparse": 1}


@on_ranks(2)
def test_two_models_whose_hooks_share_one_state_in_one_backward_pass():
    found = []
    for hooked in (False, True):
        models = [wrapped(mlp(*WIDTHS, seed=seed), None)[0] for seed in (0, 1)]
        for model in models if hooked else []:
            model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
        x = inputs(0, WIDTHS[0])
        torch.stack([model(x).square().sum() for model in models]).sum().backward()
        found.append(torch.cat([gradients(model) for model in models]))
    assert relative(found[1], found[0]) <= BOUNDS["fp16"]


# -- beside torch's hooks --------------------------------------------------------------------------


def _beside(hook: Any, state: Any, dtype: torch.dtype = torch.float32) -> float:
    """How far gradients through a hook are from those without."""
    found = []
    for hooked in (False, True):
        model, _ = wrapped(mlp(*WIDTHS).to(dtype), None)
        if hooked:
            model.register_comm_hook(state, hook)
        model(inputs(0, WIDTHS[0]).to(dtype)).float().square().sum().backward()
        found.append(gradients(model).float())
    return relative(found[1], found[0])


@on_ranks(2)
@pytest.mark.parametrize("state", ["none", "group", "own"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_hooks_of_torchs_names_take_what_torchs_take(name, state):
    given = {"none": None, "group": dist.group.WORLD, "own": comm_hooks.CommHook(name)}[state]
    assert 0 < _beside(getattr(comm_hooks, f"{name}_compress_hook"), given) <= BOUNDS[name]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "inner", "bound"),
    [("fp16", "allreduce", 1e-3), ("fp16", "PowerSGD", 1e-3), ("bf16", "allreduce", 8e-3)],
)
def test_wrappers_of_torchs_names_take_what_torchs_take(name, inner, bound):
    hook, state = default_hooks.allreduce_hook, None
    if inner == "PowerSGD":
        hook = powerSGD_hook.powerSGD_hook
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=100)
    assert 0 < _beside(getattr(comm_hooks, f"{name}_compress_wrapper")(hook), state) <= bound


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["hook", "wrapper"])
def test_their_signatures_are_torchs_and_they_can_be_pickled(wire, kind):
    ours, theirs = (getattr(it, f"{wire}_compress_{kind}") for it in (comm_hooks, default_hooks))
    assert len(inspect.signature(ours).parameters) == len(inspect.signature(theirs).parameters)
    assert pickle.loads(pickle.dumps(ours)) is ours


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_gradients_of_two_bytes_are_sent_in_two_bytes(dtype, bound):
    own = comm_hooks.CommHook("fp16")
    assert _beside(comm_hooks.fp16_compress_hook, own, dtype) <= bound
    (why,) = own.stats().fallbacks
    assert why == f"gradients reduced uncompressed: {str(dtype)[6:]} is no wider than fp16"


# -- nothing hangs, nothing is left ----------------------------------------------------------------


THOUSAND = [
    pytest.param(size, start, 50, marks=pytest.mark.slow)
    for size in (2, 4, 8)
    for start in range(0, 1000, 50)
]


@pytest.mark.parametrize(("size", "start", "count"), [(2, 0, 8), (4, 0, 6), (8, 0, 2), *THOUSAND])
def test_a_thousand_random_bucket_layouts(ranks, size, start, count):
    # A hang ends the pool with every rank's stack.
    for wrong in ranks(size).run(train_layouts, list(range(start, start + count)), timeout=240):
        assert wrong == []


# -- small parameters ------------------------------------------------------------------------------

SHAPES = [(72, 67), (64,)] * 6


def _given(rank: int, ratio: float) -> list[Tensor]:
    """Gradients of weights, and of biases between them, which are so much smaller."""
    draw = torch.Generator().manual_seed(100 + rank)
    pairs = zip(SHAPES, [1.0, ratio] * 6, strict=True)
    return [torch.randn(shape, generator=draw) * factor for shape, factor in pairs]


@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize(("wire", "bound"), [("fp16", 4e-4), ("int8", 2e-2)])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_small_parameter_among_large_ones_arrives_as_well(wrapper, wire, bound, ranks_per_host):
    for power in (1, 4, 7):
        net, everyone = Given(*SHAPES), [_given(each, 10.0**-power) for each in range(4)]
        model: Any = DistributedDataParallel(net) if wrapper == "DDP" else fully_shard(net)
        comm_hooks.register_comm_hook(model, wire, ranks_per_host=ranks_per_host)
        model(everyone[dist.get_rank()]).backward()
        flat = torch.stack([torch.cat([g.flatten() for g in each]) for each in everyone])
        parts = [each.numel() for each in everyone[0]]
        exact, mine = flat.double().mean(0).split(parts), full_gradients(model).split(parts)
        assert max(map(relative, mine, exact)) <= bound


# -- failures, and copies --------------------------------------------------------------------------


def _fails(wrapper: str, how: str, wire: str = "fp16") -> list[str]:
    """What passes say from the third on, in which rank 1 fails or is gone."""
    model, _ = spread(wrapper)
    comm_hooks.register_comm_hook(model, wire)
    said = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if how == "dies":
            os._exit(3)
        raise RuntimeError("out of memory")

    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            format_class = type(COMM_FORMATS[wire])
            format_class.encode = broken
        if step == 2 and dist.get_rank() == 2 and how == "one hears late":
            time.sleep(1)
        try:
            model(inputs(step, WIDTHS[0])).square().mean().backward()
        except RuntimeError as error:
            said.append(f"in pass {step}: {error}")
    return said


@pytest.mark.parametrize(
    ("wrapper", "how", "wire"),
    [
        ("DDP", "raises", "fp16"),
        ("DDP", "one hears late", "fp16"),
        # In which some parameters go as they are.
        ("DDP", "raises", "int8"),
        ("FSDP2", "raises", "fp16"),
    ],
)
def test_an_exchange_that_fails_on_one_rank_is_raised_on_every_rank_and_from_then_on(
    new_ranks, wrapper, how, wire
):
    found = new_ranks(3, group_timeout=120).run(_fails, wrapper, how, wire)
    assert all(
        [each.split(":")[0] for each in said] == ["in pass 2", "in pass 3", "in pass 4"]
        for said in found
    )
    assert "out of memory" in found[1][0]


def test_where_a_rank_is_gone_the_others_raise(new_ranks):
    found = new_ranks(4, group_timeout=60).run(_fails, "DDP", "dies", may_die=[1])
    assert all(found[rank][0].startswith("in pass 2: ") for rank in (0, 2, 3))


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@on_ranks(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_model_with_a_hook_can_be_copied_and_its_copy_says_how_it_is_registered(copied):
    model, _ = wrapped(mlp(*WIDTHS), "int8")
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    with pytest.warns(
        UserWarning, match=r'uncompressed.*comm_hooks\.register_comm_hook\(model, "int8"\)'
    ):
        twin = copied(model)
    again = comm_hooks.register_comm_hook(twin, "int8")
    for each in (model, twin):
        each.zero_grad()
        each(inputs(1, WIDTHS[0])).square().mean().backward()
    assert relative(gradients(twin), gradients(model)) < 2e-2
    assert again.stats().exchanges > 0
