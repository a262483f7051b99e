"""One call for every wrapper: what it refuses, on every rank alike."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import COMM_FORMATS
from distamp.comm_hooks.formats import CastFormat, Int8Blocks
from distamp.errors import RankMismatchError
from tests.comm_hooks.training import (
    BOUNDS,
    WIDTHS,
    full_gradients,
    inputs,
    mlp,
    relative,
    spread,
)
from tests.on_ranks import on_ranks
from tests.ranks import mesh, subgroup


def _registered(wrapper: str) -> tuple[Any, dict[str, Any]]:
    model, options = spread(wrapper)
    comm_hooks.register_comm_hook(model, **options)
    return model, options


def _with_a_users_hook() -> tuple[Any, dict[str, Any]]:
    model, options = spread("HSDP")
    model.set_all_reduce_hook(lambda shard: None)
    return model, options


def _hybrid() -> tuple[Any, dict[str, Any]]:
    over = mesh((1, dist.get_world_size()), ("replicate", "shard"))
    return spread("FSDP1", sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=over)


HALF, BF16 = torch.float16, torch.bfloat16
# What is said of a model and of the arguments beside it.
MISFITS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "There is no communication format 'fp12'": lambda: (spread("DDP")[0], {"format": "fp12"}),
    "cannot give OrderedDict a communication hook": lambda: (mlp(*WIDTHS).state_dict(), {}),
    "cannot give Sequential a communication hook": lambda: (mlp(*WIDTHS), {}),
    "replicas and param_format are for a model that fully_shard was applied to": lambda: (
        spread("DDP")[0],
        {"replicas": dist.group.WORLD},
    ),
    "takes 2.01 bytes an element, and gradients are reduced in torch.float16": lambda: (
        DistributedDataParallel(mlp(*WIDTHS).half()),
        {},
    ),
    "This DistributedDataParallel has a communication hook already": lambda: _registered("DDP"),
    "reduced in torch.float16, which takes 2: choose no hook, or reduce in": lambda: spread(
        "FSDP1", mixed_precision=MixedPrecision(param_dtype=HALF)
    ),
    "needs error feedback": lambda: (spread("FSDP1")[0], {"format": "int8"}),
    "not supported for hybrid strategies": _hybrid,
    "has a custom collective (CompressedReduceScatter) already": lambda: _registered("FSDP2"),
    "reduced in torch.bfloat16, which takes 2: choose 'int8' or no hook": lambda: spread(
        "FSDP2", mp_policy=MixedPrecisionPolicy(BF16, BF16)
    ),
    "format 'bf16' takes 2 bytes an element, and gradients are reduced in torch.float16": lambda: (
        DistributedDataParallel(mlp(*WIDTHS).half()),
        {"format": "bf16"},
    ),
    "not DeviceMesh; of a DeviceMesh give mesh.get_group()": lambda: (
        spread("FSDP2")[0],
        {"replicas": mesh((4,), ("all",))},
    ),
    "two-dimensional mesh": lambda: (spread("HSDP")[0], {"replicas": dist.group.WORLD}),
    "FSDPSequential has an all-reduce hook already": _with_a_users_hook,
}


@on_ranks(4)
@pytest.mark.parametrize("said", MISFITS)
def test_what_does_not_fit_is_refused(said):
    model, options = MISFITS[said]()
    refused = (TypeError, ValueError, RuntimeError, AssertionError)  # the last is FSDP1's own
    with pytest.raises(refused, match=re.escape(said)):
        comm_hooks.register_comm_hook(model, **options)


def _with_two_meshes_in_a_module() -> Any:
    """Linear layers of which the first is a unit, and the second has biases on another mesh."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch 2.11 takes one mesh for a module")
    world = mesh((2, 2), ("replicate", "shard"))
    halves = common.FSDPMeshInfo(world["shard"], shard_mesh_dim=0)
    everyone = common.FSDPMeshInfo(mesh((4,), ("all",)), shard_mesh_dim=0)

    def place(parameter: Tensor) -> Any:
        mesh_info = halves if parameter.dim() == 1 else everyone
        return common.ShardPlacementResult(Shard(0), mesh_info)

    model = mlp(64, 64, 64)
    fully_shard(model[0], mesh=everyone.mesh)
    return fully_shard(model, mesh=everyone.mesh, shard_placement_fn=place)


