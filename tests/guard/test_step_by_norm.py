"""step(max_norm=, skip_norm_above=) sends one message with flag and norm, and decides once.

`test_oracle` draws programs of such steps over one optimizer and several, and
`tests.scaler.test_random_programs` draws them in every layout.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler, StepGuard
from distamp.errors import CallOrderError, ConfigError, GradientError, NonFiniteGradientsError
from distamp.optim_utils import view_of
from distamp.scaler import MasterParameters
from tests.on_ranks import on_devices, on_ranks
from tests.place import device_type
from tests.scaler.steps import INF, NAN, backward, cpu_scaler, error_of, iteration, leaf, sgd


def disabled_scaler() -> DistGradScaler:
    return cpu_scaler(enabled=False)


MAKERS = [StepGuard, cpu_scaler, disabled_scaler]
PLAIN_AND_FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


# -- a disabled scaler -----------------------------------------------------------------------------


def test_a_disabled_scaler_clips():
    parameter, optimizer = sgd(0.0, 0.0)
    scaler = disabled_scaler()
    iteration(scaler, optimizer, parameter, [3.0, 4.0], max_norm=1.0, skip_norm_above=10.0)
    assert scaler.step_was_taken(optimizer)
    assert scaler.found_inf(optimizer) == 0.0
    assert scaler.grad_norm(optimizer) == 5.0
    assert parameter.tolist() == pytest.approx([-0.6, -0.8])


def test_a_disabled_scaler_skips_a_step_by_its_norm():
    parameter, optimizer = sgd(0.0, 0.0)
    scaler = disabled_scaler()
    iteration(scaler, optimizer, parameter, [30.0, 40.0], max_norm=1.0, skip_norm_above=10.0)
    assert not scaler.step_was_taken(optimizer)
    assert scaler.found_inf(optimizer) == 1.0
    assert scaler.grad_norm(optimizer) == 50.0
    assert scaler.step_counts(optimizer).norm_skips == 1
    assert parameter.tolist() == [0.0, 0.0]


def test_a_disabled_scaler_clips_several_optimizers_with_masters_by_their_norm():
    first, second = sgd_with_masters(), sgd_with_masters()
    first_param, second_param = model_param_of(first), model_param_of(second)
    scaler = disabled_scaler()
    backward(scaler, first_param, [3.0, 0.0])
    backward(scaler, second_param, [0.0, 4.0])
    scaler.step_all([first, second], max_norm=1.0)
    assert scaler.grad_norm().item() == pytest.approx(5.0)
    assert first_param.tolist() == pytest.approx([0.4, 1.0], rel=1e-3)
    assert second_param.tolist() == pytest.approx([1.0, 0.2], rel=1e-3)


# -- the limit of skips ----------------------------------------------------------------------------


def test_spikes_are_not_counted_towards_the_limit_of_skips_and_an_inf_is_no_spike():
    parameter, optimizer = sgd()
    guard = StepGuard(max_consecutive_skips=2)
    for gradient in (10.0, 10.0, 10.0, INF, 10.0):
        iteration(guard, optimizer, parameter, gradient, skip_norm_above=1.0)
    counts = guard.step_counts(optimizer)
    assert counts.taken == 0
    assert counts.skipped == 1
    assert counts.norm_skips == 4
    with pytest.raises(NonFiniteGradientsError):
        iteration(guard, optimizer, parameter, INF, skip_norm_above=1.0)


@on_ranks(2)
def test_after_a_rank_was_replaced_replicas_are_compared_and_skips_counted_from_the_start():
    """The protocol's model has this case: CLIPS_AGREE_KEPT_IN_A_NEW_GROUP."""
    is_replaced = dist.get_rank() == 1
    parameter, optimizer = sgd()
    guard = StepGuard(max_consecutive_skips=3)

    def step(gradient_of_rank_1: float) -> None:
        gradient = gradient_of_rank_1 if is_replaced else 1.0
        iteration(guard, optimizer, parameter, gradient, max_norm=0.25)

    step(1.0)
    step(INF)
    step(INF)
    # Rank 1 is another process now, which has only the state of the guard.
    state = guard.state_dict()
    if is_replaced:
        guard = StepGuard(max_consecutive_skips=3)
    guard.load_state_dict(state)
    guard.process_group = dist.new_group()
    step(INF)
    step(INF)
    text = r"3 steps in a row were skipped\. SGD \(1 parameter\) had inf or NaN in its"
    with pytest.raises(NonFiniteGradientsError, match=text):
        step(INF)
    guard.update()
    step(1.0)
    assert parameter.item() == pytest.approx(0.5, abs=1e-5)


# -- ranks that differ -----------------------------------------------------------------------------


