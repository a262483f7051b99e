"""Messages at odd places: groups of some ranks, meshes, another order of optimizers, pickles."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distamp import DistGradScaler
from distamp.errors import LockstepError, StageError
from tests.ranks import logged


def _skipped_in(kind: str) -> tuple[bool, list[int]]:
    """Overflow on rank 3 in scalers of two ranks each: was it skipped, and who overflowed."""
    halves = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("half", "part", "one"))
    over = halves["part", "one"] if kind == "mesh" else halves["part"].get_group()
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DistGradScaler("cpu", init_scale=2.0, process_group=over)
    scaler.scale(weight.sum()).backward()
    if dist.get_rank() == 3:
        weight.grad[0] = torch.inf
    scaler.step(optimizer)
    skipped = not scaler.stepped(optimizer)
    found = scaler.overflow_report().overflows if skipped else ()
    return skipped, [each.rank for each in found]


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_a_scaler_of_some_ranks_agrees_over_these_and_names_them(ranks4, kind):
    assert ranks4.run(_skipped_in, kind) == [(False, [])] * 2 + [(True, [3])] * 2


def _logged() -> list[str]:
    """What rank 0 says of a step that rank 2 of its group of ranks 0 and 2 could not take."""
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("part", "half"))["part"]
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DistGradScaler("cpu", init_scale=2.0, process_group=over)
    with logged("distamp.scaler") as lines:
        scaler.scale(weight.sum()).backward()
        if dist.get_rank() == 2:
            weight.grad[0] = torch.inf
        scaler.step(optimizer)
    return lines


def test_the_log_names_ranks_by_their_global_numbers(ranks4):
    first, *others = ranks4.run(_logged)
    assert len(first) == 1
    assert "on rank 2" in first[0]
    assert others == [[]] * 3


def _in_another_order() -> str:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler = DistGradScaler("cpu", init_scale=2.0)
    for number in range(2):
        scaler.scale(sum(weights)).backward()
        for optimizer in optimizers[:: -1 if number and dist.get_rank() else 1]:
            try:
                scaler.step(optimizer)
            except LockstepError:
                return "refused"
        scaler.update()
    return "stepped"


def test_twins_in_another_order_than_before_are_refused(ranks2):
    assert ranks2.run(_in_another_order) == ["refused"] * 2


def _unpickled() -> tuple[str, bool]:
    scaler = DistGradScaler("cpu", init_scale=2.0, process_group=dist.new_group([0, 1]))
    found = pickle.loads(pickle.dumps(scaler))
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    try:
        found.scale(weight.sum()).backward()
        found.step(optimizer)
        return "stepped", False
    except StageError:
        found.process_group = None
        found.step(optimizer)
        return "refused", found.stepped(optimizer)


def test_a_pickle_asks_for_the_group_that_it_had(ranks2):
    assert ranks2.run(_unpickled) == [("refused", True)] * 2
