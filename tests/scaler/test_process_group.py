"""Which ranks a scaler agrees with: what may be given, and when it is looked up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distamp import DistGradScaler
from distamp.errors import StageError
from tests.ranks import subgroup
from tests.scaler.steps import cpu_scaler, iteration, leaf, sgd


@pytest.mark.parametrize("group", [0, "gloo", [0, 1], object()], ids=lambda g: type(g).__name__)
def test_a_process_group_must_be_one(group):
    with pytest.raises(TypeError, match=r"must be a ProcessGroup, a DeviceMesh or None"):
        DistGradScaler("cpu", process_group=group)


def outside_its_group() -> str:
    group = dist.new_group([0])
    try:
        DistGradScaler("cpu", process_group=group)
    except ValueError as error:
        return str(error)
    return "taken"


def test_a_group_without_this_rank_is_refused_there(ranks2):
    inside, outside = ranks2.run(outside_its_group)
    assert inside == "taken"
    assert "does not contain this rank" in outside


def mesh_without_this_rank() -> str:
    from torch.distributed.device_mesh import DeviceMesh

    small = DeviceMesh("cpu", [0])
    try:
        DistGradScaler("cpu", process_group=small)
    except ValueError as error:
        return str(error)
    return "taken"


def test_a_mesh_without_this_rank_is_refused_there(ranks2):
    inside, outside = ranks2.run(mesh_without_this_rank)
    assert inside == "taken"
    assert "does not contain rank 1" in outside


def destroyed_and_made_anew() -> list[object]:
    group = dist.new_group([0, 1])
    parameter, optimizer = sgd(1.0)
    scaler = DistGradScaler("cpu", process_group=group)
    iteration(scaler, optimizer, parameter, 0.25)
    dist.destroy_process_group(group)
    seen: list[object] = []
    try:
        iteration(scaler, optimizer, parameter, 0.25)
    except StageError as error:
        seen.append(str(error))
    scaler.process_group = dist.new_group([0, 1])
    scaler.step(optimizer)
    scaler.update()
    return [*seen, parameter.item()]


def test_a_destroyed_group_is_named_and_a_new_one_can_be_set(ranks2):
    for message, value in ranks2.run(destroyed_and_made_anew, group="fresh"):
        assert "was destroyed; set scaler.process_group" in message
        assert value == 0.5


def norms_over_two_groups() -> tuple[list[float], list[float]]:
    """What clipping returns over rows of a mesh, then columns; and what norms there are."""
    rank = dist.get_rank()
    rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    # Both ranks of a column hold the same.
    parameter = leaf(3.0 + rank % 2)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = cpu_scaler()
    norms, expected = [], []
    for pairs, sharded in ((rows, lambda _: True), (columns, None)):
        groups = [subgroup(pair) for pair in pairs]
        scaler.process_group = next(
            g for g, pair in zip(groups, pairs, strict=True) if rank in pair
        )
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(parameter.square().sum() / 2).backward()
            norms.append(scaler.clip_grad_norm_(optimizer, 100.0, sharded=sharded).item())
            scaler.step(optimizer)
            scaler.update()
            expected.append(5.0 if pairs is rows else parameter.item())
    return norms, expected


def test_the_norm_over_another_group_is_that_of_its_ranks(ranks4):
    for norms, expected in ranks4.run(norms_over_two_groups):
        assert norms == pytest.approx(expected)


def test_a_scaler_without_torch_distributed_works_alone():
    assert not dist.is_initialized()
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    iteration(cpu_scaler(), optimizer, parameter, 0.25)
    assert parameter.item() == 0.75
