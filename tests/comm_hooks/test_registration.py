"""Registration of a hook: one call for every wrapper, and the same refusals on every rank."""

import contextlib
import re
import warnings
from collections.abc import Iterator
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

HALF, BF16 = torch.float16, torch.bfloat16


@contextlib.contextmanager
def refused(text: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Check that the block raises an error with this text."""
    with pytest.raises(kind, match=re.escape(text)):
        yield


def backward(model: Any, width: int = WIDTHS[0]) -> None:
    model(inputs(0, width)).square().sum().backward()


# -- formats ---------------------------------------------------------------------------------------


@on_ranks(4)
def test_an_unknown_format_is_refused():
    model, _ = spread("DDP")
    with refused("There is no communication format 'fp12'"):
        comm_hooks.register_comm_hook(model, "fp12")


class NarrowInt8(Int8Blocks):
    """A format with a name of the library, and other arithmetic."""


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(CastFormat("fp8", torch.float8_e4m3fn), id="a new name"),
        pytest.param(CastFormat("bf16", torch.float16), id="another dtype of a name"),
        pytest.param(NarrowInt8(), id="another class of a name"),
    ],
)
def test_a_format_of_the_users_own_is_refused(format):
    with pytest.raises(ValueError, match=r"is not one of COMM_FORMATS.*: fp16, bf16, int8"):
        comm_hooks.CommHook(format)


@on_ranks(2)
@pytest.mark.parametrize("format", COMM_FORMATS.values(), ids=list(COMM_FORMATS))
def test_a_format_of_the_table_is_taken_for_its_name(format):
    model = DistributedDataParallel(mlp(*WIDTHS))
    with comm_hooks.CommHook(format) as hook:
        model.register_comm_hook(hook, comm_hooks.fp16_compress_hook)
        backward(model)
        assert list(hook.stats().bytes_sent) == [format.name]


@on_ranks(4)
def test_a_hook_of_ddp_that_saves_nothing_is_refused():
    model = DistributedDataParallel(mlp(*WIDTHS).half())
    with refused("takes 2.01 bytes an element, and gradients are reduced in torch.float16"):
        comm_hooks.register_comm_hook(model)


@on_ranks(4)
def test_a_cast_of_ddps_gradients_that_saves_nothing_is_refused():
    model = DistributedDataParallel(mlp(*WIDTHS).half())
    text = "format 'bf16' takes 2 bytes an element, and gradients are reduced in torch.float16"
    with refused(text):
        comm_hooks.register_comm_hook(model, format="bf16")


@on_ranks(4)
def test_a_hook_of_fsdp1_that_saves_nothing_is_refused():
    model, _ = spread("FSDP1", mixed_precision=MixedPrecision(param_dtype=HALF))
    with refused("reduced in torch.float16, which takes 2: choose no hook, or reduce in"):
        comm_hooks.register_comm_hook(model)


@on_ranks(4)
def test_a_hook_of_fsdp2_that_saves_nothing_is_refused():
    model, _ = spread("FSDP2", mp_policy=MixedPrecisionPolicy(BF16, BF16))
    with refused("reduced in torch.bfloat16, which takes 2: choose 'int8' or no hook"):
        comm_hooks.register_comm_hook(model)


@on_ranks(4)
def test_fsdp1_refuses_a_format_with_error_feedback():
    model, _ = spread("FSDP1")
    with refused("needs error feedback"):
        comm_hooks.register_comm_hook(model, format="int8")


# -- models ----------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_state_dict_is_refused():
    with refused("cannot give OrderedDict a communication hook", TypeError):
        comm_hooks.register_comm_hook(mlp(*WIDTHS).state_dict())


@on_ranks(4)
def test_a_model_without_a_wrapper_is_refused():
    with refused("cannot give Sequential a communication hook", TypeError):
        comm_hooks.register_comm_hook(mlp(*WIDTHS))


@on_ranks(4)
def test_a_second_hook_of_ddp_is_refused():
    model, _ = spread("DDP")
    comm_hooks.register_comm_hook(model)
    with refused("This DistributedDataParallel has a communication hook already", RuntimeError):
        comm_hooks.register_comm_hook(model)


@on_ranks(4)
def test_a_second_hook_of_fsdp2_is_refused():
    model, _ = spread("FSDP2")
    comm_hooks.register_comm_hook(model)
    with refused("has a custom collective (CompressedReduceScatter) already"):
        comm_hooks.register_comm_hook(model)


@on_ranks(4)
def test_a_hook_beside_the_users_own_of_hsdp_is_refused():
    model, _ = spread("HSDP")
    model.set_all_reduce_hook(lambda shard: None)
    with refused("FSDPSequential has an all-reduce hook already"):
        comm_hooks.register_comm_hook(model)


@on_ranks(4)
def test_hybrid_sharding_of_fsdp1_is_refused():
    device_mesh = mesh((1, dist.get_world_size()), ("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model, _ = spread("FSDP1", sharding_strategy=strategy, device_mesh=device_mesh)
    # FSDP1 itself raises AssertionError.
    with refused("not supported for hybrid strategies", AssertionError):
        comm_hooks.register_comm_hook(model)


def with_two_meshes_in_a_module() -> Any:
    """Return linear layers: the first is a unit, the second has biases on another mesh."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch 2.11 takes one mesh for a module")
    halves = common.FSDPMeshInfo(mesh((2, 2), ("replicate", "shard"))["shard"], shard_mesh_dim=0)
    everyone = common.FSDPMeshInfo(mesh((4,), ("all",)), shard_mesh_dim=0)

    def place(param: Tensor) -> Any:
        mesh_info = halves if param.dim() == 1 else everyone
        return common.ShardPlacementResult(Shard(0), mesh_info)

    model = mlp(64, 64, 64)
    fully_shard(model[0], mesh=everyone.mesh)
    return fully_shard(model, mesh=everyone.mesh, shard_placement_fn=place)


