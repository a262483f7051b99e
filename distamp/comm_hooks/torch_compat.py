"""The names that torch keeps to itself and hooks need, in one place.

Each is used through a function here. They ran with torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.torch_version import TorchVersion

__all__ = [
    "accumulating_in_reduce_dtype",
    "all_gather",
    "all_gather_as_torch",
    "awaits_first_reduction",
    "completed",
    "custom_collective",
    "default_group",
    "drop_unreduced_gradients",
    "in_backward_pass",
    "is_destroyed",
    "mesh_groups",
    "new_communicator",
    "not_compiled",
    "output_dtype_of",
    "param_groups",
    "paused_gradient_sync",
    "policy_of",
    "reduce_scatter",
    "replicas_to_hook",
    "shut_down",
]

# Whether FSDP2 reduces gradients in their own dtype, where a policy has param_dtype alone.
_IN_OWN_DTYPE = TorchVersion(torch.__version__) >= "2.15"


def _private(owner: Any, name: str) -> Any:
    """Return what torch keeps under a name of its own."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which communication "
            "hooks read: use one of the versions that distamp supports"
        ) from None


# -- process groups ---------------------------------------------------------------------------

# By torch's newer names where there are, which do not warn.
all_gather_as_torch: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_group() -> ProcessGroup:
    """Return the default group.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    return dist.distributed_c10d._get_default_group()


def new_communicator(
    name: str, parent: ProcessGroup, ranks: Sequence[int], device: torch.device
) -> Any:
    """Return a backend for tensors of a device, made by its own members alone, from the store.

    A group of torch's ``new_group`` may be a split of the default one, which all ranks must make,
    or have a name by its ranks and by how many groups a rank has, which may differ.

    Args:
        name: No other's.
        parent: Whose timeout it has, and kind of backend; on a host it is gloo.
        ranks: Its members, by their numbers in ``parent``.
        device: Where the tensors lie.
    """
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    mine, timeout = list(ranks).index(parent.rank()), _timeout_of(parent, device.type)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, mine, len(ranks), timeout)
    backends = dict(each.split(":") for each in dist.get_backend_config(parent).split(","))
    kind = backends[device.type]
    members = [dist.get_global_rank(parent, rank) for rank in ranks]
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        setattr(options, "_timeout", timeout)  # noqa: B010  # torch's own, which it sets so
        return dist.ProcessGroupNCCL(store, mine, len(ranks), options)
    plugin = dist.Backend._plugins.get(kind.upper())
    if plugin is None or not plugin.extended_api:
        group = dist.new_group(
            members, timeout, kind, use_local_synchronization=True, group_desc=name
        )
        return _private(group, "_get_backend")(device)
    given = dist.distributed_c10d._DistributedBackendOptions()
    given.store, given.group_rank, given.group_size = store, mine, len(ranks)
    given.timeout, given.group_id, given.global_ranks_in_group = timeout, name, members
    return plugin.creator_fn(given, None)


def all_gather(backend: Any, out: Tensor, own: Tensor) -> Any:
    """Begin an all-gather of a backend: 1-D ``own`` of each rank, one after another, in ``out``."""
    return _private(backend, "_allgather_base")(out, own)


def shut_down(backend: Any) -> None:
    """Give back what a backend holds; of gloo, the end of its memory does."""
    if not isinstance(backend, dist.ProcessGroupGloo):
        with suppress(RuntimeError):
            backend.shutdown()


def is_destroyed(group: ProcessGroup) -> bool:
    """Return whether ``destroy_process_group`` was called for it."""
    return group not in dist.distributed_c10d._world.pg_map


def completed(value: Tensor) -> Future[Tensor]:
    """Return a future that has its value already."""
    future: Future[Tensor] = Future(devices=[value.device] if value.device.type != "cpu" else [])
    future.set_result(value)
    return future


def _timeout_of(group: ProcessGroup, device: str) -> Any:
    """Return how long collectives of the group may take."""
    backend = _private(group, "_get_backend")(torch.device(device))
    return getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)


# -- autograd, DDP and torch.compile ----------------------------------------------------------


def in_backward_pass() -> bool:
    """Return whether autograd runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def not_compiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given; any other as it is."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def awaits_first_reduction(model: Any) -> bool:
    """Return whether this DDP has a static graph that it has not recorded yet.

    Its first backward pass under ``no_sync()`` ends in an internal assertion of torch, and without
    that assertion DDP would never reduce again.
    """
    return bool(model.static_graph) and not _private(
        model, "_static_graph_delay_allreduce_enqueued"
    )


# -- FSDP -------------------------------------------------------------------------------------


def param_groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of one module: none, one, or one for each mesh."""
    state = _private(module, "_get_fsdp_state")()
    if hasattr(state, "_fsdp_param_groups"):
        return list(_private(state, "_fsdp_param_groups"))
    one = _private(state, "_fsdp_param_group")  # torch 2.11
    return [one] if one else []


def policy_of(module: Any, own: torch.dtype) -> tuple[torch.dtype | None, torch.dtype]:
    """Return the dtypes in which FSDP2 gathers one module, if it casts, and reduces it.

    Args:
        module: One to which ``fully_shard`` was applied.
        own: Of its parameters' gradients.
    """
    policy = _private(_private(module, "_get_fsdp_state")(), "_mp_policy")
    follows = None if _IN_OWN_DTYPE else policy.param_dtype
    return policy.param_dtype, policy.reduce_dtype or follows or own


def output_dtype_of(module: Any) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts the outputs of one module; None if it casts none.

    Args:
        module: One to which ``fully_shard`` was applied.
    """
    policy = _private(_private(module, "_get_fsdp_state")(), "_mp_policy")
    dtype: torch.dtype | None = policy.output_dtype
    return dtype


