"""What a user of `initialize` reads: the repr of an Amp, and mistakes in its first calls."""

import inspect

import pytest
import torch
from torch import nn

from distamp import initialize
from distamp.errors import CallOrderError
from distamp.levels.amp import Amp
from tests.on_ranks import on_ranks


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("level", "scaler"),
    [
        ("fp16", "<DistGradScaler of 1 rank at loss scale 65536: AdamW 0 steps taken, 0 skipped>"),
        ("bf16", "<StepGuard of 1 rank: AdamW 0 steps taken, 0 skipped>"),
    ],
)
def test_the_repr_of_an_amp_has_its_level_and_its_scaler(level, scaler):
    amp = initialize(*_trained(), level)
    assert repr(amp) == f"<Amp of Sequential at {level}: {scaler}>"


@pytest.mark.parametrize("swapped", ["both", "a list", "the model alone"])
def test_a_model_and_an_optimizer_in_the_other_order_are_told_the_order(swapped):
    model, optimizer = _trained()
    given = {
        "both": (optimizer, model),
        "a list": ([optimizer], [model]),
        "the model alone": (model, model),
    }
    order = "" if swapped == "a list" else r" The model comes first: initialize\(model, optimizer"
    with pytest.raises(TypeError, match=rf"must be a \w+ or several, not \w+\.{order}"):
        initialize(*given[swapped])


@on_ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("level", ["fp16", "fp16-O2"])
def test_a_backward_pass_of_an_unscaled_loss_names_amp_backward(level, world):
    model, optimizer = _trained()
    amp = initialize(model, optimizer, level)
    with amp.autocast():
        loss = model(torch.ones(1, 2).to(amp.models[0][0].weight.dtype)).float().sum()
    loss.backward()
    with pytest.raises(
        CallOrderError, match=r"Call amp\.backward\(loss\) instead of loss\.backward"
    ):
        amp.step()


def test_amp_documents_the_range_of_max_norm_that_clips_take():
    text = inspect.getdoc(Amp.clip_grad_norm_)
    assert text is not None
    assert "max_norm: The largest norm after clipping; >= 0." in text
