"""A scaler's state that lacks one of torch's keys is damaged; a guard's state has none of them."""

import pytest
import torch

from distamp import DistGradScaler, StepGuard
from distamp.errors import ConfigError


def make_scaler() -> DistGradScaler:
    scaler = DistGradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("key", list(torch.amp.GradScaler("cpu").state_dict()))
def test_a_state_without_one_key_is_refused_and_changes_nothing(key):
    state = DistGradScaler("cpu", init_scale=8.0).state_dict()
    del state[key]
    scaler = make_scaler()

    with pytest.raises(ConfigError, match=f"no '{key}'"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 64.0


def test_the_state_of_a_guard_leaves_the_scale():
    scaler = make_scaler()
    scaler.load_state_dict(StepGuard().state_dict())
    assert scaler.get_scale() == 64.0
