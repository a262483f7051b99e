"""A step that is skipped because of the weights raises on every rank, and names them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import NonFiniteError, NonFiniteWeightsError
from distamp.grads import to_local
from tests.collectives import count_collectives
from tests.levels.cells import wrapped
from tests.on_ranks import on_devices, on_ranks
from tests.place import device_type
from tests.scaler.steps import cpu_scaler

NAN = float("nan")
NO_STEP = "No step was taken before, so the model came with them"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.middle(self.first(inputs).tanh())


def guard_of(model: nn.Module) -> StepGuard:
    return StepGuard(named_parameters=model.named_parameters())


def backward(guard: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    inputs = torch.ones(4, 8, device=device_type())
    loss = model(inputs).float().square().mean()
    if isinstance(guard, DistGradScaler):
        loss = guard.scale(loss)
    loss.backward()


def iteration(guard: Any, model: nn.Module, optimizer: Any, **step: float) -> None:
    backward(guard, model, optimizer)
    guard.step(optimizer, **step)
    guard.update()


@torch.no_grad()
def spoil(param: Tensor) -> None:
    to_local(param).view(-1)[0] = NAN


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_model_that_came_with_nan_is_named_at_the_first_skip(fused, step):
    model = Net()
    spoil(model.middle.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with pytest.raises(NonFiniteWeightsError, match=rf"middle\.weight \(rank 0\)\..*{NO_STEP}"):
        iteration(guard_of(model), model, optimizer, **step)


def test_the_last_step_that_was_taken_is_named():
    model = Net()
    optimizer, guard = sgd(model), guard_of(model)
    for _ in range(3):
        iteration(guard, model, optimizer)
    spoil(model.first.bias)
    with pytest.raises(NonFiniteWeightsError, match="last step that was taken is number 3"):
        iteration(guard, model, optimizer)


def test_the_error_is_a_nonfinite_error():
    assert issubclass(NonFiniteWeightsError, NonFiniteError)


def test_a_scaler_raises_too():
    model = Net()
    spoil(model.first.weight)
    with pytest.raises(NonFiniteWeightsError, match=r"Step 1 of SGD \(6 parameters\)"):
        iteration(cpu_scaler(), model, sgd(model))


def skips_after_a_bad_gradient(model: Net) -> int:
    """Return the number of skipped steps after one step with NaN in a gradient."""
    optimizer, guard = sgd(model), guard_of(model)
    backward(guard, model, optimizer)
    model.first.weight.grad = torch.full_like(model.first.weight, NAN)
    guard.step(optimizer)
    guard.update()
    return guard.step_counts(optimizer).skipped


def test_a_skip_over_finite_weights_raises_nothing():
    assert skips_after_a_bad_gradient(Net()) == 1


def test_a_weight_that_the_loss_does_not_use_may_contain_anything():
    model = Net()
    spoil(model.unused.weight)
    assert skips_after_a_bad_gradient(model) == 1


def test_a_step_after_unscale_raises():
    model = Net()
    spoil(model.first.weight)
    optimizer, guard = sgd(model), guard_of(model)
    backward(guard, model, optimizer)
    guard.unscale_(optimizer)
    with pytest.raises(NonFiniteWeightsError, match=r"first\.weight"):
        guard.step(optimizer)


@pytest.mark.parametrize("split", [True, "split"], ids=["whole", "split"])
def test_weights_with_masters_are_named_and_masters_follow_them(split):
    model = distamp.cast_model(Net(), "bf16-O2", master_weights=split)
    optimizer = sgd(model)
    amp = distamp.initialize(model, optimizer, "bf16-O2", master_weights=split)

    def step() -> None:
        amp.zero_grad()
        amp.backward(amp.model(torch.ones(4, 8)).float().square().mean())
        amp.step()

    step()
    spoil(model.first.weight)
    with pytest.raises(NonFiniteWeightsError, match=r"first\.weight"):
        step()


def test_split_masters_without_a_bad_weight_are_not_accused():
    """Their values read as NaN between steps."""
    model = distamp.cast_model(Net(), "bf16-O2", master_weights="split")
    amp = distamp.initialize(model, sgd(model), "bf16-O2", master_weights="split")
    amp.zero_grad()
    amp.backward(amp.model(torch.ones(4, 8)).float().square().mean())
    model.first.weight.grad.fill_(NAN)
    assert not amp.step()


# -- several ranks ---------------------------------------------------------------------------------


def in_layout(layout: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    if layout != "ZeRO":
        model: Any = wrapped(_NetOfCells(), layout, None, "")
        return model, sgd(model)
    model = wrapped(_NetOfCells(), "DDP", None, "")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    return model, optimizer


def calls_of_a_step(guard: Any, **step: Any) -> list[tuple[str, int]]:
    """Return the collectives of the fourth step of a model in DDP, each with its bytes."""
    model, optimizer = in_layout("DDP")
    for _ in range(3):
        iteration(guard, model, optimizer, **step)
    backward(guard, model, optimizer)
    with count_collectives() as collectives:
        guard.step(optimizer, **step)
        guard.update()
    return collectives.calls


class _NetOfCells(Net):
    """The net with the names that a tensor-parallel plan has."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = self.first
        del self.first, self.unused

    def forward(self, inputs: Tensor) -> Tensor:
        return self.middle(self.hidden(inputs).tanh())


