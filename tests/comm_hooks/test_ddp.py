"""Hooks under DDP beside DDP without one, and beside torch's own hooks."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from distamp import comm_hooks
from distamp.comm_hooks import WIRE_FORMATS
from tests.comm_hooks.training import (
    BOUNDS,
    Branches,
    agreed,
    errors,
    gradients,
    inputs,
    mlp,
    train_layouts,
    wrapped,
)

WIDTHS = (31, 97, 64, 5)


# -- every format, every way DDP works --------------------------------------------------------


def _errors(wires: Sequence[str], **settings: Any) -> dict[str, float]:
    """The formats whose gradients are wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed find_unused_parameters")
        found = {w: max(errors(mlp(*WIDTHS), w, WIDTHS[0], **settings)) for w in wires}
    return {wire: error for wire, error in found.items() if not error <= BOUNDS[wire]}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_those_of_plain_ddp(ranks, size):
    assert ranks(size).run(_errors, list(WIRE_FORMATS)) == [{}] * size


@pytest.mark.parametrize(
    "settings",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 1e-6},
    ],
    ids=str,
)
def test_settings_of_ddp(ranks2, settings):
    assert ranks2.run(_errors, ["fp16"], **settings) == [{}, {}]


def _unused(wire: str, view: bool) -> list[float]:
    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        # Rank 0 goes left and the others right; in the second iteration nobody goes left.
        left = dist.get_rank() == 0 and float(x[0, 0]) != float(inputs(1, 20)[0, 0])
        return model(x, left)

    return errors(
        Branches(),
        wire,
        20,
        call=call,
        find_unused_parameters=True,
        gradient_as_bucket_view=view,
    )


@pytest.mark.parametrize("view", [False, True])
def test_parameters_that_a_rank_does_not_use(ranks4, view):
    assert max(map(max, ranks4.run(_unused, "fp16", view))) <= BOUNDS["fp16"]


def _accumulated() -> float:
    net = mlp(*WIDTHS)
    found = []
    for wire in (None, "fp16"):
        model, _ = wrapped(net, wire)
        for step in range(6):
            quiet = model.no_sync() if step % 3 != 2 else contextlib.nullcontext()
            with quiet:
                model(inputs(step, WIDTHS[0])).square().sum().backward()
        found.append(gradients(model))
    return ((found[0] - found[1]).norm() / found[0].norm()).item()


def test_accumulation_under_no_sync(ranks2):
    assert max(ranks2.run(_accumulated)) <= BOUNDS["fp16"]


def _sparse() -> tuple[bool, bool, float, dict[str, int]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3))
    found = []
    for wire in (None, "fp16"):
        model, state = wrapped(net, wire)
        for step in range(2):
            model.zero_grad()
            tokens = torch.arange(3) + 7 * dist.get_rank() + step
            model(tokens).square().sum().backward()
        weight, other = net[0].weight, model.module[0].weight
        assert weight is not other
        found.append((other.grad.coalesce(), gradients(model.module[1])))
    (sparse, dense), (sparse_hooked, dense_hooked) = found
    assert state is not None
    return (
        sparse_hooked.is_sparse,
        torch.equal(sparse.to_dense(), sparse_hooked.to_dense()),
        ((dense - dense_hooked).norm() / dense.norm()).item(),
        dict(state.stats().fallbacks),
    )


def test_sparse_gradients_are_passed_by(ranks2):
    for is_sparse, equal, error, fallbacks in ranks2.run(_sparse):
        assert is_sparse
        assert equal
        assert error <= BOUNDS["fp16"]
        assert fallbacks == {"sparse gradient all-reduced as it is": 2}


