"""Several losses with scales of their own, whose gradients meet in the same parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from distamp import initialize
from distamp.errors import SettingError
from distamp.scaler import DynamicSchedule, HeadroomSchedule
from tests.initialize.nets import batches, loss_of, net

SCALES = (2.0**12, 2.0**5)


def made(level: str = "O1", losses: int = 2, **overrides):
    """Return an Amp over one model whose losses have different scales."""
    model = net(batchnorm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = initialize(model, optimizer, level, num_losses=losses, **overrides)
    state = amp.state_dict()
    for saved, scale in zip(state["loss_scalers"], SCALES, strict=False):
        saved["scale"] = scale
    amp.load_state_dict(state)
    return amp


def scales(amp) -> list[float]:
    return [state["scale"] for state in amp.state_dict()["loss_scalers"]]


def run(amp, factors: list[tuple[int, float]]) -> bool:
    """One iteration: a backward pass for each (loss_id, factor)."""
    amp.zero_grad()
    for (context, following), (loss_id, factor) in zip(batches(len(factors)), factors, strict=True):
        with amp.autocast():
            logits = amp.model(context)
        amp.backward(loss_of(logits, following) * factor, loss_id)
    return bool(amp.step())


def stepped_by_fp32(factors: list[tuple[int, float]]) -> list[Tensor]:
    model: nn.Module = net(batchnorm=False)
    for (context, following), (_, factor) in zip(batches(len(factors)), factors, strict=True):
        (loss_of(model(context), following) * factor).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
    "order", [(0, 1), (1, 0), (0, 1, 0, 1), (0, 0, 1), (1,)], ids=lambda o: "".join(map(str, o))
)
def test_gradients_of_losses_at_different_scales_add_up(level, order):
    overrides = {"loss_scale": "dynamic"} if level == "O3" else {}
    amp = made(level, **overrides)
    factors = [(loss_id, 1.0 + 2.0 * loss_id) for loss_id in order]
    assert run(amp, factors)
    for ours, wanted in zip(amp.model.parameters(), stepped_by_fp32(factors), strict=True):
        torch.testing.assert_close(ours.float(), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("order", "bad", "wanted"),
    [
        ((0, 1), 0, (2.0**11, 2.0**5)),
        ((0, 1), 1, (2.0**12, 2.0**4)),
        ((1, 0), 0, (2.0**11, 2.0**5)),
        ((1, 0), 1, (2.0**12, 2.0**4)),
        ((0, 1, 0), 1, (2.0**12, 2.0**4)),
        ((1,), 1, (2.0**12, 2.0**4)),
    ],
)
def test_only_the_scale_of_the_loss_that_overflowed_backs_off(level, order, bad, wanted):
    amp = made(level)
    assert not run(amp, [(i, float("inf") if i == bad else 1.0) for i in order])
    assert scales(amp) == list(wanted)
    assert run(amp, [(i, 1.0) for i in order])
    assert scales(amp) == list(wanted)


def test_of_two_losses_that_overflow_the_first_is_blamed_and_then_the_second():
    amp = made()
    bad = float("inf")
    assert not run(amp, [(0, bad), (1, bad)])
    assert scales(amp) == [2.0**11, 2.0**5]
    assert not run(amp, [(0, 1.0), (1, bad)])
    assert scales(amp) == [2.0**11, 2.0**4]


def test_each_scale_grows_by_its_own_clean_iterations():
    amp = made(schedule=DynamicSchedule(growth_interval=2))
    assert run(amp, [(0, 1.0)])
    assert run(amp, [(0, 1.0), (1, 1.0)])
    assert scales(amp) == [2.0**13, 2.0**5]
    assert not run(amp, [(0, float("inf")), (1, 1.0)])
    assert scales(amp) == [2.0**12, 2.0**5], "an iteration that was spoilt is none for the other"
    assert run(amp, [(1, 1.0)])
    assert scales(amp) == [2.0**12, 2.0**6]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_norm_to_clip_by_is_that_of_the_sum(level):
    amp = made(level)
    reference = net(batchnorm=False)
    for number, (context, following) in enumerate(batches(2)):
        with amp.autocast():
            logits = amp.model(context)
        amp.backward(loss_of(logits, following), number)
        loss_of(reference(context), following).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    torch.testing.assert_close(amp.clip_grad_norm_(0.1), wanted, rtol=1e-2, atol=0)
    assert amp.step()


def test_a_penalty_takes_the_scale_of_its_loss():
    amp = made()
    ((context, following),) = batches(1)
    loss = loss_of(amp.model(context), following)
    parameters = list(amp.model.parameters())
    gradients = [amp.grad(loss, parameters, loss_id, retain_graph=True) for loss_id in (0, 1)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_a_level_without_a_scaler_takes_any_number_of_losses():
    amp = initialize(model := net(), torch.optim.SGD(model.parameters()), "bf16", num_losses=2)
    assert run(amp, [(0, 1.0), (1, 1.0)])
    assert amp.state_dict()["loss_scalers"] == []


@pytest.mark.parametrize("loss_id", [-1, 2])
def test_a_loss_that_was_not_announced_is_refused(loss_id):
    with pytest.raises(ValueError, match="num_losses=2"):
        run(made(), [(loss_id, 1.0)])


def test_a_schedule_that_watches_gradients_serves_one_loss():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(SettingError, match="serves one loss"):
        initialize(model, optimizer, "O1", num_losses=2, schedule=HeadroomSchedule())
