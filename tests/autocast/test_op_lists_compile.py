"""Op lists with torch.compile, activation checkpointing and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from distamp import autocast
from distamp.autocast import OpLists
from tests.ranks import RankPool

BF16, FP32 = torch.bfloat16, torch.float32
LISTS = [
    None,
    OpLists(fp32={"linear"}),
    OpLists(lower_precision={"softmax"}, fp32={"linear"}),
    OpLists(fp32={"softmax"}),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def function(x: Tensor, weight: Tensor) -> Tensor:
    return F.softmax(F.linear(x, weight), -1)


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_change_of_lists_never_runs_a_stale_graph(backend: str) -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(function, backend=counting, fullgraph=True)
    for lists in LISTS * 2:
        with autocast("cpu", ops=lists):
            got, want = compiled(x, weight), function(x, weight)
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want)
    assert graphs == len(LISTS)


def test_gradients_through_a_graph_made_under_lists() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    grads = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        with autocast("cpu", ops=LISTS[1]):
            run(x, leaf)[:, 0].sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_holds_the_casts_of_the_lists() -> None:
    """With TorchScript's own autocast pass off, as torch's page advises: it knows no lists."""
    torch.manual_seed(0)  # Rounding to bf16 must show in the results below.
    before = torch._C._jit_set_autocast_mode(False)
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).eval()
    x = torch.randn(2, 4)
    lists = OpLists(fp32={"linear"}, lower_precision={"gelu"})
    try:
        with torch.no_grad(), autocast("cpu", cache_enabled=False, ops=lists):
            want = net(x)
            traced = torch.jit.freeze(torch.jit.trace(net, x))
    finally:
        torch._C._jit_set_autocast_mode(before)
    with torch.no_grad():
        assert torch.equal(traced(x), want)
        assert not torch.equal(want, net(x))


def test_vmap_and_grad_of_functorch() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    with autocast("cpu", ops=OpLists(fp32={"linear"})):
        mapped = torch.vmap(F.linear, (0, None))(x, weight)
        assert mapped.dtype is FP32
        grad = torch.func.grad(lambda w: F.linear(x, w).sum())(weight)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(mapped, F.linear(x, weight))
        assert torch.equal(grad, torch.func.grad(lambda w: F.linear(x, w).sum())(weight))


def _train_sharded(rank: int = 0) -> tuple[list[torch.dtype], bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    twin = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    twin.load_state_dict(net.state_dict())
    seen: list[torch.dtype] = []
    for module in net:
        module.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    fully_shard(net[0])
    fully_shard(net)
    x = torch.randn(2, 4)
    lists = OpLists(fp32={"linear"}, lower_precision={"layer_norm"})
    for model in (net, twin):
        with autocast("cpu", ops=lists):
            loss = model(x).float().square().sum()
        loss.backward()
    equal = all(
        torch.allclose(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr, arg-type]
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True)
    )
    dist.barrier()
    return seen, equal


def test_fsdp2_gathers_and_the_lists_cast(ranks2: RankPool) -> None:
    for seen, equal in ranks2.run(_train_sharded):
        assert seen == [FP32, BF16, FP32]
        assert equal
