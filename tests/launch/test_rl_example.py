"""The policies of examples/rl_fp16.py: decoded with a cache they say what the whole model says."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import distamp
from tests.launch.jobs import ROOT


@pytest.fixture(scope="module")
def rl() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_fp16", ROOT / "examples" / "rl_fp16.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def _rollout(rl: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    policy = rl.Policy()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(32, 127, (16, 4), generator=generator)
    return policy, rl.sample(rl.cast_copy(policy, dtype), prompts, 20, generator)


def test_decoding_with_a_cache_gives_the_probabilities_of_the_whole_model(rl):
    policy, rollout = _rollout(rl, torch.float64)
    log_probs = rl.log_probs_of(policy.double(), rollout.tokens, 4)
    assert rollout.tokens.shape == (16, 24)
    torch.testing.assert_close(rollout.log_probs, log_probs.float(), rtol=1e-5, atol=1e-5)


def test_rewards_are_the_part_of_digits_and_advantages_are_relative_to_the_group(rl):
    _, rollout = _rollout(rl, torch.float32)
    digits = [sum(48 <= byte <= 57 for byte in row[4:]) / 20 for row in rollout.tokens.tolist()]
    assert rollout.rewards.tolist() == pytest.approx(digits)
    found = rl.advantages(torch.tensor([0.0, 1.0, 3.0, 3.0]), 2)
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0, 0.0], rel=1e-3)


def test_the_gap_between_rollout_and_trainer_is_smaller_in_fp16_than_in_bf16(rl):
    gaps = {}
    for dtype in (torch.bfloat16, torch.float16):
        policy, rollout = _rollout(rl, dtype)
        with torch.no_grad(), distamp.autocast("cpu", dtype=dtype):
            log_probs = rl.log_probs_of(policy, rollout.tokens, 4)
        gaps[dtype] = float((rollout.log_probs - log_probs).abs().mean())
    assert 0 < gaps[torch.float16] < 0.5 * gaps[torch.bfloat16]
