"""One call that gives a wrapped model the right kind of communication hook."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_private
from distamp.comm_hooks.adapter import ModelAdapter, TopologyByGroup
from distamp.comm_hooks.ddp import ddp_adapter
from distamp.comm_hooks.formats import CommFormat, comm_format, uncompressed
from distamp.comm_hooks.fsdp1 import fsdp1_adapter
from distamp.comm_hooks.hook import CommHook
from distamp.comm_hooks.topology import Topology, gather_topology
from distamp.errors import RankMismatchError
from distamp.observers import COMM_HOOK_ATTR

__all__ = ["hook_of", "register_comm_hook"]

_log = logging.getLogger("distamp.comm_hooks")


def register_comm_hook(
    model: nn.Module,
    format: str = "fp16",
    *,
    replicas: ProcessGroup | None = None,
    ranks_per_host: int | None = None,
    param_format: str | None = None,
) -> CommHook:
    """Send the gradients of a wrapped model in a format of fewer bytes, and add them up in fp32.

    Collective: every rank of the model's groups must call this. Call it between any two backward
    passes.

    Unlike ``model.register_comm_hook``, it accepts each kind of wrapper, and checks that the format
    has fewer bytes than the gradients. Under ``Join``, ``divide_by_initial_world_size=False`` has
    no effect, as with torch's hooks.

    Args:
        model: DistributedDataParallel, the outermost FullyShardedDataParallel, or a module that
            contains modules to which ``fully_shard`` was applied; compiled or not.
        format: ``"fp16"``, ``"bf16"``; under DDP and FSDP2 also ``"int8"``, with error feedback.
            The benchmark ``benchmarks/link.py`` times the formats on the ranks and hosts of a job.
        replicas: For replicas of a one-dimensional FSDP2: the ranks that have the same shard. Their
            gradients are averaged in the format, too. A two-dimensional mesh has them in itself.
        ranks_per_host: The number of neighbouring ranks of the group on one host, between which
            gradients are sent in their own dtype. The value 1 compresses between all ranks, for
            hosts that connect their GPUs by the network alone. None gathers the host of every
            rank. If hosts have different numbers of ranks, the hook is left off, and the logger and
            ``stats()`` contain the reason.
        param_format: Under FSDP2, a format in which weights are gathered, too, such as ``"int8"``.
            All ranks compute with the decoded weights. The shards that are stepped stay exact.

    Returns:
        The hook, with its ``stats()``. Pass it to ``attach_comm_hook`` of the scaler or guard.

    Raises:
        ValueError: The format is unknown, or has as many bytes as the gradients; FSDP2 has a hook
            already; replicas hold another shard; ``ranks_per_host`` does not divide a group.
        RuntimeError: A DDP or FSDP1 model has a hook of `register_comm_hook` already.
        RuntimeError, AssertionError: torch's own, of a DDP or FSDP1 model that takes no hook.
        TypeError: The model is none of these wrappers, or ``replicas`` is no ProcessGroup (a
            DeviceMesh, for example).
        RankMismatchError: Another rank registers another format, has another model, or raises one
            of the errors above. A rank with another kind of model has no group, so the
            remaining ranks wait until the timeout of their group.
    """
    adapter, is_fsdp2 = _adapter_for(model, replicas, param_format is not None)
    failure: Exception | None = None
    format_value = param_format_value = None
    try:
        _check_arguments(model, adapter, is_fsdp2, replicas, param_format)
        if param_format is not None:
            param_format_value = comm_format(param_format)
        format_value = _resolve_format(format, adapter)
    except (TypeError, ValueError, RuntimeError) as error:
        failure = error
    request = f"{format} for {adapter.description}"
    if param_format is not None:
        request += f", param_format={param_format}"
    topologies: dict[ProcessGroup, Topology] = {}
    for group in adapter.groups:
        # A rank without an error waits for this rank in every group.
        try:
            topologies[group] = gather_topology(None if failure else request, group, ranks_per_host)
        except (RankMismatchError, ValueError) as error:
            failure = failure or error
    if failure is not None:
        raise failure
    assert format_value is not None  # A format that does not fit is a failure.
    left_off = ""
    for topology in topologies.values():
        if not topology.hosts and not left_off:
            # In one level a host would send several times the bytes of a ring.
            left_off = f"{topology.description}; ranks_per_host=1 compresses between all"
            format_value = uncompressed(adapter.dtype)
            _log.warning("the communication hook was left off: %s", left_off)
    hook = CommHook(format_value, adapter.groups[0])
    hook.counts.left_off = left_off
    hook.param_format = param_format_value
    if format_value.is_compressed or param_format_value is not None:
        _connect(hook, adapter, topologies)
    try:
        adapter.install(hook, param_format_value, topologies)
    except Exception:
        # The model takes no hook, and nothing else would release the connections.
        hook.close()
        raise
    setattr(torch_private.unwrap_compiled(model), COMM_HOOK_ATTR, hook)
    return hook


def hook_of(model: nn.Module) -> CommHook | None:
    """Return the hook that `register_comm_hook` gave this model.

    Returns:
        None if the model has no hook, or is a copy of a model that has one.
    """
    module = torch_private.unwrap_compiled(model)
    hook: CommHook | None = getattr(module, COMM_HOOK_ATTR, None)
    return None if hook is not None and hook.is_copy else hook


def _connect(hook: CommHook, adapter: ModelAdapter, topologies: TopologyByGroup) -> None:
    """Make all connections of a model.

    Collective: every rank of the model's groups must call this.
    """
    for group in adapter.groups:
        for device in adapter.devices:
            hook.collectives_for(group, device, topologies[group])


def _adapter_for(model: Any, replicas: Any, gathers_params: bool) -> tuple[ModelAdapter, bool]:
    """Return the adapter of a model's wrapper, and whether the wrapper is FSDP2."""
    module = torch_private.unwrap_compiled(model)
    if isinstance(module, DistributedDataParallel):
        return ddp_adapter(module), False
    # A user of DDP need not wait for the import of FSDP, which takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return fsdp1_adapter(module), False
    submodules = module.modules() if isinstance(module, nn.Module) else ()
    if fsdp is not None and any(isinstance(child, fsdp.FSDPModule) for child in submodules):
        from distamp.comm_hooks import fsdp2

        # Replicas of a wrong type are refused once the groups are known.
        replicate_group = replicas if isinstance(replicas, ProcessGroup) else None
        return fsdp2.fsdp2_adapter(module, replicate_group, gathers_params), True
    raise TypeError(
        f"cannot give {type(module).__name__} a communication hook; give the wrapped model itself: "
        "DistributedDataParallel, FullyShardedDataParallel, or a module that fully_shard was "
        "applied to"
    )


