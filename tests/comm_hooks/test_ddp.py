"""Hooks under DDP beside DDP without one, and beside torch's own hooks."""

import contextlib
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from distamp import comm_hooks
from distamp.comm_hooks import WIRE_FORMATS
from tests.comm_hooks.training import (
    BOUNDS,
    errors,
    gradients,
    inputs,
    mlp,
    train_layouts,
    wrapped,
)

WIDTHS = (31, 97, 64, 5)


def _error(mine: Tensor, true: Tensor) -> float:
    return ((mine - true).norm() / true.norm()).item()


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


def _accumulated() -> float:
    found = []
    for wire in (None, "fp16"):
        model, _ = wrapped(mlp(*WIDTHS), wire)
        for step in range(6):
            with model.no_sync() if step % 3 != 2 else contextlib.nullcontext():
                model(inputs(step, WIDTHS[0])).square().sum().backward()
        found.append(gradients(model))
    return _error(found[1], found[0])


def test_accumulation_under_no_sync(ranks2):
    assert max(ranks2.run(_accumulated)) <= BOUNDS["fp16"]


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
    return same, _error(mine_dense, dense), dict(state.stats().fallbacks)


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
    return _error(found[1], found[0])


def test_two_models_in_one_backward_pass(ranks2):
    assert max(ranks2.run(_two_models)) <= BOUNDS["fp16"]


def _compiled() -> float:
    import torch._dynamo as dynamo

    plain, _ = wrapped(mlp(*WIDTHS), None)
    x = inputs(0, WIDTHS[0])
    plain(x).square().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch's own, about its graphs.
        hooked, _ = wrapped(mlp(*WIDTHS), "fp16", bucket_cap_mb=25)
        torch.compile(hooked, backend="aot_eager")(x).square().sum().backward()
    dynamo.reset()
    return _error(gradients(hooked), gradients(plain))


@pytest.mark.slow
def test_compiled_models(new_ranks):
    assert max(new_ranks(2, timeout=280).run(_compiled)) <= BOUNDS["fp16"]


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
    return _error(found[1], found[0]), dict(own.stats().fallbacks)


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
