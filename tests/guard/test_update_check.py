"""`check_update`: a step that writes inf or NaN is named before the next step is taken."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import ConfigError, NonFiniteWeightsError, RankMismatchError
from distamp.grads import to_local
from tests.guard.test_nonfinite_weights import Net, backward, calls_of_a_step, in_layout, iteration
from tests.on_ranks import on_devices, on_ranks
from tests.place import device_type

INF = float("inf")


class BadSGD(torch.optim.SGD):
    """An SGD that writes inf into one weight of one rank in one step."""

    def __init__(
        self, params: Any, bad: Tensor, rank: int = 0, bad_step: int = 3, **settings: Any
    ) -> None:
        super().__init__(params, lr=0.1, **settings)
        self.bad, self.bad_rank, self.bad_step, self.steps = bad, rank, bad_step, 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.steps == self.bad_step and rank == self.bad_rank:
            with torch.no_grad():
                to_local(self.bad).view(-1)[-1] = INF


def guard_of(model: nn.Module, **settings: Any) -> StepGuard:
    return StepGuard(named_parameters=model.named_parameters(), check_update=True, **settings)


def weights(model: nn.Module) -> list[Tensor]:
    return [to_local(param.detach()).clone() for param in model.parameters()]


def error_of_the_fourth_step(guard: Any, model: nn.Module, optimizer: Any, **step: Any) -> str:
    """Take three steps, and return the error of the fourth, which changes nothing."""
    for _ in range(3):
        iteration(guard, model, optimizer, **step)
    weights_then = weights(model)
    backward(guard, model, optimizer)
    with pytest.raises(NonFiniteWeightsError) as raised:
        guard.step(optimizer, **step)
    for now, earlier in zip(weights(model), weights_then, strict=True):
        assert torch.equal(now, earlier)
    return str(raised.value)


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
@pytest.mark.parametrize("owner", ["guard", "scaler"])
def test_one_process_raises_before_the_next_step(owner, step):
    model = Net()
    optimizer = BadSGD(model.parameters(), model.middle.weight)
    guard = guard_of(model)
    if owner == "scaler":
        names = model.named_parameters()
        guard = DistGradScaler("cpu", 8.0, named_parameters=names, check_update=True)
    text = error_of_the_fourth_step(guard, model, optimizer, **step)
    assert text.startswith("After step 3 of the steps taken by BadSGD (6 parameters), weights of")
    assert "middle.weight (rank 0). The gradients of that step were finite" in text
    assert guard.step_counts(optimizer).taken == 3


def test_without_the_setting_the_next_step_is_skipped_for_its_gradients():
    model = Net()
    optimizer = BadSGD(model.parameters(), model.middle.weight)
    guard = StepGuard(named_parameters=model.named_parameters())
    for _ in range(3):
        iteration(guard, model, optimizer)
    with pytest.raises(NonFiniteWeightsError, match=r"^Step 4 of BadSGD .* was skipped"):
        iteration(guard, model, optimizer)


def test_large_finite_weights_are_not_accused():
    """The square of such a weight is inf in float32."""
    model = Net()
    with torch.no_grad():
        model.first.bias[0] = 3e38
        model.middle.weight[:, 0] = 0.0
    optimizer, guard = torch.optim.SGD(model.parameters(), lr=0.0), guard_of(model)
    for _ in range(3):
        iteration(guard, model, optimizer)
    assert guard.step_counts(optimizer).taken == 3


def test_the_flag_of_large_finite_weights_is_not_set():
    model = Net()
    with torch.no_grad():
        model.first.bias[0] = 3e38
        model.middle.weight[:, 0] = 0.0
    guard = guard_of(model)
    iteration(guard, model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert guard._update_check._measured == []


def test_a_checkpoint_that_was_loaded_after_the_bad_step_is_not_accused():
    model = Net()
    good = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = BadSGD(model.parameters(), model.first.weight, bad_step=1)
    guard = guard_of(model)
    iteration(guard, model, optimizer)
    model.load_state_dict(good)
    iteration(guard, model, optimizer)
    assert guard.step_counts(optimizer).taken == 2


def test_check_update_must_be_a_bool():
    with pytest.raises(ConfigError, match="check_update must be True or False, not 1"):
        StepGuard(check_update=1)


# -- several ranks ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2"])
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_every_rank_names_the_weight_of_the_bad_rank(layout, step):
    model = in_layout(layout)[0]
    name, bad = next(iter(model.named_parameters()))
    optimizer = BadSGD(model.parameters(), bad, rank=1)
    text = error_of_the_fourth_step(guard_of(model), model, optimizer, **step)
    assert text.startswith("After step 3 of the steps taken by BadSGD")
    assert f"inf or NaN: {name} (rank 1). " in text


class InfSGD(torch.optim.SGD):
    """An SGD that writes inf into the first weight that it steps."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] = INF


