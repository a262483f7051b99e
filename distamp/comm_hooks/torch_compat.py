"""The names that torch keeps to itself and hooks need, in one place.

Each is used through a function here and tested against the torch that is installed
(``tests/comm_hooks/test_torch_compat.py``). The supported versions are 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore
from torch.distributed import ProcessGroup

__all__ = [
    "GradBucket",
    "all_gather_rows",
    "all_reduce_hook",
    "all_reduce_in_graph",
    "backend_name",
    "custom_reduce_scatter",
    "ddp_hook_name",
    "default_store",
    "device_of",
    "exchange_rows",
    "flat_parameter",
    "fsdp1_units",
    "gather_rows",
    "gradient_divide_factor",
    "in_backward_pass",
    "is_destroyed",
    "is_fsdp1",
    "is_fsdp2",
    "is_hsdp",
    "is_non_member",
    "mesh_groups",
    "new_gloo",
    "not_compiled",
    "numels_in",
    "param_groups",
    "reduce_scatter",
    "set_fsdp1_hook",
    "sharded_sizes",
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


def default_store() -> Any:
    """Return the store by which the ranks of the default group found each other."""
    return dist.distributed_c10d._get_default_store()


def new_gloo(name: str, parent: ProcessGroup) -> tuple[Any, Any]:
    """Return a gloo backend over the ranks of ``parent``, and a store, which ``name`` both name.

    torch's ``new_group`` would need the ranks outside the group too, or name it by its ranks: made
    a second time, such a group finds the addresses of the first.
    """
    store = PrefixStore(name, default_store())
    backend = dist.ProcessGroupGloo(store, parent.rank(), parent.size(), timeout_of(parent))
    return backend, store


def device_of(group: ProcessGroup) -> torch.device:
    """Return a device whose tensors the group can send."""
    types = [device.type for device in group._device_types]
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Return which backend serves tensors of a device, whatever ``init_process_group`` got."""
    name: str = group._get_backend(device).name()
    return name


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long collectives of the group may take."""
    backend = group._get_backend(device_of(group))
    timeout: timedelta = getattr(backend.options, "_timeout", dist.default_pg_timeout)
    return timeout


def exchange_rows(backend: Any, received: Tensor, sent: Tensor) -> None:
    """Send the r-th part of ``sent`` to rank r by a backend, all at once, and wait."""
    backend.alltoall_base(received, sent, [], []).wait()


def gather_rows(backend: Any, received: Tensor, row: Tensor) -> None:
    """Collect every rank's ``row`` by a backend's ring, and wait."""
    backend._allgather_base(received, row).wait()


def all_gather_rows(received: Tensor, row: Tensor, group: ProcessGroup) -> Any:
    """Collect every rank's ``row`` and return the work; by torch's newer name where there is."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(received, row, group=group, async_op=True)


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


def flat_parameter(unit: Any) -> Any | None:
    """Return an FSDP1 unit's own flat parameter, if it has one."""
    return unit._flat_param


def numels_in(flat: Any) -> tuple[int, ...]:
    """Return the elements of each parameter, and of padding between them, in a flat parameter."""
    numels: tuple[int, ...] = flat._numels_with_padding
    return numels


def take_fsdp1_hook(unit: Any) -> Any | None:
    """Return the hook of an FSDP1 unit, if it has one."""
    return unit._comm_hook


def set_fsdp1_hook(unit: Any, state: object, hook: Callable[..., None]) -> None:
    """Give one FSDP1 unit a hook and a state of its own.

    ``register_comm_hook`` gives all units the same state, which does not say whose gradient it is.
    """
    unit._comm_hook = hook
    unit._comm_hook_state = state


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


def sharded_sizes(group: Any) -> Iterable[tuple[nn.Parameter, int]]:
    """Yield each parameter of a group that is trained, and its elements in a rank's part."""
    for each in group.fsdp_params:
        if each.sharded_param.requires_grad:
            yield each.sharded_param, each.padded_sharded_param_size.numel()
