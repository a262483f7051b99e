"""Bytes that leave a host, read from its interface: network namespaces are the hosts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shaped import run_on_hosts
from distamp import comm_hooks
from tests import netns

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("netns")]
ROWS, COLUMNS = 1500, 2000


# A reduce-scatter is half of an all-reduce; weights are gathered in the backward pass, too.
SHARES = {"DDP": {"fp16": 0.54, "int8": 0.28}, "FSDP2": {"fp16": 0.27, "bf16": 0.27}}
ERRORS = {"fp16": 4e-4, "bf16": 4e-3, "int8": 2e-2}


def rank(wrapper: str, formats: list[str]) -> dict[str, Any]:
    """Average the gradients of 3 M parameters in some formats.

    Returns:
        For each format the bytes that left the host, the relative error, and the hook's levels.
    """
    return {format: measure_average(wrapper, format) for format in formats}


def measure_average(wrapper: str, format: str) -> dict[str, Any]:
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data.zero_()
    model: Any = DistributedDataParallel(layer) if wrapper == "DDP" else fully_shard(layer)
    hook = comm_hooks.register_comm_hook(model, format)
    # The first pass makes connections.
    for _ in range(2):
        sent = bytes_of_backward(model)
    size = dist.get_world_size()
    grads = [gradient_of_rank(number) for number in range(size)]
    exact = torch.stack(grads).double().mean(0)
    grad = next(model.parameters()).grad
    full = grad.full_tensor() if isinstance(grad, DTensor) else grad
    error = float((full.double() - exact).norm() / exact.norm())
    return {"sent": sent, "error": error, "levels": hook.stats().levels}


def bytes_of_backward(model: Any) -> int:
    """Run a pass, and return the bytes that left the host in its backward part."""
    model.zero_grad()
    grad = gradient_of_rank(dist.get_rank())
    output = model(torch.eye(COLUMNS))
    loss = (output * grad.T).sum()
    dist.barrier()
    before = netns.sent()
    loss.backward()
    dist.barrier()
    return netns.sent() - before


def gradient_of_rank(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, COLUMNS, generator=generator)


@pytest.mark.parametrize(
    ("wrapper", "hosts", "ranks_per_host"),
    [("DDP", 2, 1), ("DDP", 2, 2), ("DDP", 2, 4), ("DDP", 3, 2), ("FSDP2", 2, 2), ("FSDP2", 2, 4)],
)
def test_a_format_sends_its_share_of_the_bytes_of_a_ring(wrapper, hosts, ranks_per_host):
    if reason := netns.missing():
        pytest.skip(reason)
    options = {"wrapper": wrapper, "formats": list(SHARES[wrapper])}
    module = "tests.comm_hooks.test_bytes"
    results = run_on_hosts(module, hosts, options, 280, local=ranks_per_host)
    ring = 2 * (hosts - 1) / hosts * 4 * ROWS * COLUMNS
    for result_of_rank in results:
        for format, share in SHARES[wrapper].items():
            measured = result_of_rank[format]
            assert 0.85 * share < measured["sent"] / ring <= share
            assert measured["error"] <= ERRORS[format]
            has_two_levels = "two levels" in measured["levels"]
            assert has_two_levels == (ranks_per_host > 1)
