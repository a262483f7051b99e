"""Hooks under DDP beside DDP without one, and beside torch's own hooks."""

import copy
import inspect
import io
import os
import pickle
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from distamp import comm_hooks
from distamp.comm_hooks import WIRE_FORMATS, formats
from tests.comm_hooks.training import (
    BOUNDS,
    WIDTHS,
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

# -- every format, every way DDP works -------------------------------------------------------------


@pytest.mark.parametrize("wire", list(WIRE_FORMATS))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_those_of_plain_ddp(ranks, size, wire):
    for found in ranks(size).run(errors, mlp(*WIDTHS), wire, WIDTHS[0]):
        assert max(found) <= BOUNDS[wire]


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


@pytest.mark.parametrize("view", [False, True])
def test_parameters_that_a_rank_does_not_use(ranks4, view):
    settings = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    for found in ranks4.run(errors, _Branches(), "fp16", 20, **settings):
        assert max(found) <= BOUNDS["fp16"]


def test_accumulation_under_no_sync(ranks2):
    for found in ranks2.run(errors, mlp(*WIDTHS), "fp16", WIDTHS[0], micro_batches=3):
        assert max(found) <= BOUNDS["fp16"]


def _sparse() -> tuple[bool, float, dict[str, int]]:
    found = []
    for wire in (None, "fp16"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 300, bias=False))
        model, state = wrapped(net, wire)
        tokens = torch.arange(3) + 7 * dist.get_rank()
        model(tokens).square().sum().backward()
        embedding, linear = model.module
        found.append((embedding.weight.grad, gradients(linear)))
    (sparse, dense), (mine, mine_dense) = found
    same = mine.is_sparse and torch.equal(mine.to_dense(), sparse.to_dense())
    return same, relative(mine_dense, dense), dict(state.stats().fallbacks)


def test_sparse_gradients_are_passed_by(ranks2):
    for same, error, fallbacks in ranks2.run(_sparse):
        assert same
        assert error <= BOUNDS["fp16"]
        assert fallbacks == {"gradients reduced as they are: sparse": 1}


def _two_models() -> float:
    """Two models whose hooks share one state, in one backward pass."""
    found = []
    for hooked in (False, True):
        models = [wrapped(mlp(*WIDTHS, seed=seed), None)[0] for seed in (0, 1)]
        for model in models if hooked else []:
            model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
        x = inputs(0, WIDTHS[0])
        torch.stack([model(x).square().sum() for model in models]).sum().backward()
        found.append(torch.cat([gradients(model) for model in models]))
    return relative(found[1], found[0])


def test_two_models_in_one_backward_pass(ranks2):
    assert max(ranks2.run(_two_models)) <= BOUNDS["fp16"]


# -- beside torch's hooks --------------------------------------------------------------------------


def _dropped_in(name: str, state: Any, dtype: torch.dtype) -> tuple[float, dict[str, int]]:
    """How far gradients through a hook of torch's name are from those without, and its stats."""
    found = []
    own = comm_hooks.CommHookState(name[:4])
    given = {"none": None, "group": dist.group.WORLD, "own": own}.get(state, state)
    hook = getattr(comm_hooks, name)
    if name.endswith("wrapper"):
        inner = powerSGD_hook.powerSGD_hook if state == "PowerSGD" else default_hooks.allreduce_hook
        hook, given = hook(inner), None
        if state == "PowerSGD":
            given = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=100)
    for hooked in (False, True):
        model, _ = wrapped(mlp(*WIDTHS).to(dtype), None)
        if hooked:
            model.register_comm_hook(given, hook)
        model(inputs(0, WIDTHS[0]).to(dtype)).float().square().sum().backward()
        found.append(gradients(model).float())
    return relative(found[1], found[0]), dict(own.stats().fallbacks)