def _check_arguments(
    model: nn.Module,
    adapter: ModelAdapter,
    is_fsdp2: bool,
    replicas: Any,
    param_format: str | None,
) -> None:
    """Refuse arguments that do not fit the wrapper, and a second hook."""
    if replicas is not None and not isinstance(replicas, ProcessGroup):
        raise TypeError(
            f"replicas must be a ProcessGroup of this rank or None, not "
            f"{type(replicas).__name__}; of a DeviceMesh give mesh.get_group()"
        )
    if not is_fsdp2 and (replicas is not None or param_format is not None):
        raise ValueError(
            "replicas and param_format are for a model that fully_shard was applied to"
        )
    if adapter.refusal is not None:
        raise ValueError(adapter.refusal)
    if not is_fsdp2 and hook_of(model) is not None:
        name = type(torch_private.unwrap_compiled(model)).__name__
        raise RuntimeError(
            f"This {name} has a communication hook already, and torch takes one for each wrapper. "
            "Call register_comm_hook() or pass comm_hook= once. For another format wrap the model "
            "again."
        )


def _resolve_format(name: str, adapter: ModelAdapter) -> CommFormat:
    """Return the format of a name.

    Raises:
        ValueError: There is none of that name, or gradients do not fit.
    """
    format = comm_format(name)
    dtype = adapter.dtype
    choices = " or ".join([*map(repr, adapter.usable_formats()), "no hook"])
    if not adapter.supports(format):
        raise ValueError(
            f"{name} needs error feedback, which FSDP1 does not support. Use FSDP2 or "
            f"DistributedDataParallel, or choose {choices}."
        )
    if not format.fits(dtype):
        raise ValueError(
            f"format {name!r} takes {format.block_bytes / 256:.3g} bytes an element, and gradients "
            f"are reduced in {dtype}, which takes {dtype.itemsize}: choose {choices}, "
            "or reduce in torch.float32"
        )
    return format
