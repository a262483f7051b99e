"""The guard beyond the gradient on a real GPU: skips, updates, replicas and snapshots."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import StepGuard
from distamp.errors import NonFiniteWeightsError, ReplicaMismatchError
from distamp.guard import Snapshots
from tests.on_ranks import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIMULATED = torch.cuda.is_available() and torch.cuda.get_device_name() == "simulated"
# The simulated accelerator has no random generator, no sync_debug_mode, and no group as "cuda".
ON_A_REAL_GPU = pytest.mark.skipif(SIMULATED, reason="needs a real CUDA device")


@contextmanager
def refuse_synchronisation() -> Iterator[None]:
    """Raise if the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_run(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model on the GPU and its fused optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer


def run_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute new gradients of random inputs."""
    inputs = torch.randn(4, 8, device="cuda")
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, guard: StepGuard, steps: int) -> None:
    """Train on random inputs."""
    for _ in range(steps):
        run_backward(model, optimizer)
        guard.step(optimizer, max_norm=1.0)
        guard.update()


def train_and_wait(
    model: nn.Module, optimizer: torch.optim.Optimizer, guard: StepGuard, steps: int
) -> None:
    """Train, and wait for each step. The host reads the result of a step once it is there."""
    for _ in range(steps):
        train(model, optimizer, guard, 1)
        torch.cuda.synchronize()


def copy_weights(model: nn.Module) -> list[Tensor]:
    """Return copies of the parameters on the host."""
    return [param.detach().cpu().clone() for param in model.parameters()]


@ON_A_REAL_GPU
def test_a_fused_step_with_skip_if_and_check_update_never_synchronises() -> None:
    model, optimizer = make_run()
    guard = StepGuard(check_update=True)
    train(model, optimizer, guard, 2)
    run_backward(model, optimizer)
    is_spike = torch.zeros((), dtype=torch.bool, device="cuda")
    with refuse_synchronisation():
        guard.step(optimizer, skip_if=is_spike)
        guard.update()
    assert guard.step_counts(optimizer).taken == 3


def test_an_update_that_is_not_finite_is_named_before_the_next_step() -> None:
    model, optimizer = make_run()
    guard = StepGuard(check_update=True, named_parameters=model.named_parameters())
    train(model, optimizer, guard, 2)
    with torch.no_grad():
        optimizer.state[model[2].weight]["exp_avg"].fill_(torch.inf)
    train(model, optimizer, guard, 1)
    weights = copy_weights(model)
    with pytest.raises(NonFiniteWeightsError, match=r"2\.weight"):
        train_and_wait(model, optimizer, guard, 2)
    for weight, earlier_weight in zip(copy_weights(model), weights, strict=True):
        torch.testing.assert_close(weight, earlier_weight, rtol=0, atol=0, equal_nan=True)


@ON_A_REAL_GPU
def test_a_run_that_went_back_continues_with_the_same_bits() -> None:
    model, optimizer = make_run()
    guard = StepGuard()
    snapshots = Snapshots(model, optimizer, guard, every=2)
    train(model, optimizer, guard, 2)
    snapshots.record()
    train(model, optimizer, guard, 3)
    expected = copy_weights(model)
    snapshots.rewind()
    train(model, optimizer, guard, 3)
    for weight, expected_weight in zip(copy_weights(model), expected, strict=True):
        assert torch.equal(weight, expected_weight)


def flip_a_bit(tensor: Tensor) -> None:
    """Flip the lowest bit of the first element."""
    words = tensor.detach().view(-1).view(torch.int32)
    words[0] ^= 1


@ON_A_REAL_GPU
@on_ranks(2)
def test_a_flipped_bit_of_a_replica_is_found_on_two_ranks_of_one_gpu():
    model, optimizer = make_run()
    replica = DistributedDataParallel(model)
    guard = StepGuard(named_parameters=model.named_parameters(), check_replicas_every=1)
    train(replica, optimizer, guard, 2)
    if dist.get_rank() == 1:
        flip_a_bit(model[2].weight)
    with pytest.raises(ReplicaMismatchError, match=r"2\.weight"):
        train(replica, optimizer, guard, 2)