@on_ranks(2)
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2", "TP", "ZeRO"])
def test_a_weight_of_one_rank_is_named_on_every_rank(layout, step):
    model, optimizer = in_layout(layout)
    guard = StepGuard()
    iteration(guard, model, optimizer, **step)
    bad_rank = 1
    if dist.get_rank() == bad_rank:
        params = [param for param in model.parameters() if to_local(param).numel()]
        spoil(params[0])
    with pytest.raises(NonFiniteWeightsError, match="rank 1") as raised:
        iteration(guard, model, optimizer, **step)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, str(raised.value))
    assert texts[0] == texts[1]


@on_ranks(2)
def test_after_the_error_a_model_that_was_repaired_trains_on():
    model, optimizer = in_layout("DDP")
    guard = StepGuard()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 1:
        spoil(next(model.parameters()))
    with pytest.raises(NonFiniteWeightsError):
        iteration(guard, model, optimizer)
    model.load_state_dict(state)
    guard.update()
    iteration(guard, model, optimizer)
    assert guard.step_was_taken(optimizer)


@on_ranks(2)
def test_an_overflow_of_one_rank_over_finite_weights_raises_nothing():
    model, optimizer = in_layout("DDP")
    guard = StepGuard()
    backward(guard, model, optimizer)
    if dist.get_rank() == 1:
        next(model.parameters()).grad.fill_(NAN)
    guard.step(optimizer)
    guard.update()
    assert guard.step_counts(optimizer).skipped == 1


# -- devices ---------------------------------------------------------------------------------------


def _step_and_read(guard: StepGuard, optimizer: Any, **step: float) -> None:
    """Step and update; the host reads the reply of a fused step in the last call."""
    guard.step(optimizer, **step)
    guard.update()
    guard.step_counts(optimizer)


@on_devices(2)
@pytest.mark.parametrize(
    "step",
    [
        pytest.param({}, id="flags"),
        pytest.param({"max_norm": 1.0}, id="norm", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_on_devices_every_rank_raises_at_the_latest_one_call_later(fused, step):
    model = Net().to(device_type())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    guard = guard_of(model)
    if dist.get_rank() == 1:
        spoil(model.first.weight)
    iteration(guard, model, optimizer, **step)
    guard.step_counts(optimizer)  # so that the host has read the outcome
    backward(guard, model, optimizer)
    with pytest.raises(NonFiniteWeightsError, match=r"first\.weight \(rank 1\)"):
        _step_and_read(guard, optimizer, **step)
    assert guard.step_counts(optimizer).taken == 0