@on_ranks(2)
def test_under_zero_the_owners_of_the_weights_find_it():
    model, _ = in_layout("DDP")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), InfSGD, lr=0.1)
    guard = guard_of(model)
    iteration(guard, model, optimizer)
    backward(guard, model, optimizer)
    with pytest.raises(NonFiniteWeightsError, match=r"^After step 1 of .*module\.hidden"):
        guard.step(optimizer)


@on_ranks(2)
@pytest.mark.parametrize("split", [True, "split"], ids=["whole", "split"])
def test_inf_in_a_master_is_found_in_its_weight(split):
    """The values of a split master exist only inside the step."""
    model = distamp.cast_model(Net(), "bf16-O2", master_weights=split)
    optimizer = InfSGD(model.parameters(), lr=0.1)
    amp = distamp.initialize(model, optimizer, "bf16-O2", master_weights=split, check_update=True)

    def step() -> None:
        amp.zero_grad()
        amp.backward(amp.model(torch.ones(4, 8)).float().square().mean())
        amp.step()

    step()
    with pytest.raises(NonFiniteWeightsError, match=r"^After step 1 .* first\.weight"):
        step()


@on_ranks(2)
def test_no_message_and_no_byte_is_added():
    calls = calls_of_a_step(StepGuard())
    assert calls_of_a_step(StepGuard(check_update=True)) == calls


# -- at the end of a run ---------------------------------------------------------------------------


@on_ranks(2)
def test_check_weights_finds_the_last_step():
    model = in_layout("DDP")[0]
    name = "module.middle.weight"
    optimizer = BadSGD(model.parameters(), dict(model.named_parameters())[name], rank=1)
    guard = guard_of(model)
    for _ in range(2):
        iteration(guard, model, optimizer)
    guard.check_weights()
    iteration(guard, model, optimizer)
    with pytest.raises(NonFiniteWeightsError, match=r"module\.middle\.weight \(rank 1\)"):
        guard.check_weights()


def test_check_weights_looks_at_the_optimizer_state():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = StepGuard(named_parameters=model.named_parameters())
    iteration(guard, model, optimizer)
    optimizer.state[model.first.weight]["exp_avg_sq"][0, 0] = INF
    with pytest.raises(NonFiniteWeightsError, match=r"exp_avg_sq of first\.weight \(rank 0\)"):
        guard.check_weights()


@on_ranks(2)
def test_check_weights_of_one_rank_alone_is_an_error():
    model = in_layout("DDP")[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guard_of(model)
    iteration(guard, model, optimizer)
    backward(guard, model, optimizer)
    call = guard.check_weights if dist.get_rank() == 0 else functools.partial(guard.step, optimizer)
    with pytest.raises(RankMismatchError, match=r"check_weights\(\)"):
        call()


# -- devices ---------------------------------------------------------------------------------------


def steps_that_the_host_reads(
    guard: StepGuard, model: nn.Module, optimizer: Any, **step: Any
) -> None:
    iteration(guard, model, optimizer, **step)
    guard.step_counts(optimizer)
    iteration(guard, model, optimizer, **step)


@on_devices(2)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_on_devices_every_rank_raises_one_call_later_and_no_step_is_taken(fused, step):
    model = Net().to(device_type())
    optimizer = BadSGD(model.parameters(), model.middle.weight, rank=1, bad_step=2, fused=fused)
    guard = guard_of(model)
    for _ in range(2):
        iteration(guard, model, optimizer, **step)
    weights_then = weights(model)
    with pytest.raises(NonFiniteWeightsError, match=r"^After step 2 .* middle\.weight \(rank 1\)"):
        steps_that_the_host_reads(guard, model, optimizer, **step)
    for now, earlier in zip(weights(model), weights_then, strict=True):
        assert torch.equal(now, earlier)
    assert guard.step_counts(optimizer).taken == 2


@on_devices(1)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_one_process_on_a_device_takes_no_further_step(fused, step):
    model = Net().to(device_type())
    optimizer = BadSGD(model.parameters(), model.middle.weight, bad_step=2, fused=fused)
    guard = guard_of(model)
    for _ in range(2):
        iteration(guard, model, optimizer, **step)
    weights_then = weights(model)
    with pytest.raises(NonFiniteWeightsError, match=r"^After step 2 "):
        steps_that_the_host_reads(guard, model, optimizer, **step)
    for now, earlier in zip(weights(model), weights_then, strict=True):
        assert torch.equal(now, earlier)
