"""A GPT in bf16 under FSDP2 x tensor parallel on four ranks, with a NaN on one rank in one step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distamp import StepGuard
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.report.setups import Net, parallel, sharded
from tests.scaler.steps import NAN

STEPS = 3
BAD_STEP = 1
BAD_RANK = 3


class Training:
    """A GPT and its optimizer on this rank, before the first step."""

    def __init__(self, fused: bool) -> None:
        two_dimensions = mesh((2, 2), ("data", "tensor"))
        policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        net = parallel(Net(), two_dimensions["tensor"])
        self.model: Any = sharded(net, two_dimensions["data"], **policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)

    def backward(self, step: int) -> None:
        """Compute the gradients of a step; both ranks of a tensor group have the same tokens."""
        data_rank = dist.get_rank() // 2
        generator = torch.Generator().manual_seed(10 * step + data_rank)
        tokens = torch.randint(32, (2, 7), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        self.optimizer.zero_grad()
        logits = self.model(inputs).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()

    def spoil_a_gradient(self) -> None:
        """Write NaN into a shard of one gradient, on one rank."""
        if dist.get_rank() == BAD_RANK:
            grad = self.model.blocks[0].up.weight.grad
            grad.to_local().view(-1)[0] = NAN

    def weights(self) -> list[Tensor]:
        """Return the full weights. Every rank must call this."""
        weights: list[Tensor] = []
        for param in self.model.parameters():
            is_sharded = isinstance(param, DTensor)
            weights.append(param.full_tensor() if is_sharded else param.detach())
        return weights


def train_with_a_bad_step(fused: bool, **limits: Any) -> list[Tensor]:
    """Train under a guard, which skips the bad step; return the weights."""
    training = Training(fused)
    guard = StepGuard()
    for step in range(STEPS):
        training.backward(step)
        if step == BAD_STEP:
            training.spoil_a_gradient()
        guard.step_all([training.optimizer], **limits)
        assert guard.step_was_taken(training.optimizer) is (step != BAD_STEP)
        guard.update()
    return training.weights()


def train_without_the_bad_step(fused: bool, **limits: Any) -> list[Tensor]:
    """Train under a guard without the batch of the bad step; return the weights."""
    training = Training(fused)
    guard = StepGuard()
    for step in range(STEPS):
        if step != BAD_STEP:
            training.backward(step)
            guard.step_all([training.optimizer], **limits)
            guard.update()
    return training.weights()


def mesh_of(param: Any) -> Any:
    """Return the mesh of a parameter as its declaration.

    Attention and norms are not in the plan, so both ranks of a tensor group hold them.
    """
    return getattr(param, "device_mesh", None)


@on_ranks(4)
def test_a_gpt_goes_on_as_if_the_bad_step_had_been_left_out():
    weights = train_with_a_bad_step(fused=False)
    expected = train_without_the_bad_step(fused=False)
    assert all(map(torch.equal, weights, expected))


@on_ranks(4)
@pytest.mark.slow
def test_a_gpt_that_is_clipped_goes_on_as_if_the_bad_step_had_been_left_out():
    limits = {"max_norm": 1.0, "shard_group_fn": mesh_of}
    weights = train_with_a_bad_step(fused=True, **limits)
    expected = train_without_the_bad_step(fused=True, **limits)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
@on_ranks(4)
def test_without_a_guard_the_bad_step_makes_weights_nan():
    """torch alone cannot clip here: its clip raises for tensors of two meshes."""
    training = Training(fused=False)
    training.backward(BAD_STEP)
    training.spoil_a_gradient()
    training.optimizer.step()
    assert any(bool(weight.isnan().any()) for weight in training.weights())
