"""What an Amp saves, and what it loads: its own, another level's, torch's and Apex's."""

import copy
import io
from typing import Any

import pytest
import torch

from distamp import initialize
from distamp.errors import SettingError, StageError
from distamp.initialize import Amp
from distamp.scaler import HysteresisSchedule
from tests.initialize.nets import adam, backward, batches, net, values


def made(level: str, seed: int = 0, **overrides: Any) -> Amp:
    model = net(seed)
    return initialize(model, adam(model), level, **overrides)


def train(amp: Amp, first: int, last: int) -> list[float]:
    losses = []
    for batch in list(batches(last))[first:]:
        amp.zero_grad()
        losses.append(backward(amp, batch))
        amp.step()
    return losses


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "bf16", "bf16-O2"])
def test_a_resumed_run_goes_on_to_the_bit(level):
    amp, file = made(level), io.BytesIO()
    train(amp, 0, 3)
    parts = (amp.model, amp.optimizers[0], amp)
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    resumed = made(level, seed=1)
    states = torch.load(file, weights_only=True)
    for part, state in zip((resumed.model, resumed.optimizers[0], resumed), states, strict=True):
        part.load_state_dict(state)
    assert train(resumed, 3, 6) == train(amp, 3, 6)
    assert all(map(torch.equal, values(amp.model), values(resumed.model)))


def test_credit_for_overflows_goes_on_from_a_state():
    schedule = HysteresisSchedule(hysteresis=3, min_scale=2.0)
    amp, resumed = made("O1", schedule=schedule), made("O1", schedule=schedule)
    backward(amp, next(batches(1)), torch.inf)
    assert not amp.step()
    resumed.load_state_dict(amp.state_dict())
    saved = amp.scaler.state_dict()
    assert resumed.scaler.state_dict() == saved
    assert saved["distamp_guard"]["hysteresis_tracker"] == 2


APEX = {"loss_scale": 4096.0, "unskipped": 7}
TORCHS = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=77).state_dict()


@pytest.mark.parametrize(
    ("state", "scale", "tracker"),
    [
        ({"loss_scaler0": APEX}, 4096.0, 7),
        # Of several losses the smallest.
        ({"loss_scaler0": APEX, "loss_scaler1": APEX | {"loss_scale": 512.0}}, 512.0, 7),
        (TORCHS, 512.0, 0),
    ],
    ids=["Apex's", "Apex's of two losses", "torch's"],
)
def test_the_state_of_another_library_is_read(state, scale, tracker):
    amp = made("O2")
    amp.load_state_dict(state)
    found = amp.scaler.state_dict()
    assert (found["scale"], found["_growth_tracker"]) == (scale, tracker)
    assert found["growth_interval"] == (77 if state is TORCHS else 2000)


def test_a_run_can_go_on_at_another_level():
    first, second = made("O0"), made("O2", seed=1)
    train(first, 0, 3)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    train(second, 0, 1)
    (masters,) = second.masters
    trained = [p.detach() for n, p in first.model.named_parameters() if "norm" not in n]
    for (parameter, master), wanted in zip(masters.pairs(), trained, strict=True):
        assert torch.equal(parameter, master.half())
        torch.testing.assert_close(master.detach(), wanted, rtol=0, atol=0.02)


STATIC = {"loss_scale": 128.0}


@pytest.mark.parametrize(
    ("before", "after", "scale", "kind"),
    [
        (("O3", {}), ("O2", {}), 65536.0, "dynamic"),
        (("O1", {}), ("O3", {}), 1.0, "static"),
        (("O1", {}), ("O2", {}), 4.0, "dynamic"),
        (("O2", {}), ("O2", STATIC), 128.0, "static"),
        (("O2", STATIC), ("O2", {}), 65536.0, "dynamic"),
        (("O2", STATIC), ("O2", {"loss_scale": 64.0}), 64.0, "static"),
        (("O1", {}), ("O2", {"schedule": HysteresisSchedule(hysteresis=3)}), 4.0, "hysteresis"),
    ],
)
def test_a_scale_is_loaded_where_both_are_dynamic(before, after, scale, kind):
    first, second = made(before[0], **before[1]), made(after[0], **after[1])
    if first.scaler.schedule.kind == "dynamic":
        first.scaler.load_state_dict({**first.scaler.state_dict(), "scale": 4.0})
    second.load_state_dict(first.state_dict())
    assert second.scaler.get_scale() == scale
    assert second.scaler.schedule.kind == kind


def test_another_version_and_a_copy_are_refused():
    amp = made("O1")
    with pytest.raises(SettingError, match="version"):
        amp.load_state_dict({**amp.state_dict(), "version": 99})
    with pytest.raises(StageError, match="copied"):
        copy.deepcopy(amp)
