"""What a user of a guard or scaler reads: its repr, and messages about calls that it refuses."""

import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distamp import DistGradScaler, StepGuard
from distamp.errors import CallOrderError, RankMismatchError
from distamp.groups import Group, reach
from tests.on_ranks import on_ranks
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, sgd


def test_a_repr_has_the_scale_the_ranks_and_the_steps_that_the_host_knows():
    (parameter, optimizer), guard, scaler = sgd(), StepGuard(), cpu_scaler(8.0)
    assert repr(guard) == "<StepGuard of 1 rank>"
    assert repr(scaler) == "<DistGradScaler of 1 rank at loss scale 8>"
    assert repr(cpu_scaler(enabled=False)) == "<DistGradScaler, disabled>"
    for made in (guard, scaler):
        for gradient in (1.0, INF, 50.0):
            iteration(made, optimizer, parameter, gradient, skip_norm_above=10.0)
    assert repr(guard) == "<StepGuard of 1 rank: SGD 1 step taken, 1 skipped, 1 spike>"
    assert repr(scaler) == (
        "<DistGradScaler of 1 rank at loss scale 4: SGD 1 step taken, 1 skipped, 1 spike>"
    )


@on_ranks(2)
@pytest.mark.parametrize("given", ["default group", "a group", "a rank alone"])
def test_a_repr_of_one_rank_sends_nothing(given):
    """Rank 0 alone makes it, before the first message and after it."""
    groups = {
        "default group": lambda: None,
        "a group": dist.new_group,
        "a rank alone": lambda: [dist.new_group([rank]) for rank in range(2)][dist.get_rank()],
    }
    (parameter, optimizer), guard = sgd(), StepGuard(groups[given]())
    size = "1 rank" if given == "a rank alone" else "2 ranks"
    if dist.get_rank() == 0:
        assert repr(guard) == f"<StepGuard of {size}>"
    iteration(guard, optimizer, parameter, 1.0)
    if dist.get_rank() == 0:
        assert repr(guard) == f"<StepGuard of {size}: SGD 1 step taken, 0 skipped>"
    iteration(guard, optimizer, parameter, 1.0)


def test_a_repr_does_not_read_a_loss_scale_on_a_device():
    """A tensor on meta cannot be read, and stands for one that the host would wait for."""
    scaler = cpu_scaler()
    scaler._scale = torch.ones((), device="meta")
    assert repr(scaler) == "<DistGradScaler of 1 rank with its loss scale on meta>"


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler, lambda: cpu_scaler(enabled=False)])
def test_a_number_in_the_place_of_a_closure_is_refused_by_name(make, fused):
    """As in guard.step(optimizer, 1.0), which means max_norm=1.0."""
    (parameter, optimizer), made = sgd(fused=fused), make()
    backward(made, parameter, 1.0)
    with pytest.raises(TypeError, match=r"passes 1\.0 to SGD\.step as its closure.*max_norm=1\.0"):
        made.step(optimizer, 1.0)
    assert parameter.item() == 1.0


class WithALength(torch.optim.SGD):
    """An optimizer whose step takes a number of its own."""

    def step(self, length: float) -> None:  # type: ignore[override]
        """Multiply the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(length)


@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_a_number_that_the_optimizers_own_step_takes_is_passed_on(make):
    (parameter, _), made = sgd(3.0), make()
    backward(made, parameter, 1.0)
    made.step(WithALength([parameter], lr=1.0), 2.0)
    assert parameter.item() == 6.0


def test_a_report_of_a_guard_names_no_loss_scale_and_one_of_a_scaler_does():
    titles = {}
    for made in (StepGuard(), cpu_scaler(8.0)):
        parameter, optimizer = sgd()
        iteration(made, optimizer, parameter, INF)
        titles[type(made)] = str(made.nonfinite_report()).splitlines()[0]
    assert titles[StepGuard] == "inf or NaN in the gradients"
    assert titles[DistGradScaler] == "inf or NaN in the gradients at loss scale 8"


@on_ranks(2)
def test_lost_peers_are_told_of_guards_and_scalers_alike():
    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    group: Any = Group(dist.group.WORLD, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="lost its peers") as raised:
        reach(group, fail)
    assert "pass it as process_group=. (Connection closed by peer)" in str(raised.value)
    assert "DistGradScaler" not in str(raised.value)


@on_ranks(2)
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_a_group_lost_in_a_pickle_is_named_of_guards_and_scalers_alike(make):
    pickled = pickle.dumps(make(process_group=dist.new_group([0, 1])))
    (parameter, optimizer), made = sgd(), pickle.loads(pickled)
    backward(made, parameter, 1.0)
    with pytest.raises(
        CallOrderError, match="this guard or scaler was left out of a pickle"
    ) as raised:
        made.step(optimizer)
    assert "Set guard.process_group or scaler.process_group" in str(raised.value)


@on_ranks(2)
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_ranks_that_diverged_read_of_their_calls_and_of_no_scaler(make):
    (parameter, optimizer), made = sgd(), make()
    backward(made, parameter, 1.0)
    with pytest.raises(
        RankMismatchError, match="must make the same calls, with the same optimi"
    ) as raised:
        made.step(optimizer, max_norm=1.0 + dist.get_rank())
    assert "scaler calls" not in str(raised.value)


@pytest.mark.parametrize("method", [StepGuard.step, StepGuard.unscale_])
def test_the_docs_of_a_guards_methods_name_what_a_guard_raises(method):
    text = inspect.getdoc(method)
    assert text is not None
    assert "Divide the optimizers' gradients by the loss scale" not in text
    assert ("LossScaleCollapseError" in text) == ("a scaler raises its subclass" in text)


def test_a_scaler_whose_loss_was_never_scaled_says_so_as_torchs_does():
    (parameter, optimizer), scaler = sgd(), cpu_scaler()
    parameter.sum().backward()
    with pytest.raises(CallOrderError, match=r"did not use scaler\.scale\(loss or outputs\)"):
        scaler.step(optimizer)
