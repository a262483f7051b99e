"""fp32 masters train as a loop with float32 copies by hand, bit for bit.

Facts about split masters alone are in `tests.masters.test_split`.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from distamp import StepGuard
from distamp.errors import CallOrderError, ConfigError
from distamp.scaler import MasterParameters, master_params, masters_of
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh
from tests.scaler.masters import (
    ByHand,
    Job,
    adamw,
    half_mlp,
    local,
    loss_of,
    master_scaler,
    one_master,
    spread,
)
from tests.scaler.matrix.layouts import LAYOUTS, Parameters
from tests.scaler.matrix.reference import KINDS
from tests.scaler.steps import INF, backward, cpu_scaler, leaf

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
QUICK_IF_SPLIT = pytest.mark.parametrize(
    "split",
    [
        pytest.param(False, id="whole", marks=pytest.mark.slow),
        pytest.param(True, id="split"),
    ],
)


def equal(tensors: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Return whether the shards of this rank are bit-identical."""
    pairs = zip(tensors, expected, strict=True)
    return all(torch.equal(local(tensor), local(other)) for tensor, other in pairs)


# -- training beside a loop by hand ----------------------------------------------------------------

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": adamw,
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "SGD momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "SGD fused": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}
ZERO_GRADS = ["optimizer", "optimizer in place", "model", "model in place"]