@pytest.mark.parametrize(
    ("name", "state", "bound"),
    [
        ("fp16_compress_hook", "none", BOUNDS["fp16"]),
        ("fp16_compress_hook", "group", BOUNDS["fp16"]),
        ("bf16_compress_hook", "none", BOUNDS["bf16"]),
        ("bf16_compress_hook", "own", BOUNDS["bf16"]),
        ("fp16_compress_wrapper", "allreduce", 1e-3),
        ("fp16_compress_wrapper", "PowerSGD", 1e-3),
        ("bf16_compress_wrapper", "allreduce", 8e-3),
    ],
)
def test_hooks_of_torchs_names_take_what_torchs_take(ranks2, name, state, bound):
    for error, _ in ranks2.run(_dropped_in, name, state, torch.float32):
        assert 0 < error <= bound
    ours, theirs = getattr(comm_hooks, name), getattr(default_hooks, name)
    assert len(inspect.signature(ours).parameters) == len(inspect.signature(theirs).parameters)
    assert pickle.loads(pickle.dumps(ours)) is ours


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_gradients_of_two_bytes_are_sent_in_two_bytes(ranks2, dtype, bound):
    for error, fallbacks in ranks2.run(_dropped_in, "fp16_compress_hook", "own", dtype):
        assert error <= bound
        (why,) = fallbacks
        assert why == f"gradients reduced as they are: {str(dtype)[6:]} is no wider than fp16"


# -- nothing hangs, nothing is left ----------------------------------------------------------------


@pytest.mark.parametrize(("size", "layouts"), [(2, 8), (4, 6), (8, 2)])
def test_random_bucket_layouts(ranks, size, layouts):
    # Each layout is one that a longer run has too; a hang ends the pool with every rank's stack.
    for wrong in ranks(size).run(train_layouts, list(range(layouts)), timeout=240):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 1000, 50))
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_thousand_random_bucket_layouts(ranks, size, start):
    seeds = list(range(start, start + 50))
    for wrong in ranks(size).run(train_layouts, seeds, timeout=240):
        assert wrong == []


# -- odd parameters, and torch's defaults ----------------------------------------------------------


class _Odd(nn.Module):
    """A complex parameter, a real one, and one without elements in a bucket of its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 9, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(9))
        self.nothing = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias + self.nothing.sum()


@pytest.mark.parametrize("wire", list(comm_hooks.WIRE_FORMATS))
def test_complex_gradients_and_buckets_without_elements_are_exchanged(ranks4, wire):
    for found in ranks4.run(errors, _Odd(), wire, 40):
        assert max(found) <= BOUNDS[wire]


class _Uneven(nn.Module):
    """Weights, and biases between them whose gradients are so much smaller; each is given."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        shapes = [(72, 67), (64,)] * 6
        self.both = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.factors = [1.0, ratio] * 6

    def given(self, rank: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(100 + rank)
        pairs = zip(self.both, self.factors, strict=True)
        return [torch.randn(p.shape, generator=draw) * factor for p, factor in pairs]

    def forward(self, given: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.both, given, strict=True)]).sum()


def _worst(wrapper: str, wire: str, ranks_per_host: int) -> float:
    """The largest relative error of a parameter at any ratio."""
    rank, size, worst = dist.get_rank(), dist.get_world_size(), 0.0
    for power in range(1, 8):
        net = _Uneven(10.0**-power)
        everyone = [net.given(each) for each in range(size)]
        sizes = [each.numel() for each in everyone[0]]
        model: Any = DistributedDataParallel(net) if wrapper == "DDP" else fully_shard(net)
        comm_hooks.register(model, wire, ranks_per_host=ranks_per_host)
        model(everyone[rank]).backward()
        flat = torch.stack([torch.cat([g.flatten() for g in each]) for each in everyone])
        exact, mine = flat.double().mean(0), full_gradients(model).double()
        for ours, true in zip(mine.split(sizes), exact.split(sizes), strict=True):
            worst = max(worst, relative(ours, true))
    return worst


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize(
    ("wrapper", "wire", "bound"),
    [
        ("DDP", "fp16", 4e-4),
        ("DDP", "int8", 2e-2),
        ("FSDP2", "fp16", 4e-4),
        ("FSDP2", "int8", 2e-2),
    ],
)
def test_a_small_parameter_among_large_ones_arrives_as_well(
    ranks4, wrapper, wire, bound, ranks_per_host
):
    assert max(ranks4.run(_worst, wrapper, wire, ranks_per_host)) <= bound