@on_ranks(4)
@pytest.mark.parametrize(
    "options", [{}, {"format": "int8", "param_format": "int8"}], ids=["fp16", "int8"]
)
def test_a_module_with_several_meshes_is_refused_before_any_module_is_hooked(options):
    model = with_two_meshes_in_a_module()
    plain = with_two_meshes_in_a_module()
    with pytest.raises(ValueError, match=r"FSDPSequential has 2 groups .* fully_shard to a module"):
        comm_hooks.register_comm_hook(model, **options)
    backward(model, width=64)
    backward(plain, width=64)
    # The blocks of any format would have rounded the gradients of the first layer.
    assert torch.equal(full_gradients(model), full_gradients(plain))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_compiled_model_is_registered_as_one_that_is_not(wrapper):
    # torch wants the first bucket to be the smallest.
    settings = {"bucket_cap_mb": 25} if wrapper == "DDP" else {}
    model, _ = spread(wrapper, **settings)
    plain = DistributedDataParallel(mlp(*WIDTHS))
    compiled = torch.compile(model, backend="aot_eager")
    comm_hooks.register_comm_hook(compiled, "fp16")
    backward(plain)
    with warnings.catch_warnings(action="ignore"):  # torch warns about its graphs
        backward(compiled)
    error = relative(full_gradients(model), full_gradients(plain))
    assert 0 < error <= BOUNDS["fp16"]


# -- replicas= -------------------------------------------------------------------------------------


@on_ranks(4)
def test_replicas_of_a_model_in_ddp_are_refused():
    model, _ = spread("DDP")
    text = "replicas and param_format are for a model that fully_shard was applied to"
    with refused(text):
        comm_hooks.register_comm_hook(model, replicas=dist.group.WORLD)


@on_ranks(4)
def test_a_mesh_as_replicas_is_refused():
    model, _ = spread("FSDP2")
    with refused("not DeviceMesh; of a DeviceMesh give mesh.get_group()", TypeError):
        comm_hooks.register_comm_hook(model, replicas=mesh((4,), ("all",)))


@on_ranks(4)
def test_replicas_beside_a_two_dimensional_mesh_are_refused():
    model, _ = spread("HSDP")
    with refused("two-dimensional mesh"):
        comm_hooks.register_comm_hook(model, replicas=dist.group.WORLD)


def group_of_this_rank(groups: list[list[int]]) -> Any:
    """Make process groups, and return that of this rank."""
    made = [subgroup(ranks) for ranks in groups]
    for group, ranks in zip(made, groups, strict=True):
        if dist.get_rank() in ranks:
            return group
    raise ValueError(f"rank {dist.get_rank()} is in none of {groups}")


def check_wrong_replicas(replicas: Any, ranks: list[int]) -> None:
    """Check that a group with the ranks of the shards is refused, and that the right one is not."""
    model, _ = spread("replicas")
    shards = [0, 1] if dist.get_rank() < 2 else [2, 3]
    text = f"replicas holds ranks {ranks}, but FSDPSequential is sharded over ranks {shards}: "
    with refused(text):
        comm_hooks.register_comm_hook(model, "fp16", replicas=replicas)
    right = group_of_this_rank([[0, 2], [1, 3]])
    comm_hooks.register_comm_hook(model, "fp16", replicas=right)


@on_ranks(4)
def test_all_ranks_as_replicas_are_refused():
    check_wrong_replicas(dist.group.WORLD, [0, 1, 2, 3])


@on_ranks(4)
def test_the_ranks_of_the_shards_as_replicas_are_refused():
    group = group_of_this_rank([[0, 1], [2, 3]])
    check_wrong_replicas(group, dist.get_process_group_ranks(group))


# -- ranks that differ -----------------------------------------------------------------------------

NONE_WAS_REGISTERED = "The ranks register different communication hooks, and none was registered"


@on_ranks(4)
def test_a_rank_that_registers_another_format_is_named_on_every_rank():
    model, _ = spread("DDP")
    format = "int8" if dist.get_rank() == 2 else "fp16"
    formats = r":\n  rank 2: int8 for .*\n  ranks 0, 1, 3: fp16 for "
    with pytest.raises(RankMismatchError, match=NONE_WAS_REGISTERED + formats):
        comm_hooks.register_comm_hook(model, format)
    # The failed call has registered nothing.
    comm_hooks.register_comm_hook(model, "fp16")


@on_ranks(4)
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP1", "FSDP2", "replicas"])
def test_a_rank_that_refuses_alone_keeps_no_other_rank_waiting(wrapper):
    model, options = spread(wrapper)
    if dist.get_rank() == 2:
        with refused("There is no communication format 'fp61'"):
            comm_hooks.register_comm_hook(model, "fp61", **options)
    else:
        with refused(NONE_WAS_REGISTERED, RankMismatchError):
            comm_hooks.register_comm_hook(model, "fp16", **options)
    # The failed call has registered nothing.
    comm_hooks.register_comm_hook(model, "fp16", **options)