def assert_every_rank_raises(limits: list[dict[str, Any]], name: str, words: str) -> None:
    """Step with the limits of this rank; assert the error, and that nothing was stepped."""
    parameter, optimizer = sgd()
    guard = StepGuard()
    limits_here = limits[dist.get_rank()]
    raised_name, text = error_of(iteration, guard, optimizer, parameter, 1.0, **limits_here)
    assert raised_name == name
    assert words in text
    assert parameter.item() == 1.0


@on_ranks(2)
def test_ranks_that_clip_to_another_norm_raise_on_every_rank():
    limits = [{"max_norm": 1.0}, {"max_norm": 2.0}]
    assert_every_rank_raises(limits, "RankMismatchError", "max_norm=2.0")


@on_ranks(2)
def test_a_clip_on_one_rank_and_a_limit_on_the_other_raise_on_every_rank():
    limits: list[dict[str, Any]] = [{"max_norm": 1.0}, {"skip_norm_above": 3.0}]
    assert_every_rank_raises(limits, "RankMismatchError", "skip_norm_above=3.0")


@on_ranks(2)
def test_a_negative_norm_of_one_rank_raises_on_every_rank():
    limits = [{"max_norm": 1.0}, {"max_norm": -1.0}]
    assert_every_rank_raises(limits, "ConfigError", "max_norm must be >= 0")


@on_ranks(2)
def test_limits_in_tensors_that_differ_raise_on_every_rank():
    """The limit of rank 0 would skip the step, and the limit of rank 1 would not."""
    limits = [{"skip_norm_above": torch.tensor(0.5)}, {"skip_norm_above": torch.tensor(1.5)}]
    assert_every_rank_raises(limits, "RankMismatchError", "skip_norm_above=1.5")


# -- refusals --------------------------------------------------------------------------------------


class SelfClippingSGD(torch.optim.SGD):
    """An optimizer that clips by itself."""

    def step(  # type: ignore[override]
        self, max_norm: float = 1.0, shard_group_fn: Any = None, is_replicated_fn: Any = None
    ) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("name", "value"), [("max_norm", 1.0), ("shard_group_fn", bool), ("is_replicated_fn", bool)]
)
def test_an_argument_that_the_optimizers_step_has_too_is_refused(name, value):
    parameter, _ = sgd()
    optimizer = SelfClippingSGD([parameter], lr=1.0)
    with pytest.raises(TypeError, match=f"a {name} of its own"):
        StepGuard().step(optimizer, **{"skip_norm_above": 9.0, name: value})


def test_a_norm_that_was_never_measured_is_refused():
    with pytest.raises(CallOrderError, match="before a norm was measured"):
        StepGuard().grad_norm()


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(0.0, id="zero"),
        pytest.param(torch.ones(2), id="two values"),
        pytest.param(torch.tensor(NAN), id="NaN"),
    ],
)
def test_a_limit_that_is_no_positive_number_is_refused(limit):
    parameter, optimizer = sgd()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="skip_norm_above"):
        StepGuard().step(optimizer, skip_norm_above=limit)


# -- declarations ----------------------------------------------------------------------------------


def step_with_declaration(make: Any, fused: bool, norm: float, **declaration: Any) -> None:
    """Step with gradient 3 on rank 0 and 4 on rank 1; assert the norm and the clipped step."""
    parameter, optimizer = sgd(0.0, fused=fused)
    guard = make()
    gradient = 3.0 if dist.get_rank() == 0 else 4.0
    iteration(guard, optimizer, parameter, gradient, max_norm=1.0, **declaration)
    assert guard.grad_norm(optimizer).item() == pytest.approx(norm)
    assert parameter.item() == pytest.approx(-gradient / norm, rel=1e-5)


@on_ranks(2)
@PLAIN_AND_FUSED
@pytest.mark.parametrize("make", MAKERS)
def test_a_step_adds_the_squares_of_declared_shards(make, fused):
    step_with_declaration(make, fused, norm=5.0, shard_group_fn=lambda param: True)


@on_ranks(2)
@PLAIN_AND_FUSED
@pytest.mark.parametrize("make", MAKERS)
def test_a_step_averages_the_squares_of_declared_replicas(make, fused):
    norm = ((9.0 + 16.0) / 2) ** 0.5
    step_with_declaration(make, fused, norm, is_replicated_fn=lambda param: True)


# -- a step that is skipped does not clip ----------------------------------------------------------


def sgd_for_loop() -> torch.optim.Optimizer:
    return torch.optim.SGD([leaf(1.0, 1.0)], lr=1.0, foreach=False)


def adamw_foreach() -> torch.optim.Optimizer:
    return torch.optim.AdamW([leaf(1.0, 1.0)], foreach=True)


