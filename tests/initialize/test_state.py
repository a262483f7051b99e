"""What an Amp saves, and what it loads: its own, another level's, torch's and Apex's."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from distamp import initialize
from distamp.errors import SettingError, StageError
from distamp.initialize import Amp
from tests.initialize.nets import batches, loss_of, net, values


def made(level: str, seed: int = 0, **overrides: Any) -> Amp:
    model = net(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    return initialize(model, optimizer, level, **overrides)


def train(amp: Amp, count: int, skip: int = 0) -> list[float]:
    losses = []
    for context, following in list(batches(count))[skip:]:
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context)
        loss = loss_of(logits, following)
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    return losses


def saved(amp: Amp) -> Any:
    file = io.BytesIO()
    (optimizer,) = amp.optimizers
    torch.save([amp.model.state_dict(), optimizer.state_dict(), amp.state_dict()], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "bf16", "bf16-O2"])
def test_a_resumed_run_goes_on_to_the_bit(level):
    whole = made(level)
    losses = train(whole, 6)
    first = made(level)
    train(first, 3)
    model_state, optimizer_state, amp_state = saved(first)
    second = made(level, seed=1)
    second.model.load_state_dict(model_state)
    second.optimizers[0].load_state_dict(optimizer_state)
    second.load_state_dict(amp_state)
    assert train(second, 6, skip=3) == losses[3:]
    assert all(map(torch.equal, values(whole.model), values(second.model)))


APEX = {"loss_scale": 4096.0, "unskipped": 7}


def test_apexs_amp_state_is_read():
    amp = made("O2")
    amp.load_state_dict({"loss_scaler0": APEX})
    (state,) = amp.state_dict()["loss_scalers"]
    assert (state["scale"], state["_growth_tracker"]) == (4096.0, 7)


def test_of_apexs_scales_of_several_losses_the_smallest_is_taken():
    amp = made("O2", num_losses=3)
    scales = (65536.0, 512.0, 4096.0)
    amp.load_state_dict({f"loss_scaler{i}": APEX | {"loss_scale": scales[i]} for i in range(3)})
    assert amp.scaler.get_scale() == 512.0


def test_the_state_of_torchs_scaler_is_read():
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=77)
    amp = made("O1")
    amp.load_state_dict(scaler.state_dict())
    assert amp.scaler.get_scale() == 512.0
    assert amp.scaler.get_growth_interval() == 77


def test_a_run_can_go_on_at_another_level():
    first = made("O0")
    train(first, 3)
    second = made("O2", seed=1)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    train(second, 1)
    for (parameter, master), trained in zip(
        second.masters[0].pairs(),
        [p for n, p in first.model.named_parameters() if "norm" not in n],
        strict=True,
    ):
        assert torch.equal(parameter, master.half())
        torch.testing.assert_close(master.detach(), trained.detach(), rtol=0, atol=0.02)


def test_a_state_of_another_version_is_refused():
    amp = made("O1")
    with pytest.raises(SettingError, match="another version"):
        amp.load_state_dict({**amp.state_dict(), "version": 99})


def test_a_copy_is_refused_for_its_optimizers_would_be_strangers():
    with pytest.raises(StageError, match="cannot be copied or pickled"):
        copy.deepcopy(made("O1"))
