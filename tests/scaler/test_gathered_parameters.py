"""Clips and reports after FSDP has gathered parameters, so that they have no gradients.

A forward pass without a backward pass, such as one for a validation loss, leaves the parameters of
a root module gathered. Until the next backward pass ``model.parameters()`` yields gathered tensors.
"""

import itertools
from collections.abc import Callable
from functools import partial
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


def shard(model: nn.Module, shape: tuple[int, ...], **options: Any) -> nn.Module:
    """Shard a model over a mesh of one or two dimensions."""
    names = ("shard",) if len(shape) == 1 else ("copies", "shard")
    return fully_shard(model, mesh=mesh(shape, names), **options)


def shard_layers_and_root(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        shard(layer, (4,), **options)
    return shard(model, (4,))


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "root": partial(shard, shape=(4,)),
    "HSDP": partial(shard, shape=(2, 2)),
    "nested": shard_layers_and_root,
    "nested, not resharded": partial(shard_layers_and_root, reshard_after_forward=False),
    "nested, resharded to two": partial(shard_layers_and_root, reshard_after_forward=2),
}


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module) -> Tensor:
    inputs = torch.linspace(-1, 1, 8).view(2, 4)
    return model(inputs).square().sum()


def norm_of_a_plain_model() -> float:
    """Return the norm of the same gradients without FSDP."""
    model = two_layers()
    loss_of(model).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return nn.utils.get_total_norm(gradients).item()


# -- FSDP2 -----------------------------------------------------------------------------------------


class GatheredModel:
    """A model with sharded gradients, and with parameters that a validation pass gathered."""

    def __init__(self, layout: str, scaler: Any, validation_grad: bool = False) -> None:
        self.model = LAYOUTS[layout](two_layers())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        scaler.register_optimizers(self.optimizer)
        scaler.scale(loss_of(self.model)).backward()
        with torch.set_grad_enabled(validation_grad):
            loss_of(self.model)

    def check_clip(self, norm: Tensor) -> None:
        """Check the norm of a clip to 0.5, and the clipped gradients of the shards."""
        assert norm.item() == pytest.approx(norm_of_a_plain_model(), rel=1e-4)
        clipped_norm = distamp.clip_grad_norm_(self.optimizer, 1e9)
        assert clipped_norm.item() == pytest.approx(0.5, rel=1e-4)


SCALERS: dict[str, Callable[[], Any]] = {
    "guard": StepGuard,
    "scaler": partial(cpu_scaler, 4.0),
    "disabled": partial(cpu_scaler, enabled=False),
}
# Each layout, with a validation pass under torch.no_grad() and with a graph.
CASES = list(itertools.product(LAYOUTS, ["no_grad", "grad"]))


@on_ranks(4)
@pytest.mark.parametrize(("layout", "grad"), quick_cases(CASES, quick=[("root", "no_grad")]))
def test_every_clip_takes_the_shards_of_gathered_parameters(layout, grad):
    validation_grad = grad == "grad"
    for make_scaler in SCALERS.values():
        scaler = make_scaler()
        gathered = GatheredModel(layout, scaler, validation_grad)
        norm = scaler.clip_grad_norm_(gathered.model.parameters(), 0.5)
        gathered.check_clip(norm)

    gathered = GatheredModel(layout, StepGuard(), validation_grad)
    norm = distamp.clip_grad_norm_(gathered.model.parameters(), 0.5)
    gathered.check_clip(norm)


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
    model = LAYOUTS[layout](two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        loss_of(model)
    named_parameters = model.named_parameters() if named == "by pairs" else None
    guard = StepGuard(named_parameters=named_parameters)
    loss = loss_of(model) * INF
    loss.backward()
    guard.step(optimizer)
    with torch.no_grad():
        loss_of(model)
    report = guard.nonfinite_report(model if named == "by a model" else None)
    names = {overflow.name for overflow in report.overflows}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}


@on_ranks(4)
@pytest.mark.parametrize("name", ["_module_state_mapping", "_fsdp_param_group", "_unsharded_param"])
def test_a_torch_without_the_private_names_is_refused_by_name(name):
    """A clip that cannot find shards raises, on every rank, instead of returning 0."""
    guard = StepGuard()
    gathered = GatheredModel("root", guard)
    parameters = list(gathered.model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        remove_private_name(name, gathered.model._get_fsdp_state(), patch)
        with pytest.raises(GradientError, match=f"has no {name} in .* Pass the optimizer"):
            guard.clip_grad_norm_(parameters, 1.0)


def remove_private_name(name: str, state: Any, patch: pytest.MonkeyPatch) -> None:
    """Remove a private name of torch."""
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


# -- FSDP1 -----------------------------------------------------------------------------------------


class GatheredByFSDP1:
    """A model of FSDP1 with gradients of a scaled loss."""

    def __init__(self, scaler: Any, use_orig_params: bool) -> None:
        self.model = FullyShardedDataParallel(
            two_layers(),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        scaler.register_optimizers(self.optimizer)
        scaler.scale(loss_of(self.model)).backward()

    def keep_gathered(self) -> None:
        """Run a forward pass with a graph, for which SHARD_GRAD_OP keeps parameters gathered."""
        loss_of(self.model)


NO_GRADIENT = "is the result of an operation, so it has no gradient"


@on_ranks(2)
@pytest.mark.parametrize("name", ["guard", "scaler"])
def test_a_scaler_refuses_the_tensors_that_fsdp1_puts_in_place_of_parameters(name):
    scaler = SCALERS[name]()
    gathered = GatheredByFSDP1(scaler, use_orig_params=True)
    gathered.keep_gathered()
    with pytest.raises(GradientError, match=NO_GRADIENT):
        scaler.clip_grad_norm_(gathered.model.parameters(), 1.0)


@on_ranks(2)
def test_the_function_refuses_the_tensors_that_fsdp1_puts_in_place_of_parameters():
    gathered = GatheredByFSDP1(StepGuard(), use_orig_params=True)
    gathered.keep_gathered()
    with pytest.raises(GradientError, match=NO_GRADIENT):
        distamp.clip_grad_norm_(gathered.model.parameters(), 1.0)


@on_ranks(2)
@pytest.mark.parametrize("name", ["guard", "scaler"])
def test_a_scaler_refuses_parameters_that_fsdp1_has_summoned(name):
    """The function knows no optimizer, so it cannot refuse them, and the docs say so."""
    scaler = SCALERS[name]()
    gathered = GatheredByFSDP1(scaler, use_orig_params=False)
    with (
        FullyShardedDataParallel.summon_full_params(gathered.model),
        pytest.raises(GradientError, match="Call clip_grad_norm_ outside of summon_full"),
    ):
        scaler.clip_grad_norm_(gathered.model.parameters(), 1.0)