@on_ranks(4)
@pytest.mark.parametrize(
    "options", [{}, {"format": "int8", "param_format": "int8"}], ids=["fp16", "int8"]
)
def test_a_module_with_several_meshes_is_refused_before_any_module_is_hooked(options):
    model, plain = _with_two_meshes_in_a_module(), _with_two_meshes_in_a_module()
    with pytest.raises(ValueError, match=r"FSDPSequential has 2 groups .* fully_shard to a module"):
        comm_hooks.register_comm_hook(model, **options)
    x = inputs(0, 64)
    for each in (model, plain):
        each(x).square().sum().backward()
    # The blocks of any format would have rounded the gradients of the first layer.
    assert torch.equal(full_gradients(model), full_gradients(plain))


class NarrowInt8(Int8Blocks):
    """The name of a format of the library, and other arithmetic."""


@pytest.mark.parametrize(
    "wire",
    [
        CastFormat("fp8", torch.float8_e4m3fn),
        CastFormat("bf16", torch.float16),
        NarrowInt8(),
    ],
    ids=["a new name", "another dtype of a name", "another class of a name"],
)
def test_a_format_of_the_users_own_is_refused(wire):
    with pytest.raises(ValueError, match=r"is not one of COMM_FORMATS.*: fp16, bf16, int8"):
        comm_hooks.CommHook(wire)


@on_ranks(2)
@pytest.mark.parametrize("wire", COMM_FORMATS.values(), ids=list(COMM_FORMATS))
def test_a_format_of_the_table_is_taken_for_its_name(wire):
    model = DistributedDataParallel(mlp(*WIDTHS))
    with comm_hooks.CommHook(wire) as hook:
        model.register_comm_hook(hook, comm_hooks.fp16_compress_hook)
        model(inputs(0, WIDTHS[0])).sum().backward()
        assert list(hook.stats().bytes_sent) == [wire.name]


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_compiled_model_is_registered_as_one_that_is_not(wrapper):
    x, plain = inputs(0, WIDTHS[0]), DistributedDataParallel(mlp(*WIDTHS))
    # torch wants the first bucket to be the smallest.
    model, _ = spread(wrapper, **({"bucket_cap_mb": 25} if wrapper == "DDP" else {}))
    compiled = torch.compile(model, backend="aot_eager")
    comm_hooks.register_comm_hook(compiled, "fp16")
    with warnings.catch_warnings(action="ignore"):  # of torch's own, about its graphs
        for each in (plain, compiled):
            each(x).square().sum().backward()
    assert 0 < relative(full_gradients(model), full_gradients(plain)) <= BOUNDS["fp16"]


def _pair(pairs: list[list[int]]) -> Any:
    """The group of two ranks that this rank is in."""
    made = {tuple(pair): subgroup(pair) for pair in pairs}
    return next(group for pair, group in made.items() if dist.get_rank() in pair)


@on_ranks(4)
@pytest.mark.parametrize("whole", [False, True])
def test_replicas_that_hold_other_shards_are_refused_on_all_ranks(whole):
    model, _ = spread("replicas")
    group = dist.group.WORLD if whole else _pair([[0, 1], [2, 3]])
    shards = [0, 1] if dist.get_rank() < 2 else [2, 3]
    given = [0, 1, 2, 3] if whole else shards
    said = f"replicas holds ranks {given}, but FSDPSequential is sharded over ranks {shards}: "
    with pytest.raises(ValueError, match=re.escape(said)):
        comm_hooks.register_comm_hook(model, "fp16", replicas=group)
    comm_hooks.register_comm_hook(model, "fp16", replicas=_pair([[0, 2], [1, 3]]))


@on_ranks(4)
@pytest.mark.parametrize(
    ("wrapper", "other", "says"),
    [
        ("DDP", "int8", r":\n  rank 2: int8 for .*\n  ranks 0, 1, 3: fp16 for "),
        *((wrapper, "fp61", "") for wrapper in ("DDP", "FSDP1", "FSDP2", "replicas")),
    ],
)
def test_a_rank_that_registers_another_format_or_refuses_alone_keeps_no_other_waiting(
    wrapper, other, says
):
    model, options = spread(wrapper)
    odd = dist.get_rank() == 2
    error, says = (
        RankMismatchError,
        rf"The ranks register different communication hooks, and none was registered{says}",
    )
    if other == "fp61" and odd:
        error, says = ValueError, "There is no communication format 'fp61'"
    with pytest.raises(error, match=says):
        comm_hooks.register_comm_hook(model, other if odd else "fp16", **options)
    comm_hooks.register_comm_hook(
        model, "fp16", **options
    )  # Nothing was registered by the failed call.