def mesh_groups(group: Any) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return the ranks that a parameter group is sharded over, and those torch averages between.

    The first is None under ``replicate``, the second where there are shards alone.
    """
    names = "shard_process_group", "replicate_process_group"
    shards, replicas = (getattr(group.mesh_info, name, None) for name in names)
    return shards, replicas


def custom_collective(group: Any, gathers: bool, replicas: bool) -> str | None:
    """Return which hook point of a parameter group is taken already; None if none is.

    Args:
        group: The parameter group.
        gathers: Whether the one for all-gathers is asked for.
        replicas: Whether the one between replicas is.
    """
    for name in ("_reduce_scatter_comm", *(("_all_gather_comm",) if gathers else ())):
        kind = type(_private(group, name)).__name__
        if not kind.startswith(("Default", "ProcessGroupAlloc", "SymmMem")):
            return f"a custom collective ({kind})"
    taken = replicas and _private(group, "_all_reduce_hook") is not None
    return "an all-reduce hook" if taken else None


def replicas_to_hook(group: Any) -> None:
    """Let torch reduce a parameter group over its shards alone: replicas are left to the hook.

    Parameters keep their mesh; what changes is what torch reads when it reduces.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    known: Any = group.mesh_info
    sharded = mesh_groups(group)[0] is not None
    kind: Any = common.FSDPMeshInfo if sharded else common.DataParallelMeshInfo
    left = kind(**{each.name: getattr(known, each.name) for each in fields(kind) if each.init})
    if sharded and hasattr(known, "reduce_scatter_process_group"):  # since torch 2.13
        left.reduce_scatter_process_group = known.reduce_scatter_process_group
    if group.post_forward_mesh_info == known:
        group.post_forward_mesh_info = left
    group.mesh_info = left


# FSDP2 has no public name for what a backward pass without reduction leaves: gradients of whole
# parameters, in ``_unsharded_param.grad`` or, in the dtype they are reduced in, in
# ``unsharded_accumulated_grad``; and in ``_partial_reduce_output`` those that are reduced over the
# shards of HSDP alone. Nor has it one to read whether it reduces. If torch renames them, training
# without `Amp.no_sync` and `Amp.zero_grad` is as before, and those raise the error of `_private`.


@contextmanager
def paused_gradient_sync(module: Any) -> Iterator[None]:
    """Have FSDP2 not reduce the gradients of one module inside; then restore what was set before.

    Args:
        module: One to which ``fully_shard`` was applied.
    """
    names = "reduce_grads", "all_reduce_grads"
    before = [
        (group, name, _private(group, name)) for group in param_groups(module) for name in names
    ]
    module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for group, name, value in before:
            setattr(group, name, value)


def drop_unreduced_gradients(module: Any) -> list[nn.Parameter]:
    """Drop the gradients that FSDP2 has accumulated for one module and not reduced.

    Args:
        module: One to which ``fully_shard`` was applied.

    Returns:
        The sharded parameters that had such a gradient.
    """
    dropped = []
    for group in param_groups(module):
        if _private(group, "_partial_reduce_output") is not None:
            setattr(group, "_partial_reduce_output", None)  # noqa: B010  # torch's own
        for fsdp_param in _private(group, "fsdp_params"):
            accumulated = _private(fsdp_param, "unsharded_accumulated_grad")
            unsharded = getattr(fsdp_param, "_unsharded_param", None)  # None before a forward pass
            if accumulated is not None:
                fsdp_param.unsharded_accumulated_grad = None
            elif unsharded is None or unsharded.grad is None:
                continue
            if unsharded is not None:
                unsharded.grad = None
            dropped.append(fsdp_param.sharded_param)
    return dropped


@contextmanager
def accumulating_in_reduce_dtype(module: Any) -> Iterator[None]:
    """Let parameters get their first gradient after others of their unit were accumulated.

    Under a policy, FSDP2 accumulates unreduced gradients in the dtype it reduces in. A parameter
    whose first gradient comes in the pass that reduces has its own dtype, and torch refuses to
    reduce both in one message ("uniform gradient dtype"). So that gradient is moved to where the
    others are, by torch's own methods, as soon as it is there.

    Args:
        module: One to which ``fully_shard`` was applied, in a backward pass that reduces.
    """
    handles = []
    for group in param_groups(module):
        fsdp_params = _private(group, "fsdp_params")
        if all(each.unsharded_accumulated_grad is None for each in fsdp_params):
            continue
        for fsdp_param in fsdp_params:
            late = fsdp_param.unsharded_accumulated_grad is None
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if late and unsharded is not None and unsharded.requires_grad:
                handles.append(
                    unsharded.register_post_accumulate_grad_hook(_accumulate(fsdp_param))
                )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _accumulate(fsdp_param: Any) -> Callable[[Tensor], None]:
    """Return a hook that moves an unsharded gradient to where FSDP2 accumulates such gradients."""

    def accumulate(_: Tensor) -> None:
        fsdp_param.accumulate_unsharded_grad_if_needed()
        fsdp_param.to_accumulated_grad_if_needed()

    return accumulate