def adamw_fused() -> torch.optim.Optimizer:
    return torch.optim.AdamW([leaf(1.0, 1.0)], fused=True)


def adamw_fused_in_float64() -> torch.optim.Optimizer:
    return torch.optim.AdamW([leaf(1.0, 1.0, dtype=torch.float64)], fused=True)


def sgd_with_masters() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([leaf(1.0, 1.0, dtype=torch.float16)], lr=1.0)
    MasterParameters(optimizer)
    return optimizer


def model_param_of(optimizer: torch.optim.Optimizer) -> nn.Parameter:
    (parameter,) = view_of(optimizer).model_params()
    return parameter


def gradients_after_a_skip(make: Any, make_optimizer: Any, **limits: float) -> list[Any]:
    """Return the gradients of parameters and masters after a step that the norm of 50 skips."""
    optimizer = make_optimizer()
    settings = {}
    if make is cpu_scaler and make_optimizer is sgd_with_masters:
        settings["fp16_grads"] = "master"
    guard = make(**settings)
    backward(guard, model_param_of(optimizer), [30.0, 40.0])
    guard.step(optimizer, skip_norm_above=10.0, **limits)
    assert not guard.step_was_taken(optimizer)
    gradients: list[Any] = []
    for model_param, stepped_param in view_of(optimizer).param_pairs():
        gradients += [model_param.grad, stepped_param.grad]
    return gradients


@pytest.mark.parametrize(
    "make_optimizer",
    [sgd_for_loop, adamw_foreach, adamw_fused, adamw_fused_in_float64, sgd_with_masters],
)
@pytest.mark.parametrize("make", MAKERS)
def test_a_step_that_skip_norm_above_skips_does_not_clip(make, make_optimizer):
    expected = gradients_after_a_skip(make, make_optimizer)
    gradients = gradients_after_a_skip(make, make_optimizer, max_norm=1.0)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


@on_devices(2)
@PLAIN_AND_FUSED
def test_gradients_below_max_norm_are_not_enlarged_on_a_device(fused):
    parameter = nn.Parameter(torch.zeros(1, device=device_type()))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    guard = StepGuard()
    parameter.grad = torch.full_like(parameter, 0.5)
    guard.step(optimizer, max_norm=100.0)
    guard.update()
    assert parameter.item() == -0.5


# -- several messages for one step -----------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}], ids=["step", "by norm"])
@PLAIN_AND_FUSED
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_both_optimizers_of_a_clip_skip_if_one_has_a_nan(make, fused, limits):
    """Their steps do not decide again, by a norm or without."""
    good_param, good = sgd(fused=fused)
    bad_param, bad = sgd(fused=fused)
    guard = make()
    guard.register_optimizers(good, bad)
    backward(guard, good_param, 1.0)
    backward(guard, bad_param, NAN)
    assert guard.clip_grad_norm_([good_param, bad_param], 1.0).isnan()
    for optimizer in (good, bad):
        assert guard.found_inf(optimizer).item() == 1.0
        guard.step(optimizer, **limits)
        assert not guard.step_was_taken(optimizer)
    assert good_param.item() == 1.0
    assert bad_param.item() == 1.0


class UnequalReplicas:
    """Two parameters under a guard; the gradients of the second differ between ranks."""

    def __init__(self) -> None:
        self.equal = nn.Parameter(torch.ones(2))
        self.unequal = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.equal, self.unequal], lr=0.1)
        self.guard = StepGuard()

    def backward(self) -> None:
        self.equal.grad = torch.ones(2)
        self.unequal.grad = torch.full((2,), 1.0 + dist.get_rank())

    def assert_a_step_by_norm_raises(self) -> None:
        self.backward()
        text = r"differ between ranks.*some were not reduced"
        with pytest.raises(GradientError, match=text):
            self.guard.step(self.optimizer, max_norm=1.0)


@on_ranks(2)
def test_replicas_are_compared_again_if_a_frozen_parameter_takes_part():
    """DDP does not average a parameter that was frozen at first."""
    replicas = UnequalReplicas()
    for _ in range(2):
        replicas.backward()
        replicas.unequal.grad = None
        replicas.guard.step(replicas.optimizer, max_norm=1.0)
        replicas.guard.update()
    replicas.assert_a_step_by_norm_raises()


@on_ranks(2)
def test_replicas_are_compared_again_if_a_declaration_is_left_out():
    replicas = UnequalReplicas()

    def is_shard(param: torch.Tensor) -> bool:
        return param is replicas.unequal

    for _ in range(2):
        replicas.backward()
        replicas.guard.clip_grad_norm_(replicas.optimizer, 1.0, shard_group_fn=is_shard)
        replicas.guard.step(replicas.optimizer)
        replicas.guard.update()
    replicas.assert_a_step_by_norm_raises()