def _by_default(device: str | None, dtype: torch.dtype, wire: str) -> Tensor:
    model = DistributedDataParallel(mlp(31, 97, 64, 5), bucket_cap_mb=0.02)
    given = [inputs(step, 31) for step in range(3)]
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        state = comm_hooks.register(model, wire)
        for x in given:
            model(x).square().mean().backward()
            state.load_state_dict(state.state_dict())
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return gradients(model)


@pytest.mark.parametrize(
    ("device", "dtype"), [("meta", torch.float32), (None, torch.float64)], ids=str
)
def test_torchs_defaults_of_device_and_dtype_change_no_bit(ranks2, device, dtype):
    plain = ranks2.run(_by_default, None, torch.float32, "int8")
    assert all(map(torch.equal, ranks2.run(_by_default, device, dtype, "int8"), plain))


# -- failures, and copies --------------------------------------------------------------------------


def _fails(wrapper: str, how: str) -> list[str]:
    """What passes say from the third on, in which rank 1 fails or is gone."""
    model, _ = spread(wrapper)
    comm_hooks.register(model, "fp16")
    said = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if how == "dies":
            os._exit(3)
        raise RuntimeError("out of memory")

    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            formats.encode = broken
        if step == 2 and dist.get_rank() == 2 and how == "one hears late":
            time.sleep(1)
        try:
            model(inputs(step, WIDTHS[0])).square().mean().backward()
        except RuntimeError as error:
            said.append(f"in pass {step}: {error}")
    return said


@pytest.mark.parametrize(
    ("wrapper", "how"), [("DDP", "raises"), ("DDP", "one hears late"), ("FSDP2", "raises")]
)
def test_an_exchange_that_fails_on_one_rank_is_raised_on_every_rank_and_from_then_on(
    new_ranks, wrapper, how
):
    found = new_ranks(3, group_timeout=120).run(_fails, wrapper, how)
    assert all(
        [each.split(":")[0] for each in said] == ["in pass 2", "in pass 3", "in pass 4"]
        for said in found
    )
    assert "out of memory" in found[1][0]


def test_where_a_rank_is_gone_the_others_raise(new_ranks):
    found = new_ranks(4, group_timeout=60).run(_fails, "DDP", "dies", may_die=[1])
    assert all(found[rank][0].startswith("in pass 2: ") for rank in (0, 2, 3))


def _copied(how: str) -> tuple[list[str], float, int]:
    """What was warned of, and whether a copy sends what it says once it is registered."""
    model, _ = wrapped(mlp(*WIDTHS), "int8")
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "AveragedModel":
            twin = AveragedModel(model).module
        elif how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
    warned = [str(each.message) for each in caught if each.category is UserWarning]
    again = comm_hooks.register(twin, "int8")
    for each in (model, twin):
        each.zero_grad()
        each(inputs(1, WIDTHS[0])).square().mean().backward()
    return warned, relative(gradients(twin), gradients(model)), again.stats().exchanges


@pytest.mark.parametrize("how", ["deepcopy", "AveragedModel", "save"])
def test_a_model_with_a_hook_can_be_copied(ranks2, how):
    for warned, error, exchanges in ranks2.run(_copied, how):
        (message,) = set(warned)
        assert "uncompressed" in message
        assert 'distamp.comm_hooks.register(model, "int8")' in message
        assert error < 2e-2
        assert exchanges > 0
