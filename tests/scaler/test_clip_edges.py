"""Clipping at odd places: two dimensions of replicas, and gradients of which some are unscaled."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from distamp import DistGradScaler


def _norm_of_replicas() -> float:
    mesh = init_device_mesh("cpu", (2, 2))
    weight = torch.nn.Parameter(
        DTensor.from_local(torch.zeros(3), mesh, [Replicate(), Replicate()])
    )
    weight.grad = DTensor.from_local(torch.full((3,), 4.0), mesh, [Replicate(), Replicate()])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DistGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return scaler.clip_grad_norm_(optimizer, 1.0).item()


def test_a_replica_in_both_dimensions_of_a_mesh_counts_once(ranks4):
    assert ranks4.run(_norm_of_replicas) == [pytest.approx(math.sqrt(3))] * 4


def test_gradients_that_are_unscaled_already_are_clipped_with_those_that_are_not():
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler = DistGradScaler("cpu", init_scale=4.0)
    scaler.add_optimizer(*optimizers)
    scaler.scale(weights[0].sum() + weights[1].sum()).backward()
    scaler.unscale_(optimizers[0])
    assert scaler.clip_grad_norm_(weights, 1.0).item() == pytest.approx(2.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert torch.cat(weights).tolist() == pytest.approx([-0.5] * 4, abs=1e-5)