def zero_gradients(zero_grad: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Call ``zero_grad`` of the optimizer or of the model, in place or not."""
    zeroing = optimizer if zero_grad.startswith("optimizer") else model
    if zero_grad.endswith("in place"):
        zeroing.zero_grad(set_to_none=False)
    else:
        zeroing.zero_grad()


def adamw_with_groups(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    first, *others = parameters
    first_group = {"params": [first], "lr": 0.1}
    second_group = {"params": others, "weight_decay": 0.5}
    return torch.optim.AdamW([first_group, second_group], lr=1e-3)


def sparse_adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), lr=0.1)


def half_with_a_float32_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8).half(), nn.BatchNorm1d(8))


def sparse_table() -> nn.Module:
    return nn.Embedding(6, 4, sparse=True, dtype=F16)


def loss_of_rows(model: nn.Module, batch: int, factor: float = 1.0) -> Tensor:
    """Return the loss of three rows of a table with one row twice.

    Odd batches have no gradient, because torch cannot add sparse gradients in float16.
    """
    if batch % 2 == 1:
        return torch.zeros((), requires_grad=True)
    rows = [0, 5, 5] if batch % 4 == 2 else [1, 1, 3]
    return model(torch.tensor(rows)).float().square().sum() * factor


# Constructors of a model and of its optimizer, and the loss.
Recipe = tuple[Callable[[], nn.Module], MakeOptimizer, Callable[..., Tensor]]
RECIPES: dict[str, Recipe] = {
    **{name: (half_mlp, optimizer, loss_of) for name, optimizer in OPTIMIZERS.items()},
    "bfloat16": (partial(half_mlp, dtype=BF16), adamw, loss_of),
    "groups": (half_mlp, adamw_with_groups, loss_of),
    "a norm in float32": (half_with_a_float32_norm, adamw, loss_of),
    "sparse": (sparse_table, partial(torch.optim.SGD, lr=0.1), loss_of_rows),
    "SparseAdam": (sparse_table, sparse_adam, loss_of_rows),
}

STEPS = 4
OVERFLOWING_STEP = 2


class TwinTraining:
    """A model with masters, and an equal model that is trained by float32 copies by hand.

    With a loss scale, a loss of the first data-parallel rank is inf in `OVERFLOWING_STEP`.
    """

    def __init__(
        self, recipe: str, *, split: bool = False, layout: str = "", scaled: bool = True
    ) -> None:
        make_model, make_optimizer, self.loss = RECIPES[recipe]
        self.split = split
        self.scaled = scaled
        self.models = []
        for _ in range(2):
            torch.manual_seed(0)
            model = make_model()
            if split:
                model.to(BF16)
            self.models.append(spread(model, layout))
        self.model, self.reference = self.models
        self.optimizer = make_optimizer(self.model.parameters())
        self.by_hand = ByHand(self.reference.parameters(), make_optimizer, split)
        self.schedules = []
        for optimizer in (self.optimizer, self.by_hand.optimizer):
            self.schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        self.masters = MasterParameters(self.optimizer, split=split)
        self.scaler = master_scaler(enabled=scaled)

        rank = dist.get_rank() if layout else 0
        data_ranks = {"TP": 0, "FSDP2 x TP": rank // 2}
        self.data_rank = data_ranks.get(layout, rank)

    def low_precision(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.dtype is not F32]

    def backward(self, step: int, zero_grad: str = "optimizer") -> float:
        """Zero the gradients, accumulate two microbatches, and return the loss scale."""
        zero_gradients(zero_grad, self.optimizer, self.model)
        self.by_hand.zero_grad()
        overflows = self.scaled and step == OVERFLOWING_STEP and self.data_rank == 0
        factor = INF if overflows else 1.0
        scale = self.scaler.get_scale()
        first_batch = 2 * step + 100 * self.data_rank
        for batch in (first_batch, first_batch + 1):
            self.scaler.scale(self.loss(self.model, batch, factor)).backward()
            (self.loss(self.reference, batch, factor) * scale).backward()
        return scale

    def unscale(self) -> None:
        """Unscale by the scaler, which also frees the gradients in low precision."""
        self.scaler.unscale_(self.optimizer)
        for parameter in self.low_precision():
            assert parameter.grad is None

    def step(self, step: int, finite: bool, with_scaler: bool = True) -> None:
        """Step the model, and also the copies if their gradients are finite."""
        if with_scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        self.scaler.update()
        if finite:
            self.by_hand.step()
        for schedule in self.schedules:
            schedule.step()
        if self.scaled:
            assert self.scaler.step_was_taken(self.optimizer) is (step != OVERFLOWING_STEP)

    def check(self) -> None:
        """Compare masters and weights, and check the memory that masters take between steps."""
        if self.split:
            for master in master_params(self.optimizer):
                assert local(master).isnan().all(), "split masters are freed between steps"
        with self.masters.materialized():
            assert equal(master_params(self.optimizer), self.by_hand.copies)
        assert equal(self.model.parameters(), self.reference.parameters())

        elements = sum(local(parameter).numel() for parameter in self.low_precision())
        bytes_of_element = 2 if self.split else 4
        assert elements > 0
        assert self.masters.nbytes == bytes_of_element * elements


def train_twins(
    recipe: str,
    call: str = "step",
    *,
    split: bool = False,
    layout: str = "",
    zero_grad: str = "optimizer",
) -> None:
    """Train both models with a call of `CALLS` in each step, and compare them."""
    scaled = call in ("step", "unscale_")
    twins = TwinTraining(recipe, split=split, layout=layout, scaled=scaled)
    for step in range(STEPS):
        scale = twins.backward(step, zero_grad)
        if call == "unscale_":
            twins.unscale()
        finite = twins.by_hand.unscale(scale)
        twins.step(step, finite, with_scaler=call != "no scaler")
    twins.check()


CALLS = ["step", "unscale_", "no scaler"]
CLIPPED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer,
    "model.parameters()": lambda model, optimizer: model.parameters(),
    "master_params": lambda model, optimizer: master_params(optimizer),
}


def clip_twins(recipe: str, clipped: str, *, split: bool = False, layout: str = "") -> None:
    """Train both models with a clip of their gradients in each step, and compare them.

    The first two clips come after `unscale_`, and later clips unscale the gradients.
    """
    twins = TwinTraining(recipe, split=split, layout=layout)
    for step in range(STEPS):
        scale = twins.backward(step)
        if step < 2:
            twins.unscale()
        finite = twins.by_hand.unscale(scale)
        parameters = CLIPPED[clipped](twins.model, twins.optimizer)
        norm = twins.scaler.clip_grad_norm_(parameters, 0.1)
        gradients = [parameter.grad for parameter in twins.by_hand.copies]
        if finite:
            exact = norm_over_ranks(gradients)
            assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
        factor = 0.1 / (norm + 1e-6)
        for gradient in gradients:
            gradient.mul_(factor.clamp(max=1.0))
        twins.step(step, finite)
    twins.check()


def norm_over_ranks(gradients: list[Any]) -> Tensor:
    """Return the norm of gradients from the shards of all ranks."""
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        squares += gradient.double().square().sum()
    if dist.is_initialized():
        dist.all_reduce(squares)
    return squares.sqrt()


def with_each_call(
    recipes: Iterable[str], calls: list[str], quick_call: str, all_calls_of: str
) -> pytest.MarkDecorator:
    """Return a parametrization: quick cases are one call of each recipe, and all of one recipe."""
    cases = list(itertools.product(recipes, calls))
    quick = [case for case in cases if case[0] == all_calls_of or case[1] == quick_call]
    return pytest.mark.parametrize(("recipe", "call"), quick_cases(cases, quick))


@with_each_call(RECIPES, [*CALLS, "disabled"], quick_call="step", all_calls_of="AdamW")
def test_training_is_that_of_the_loop_by_hand(recipe, call):
    train_twins(recipe, call)


@with_each_call(OPTIMIZERS, CALLS, quick_call="step", all_calls_of="AdamW")
def test_training_with_split_masters_is_that_of_the_loop_by_hand(recipe, call):
    train_twins(recipe, call, split=True)


def with_each_clip(recipes: Iterable[str]) -> pytest.MarkDecorator:
    """Return a parametrization with each way to name what is clipped; AdamW's cases are quick."""
    cases = list(itertools.product(recipes, CLIPPED))
    quick = [case for case in cases if case[0] == "AdamW"]
    return pytest.mark.parametrize(("recipe", "clipped"), quick_cases(cases, quick))


@with_each_clip(["AdamW", "SGD fused", "groups"])
def test_clipped_training_is_that_of_the_loop_by_hand(recipe, clipped):
    clip_twins(recipe, clipped)


@with_each_clip(OPTIMIZERS)
def test_clipped_training_with_split_masters_is_that_of_the_loop_by_hand(recipe, clipped):
    clip_twins(recipe, clipped, split=True)


CASES_OF_DDP = list(itertools.product(ZERO_GRADS, ["buckets", "bucket views"]))
QUICK_CASES_OF_DDP = [("optimizer", "buckets"), ("model in place", "bucket views")]


@on_ranks(2)
@pytest.mark.parametrize(("zero_grad", "layout"), quick_cases(CASES_OF_DDP, QUICK_CASES_OF_DDP))
def test_training_under_ddp_is_that_of_the_loop_by_hand(zero_grad, layout):
    train_twins("AdamW", layout=layout, zero_grad=zero_grad)


@on_ranks(2)
@SPLIT
def test_training_of_shards_is_that_of_the_loop_by_hand(split):
    train_twins("AdamW fused", split=split, layout="FSDP2")


@on_ranks(2)
@QUICK_IF_SPLIT
def test_clipped_training_of_shards_is_that_of_the_loop_by_hand(split):
    clip_twins("AdamW fused", "optimizer", split=split, layout="FSDP2")


CALLS_ON_TWO_DIMENSIONS = {"HSDP": "no scaler", "TP": "step", "FSDP2 x TP": "no scaler"}


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("layout", CALLS_ON_TWO_DIMENSIONS)
def test_training_with_split_masters_on_a_mesh_is_that_of_the_loop_by_hand(layout):
    call = CALLS_ON_TWO_DIMENSIONS[layout]
    train_twins("AdamW", call, split=True, layout=layout)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("layout", CALLS_ON_TWO_DIMENSIONS)
def test_training_with_whole_masters_on_a_mesh_is_that_of_the_loop_by_hand(layout):
    call = CALLS_ON_TWO_DIMENSIONS[layout]
    train_twins("AdamW", call, layout=layout)


@on_ranks(2)
@SPLIT
def test_a_gradient_that_is_a_sum_over_ranks_is_stepped_by_the_sum(split):
    """Replicated norms have such gradients under sequence parallelism."""
    device_mesh = mesh((2,), ("tensor",))
    zeros = torch.zeros(3, dtype=BF16)
    weight = nn.Parameter(distribute_tensor(zeros, device_mesh))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    MasterParameters(optimizer, split=split)
    scaler = master_scaler(2.0)
    scaler.scale(torch.ones(()))
    summand = torch.full((3,), 2.0 * (dist.get_rank() + 1), dtype=BF16)
    weight.grad = DTensor.from_local(summand, device_mesh, [Partial()])
    scaler.step(optimizer)
    assert weight.to_local().tolist() == [-3.0] * 3


# -- zero_grad -------------------------------------------------------------------------------------


class TwoWeights:
    """A used and an unused weight of one optimizer with masters."""

    def __init__(self, dtype: torch.dtype, zero_grad: str) -> None:
        self.scaler = master_scaler(enabled=dtype is F16)
        self.used, self.optimizer, self.masters = one_master(dtype=dtype)
        self.unused = leaf(1.0, dtype=dtype)
        self.optimizer.add_param_group({"params": [self.unused]})
        self.parameters = nn.ParameterList([self.used, self.unused])
        self.zero_grad = zero_grad

    def zero(self) -> None:
        zero_gradients(self.zero_grad, self.optimizer, self.parameters)

    def step(self, *gradients: float) -> None:
        """Step the used weight by the sum of gradients, and zero all gradients."""
        for gradient in gradients:
            backward(self.scaler, self.used, gradient)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero()


ZERO_GRAD = pytest.mark.parametrize("zero_grad", ZERO_GRADS)
DTYPE = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16 without a scaler"])


@DTYPE
@ZERO_GRAD
def test_gradients_that_were_zeroed_are_not_stepped(zero_grad, dtype):
    """A loop, or a wrapper that warms up, drops the gradients of a pass before each step."""
    weights = TwoWeights(dtype, zero_grad)
    unscaled = master_scaler(enabled=False)
    for dropping_scaler, gradient in (
        (weights.scaler, 1.0),
        (unscaled, 2.0),
        (weights.scaler, 4.0),
    ):
        backward(dropping_scaler, weights.used, 100.0)
        weights.zero()
        weights.step(gradient, gradient)
    assert weights.used.item() == -14.0


@DTYPE
@ZERO_GRAD
def test_a_weight_that_later_losses_leave_out_is_not_stepped_again(zero_grad, dtype):
    weights = TwoWeights(dtype, zero_grad)
    backward(weights.scaler, weights.unused, 1.0)
    weights.step(1.0)
    assert weights.unused.item() == 0.0
    weights.step(2.0)
    weights.step(4.0)
    assert weights.unused.item() == 0.0
    assert weights.used.item() == -7.0


@ZERO_GRAD
def test_a_gradient_of_a_skipped_step_is_not_stepped_later(zero_grad):
    weights = TwoWeights(F16, zero_grad)
    weights.step(1.0)
    backward(weights.scaler, weights.unused, 1.0)
    weights.step(INF)
    weights.step(1.0)
    assert weights.used.item() == -2.0
    assert weights.unused.item() == 1.0


# -- kinds of gradients ----------------------------------------------------------------------------


def master_after_a_step(parameter: nn.Parameter, gradient: Tensor, scale: float = 1024.0) -> Tensor:
    """Return the master after a step of SGD by this gradient of a scaled loss."""
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(optimizer)
    scaler = master_scaler(scale)
    scaler.scale(torch.ones(()))
    parameter.grad = gradient
    scaler.step(optimizer)
    return next(iter(master_params(optimizer)))


# Masters convert a gradient of more elements in pieces.
PIECE = 131_072
SIZES = [0, 1, PIECE, PIECE + 1, 300_000]


def seeded_gradient(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=generator).half()


@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_of_every_size_is_converted_whole(size):
    gradient = seeded_gradient(size)
    expected = -(gradient.float() / 2.0**16)
    parameter = nn.Parameter(torch.zeros(size, dtype=F16))
    master = master_after_a_step(parameter, gradient, 2.0**16)
    assert torch.equal(master, expected)


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_nan_anywhere_in_a_gradient_skips_the_step(size):
    end_of_first_piece = min(size, PIECE) - 1
    for index in (0, end_of_first_piece, size - 1):
        gradient = seeded_gradient(size)
        gradient[index] = float("nan")
        parameter = nn.Parameter(torch.zeros(size, dtype=F16))
        master = master_after_a_step(parameter, gradient, 2.0**16)
        assert torch.equal(master, torch.zeros(size)), index


def master_of_rows(*values: float) -> list[float]:
    """Return the master of three weights after a step by values that all add to the second."""
    indices = [[1] * len(values)]
    gradient = torch.sparse_coo_tensor(
        indices, torch.tensor(values, dtype=F16), (3,), check_invariants=True
    )
    parameter = leaf(0.0, 0.0, 0.0, dtype=F16)
    return master_after_a_step(parameter, gradient).tolist()


def test_rows_of_a_sparse_gradient_are_added_in_float32():
    """The sum of 40000 and 40000 overflows in float16."""
    assert master_of_rows(40000.0, 40000.0) == [0.0, -78.125, 0.0]


def test_an_inf_in_a_row_of_a_sparse_gradient_skips_the_step():
    assert master_of_rows(INF, 1.0) == [0.0, 0.0, 0.0]


def test_a_transposed_gradient_keeps_the_order_of_its_elements():
    values = torch.arange(150_000.0).reshape(300, 500).remainder(97.0)
    gradient = values.half().t()
    parameter = nn.Parameter(torch.zeros(300, 500, dtype=F16).t())
    master = master_after_a_step(parameter, gradient, 1.0)
    assert torch.equal(master, -gradient.float())


def test_a_gradient_added_by_hand_after_unscale_is_added_to_that_of_the_loss():
    """As with torch, the gradient of a penalty is not scaled."""
    parameter, optimizer, _masters = one_master(1.0)
    scaler = master_scaler()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    backward(master_scaler(enabled=False), parameter, 0.5)
    scaler.step(optimizer)
    assert parameter.item() == 0.25


# -- groups and optimizers -------------------------------------------------------------------------


def test_groups_added_later_and_parameters_that_thaw_get_masters():
    first, optimizer, masters = one_master()
    second = leaf(0.0, dtype=F16)
    frozen = leaf(0.0, dtype=F16).requires_grad_(False)
    optimizer.add_param_group({"params": [frozen]})
    optimizer.step()
    assert masters.master_of(frozen) is None

    optimizer.add_param_group({"params": [second], "lr": 0.5})
    frozen.requires_grad_(True)
    scaler = master_scaler()
    loss = first.float() + second.float() + frozen.float()
    scaler.scale(loss.sum()).backward()
    scaler.step(optimizer)
    assert first.item() == -1.0
    assert second.item() == -0.5
    assert frozen.item() == -1.0
    assert masters.nbytes == 12
    assert optimizer.param_groups[2]["params"][0] is masters.master_of(second)


class WritesAroundItsParent(torch.optim.SGD):
    """Writes weights before and after its parent's step, for which torch calls hooks again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (parameter,) = self.param_groups[0]["params"]
        parameter.mul_(0.5)
        super().step()
        parameter.lerp_(parameter.grad, 0.5)


@SPLIT
def test_an_optimizer_may_write_around_the_step_of_its_parent_class(split):
    torch.optim.SGD([leaf(1.0)])  # torch patches the step of each class at its first instance.
    parameter = leaf(8.0, dtype=BF16)
    optimizer = WritesAroundItsParent([parameter], lr=1.0)
    MasterParameters(optimizer, split=split)
    backward(StepGuard(), parameter, 1.0)
    optimizer.step()
    assert parameter.item() == (8.0 / 2 - 1.0 + 1.0) / 2
    backward(StepGuard(), parameter, 1.0)
    optimizer.step()
    assert parameter.item() == (2.0 / 2 - 1.0 + 1.0) / 2


# -- refusals --------------------------------------------------------------------------------------


def test_masters_of_a_float32_model_are_refused():
    optimizer = torch.optim.SGD([leaf(1.0)], lr=1.0)
    with pytest.raises(ValueError, match="cast the model"):
        MasterParameters(optimizer)


def test_masters_of_a_list_of_optimizers_are_refused():
    optimizers: Any = [torch.optim.SGD([leaf(1.0)], lr=1.0)]
    with pytest.raises(TypeError, match="Optimizer, not list"):
        MasterParameters(optimizers)


def test_second_masters_of_an_optimizer_are_refused():
    _, optimizer, _masters = one_master(1.0)
    with pytest.raises((ValueError, TypeError), match="has master parameters already"):
        MasterParameters(optimizer)


def test_masters_of_lbfgs_are_refused_because_it_holds_its_parameters():
    optimizer = torch.optim.LBFGS([leaf(1.0, dtype=F16)])
    with pytest.raises((ValueError, TypeError), match="LBFGS holds its parameters in '_params'"):
        MasterParameters(optimizer)


def test_a_closure_is_refused():
    parameter, optimizer, _masters = one_master(1.0)
    with pytest.raises(CallOrderError, match="closure"):
        optimizer.step(lambda: parameter.float().sum())


@pytest.mark.parametrize("copy_function", [copy.deepcopy, pickle.dumps], ids=["copy", "pickle"])
def test_an_optimizer_with_masters_cannot_be_copied(copy_function):
    _, optimizer, _masters = one_master(1.0)
    with pytest.raises(CallOrderError, match="cannot be copied or pickled"):
        copy_function(optimizer)


@pytest.mark.parametrize("copy_function", [copy.deepcopy, pickle.dumps], ids=["copy", "pickle"])
def test_masters_cannot_be_copied(copy_function):
    _, _optimizer, masters = one_master(1.0)
    with pytest.raises(CallOrderError, match="cannot be copied or pickled"):
        copy_function(masters)


def test_a_parameter_in_a_second_group_is_refused():
    parameter, optimizer, _masters = one_master(1.0)
    optimizer.add_param_group({"params": [parameter]})
    with pytest.raises(ValueError, match="has a master of it already"):
        optimizer.step()


def test_masters_whose_optimizer_is_gone_raise():
    masters = one_master()[2]
    with pytest.raises(CallOrderError, match="is gone"):
        masters.param_pairs()


REFUSING_CALLS = pytest.mark.parametrize("call", ["unscale_", "step", "clip_grad_norm_"])


def make_call(scaler: Any, call: str, optimizer: torch.optim.Optimizer) -> None:
    """Call a method of a scaler with the arguments that it requires."""
    if call == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 1.0)
    else:
        method = getattr(scaler, call)
        method(optimizer)


@REFUSING_CALLS
@pytest.mark.parametrize("fp16_grads", ["error", "inplace"])
def test_a_scaler_that_knows_of_no_masters_refuses_an_optimizer_with_masters(fp16_grads, call):
    scaler = cpu_scaler(fp16_grads=fp16_grads)
    parameter, optimizer, _masters = one_master(1.0)
    backward(scaler, parameter, 1.0)
    with pytest.raises(ConfigError, match="Make the scaler with fp16_grads='master'"):
        make_call(scaler, call, optimizer)
    assert parameter.item() == 1.0


@REFUSING_CALLS
def test_a_scaler_for_masters_refuses_an_optimizer_without_masters(call):
    scaler = master_scaler()
    parameter = leaf(1.0, dtype=F16)
    optimizer = torch.optim.SGD([parameter])
    backward(scaler, parameter, 1.0)
    with pytest.raises(ConfigError, match=r"MasterParameters\(optimizer\) before"):
        make_call(scaler, call, optimizer)
    assert parameter.item() == 1.0


def optimizer_of_a_float16_layout(name: str) -> torch.optim.Optimizer:
    """Return an optimizer over a model that was cast to float16 before it was sharded."""
    layout = type("Half", (Parameters, LAYOUTS[name]), {})()
    parameters = []
    for part in layout.parts():
        parameters.extend(part)
    return layout.optimizer(KINDS["SGD for-loop"], parameters)


FULLY_SHARD_OR_FLOAT32 = r"float32.*fully_shard|fully_shard.*float32"


@on_ranks(4)
@pytest.mark.parametrize("name", ["FSDP1", "FSDP1 orig params"])
def test_masters_of_flat_parameters_are_refused_with_the_way_out(name):
    optimizer = optimizer_of_a_float16_layout(name)
    with pytest.raises(ValueError, match=FULLY_SHARD_OR_FLOAT32) as error:
        MasterParameters(optimizer)
    assert "fp16" not in str(error.value)
    assert masters_of(optimizer) is None


@on_ranks(4)
@pytest.mark.parametrize("name", ["ZeRO", "OSS"])
def test_masters_of_a_sharded_optimizer_are_refused_with_the_way_out(name):
    optimizer = optimizer_of_a_float16_layout(name)
    with pytest.raises(ValueError, match=FULLY_SHARD_OR_FLOAT32) as error:
        MasterParameters(optimizer)
    assert "fp16" in str(error.value)
    assert masters_of(optimizer) is None


# -- checkpoints -----------------------------------------------------------------------------------


@QUICK_IF_SPLIT
@pytest.mark.parametrize(
    "order", list(itertools.permutations(["model", "optimizer", "masters"])), ids=", ".join
)
def test_a_resumed_run_continues_bit_identical_in_any_order_of_loading(order, split):
    uninterrupted = Job(split=split).train(0, 1, 2, 3)
    state = Job(split=split).train(0, 1).saved()
    resumed = Job(seed=1, split=split).load(state, order).train(2, 3)
    assert equal(resumed.values(), uninterrupted.values())


@pytest.mark.slow
@on_ranks(2)
@SPLIT
def test_a_sharded_run_continues_bit_identical_by_torchs_distributed_checkpoint(tmp_path, split):
    saving = Job(split=split, layout="FSDP2").train(0, 1)
    dcp.save(saving.state(), checkpoint_id=tmp_path)
    resumed = Job(seed=1, split=split, layout="FSDP2")
    state = resumed.train(7).state()  # DCP loads into optimizer state that exists.
    dcp.load(state, checkpoint_id=tmp_path)
    resumed.load(state, ("optimizer", "masters", "model"))
    resumed.train(2, 3)
    uninterrupted = saving.train(2, 3)
    assert equal(resumed.values(), uninterrupted.values())


def optimizer_with_momentum(requires_grad: bool) -> tuple[nn.Parameter, torch.optim.Optimizer, Any]:
    """Return the parameter of a second group, its optimizer with masters, and the masters."""
    _, optimizer, masters = one_master()
    parameter = leaf(0.0, 0.0, dtype=F16).requires_grad_(requires_grad)
    optimizer.add_param_group({"params": [parameter], "momentum": 0.999})
    return parameter, optimizer, masters


def state_with_momentum() -> dict[str, Any]:
    """Return the state of an optimizer after two steps of the parameter in its second group."""
    parameter, optimizer, _masters = optimizer_with_momentum(requires_grad=True)
    for _ in range(2):
        loss = (parameter.float() * torch.tensor([1.0, 3.0])).sum()
        loss.backward()
        optimizer.step()
    return optimizer.state_dict()


def test_the_state_of_a_parameter_that_thawed_before_the_load_is_loaded_in_float32():
    state = state_with_momentum()
    parameter, optimizer, _masters = optimizer_with_momentum(requires_grad=False)
    parameter.requires_grad_(True)
    optimizer.load_state_dict(state)
    momentum = optimizer.state_dict()["state"][1]["momentum_buffer"]
    assert torch.equal(momentum, state["state"][1]["momentum_buffer"])
    with pytest.warns(UserWarning, match="masters of 1 parameter were rebuilt"):
        optimizer.step()


def test_the_state_of_a_parameter_that_thaws_after_the_load_is_refused():
    """Without a master, load_state_dict of the optimizer rounds the state to float16."""
    state = state_with_momentum()
    parameter, optimizer, _masters = optimizer_with_momentum(requires_grad=False)
    optimizer.load_state_dict(state)
    parameter.requires_grad_(True)
    with pytest.raises(ConfigError, match="to be trained"):
        optimizer.step()


def test_masters_follow_a_model_that_is_loaded_without_them():
    """The masters are then equal to the float16 weights."""
    state = Job().train(0, 1).saved()
    resumed = Job(seed=1).train(5)
    resumed.model.load_state_dict(state["model"])
    masters = resumed.masters.state_dict()["masters"].values()
    assert equal(masters, [value.float() for value in state["model"].values()])


def test_the_model_follows_masters_that_are_loaded_without_it():
    job = Job().train(0, 1)
    resumed = Job(seed=1)
    resumed.masters.load_state_dict(job.saved()["masters"])
    assert equal(resumed.model.parameters(), job.model.parameters())
    assert equal(master_params(resumed.optimizer), master_params(job.optimizer))


def masters_of_5_and_6() -> tuple[torch.optim.Optimizer, MasterParameters]:
    """Return masters of 5 and 6, between which the optimizer has a frozen parameter."""
    _, optimizer, masters = one_master(5.0)
    frozen = leaf(1.0, dtype=F16).requires_grad_(False)
    trained = leaf(6.0, dtype=F16)
    optimizer.add_param_group({"params": [frozen, trained]})
    return optimizer, masters


def test_a_state_has_the_numbers_of_parameters_in_the_optimizer():
    _optimizer, masters = masters_of_5_and_6()
    state = masters.state_dict()["masters"]
    assert set(state) == {0, 2}
    assert state[0].item() == 5.0
    assert state[2].item() == 6.0
    assert state[0].dtype is F32
    assert state[2].dtype is F32


def test_a_state_without_masters_is_refused():
    _optimizer, masters = masters_of_5_and_6()
    with pytest.raises(ValueError, match="not a state of master"):
        masters.load_state_dict({})


def test_a_state_that_lacks_a_parameter_is_refused_and_changes_nothing():
    optimizer, masters = masters_of_5_and_6()
    incomplete = {0: torch.full((1,), 7.0)}
    message = "1 master and this optimizer has 2. Parameter 2 .* only in the optimizer"
    with pytest.raises(ValueError, match=message):
        masters.load_state_dict({"version": 1, "masters": incomplete})
    values = [master.item() for master in master_params(optimizer)]
    assert values == [5.0, 1.0, 6.0]


def test_a_state_of_another_shape_is_refused_and_changes_nothing():
    optimizer, masters = masters_of_5_and_6()
    longer = {0: torch.full((1,), 7.0), 2: torch.ones(3)}
    with pytest.raises(ValueError, match=r"parameter 2 is .*\(3,\), but .* is .*\(1,\)"):
        masters.load_state_dict({"version": 1, "masters": longer})
    values = [master.item() for master in master_params(optimizer)]
    assert values == [5.0, 1.0, 6.0]


# -- writes to weights -----------------------------------------------------------------------------


@SPLIT
def test_weights_that_are_swapped_out_and_back_keep_their_masters(split):
    """An evaluation with averaged weights swaps them."""
    swapped = Job(split=split).train(0, 1, 2)
    with torch.no_grad():
        for parameter in swapped.model.parameters():
            trained = parameter.clone()
            parameter.fill_(2.0)
            parameter.copy_(trained)
    swapped.train(3)
    unswapped = Job(split=split).train(0, 1, 2, 3)
    assert equal(swapped.values(), unswapped.values())


@SPLIT
def test_refresh_reads_weights_that_were_written_through_data(split):
    """A write through ``.data`` does not change the version of a tensor."""
    parameter, _optimizer, masters = one_master(1.0, split=split)
    parameter.data.fill_(4.0)
    masters.refresh()
    assert masters.state_dict()["masters"][0].tolist() == [4.0]


def load_state_dict(model: nn.Module, weights: dict[str, Any]) -> None:
    model.load_state_dict(weights)


def write_in_place(model: nn.Module, weights: dict[str, Any]) -> None:
    """Write as ``dcp.load(model.state_dict())`` does."""
    for name, tensor in model.state_dict().items():
        tensor.to_local().copy_(weights[name].to_local())


def write_by_foreach(model: nn.Module, weights: dict[str, Any]) -> None:
    torch._foreach_lerp_(list(model.parameters()), list(weights.values()), 1.0)


@on_ranks(2)
@QUICK_IF_SPLIT
@pytest.mark.parametrize("write", [load_state_dict, write_in_place, write_by_foreach])
@torch.no_grad()
def test_a_write_to_sharded_weights_before_a_step_stays(write, split):
    job = Job(split=split, layout="FSDP2")
    weights = {}
    for name, parameter in job.model.state_dict().items():
        weights[name] = torch.full_like(parameter, 0.25)
    write(job.model, weights)
    for parameter in job.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    job.optimizer.param_groups[0]["weight_decay"] = 0.0
    job.optimizer.step()
    for parameter in job.model.parameters():
        assert (local(parameter) == 0.25).all()


@on_ranks(2)
@torch.no_grad()
def test_a_broadcast_before_the_first_step_stays():
    weight, optimizer, _masters = one_master(float(dist.get_rank()))
    dist.broadcast(weight, 1)
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    assert weight.item() == 0.5
