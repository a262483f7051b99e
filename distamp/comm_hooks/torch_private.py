"""Private names of torch's process groups, autograd and DDP, which hooks and levels read.

Each name is read in one function here. They were read in torch 2.11 to 2.15. FSDP2's names are in
`distamp.fsdp_unit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.futures import Future

__all__ = [
    "all_gather",
    "all_gather_single",
    "awaits_first_reduction",
    "completed_future",
    "default_group",
    "in_backward_pass",
    "new_communicator",
    "reduce_scatter_single",
    "shut_down",
    "unwrap_compiled",
]


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which communication "
            "hooks read: use one of the versions that distamp supports"
        ) from None


# -- process groups ---------------------------------------------------------------------------

# torch's newer names do not warn.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def default_group() -> ProcessGroup:
    """Return the default group.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    return dist.distributed_c10d._get_default_group()


def new_communicator(
    name: str, parent: ProcessGroup, ranks: Sequence[int], device: torch.device
) -> Any:
    """Return a backend for tensors of a device, which its members make from the store.

    A group of torch's ``new_group`` may be a split of the default group, and then every rank must
    make it. Or its name follows from the number of groups of a rank, and ranks may differ in that.

    Args:
        name: A name that no other communicator has.
        parent: The group with the timeout and the kind of the backend. On a CPU the kind is gloo.
        ranks: The members, by their numbers in ``parent``.
        device: The device of the tensors.
    """
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank = list(ranks).index(parent.rank())
    size = len(ranks)
    timeout = _timeout_of(parent, device.type)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    config = dist.get_backend_config(parent)
    backend_by_device = dict(entry.split(":") for entry in config.split(","))
    backend = backend_by_device[device.type]
    if backend == "nccl":
        nccl_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # torch sets the timeout of its groups in this way.
        setattr(nccl_options, "_timeout", timeout)  # noqa: B010
        return dist.ProcessGroupNCCL(store, rank, size, nccl_options)
    members = [dist.get_global_rank(parent, member) for member in ranks]
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None or not plugin.extended_api:
        group = dist.new_group(
            members, timeout, backend, use_local_synchronization=True, group_desc=name
        )
        return _read(group, "_get_backend")(device)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = size
    options.timeout = timeout
    options.group_id = name
    options.global_ranks_in_group = members
    return plugin.creator_fn(options, None)


def all_gather(backend: Any, rows: Tensor, row: Tensor) -> Any:
    """Begin an all-gather of a backend, which writes the ``row`` of each rank to ``rows``."""
    return _read(backend, "_allgather_base")(rows, row)


def shut_down(backend: Any) -> None:
    """Release the resources of a backend. The end of its memory does so for gloo."""
    if not isinstance(backend, dist.ProcessGroupGloo):
        with suppress(RuntimeError):
            backend.shutdown()


def completed_future(value: Tensor) -> Future[Tensor]:
    """Return a future that has its value already."""
    devices: list[int | str | torch.device] = []
    if value.device.type != "cpu":
        devices.append(value.device)
    future: Future[Tensor] = Future(devices=devices)
    future.set_result(value)
    return future


def _timeout_of(group: ProcessGroup, device: str) -> Any:
    """Return the timeout of a group's collectives."""
    backend = _read(group, "_get_backend")(torch.device(device))
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)


# -- autograd, DDP and torch.compile ----------------------------------------------------------


def in_backward_pass() -> bool:
    """Return whether autograd runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wrapped, or any other module unchanged."""
    module: nn.Module = getattr(model, "_orig_mod", model)
    return module


def awaits_first_reduction(model: Any) -> bool:
    """Return whether this DDP has a static graph that it has not recorded yet.

    Its first backward pass under ``no_sync()`` ends in an internal assertion of torch, and without
    that assertion DDP would never reduce again.
    """
    # A DDP without a static graph does not have the private attribute.
    return bool(model.static_graph) and not _read(model, "_static_graph_delay_allreduce_enqueued")
