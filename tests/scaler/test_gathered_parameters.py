"""Clips and reports where FSDP has gathered parameters, which have no gradients then.

A forward pass without a backward pass, such as one for a validation loss, leaves the parameters of
a root module gathered. ``model.parameters()`` yields those until the next backward pass.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import distamp
from distamp import StepGuard
from distamp.errors import GradientError
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh
from tests.scaler.steps import INF, cpu_scaler


def _fully_shard(model: nn.Module, shape: tuple[int, ...], **options: Any) -> nn.Module:
    names = ("copies", "shard")[-len(shape) :]
    return fully_shard(model, mesh=mesh(shape, names), **options)


def _nested(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        _fully_shard(layer, (4,), **options)
    return _fully_shard(model, (4,))


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "root": lambda model: _fully_shard(model, (4,)),
    "HSDP": lambda model: _fully_shard(model, (2, 2)),
    "nested": _nested,
    "nested, not resharded": lambda model: _nested(model, reshard_after_forward=False),
    "nested, resharded to two": lambda model: _nested(model, reshard_after_forward=2),
}
#: Optimizers, which a guard holds weakly.
_KEPT: list[torch.optim.Optimizer] = []
CLIPS: dict[str, tuple[Callable[[], Any], float]] = {
    "function": (StepGuard, 1.0),
    "guard": (StepGuard, 1.0),
    "scaler": (lambda: cpu_scaler(4.0), 4.0),
    "disabled": (lambda: cpu_scaler(enabled=False), 1.0),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum()


def _norm_of_a_plain_model() -> float:
    model = _model()
    _loss(model).backward()
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


CASES = list(itertools.product(LAYOUTS, ["no_grad", "grad"]))


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "grad"), quick_cases(CASES, quick=[("root", "no_grad"), ("nested", "grad")])
)
def test_a_clip_takes_the_shards_of_gathered_parameters(layout, grad):
    """Of all clips, over parameters whose optimizer was seen, and which are clipped in place."""
    for name, (make, scale) in CLIPS.items():
        model, made = LAYOUTS[layout](_model()), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.register_optimizers(optimizer)
        made.scale(_loss(model)).backward()
        with torch.set_grad_enabled(grad == "grad"):
            _loss(model)
        clip = distamp.clip_grad_norm_ if name == "function" else made.clip_grad_norm_
        norm = clip(model.parameters(), 0.5)
        assert norm.item() == pytest.approx(_norm_of_a_plain_model(), rel=1e-4), (name, scale)
        clipped = distamp.clip_grad_norm_(optimizer, 1e9)
        assert clipped.item() == pytest.approx(0.5, rel=1e-4), name


@on_ranks(4)
@pytest.mark.parametrize(
    ("named", "layout"),
    [
        ("by a model", "root"),
        ("by pairs", "nested, not resharded"),
        pytest.param("by a model", "nested, not resharded", marks=pytest.mark.slow),
        pytest.param("by pairs", "root", marks=pytest.mark.slow),
    ],
)
def test_a_report_takes_the_shards_of_gathered_parameters(layout, named):
    model = LAYOUTS[layout](_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        _loss(model)
    guard = StepGuard(named_parameters=model.named_parameters() if named == "by pairs" else None)
    (_loss(model) * INF).backward()
    guard.step(optimizer)
    with torch.no_grad():
        _loss(model)
    report = guard.nonfinite_report(model if named == "by a model" else None)
    names = {overflow.name for overflow in report.overflows}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}


@on_ranks(4)
@pytest.mark.parametrize("name", ["_module_state_mapping", "_fsdp_param_group", "_unsharded_param"])
def test_a_torch_without_the_private_names_is_refused_by_name(name):
    """A clip that cannot find shards raises, on every rank, instead of returning 0."""
    model, guard = LAYOUTS["root"](_model()), StepGuard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.register_optimizers(optimizer)
    _loss(model).backward()
    with torch.no_grad():
        _loss(model)
    gathered = list(model.parameters())
    refused = pytest.raises(GradientError, match=f"has no {name} in .* Pass the optimizer")
    with pytest.MonkeyPatch.context() as patch:
        _remove(name, model._get_fsdp_state(), patch)
        with refused:
            guard.clip_grad_norm_(gathered, 1.0)


def _remove(name: str, state: Any, patch: pytest.MonkeyPatch) -> None:
    """Let torch have no such private name."""
    if name == "_module_state_mapping":
        patch.delattr(_composable_state, name)
    elif name == "_fsdp_param_group":
        if not hasattr(state, "_fsdp_param_groups"):  # torch 2.11
            patch.delattr(state, name)
            return
        patch.delattr(type(state), name)
        patch.delattr(state, "_fsdp_param_groups")
    else:
        fsdp_params = state._fsdp_param_group.fsdp_params
        annotations = dict(type(fsdp_params[0]).__annotations__)
        del annotations[name]
        patch.setattr(type(fsdp_params[0]), "__annotations__", annotations)
        for fsdp_param in fsdp_params:
            patch.delattr(fsdp_param, name)


# -- FSDP1, which hides the gradients of what it has gathered --------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("by", ["function", "guard", "scaler"])
def test_tensors_that_fsdp1_puts_in_the_place_of_parameters_are_refused(by):
    """SHARD_GRAD_OP keeps its parameters gathered after a forward pass with a graph."""
    model, clip = _under_fsdp1(by, use_orig_params=True)
    _loss(model)
    with pytest.raises(GradientError, match="is the result of an operation, so it has no gradient"):
        clip(model.parameters(), 1.0)


@on_ranks(2)
@pytest.mark.parametrize("by", ["guard", "scaler"])
def test_parameters_that_fsdp1_has_summoned_are_refused(by):
    """The function knows of no optimizer, so the docs have this limit of it."""
    model, clip = _under_fsdp1(by, use_orig_params=False)
    summoned = FullyShardedDataParallel.summon_full_params(model)
    refused = pytest.raises(GradientError, match="Call clip_grad_norm_ outside of summon_full")
    with summoned, refused:
        clip(model.parameters(), 1.0)


def _under_fsdp1(by: str, use_orig_params: bool) -> tuple[nn.Module, Any]:
    """Return a model after a backward pass, and how it is clipped."""
    model = FullyShardedDataParallel(
        _model(),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    make, _ = CLIPS[by]
    made, optimizer = make(), torch.optim.SGD(model.parameters(), lr=0.1)
    made.register_optimizers(optimizer)
    made.scale(_loss(model)).backward()
    _KEPT.append(optimizer)
    return model, distamp.clip_grad_norm_ if by == "function" else made.clip_grad_norm_