def _uneven(wire: str | None) -> torch.Tensor:
    model, _ = wrapped(mlp(*WIDTHS), wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(inputs(step, WIDTHS[0])).square().sum().backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _uneven_pair() -> tuple[float, bool]:
    plain, hooked = _uneven(None), _uneven("fp16")
    return ((plain - hooked).norm() / plain.norm()).item(), agreed(hooked)


def test_uneven_inputs_under_join(ranks4):
    for error, same in ranks4.run(_uneven_pair):
        assert error <= 1e-4
        assert same


def _two_models() -> tuple[float, float]:
    """Two models whose hooks share one state, their backward passes interleaved."""
    nets = [mlp(*WIDTHS, seed=seed) for seed in (0, 1)]
    plain = [wrapped(net, None)[0] for net in nets]
    hooked = [wrapped(net, None)[0] for net in nets]
    for model in hooked:
        model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    for models in (plain, hooked):
        for step in range(2):
            losses = []
            for model in models:
                model.zero_grad()
                losses.append(model(inputs(step, WIDTHS[0])).square().sum())
            (losses[0] + losses[1]).backward()
    return tuple(
        ((gradients(a) - gradients(b)).norm() / gradients(a).norm()).item()
        for a, b in zip(plain, hooked, strict=True)
    )


def test_two_models_in_one_backward_pass(ranks2):
    assert max(map(max, ranks2.run(_two_models))) <= BOUNDS["fp16"]


def _compiled(reducer: str) -> tuple[float, dict[str, int]]:
    import torch._dynamo as dynamo

    net = mlp(*WIDTHS)
    plain, _ = wrapped(net, None)
    x = inputs(0, WIDTHS[0])
    plain(x).square().sum().backward()
    with warnings.catch_warnings(), dynamo.config.patch(optimize_ddp=reducer or True):
        warnings.simplefilter("ignore")  # of torch's own, about its graphs
        hooked, state = wrapped(net, "fp16", bucket_cap_mb=25)
        loss = torch.compile(hooked, backend="aot_eager")(x).square().sum()
        with contextlib.ExitStack() as stack:
            if reducer:
                compiler = torch.compile(backend="aot_eager")
                stack.enter_context(dynamo.compiled_autograd._enable(compiler))
            loss.backward()
    dynamo.reset()
    a, b = gradients(plain), gradients(hooked)
    return ((a - b).norm() / a.norm()).item(), dict(state.stats().fallbacks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reducer", "counted"),
    [
        ("", {}),
        (
            "python_reducer",
            # Of every weight and bias one.
            {"gradient all-reduced by torch.compile's Python reducer": 6},
        ),
    ],
)
def test_compiled_models(new_ranks, reducer, counted):
    for error, fallbacks in new_ranks(2, timeout=280).run(_compiled, reducer):
        assert error <= BOUNDS["fp16"]
        assert fallbacks == counted


def _half(dtype: torch.dtype) -> tuple[float, dict[str, int]]:
    net = mlp(*WIDTHS).to(dtype)
    found = []
    for hooked in (False, True):
        model, _ = wrapped(net, None)
        state = comm_hooks.CommHookState("fp16")
        if hooked:
            model.register_comm_hook(state, comm_hooks.fp16_compress_hook)
        model(inputs(0, WIDTHS[0]).to(dtype)).float().square().sum().backward()
        found.append(gradients(model).float())
    error = ((found[0] - found[1]).norm() / found[0].norm()).item()
    return error, dict(state.stats().fallbacks)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_gradients_of_two_bytes_are_sent_in_two_bytes(ranks2, dtype, bound):
    for error, fallbacks in ranks2.run(_half, dtype):
        assert error <= bound
        assert list(fallbacks) == [f"{str(dtype)[6:]} gradients all-reduced as they are"]


# -- beside torch's hooks ---------------------------------------------------------------------


def _dropped_in(name: str, state: str) -> float:
    net = mlp(*WIDTHS)
    plain, _ = wrapped(net, None)
    hooked, _ = wrapped(net, None)
    states: dict[str, Any] = {
        "none": None,
        "group": dist.group.WORLD,
        "own": comm_hooks.CommHookState("bf16" if name.startswith("bf16") else "fp16"),
    }
    hooked.register_comm_hook(states[state], getattr(comm_hooks, name))
    for model in (plain, hooked):
        model(inputs(0, WIDTHS[0])).square().sum().backward()
    a, b = gradients(plain), gradients(hooked)
    return ((a - b).norm() / a.norm()).item()


@pytest.mark.parametrize("state", ["none", "group", "own"])
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
def test_hooks_take_what_torch_s_take(ranks2, name, state):
    assert max(ranks2.run(_dropped_in, name, state)) <= BOUNDS[name[:4]]


@pytest.mark.parametrize(
    "name",
    [
        "fp16_compress_hook",
        "bf16_compress_hook",
        "fp16_compress_wrapper",
        "bf16_compress_wrapper",
    ],
)
def test_hooks_have_torch_s_parameters_and_can_be_pickled(name):
    ours, theirs = getattr(comm_hooks, name), getattr(default_hooks, name)
    count = len(inspect.signature(theirs).parameters)
    assert len(inspect.signature(ours).parameters) == count
    assert pickle.loads(pickle.dumps(ours)) is ours


def _wrapped_hook(name: str, hook: str) -> tuple[float, bool]:
    net = mlp(*WIDTHS)
    plain, _ = wrapped(net, None)
    hooked, _ = wrapped(net, None)
    state: Any = None
    inner: Any = default_hooks.allreduce_hook
    if hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=100)
        inner = powerSGD_hook.powerSGD_hook
    hooked.register_comm_hook(state, getattr(comm_hooks, name)(inner))
    for model in (plain, hooked):
        model(inputs(0, WIDTHS[0])).square().sum().backward()
    a, b = gradients(plain), gradients(hooked)
    return ((a - b).norm() / a.norm()).item(), torch.equal(a, b)


@pytest.mark.parametrize("hook", ["allreduce", "PowerSGD"])
@pytest.mark.parametrize(
    ("name", "bound"), [("fp16_compress_wrapper", 1e-3), ("bf16_compress_wrapper", 8e-3)]
)
def test_wrappers_cast_for_another_hook(ranks2, name, bound, hook):
    for error, equal in ranks2.run(_wrapped_hook, name, hook):
        assert error <= bound
        assert not equal


# -- nothing hangs, nothing is left -----------------------------------------------------------


@pytest.mark.parametrize(("size", "layouts"), [(2, 30), (4, 30), (8, 10)])
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
