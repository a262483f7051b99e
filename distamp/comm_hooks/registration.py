"""One call that gives a wrapped model the right kind of communication hook."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_compat, torch_hooks
from distamp.comm_hooks.auto import AUTO, TORCHS, Tables, as_it_is, auto, connect
from distamp.comm_hooks.formats import WireFormat, wire_format
from distamp.comm_hooks.hosts import agreed, hosts_of, own_row
from distamp.comm_hooks.state import CommHookState
from distamp.comm_hooks.stats import Choice
from distamp.comm_hooks.wrapped import Wrapped
from distamp.errors import LockstepError

__all__ = ["register"]

_log = logging.getLogger("distamp.comm_hooks")


def register(
    model: nn.Module,
    wire: str = "fp16",
    *,
    replicas: ProcessGroup | None = None,
    ranks_per_host: int | None = None,
    gather: str | None = None,
) -> CommHookState:
    """Average the gradients of a wrapped model through a wire format.

    Unlike ``model.register_comm_hook``, it works for each wrapper, and checks that format and
    gradients fit. Call it on every rank at the same point, between any two backward passes.

    Args:
        model: DistributedDataParallel, the outermost FullyShardedDataParallel, or a module that
            contains modules to which ``fully_shard`` was applied; compiled or not.
        wire: ``"fp16"``, ``"bf16"``; under DDP and FSDP2 also ``"int8"``, with error feedback.
            ``"auto"`` times uncompressed gradients, torch's own bf16, ``"fp16"`` and ``"int8"``
            for some seconds between the job's own ranks and hosts. It takes the most exact one
            that is not slower, the same on all ranks. ``stats().choice`` and, on rank 0, the
            logger say which and why.
        replicas: For replicas of a one-dimensional FSDP2: the ranks that have the same shard, to
            average between them in the wire format too. A two-dimensional mesh has its own.
        ranks_per_host: How many neighbours in the group are on one host, where gradients travel in
            their own dtype; 1 compresses between all ranks, for hosts whose GPUs are joined by
            nothing faster than the network. None asks every rank for its host. Where hosts have
            different numbers of ranks the hook is left off; the logger and ``stats()`` say so.
        gather: Under FSDP2, a format in which weights are gathered, too: ``"int8"`` or ``"bf16"``.
            All ranks compute with what was sent; the shards that are stepped stay exact.

    Returns:
        The state of the hook: it has ``stats()``, and is the argument of ``DistGradScaler.attach``.

    Raises:
        ValueError: The format is unknown; the model has a hook already; replicas hold another
            shard; the format is wider than the gradients; the group is not so many hosts.
        TypeError: The model is none of these wrappers, or replicas are no ProcessGroup (a
            DeviceMesh, for example).
        LockstepError: A rank registers another format, has another model, or raises one of the
            errors above; raised on all other ranks. But a rank whose model is none of these
            wrappers knows no group to tell: the others wait until their group's timeout.
    """
    group = replicas if isinstance(replicas, ProcessGroup) else None
    wrapped = _wrapped(torch_compat.not_compiled(model), group, gather is not None)
    failure: Exception | None = None
    chosen: WireFormat | None = None
    gathers: WireFormat | None = None
    try:
        chosen = None if wire == AUTO else wire_format(wire)
        gathers = None if gather is None else wire_format(gather)
        if gathers is not None and not wrapped.gathers:
            raise ValueError("gather is for weights that fully_shard gathers: leave it out")
        _check(wrapped, chosen, replicas, ranks_per_host)
    except (TypeError, ValueError) as error:
        failure = error
    tables: Tables = {}
    for group in wrapped.groups:
        # The other ranks may have nothing to refuse, and wait for this one in every group.
        row = own_row(None if failure else _asked(wire, gather, wrapped), ranks_per_host)
        try:
            tables[group] = hosts_of(agreed(row, group))
        except LockstepError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    choice: Choice | None = None
    uneven = [hosts.text for hosts in tables.values() if not hosts.ranks]
    if uneven:
        # In one level a host would send several times what a ring does.
        reason = f"{uneven[0].removeprefix('no hook: ')}; ranks_per_host=1 compresses between all"
        chosen = as_it_is(wrapped.dtypes[0])
        choice = Choice(chosen.name, False, {}, 0, reason, auto=False)
        _log.warning("%s", choice)
    elif chosen is None:
        choice, chosen, tables = auto(wrapped, tables)
    state = CommHookState(chosen, wrapped.over[0])
    state.counts.choice = choice
    compressed = choice is None or choice.compressed
    if compressed or gathers is not None:
        connect(state, wrapped, tables)
    wrapped.attach(state, compressed, gathers)
    if chosen is TORCHS and wrapped.attach_torchs is not None:
        wrapped.attach_torchs()
    return state


def _asked(wire: str, gather: str | None, wrapped: Wrapped) -> str:
    """Return what a rank asks for, in words."""
    return f"{wire} for {wrapped.what}" + ("" if gather is None else f", gather={gather}")


def _wrapped(model: Any, replicas: ProcessGroup | None, gathers: bool) -> Wrapped:
    """Return a model as its wrapper's adapter has it."""
    if isinstance(model, DistributedDataParallel):
        return torch_hooks.ddp(model)
    # It takes a second to import, which a user of DDP need not wait.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        return torch_hooks.fsdp1(model)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in modules):
        from distamp.comm_hooks import fsdp2

        return fsdp2.wrapped(model, replicas, gathers)
    raise TypeError(
        f"cannot give {type(model).__name__} a communication hook; give the wrapped model itself: "
        "DistributedDataParallel, FullyShardedDataParallel, or a module that fully_shard was "
        "applied to"
    )


def _check(
    wrapped: Wrapped, wire: WireFormat | None, replicas: object, ranks_per_host: int | None
) -> None:
    """Refuse what cannot be registered.

    Raises:
        TypeError: Replicas are no group.
        ValueError: All else.
    """
    if replicas is not None and not isinstance(replicas, ProcessGroup):
        raise TypeError(
            f"replicas must be a ProcessGroup of this rank or None, not {type(replicas).__name__}; "
            "of a DeviceMesh give mesh.get_group()"
        )
    if replicas is not None and not (wrapped.shards and wrapped.replicas is replicas):
        raise ValueError("replicas are for a model that fully_shard was applied to")
    for group in wrapped.groups if ranks_per_host is not None else ():
        if ranks_per_host < 1 or group.size() % ranks_per_host:  # type: ignore[operator]
            raise ValueError(
                f"ranks_per_host is {ranks_per_host}, and a group has {group.size()} ranks: give a "
                "number that divides it, or leave it out"
            )
    if wrapped.refused is not None:
        raise ValueError(wrapped.refused)
    if wire is None:
        return
    allowed = ", ".join(map(repr, wrapped.formats()))
    if wire.needs_error_feedback > wrapped.feedback:
        raise ValueError(
            f"{wire.name} needs error feedback, which gradients of FSDP1 have not: use FSDP2 or "
            f"DistributedDataParallel, or one of {allowed}"
        )
    dtype = wrapped.dtypes[0]
    if not wire.fits(dtype):
        raise ValueError(
            f"format {wire.name!r} takes {wire.block_bytes / 256:.3g} bytes an element, and "
            f"gradients are reduced in {dtype}, which takes {dtype.itemsize}: choose "
            f"{allowed or 'no format'} or no hook, or reduce in torch.float32"
        )
