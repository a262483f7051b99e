"""The names that torch keeps to itself and hooks need, in one place.

Each is used through a function here and tested against the torch that is installed
(``tests/comm_hooks/test_torch_compat.py``). The supported versions are 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore
from torch.distributed import ProcessGroup
from torch.futures import Future

__all__ = [
    "GradBucket",
    "all_reduce_hook",
    "all_reduce_in_graph",
    "completed",
    "custom_reduce_scatter",
    "ddp_hook_name",
    "device_of",
    "fsdp1_numel",
    "fsdp1_units",
    "gradient_divide_factor",
    "in_backward_pass",
    "is_destroyed",
    "is_fsdp1",
    "is_fsdp2",
    "is_hsdp",
    "is_non_member",
    "mesh_groups",
    "new_communicator",
    "new_gloo",
    "not_compiled",
    "param_groups",
    "reduce_scatter",
    "take_fsdp1_hook",
    "timeout_of",
    "torchs_replicas",
]


# -- process groups ---------------------------------------------------------------------------


def is_non_member(group: object) -> bool:
    """Return whether this is what ``new_group`` returns on ranks that are no members."""
    return dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER


def is_destroyed(group: ProcessGroup) -> bool:
    """Return whether ``destroy_process_group`` ended the group."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:  # torch forgot it
        return True
    return False


def new_gloo(name: str, parent: ProcessGroup) -> Any:
    """Return a gloo backend over the ranks of ``parent``; no other has its name.

    torch's ``new_group`` would need the ranks outside the group too, or name it by its ranks and by
    how many groups a rank has, which may differ.
    """
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, parent.rank(), parent.size(), timeout_of(parent))


def new_communicator(
    name: str, parent: ProcessGroup, ranks: Sequence[int], device: torch.device
) -> ProcessGroup:
    """Return a group for tensors of a device; made by its own members, as `new_gloo`.

    Args:
        name: No other's.
        parent: Whose backend and timeout it has.
        ranks: Its members, by their numbers in ``parent``.
        device: Where the tensors lie.
    """
    backend = f"{device.type}:{parent._get_backend(device).name()}"
    members = [dist.get_global_rank(parent, rank) for rank in ranks]
    group: ProcessGroup
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(parent.rank()),
        members,
        dist.Backend(backend),
        PrefixStore(name, dist.distributed_c10d._get_default_store()),
        group_name=dist.distributed_c10d.GroupName(name),
        timeout=timeout_of(parent),
    )
    # Which destroy_process_group() asks for.
    known = dist.distributed_c10d._world.pg_group_ranks
    known[group] = {rank: index for index, rank in enumerate(members)}
    return group


def completed(value: Tensor) -> Future[Tensor]:
    """Return a future that has its value already."""
    devices: list[int | str | torch.device] = []
    if value.device.type != "cpu":
        devices.append(value.device)
    future: Future[Tensor] = Future(devices=devices)
    future.set_result(value)
    return future


def device_of(group: ProcessGroup) -> torch.device:
    """Return a device whose tensors the group can send."""
    types = [device.type for device in group._device_types]
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long collectives of the group may take."""
    backend = group._get_backend(device_of(group))
    timeout: timedelta = getattr(backend.options, "_timeout", dist.default_pg_timeout)
    return timeout


def reduce_scatter(out: Tensor, values: Tensor, group: ProcessGroup) -> None:
    """Reduce and scatter as torch does; by torch's newer name where there is."""
    by_torch = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    by_torch(out, values, group=group)


# -- autograd and DDP -------------------------------------------------------------------------


def in_backward_pass() -> bool:
    """Return whether autograd runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def ddp_hook_name(model: Any) -> str | None:
    """Return the name of a DDP module's communication hook; None without one."""
    name: str | None = model._get_ddp_logging_data().get("comm_hook")
    return name


def not_compiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given; any other as it is."""
    # By its name: torch._dynamo takes a second to import.
    if type(model).__name__ == "OptimizedModule":
        inner: nn.Module = model._orig_mod  # type: ignore[assignment]
        return inner
    return model


def all_reduce_in_graph(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, as a node of a graph that is being compiled."""
    from torch.distributed import _functional_collectives as functional_collectives

    total: Tensor = functional_collectives.all_reduce(values, "sum", group)
    return total


# -- FSDP, which takes a second to import, so that it is looked for where it was imported already --


def is_fsdp1(model: object) -> bool:
    """Return whether a module is a FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel)


def is_fsdp2(module: object) -> bool:
    """Return whether ``fully_shard`` was applied to a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


# -- FSDP1 ------------------------------------------------------------------------------------


def fsdp1_units(model: Any) -> list[Any]:
    """Return every FullyShardedDataParallel in a model."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.fsdp_modules(model)


def fsdp1_numel(unit: Any) -> int:
    """Return the elements of an FSDP1 unit's own parameters, unsharded."""
    flat = unit._flat_param
    return 0 if flat is None else int(flat._unpadded_unsharded_size.numel())


def take_fsdp1_hook(unit: Any) -> Any | None:
    """Return the hook of an FSDP1 unit, if it has one."""
    return unit._comm_hook


# -- FSDP2 ------------------------------------------------------------------------------------


def param_groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of one module: none, one, or one for each mesh."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def mesh_groups(group: Any) -> list[ProcessGroup]:
    """Return the ranks of a parameter group: those it is sharded over, and torch's replicas."""
    names = ("shard_process_group", "replicate_process_group")
    found = (getattr(group.mesh_info, name, None) for name in names)
    return [ranks for ranks in found if ranks is not None]


def custom_reduce_scatter(group: Any) -> str | None:
    """Return the class of a custom reduce-scatter of a parameter group; None for torch's own."""
    name = type(group._reduce_scatter_comm).__name__
    return None if name.startswith("Default") else name


def all_reduce_hook(group: Any) -> Callable[[Tensor], None] | None:
    """Return what ``set_all_reduce_hook`` gave a parameter group."""
    hook: Callable[[Tensor], None] | None = getattr(group, "_all_reduce_hook", None)
    return hook


def is_hsdp(group: Any) -> bool:
    """Return whether a parameter group has a dimension of replicas, which torch all-reduces."""
    return bool(getattr(group, "_is_hsdp", False))


def torchs_replicas(group: Any) -> int:
    """Return over how many replicas torch all-reduces a parameter group by itself."""
    return int(group.mesh_info.replicate_process_group.size()) if is_hsdp(group) else 1


def gradient_divide_factor(group: Any) -> float | None:
    """Return what a user had gradients of a parameter group divided by."""
    factor: float | None = group.gradient_divide_factor
    return factor
