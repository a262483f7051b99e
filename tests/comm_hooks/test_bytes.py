"""What leaves a host, read from its interface: network namespaces are the hosts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shaped import run_on_hosts
from distamp import comm_hooks
from tests import netns

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("netns")]
ROWS, COLUMNS = 1500, 2000


def rank(wrapper: str, wires: list[str]) -> dict[str, Any]:
    """Average the gradients of 3 M parameters in some formats; what left the host meanwhile."""
    found = {}
    for wire in wires:
        layer = nn.Linear(COLUMNS, ROWS, bias=False)
        layer.weight.data.zero_()
        model: Any = DistributedDataParallel(layer) if wrapper == "DDP" else fully_shard(layer)
        state = comm_hooks.register_comm_hook(model, wire)
        for _ in range(2):  # Connections are made in the first.
            model.zero_grad()
            given = _gradient(dist.get_rank())
            loss = (model(torch.eye(COLUMNS)) * given.T).sum()
            dist.barrier()
            before = netns.sent()
            loss.backward()
            dist.barrier()
            sent = netns.sent() - before
        exact = sum(_gradient(each).double() for each in range(dist.get_world_size()))
        mine = next(model.parameters()).grad
        whole = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        error = (whole.double() - exact / dist.get_world_size()).norm() / exact.norm()
        ratio = float(error * dist.get_world_size())
        found[wire] = {"sent": sent, "error": ratio, "levels": state.stats().levels}
    return found


def _gradient(number: int) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number))


# A reduce-scatter is half of an all-reduce; weights are gathered in the backward pass, too.
SHARES = {"DDP": {"fp16": 0.54, "int8": 0.28}, "FSDP2": {"fp16": 0.27, "bf16": 0.27}}


@pytest.mark.parametrize(
    ("wrapper", "hosts", "local"),
    [("DDP", 2, 1), ("DDP", 2, 2), ("DDP", 2, 4), ("DDP", 3, 2), ("FSDP2", 2, 2), ("FSDP2", 2, 4)],
)
def test_what_leaves_a_host(wrapper, hosts, local):
    if reason := netns.missing():
        pytest.skip(reason)
    options = {"wrapper": wrapper, "wires": list(SHARES[wrapper])}
    ring = 2 * (hosts - 1) / hosts * 4 * ROWS * COLUMNS
    for each in run_on_hosts("tests.comm_hooks.test_bytes", hosts, options, 280, local=local):
        for wire, share in SHARES[wrapper].items():
            found = each[wire]
            assert 0.85 * share < found["sent"] / ring <= share
            assert found["error"] <= {"fp16": 4e-4, "bf16": 4e-3, "int8": 2e-2}[wire]
            assert ("two levels" in found["levels"]) == (local > 1)
