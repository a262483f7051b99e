"""One call that gives a wrapped model the right kind of communication hook."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import ddp, torch_compat
from distamp.comm_hooks.auto import AUTO, Tables, auto, connect
from distamp.comm_hooks.formats import WireFormat, wire_format
from distamp.comm_hooks.hosts import Hosts, agreed, hosts_of, own_row
from distamp.comm_hooks.state import CommHookState
from distamp.comm_hooks.stats import Choice
from distamp.comm_hooks.wrapped import Wrapped
from distamp.errors import LockstepError

__all__ = ["register"]

_CHOICES = (
    "DistributedDataParallel, FullyShardedDataParallel, or a module that fully_shard was applied to"
)


def register(
    model: nn.Module,
    wire: str = "fp16",
    *,
    process_group: ProcessGroup | None = None,
    replicas: ProcessGroup | None = None,
    ranks_per_host: int | None = None,
) -> CommHookState:
    """Average the gradients of a wrapped model through a wire format.

    Unlike ``model.register_comm_hook``, it works for each wrapper, and checks that format,
    gradients and group fit. Call it on every rank at the same point, between any two backward
    passes.

    Args:
        model: DistributedDataParallel, the outermost FullyShardedDataParallel, or a module that
            contains modules to which ``fully_shard`` was applied; compiled or not.
        wire: ``"fp16"``, ``"bf16"``; under DDP also ``"int8"``, with error feedback. ``"auto"``
            times uncompressed gradients, ``"fp16"`` and under DDP ``"int8"`` for some seconds
            between the job's own ranks and hosts. It takes the most exact one that is not slower,
            the same on all ranks. ``stats().choice`` and, on rank 0, the logger say which and why.
        process_group: The ranks to average over: the model's own, or None for these.
        replicas: For replicas of a one-dimensional FSDP2: the ranks that have the same shard, to
            average between them in the wire format too.
        ranks_per_host: How many neighbours in the group are on one host, where gradients travel in
            their own dtype. None asks every rank for its host; 1 compresses between all ranks, for
            hosts whose GPUs are joined by nothing faster than the network.

    Returns:
        The state of the hook: it has ``stats()``, and is the argument of ``DistGradScaler.attach``.

    Raises:
        ValueError: The format is unknown; the module is not one of these wrappers, or has a hook
            already; the group has other ranks, or was destroyed; replicas hold another shard; the
            format is wider than the gradients; the group is not so many hosts.
        TypeError: The model is no module, or a group is not a ProcessGroup (a DeviceMesh, for
            example).
        LockstepError: A rank registers another format, has another model, or raises one of the
            errors above; raised on all other ranks. But a rank whose model is none of these
            wrappers knows no group to tell: the others wait until their group's timeout.
        RuntimeError: This torch's FSDP2 does not support hooks, or the model's own process group
            was destroyed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"cannot give {type(model).__name__} a communication hook; give the wrapped model "
            f"itself: {_CHOICES}"
        )
    model = torch_compat.not_compiled(model)
    wrapped = _wrapped(model, replicas if _exists(replicas) else None)
    if not all(map(_exists, wrapped.groups)):
        raise RuntimeError(
            f"the process group of this {type(model).__name__} was destroyed: call "
            "torch.distributed.init_process_group, wrap the module again and register the hook on "
            "the new wrapper"
        )
    failure: Exception | None = None
    chosen: WireFormat | None = None
    try:
        _check_groups(process_group=process_group, replicas=replicas)
        if replicas is not None and not (wrapped.shards and wrapped.replicas is replicas):
            raise ValueError(
                "replicas are for a model that fully_shard was applied to, not "
                f"{type(model).__name__}"
            )
        chosen = None if wire == AUTO else wire_format(wire)
        wrapped.check(chosen, process_group, ranks_per_host)
    except (TypeError, ValueError) as error:
        failure = error
    found: dict[ProcessGroup, Hosts] = {}
    for group in wrapped.groups:
        # The other ranks may have nothing to refuse, and wait for this one in every group.
        row = own_row(None if failure else f"{wire} for {wrapped.what}", ranks_per_host)
        try:
            found[group] = hosts_of(agreed(row, group))
        except LockstepError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    choice: Choice | None = None
    tables: Tables = found
    if chosen is None:
        choice, chosen, tables = auto(wrapped, found)
    state = CommHookState(chosen, wrapped.over[0])
    state.counts.choice = choice
    compressed = choice is None or choice.compressed
    if compressed:
        connect(state, wrapped, tables)
    wrapped.attach(state, compressed)
    return state


def _exists(group: object) -> bool:
    return isinstance(group, ProcessGroup) and not torch_compat.is_destroyed(group)


def _check_groups(**groups: object) -> None:
    for name, group in groups.items():
        if torch_compat.is_non_member(group):
            raise ValueError(f"{name} does not contain this rank: give it the group it belongs to")
        if group is not None and not isinstance(group, ProcessGroup):
            raise TypeError(
                f"{name} must be a ProcessGroup or None, not {type(group).__name__}; of a "
                "DeviceMesh give mesh.get_group()"
            )
        if group is not None and not _exists(group):
            raise ValueError(f"{name} was destroyed: give a group that exists")


def _wrapped(model: Any, replicas: ProcessGroup | None) -> Wrapped:
    """Return a model as its wrapper's adapter has it."""
    # Those of FSDP are imported here: it takes a second, which a user of DDP need not wait.
    if isinstance(model, DistributedDataParallel):
        return ddp.wrapped(model)
    if torch_compat.is_fsdp1(model):
        from distamp.comm_hooks import fsdp1

        return fsdp1.wrapped(model)
    if any(map(torch_compat.is_fsdp2, model.modules())):
        from distamp.comm_hooks import fsdp2

        return fsdp2.wrapped(model, replicas)
    kind = type(model)
    if kind.__name__ == "ShardedDataParallel" and kind.__module__.startswith("fairscale."):
        raise ValueError(
            "fairscale's ShardedDataParallel has no place for a communication hook: its buckets "
            "are reduced as they are, or in plain fp16 by ShardedDataParallel(reduce_fp16=True)"
        )
    raise ValueError(f"cannot give {kind.__name__} a communication hook; give one of {_CHOICES}")
