"""One call that gives a wrapped model the right kind of communication hook."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_compat, torch_hooks
from distamp.comm_hooks.formats import CommFormat, as_it_is, comm_format
from distamp.comm_hooks.hosts import Hosts, agreed
from distamp.comm_hooks.state import CommHook
from distamp.comm_hooks.wrapped import Tables, Wrapped
from distamp.errors import RankMismatchError

__all__ = ["hook_of", "register_comm_hook"]

_log = logging.getLogger("distamp.comm_hooks")
_MARK = "_distamp_comm_hook"  # an attribute of the wrapper


def register_comm_hook(
    model: nn.Module,
    format: str = "fp16",
    *,
    replicas: ProcessGroup | None = None,
    ranks_per_host: int | None = None,
    param_format: str | None = None,
) -> CommHook:
    """Average the gradients of a wrapped model through a wire format.

    Collective: every rank of the model's groups must call this. Call it between any two backward
    passes.

    Unlike ``model.register_comm_hook``, it works for each wrapper, and checks that format and
    gradients fit. Under ``Join``, ``divide_by_initial_world_size=False`` has no effect, as with
    torch's hooks.

    Args:
        model: DistributedDataParallel, the outermost FullyShardedDataParallel, or a module that
            contains modules to which ``fully_shard`` was applied; compiled or not.
        format: ``"fp16"``, ``"bf16"``; under DDP and FSDP2 also ``"int8"``, with error feedback.
            The benchmark ``benchmarks/link.py`` times them on a job's own ranks and hosts.
        replicas: For replicas of a one-dimensional FSDP2: the ranks that have the same shard, to
            average between them in the wire format too. A two-dimensional mesh has its own.
        ranks_per_host: How many neighbours in the group are on one host, where gradients travel in
            their own dtype; 1 compresses between all ranks, for hosts whose GPUs are joined by
            nothing faster than the network. None asks every rank for its host. Where hosts have
            different numbers of ranks the hook is left off; the logger and ``stats()`` say so.
        param_format: Under FSDP2, a format in which weights are gathered, too: ``"int8"`` or
            ``"bf16"``. All ranks compute with what was sent; the shards that are stepped stay
            exact.

    Returns:
        The state of the hook: it has ``stats()``, and is the argument of
            ``DistGradScaler.attach_comm_hook``.

    Raises:
        ValueError: The format is unknown; FSDP2 has a hook already; replicas hold another
            shard; the format is no narrower than gradients; the group is not so many hosts.
        RuntimeError: A DDP or FSDP1 model has a hook of `register_comm_hook` already.
        RuntimeError, AssertionError: torch's own, of a DDP or FSDP1 model that takes no hook.
        TypeError: The model is none of these wrappers, or replicas are no ProcessGroup (a
            DeviceMesh, for example).
        RankMismatchError: A rank registers another format, has another model, or raises one of the
            errors above; raised on all other ranks. But a rank whose model is none of these
            wrappers knows no group to tell: the others wait until their group's timeout.
    """
    given = replicas if isinstance(replicas, ProcessGroup) else None
    wrapped, sharded = _wrapped(torch_compat.not_compiled(model), given, param_format is not None)
    failure: Exception | None = None
    chosen = gathers = None
    try:
        if replicas is not None and given is None:
            raise TypeError(
                f"replicas must be a ProcessGroup of this rank or None, not "
                f"{type(replicas).__name__}; of a DeviceMesh give mesh.get_group()"
            )
        if not sharded and (replicas is not None or param_format is not None):
            raise ValueError(
                "replicas and param_format are for a model that fully_shard was applied to"
            )
        if wrapped.refused is not None:
            raise ValueError(wrapped.refused)
        if not sharded and hook_of(model) is not None:
            wrapper = torch_compat.not_compiled(model)
            name = type(wrapper).__name__
            raise RuntimeError(
                f"This {name} has a communication hook already, and torch takes one for each "
                "wrapper. Call register_comm_hook() or pass comm_hook= "
                "once. For another format wrap the model again."
            )
        gathers = None if param_format is None else comm_format(param_format)
        chosen = _fitting(format, wrapped)
    except (TypeError, ValueError, RuntimeError) as error:
        failure = error
    found: dict[ProcessGroup, Hosts] = {}
    asked = f"{format} for {wrapped.what}" + (
        "" if param_format is None else f", param_format={param_format}"
    )
    for group in wrapped.over:
        # The other ranks may have nothing to refuse, and wait for this one in every group.
        try:
            found[group] = agreed(None if failure else asked, group, ranks_per_host)
        except (RankMismatchError, ValueError) as error:
            failure = failure or error
    if failure is not None:
        raise failure
    assert chosen is not None  # A format that does not fit is a failure.
    uneven = [hosts.text for hosts in found.values() if not hosts.ranks]
    left_off = ""
    if uneven:
        # In one level a host would send several times what a ring does.
        chosen = as_it_is(wrapped.dtype)
        left_off = f"{uneven[0]}; ranks_per_host=1 compresses between all"
        _log.warning("the communication hook was left off: %s", left_off)
    state = CommHook(chosen, wrapped.over[0])
    state.counts.left_off = left_off
    state.param_format = gathers
    if chosen.encodes or gathers is not None:
        _connect(state, wrapped, found)
    try:
        wrapped.attach(state, gathers, found)
    except Exception:
        # The model takes no hook, and nothing would give the connections back.
        state.close()
        raise
    setattr(torch_compat.not_compiled(model), _MARK, state)
    return state


def hook_of(model: nn.Module) -> CommHook | None:
    """Return the hook that `register_comm_hook` gave this model.

    Returns:
        None if the model has no hook, or is a copy of a model that has one.
    """
    hook: CommHook | None = getattr(torch_compat.not_compiled(model), _MARK, None)
    return None if hook is not None and hook.is_copy else hook


def _connect(state: CommHook, wrapped: Wrapped, tables: Tables) -> None:
    """Make all exchanges of a model.

    Collective: every rank of the model's groups must call this.
    """
    for group in wrapped.over:
        for device in wrapped.devices:
            state.exchange(group, device, tables[group])


def _wrapped(model: Any, replicas: ProcessGroup | None, gathers: bool) -> tuple[Wrapped, bool]:
    """Return a model as its wrapper's adapter has it, and whether that is FSDP2's."""
    if isinstance(model, DistributedDataParallel):
        return torch_hooks.ddp(model), False
    # It takes a second to import, which a user of DDP need not wait.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        return torch_hooks.fsdp1(model), False
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in modules):
        from distamp.comm_hooks import fsdp2

        return fsdp2.wrapped(model, replicas, gathers), True
    raise TypeError(
        f"cannot give {type(model).__name__} a communication hook; give the wrapped model itself: "
        "DistributedDataParallel, FullyShardedDataParallel, or a module that fully_shard was "
        "applied to"
    )


def _fitting(name: str, wrapped: Wrapped) -> CommFormat:
    """Return a format.

    Raises:
        ValueError: There is none of that name, or gradients do not fit.
    """
    format, dtype = comm_format(name), wrapped.dtype
    allowed = " or ".join([*map(repr, wrapped.fitting()), "no hook"])
    if name not in wrapped.formats:
        raise ValueError(
            f"{name} needs error feedback, which gradients of FSDP1 have not: use FSDP2 or "
            f"DistributedDataParallel, or take {allowed}"
        )
    if not format.fits(dtype):
        raise ValueError(
            f"format {name!r} takes {format.block_bytes / 256:.3g} bytes an element, and gradients "
            f"are reduced in {dtype}, which takes {dtype.itemsize}: choose {allowed}, "
            "or reduce in torch.float32"
        )
    return format
