"""compare_gradients: clean layouts match, and a wrong gradient is named with its cause."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.report.gradient_plants import expert_case, hand_case, pipeline_case
from tests.report.gradient_setups import (
    net_case,
)
from tests.report.setups import Net, parallel, sharded

BF16 = torch.bfloat16
PRECISIONS = [None, BF16]


def fsdp1(net: Net, **settings: Any) -> nn.Module:
    settings["device_id"] = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about NO_SHARD
        net.blocks[0] = FullyShardedDataParallel(net.blocks[0], **settings)
        return FullyShardedDataParallel(net, **settings)


def compiled(net: Net) -> nn.Module:
    return torch.compile(DistributedDataParallel(net), backend="aot_eager")


def zero(net: Net) -> nn.Module:
    model = DistributedDataParallel(net)
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3)
    return model


def tensor_parallel(net: Net) -> nn.Module:
    return parallel(net, mesh((dist.get_world_size(),), ("tp",)))


def sequence_parallel(net: Net, device_mesh: Any = None) -> nn.Module:
    device_mesh = device_mesh or mesh((2,), ("tp",))
    net = parallel(net, device_mesh, sequence=True)
    # The loss takes whole logits.
    net.head.register_forward_hook(lambda _, __, logits: whole(logits, device_mesh))
    return net


def whole(logits: torch.Tensor, device_mesh: Any) -> torch.Tensor:
    return DTensor.from_local(logits, device_mesh, [Shard(-1)]).full_tensor()


LAYOUTS_OF_TWO: dict[str, tuple[Callable[[Net], Any], Any]] = {
    "ddp": (DistributedDataParallel, None),
    "compiled ddp": (compiled, None),
    "zero": (zero, None),
    "fsdp2": (lambda net: sharded(net, mesh((2,), ("dp",))), None),
    "fsdp1 with original parameters": (lambda net: fsdp1(net, use_orig_params=True), None),
    "fsdp1 with flat parameters": (lambda net: fsdp1(net, use_orig_params=False), None),
    "fsdp1 without shards": (
        lambda net: fsdp1(net, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
        None,
    ),
    "tensor parallel": (tensor_parallel, (0, 1)),
    "sequence parallel": (sequence_parallel, (0, 1)),
}


@on_ranks(2)
@pytest.mark.parametrize("region", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS_OF_TWO)
def test_gradients_of_a_right_layout_match(layout, region):
    wrap, ranks = LAYOUTS_OF_TWO[layout]
    attends = layout != "sequence parallel"
    comparison = net_case(wrap, region=region, ranks=ranks, attends=attends).compare()
    assert comparison.matches, str(comparison)
    assert len(comparison.rows) == len(list(Net(attends=attends).parameters()))


def in_two_dimensions(net: Net) -> Any:
    grid = mesh((2, 2), ("dp", "tp"))
    return sharded(parallel(net, grid["tp"]), grid["dp"])


def hybrid_fsdp1(net: Net) -> nn.Module:
    grid = mesh((2, 2), ("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    return fsdp1(net, use_orig_params=True, device_mesh=grid, sharding_strategy=hybrid)


LAYOUTS_OF_FOUR: dict[str, tuple[Callable[[Net], Any], Callable[[], Any]]] = {
    "fsdp2 over tensor parallel": (
        in_two_dimensions,
        lambda: (mesh((2, 2), ("dp", "tp")).get_local_rank("dp"), 2),
    ),
    "hsdp": (lambda net: sharded(net, mesh((2, 2), ("replicate", "shard"))), lambda: None),
    "fsdp1 with replicas": (hybrid_fsdp1, lambda: None),
}


@on_ranks(4)
@pytest.mark.parametrize("region", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS_OF_FOUR)
def test_gradients_of_a_right_layout_of_two_dimensions_match(layout, region):
    wrap, find_ranks = LAYOUTS_OF_FOUR[layout]
    comparison = net_case(wrap, region=region, ranks=find_ranks(), attends=True).compare()
    assert comparison.matches, str(comparison)


@on_ranks(2)
@pytest.mark.parametrize("region", PRECISIONS)
@pytest.mark.parametrize("make", [hand_case, expert_case])
def test_gradients_of_layouts_without_dtensor_match(make, region):
    comparison = make(region=region).compare()
    assert comparison.matches, str(comparison)


@on_ranks(4)
def test_gradients_of_plain_tensors_on_a_mesh_match():
    comparison = hand_case((2, 2), ("dp", "tp")).compare()
    assert comparison.matches, str(comparison)


@on_ranks(2)
@pytest.mark.parametrize("tied", ["", "summed"])
def test_gradients_of_pipeline_stages_match_by_their_names(tied):
    comparison = pipeline_case(tied).compare()
    assert comparison.matches, str(comparison)
