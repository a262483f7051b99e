"""One call that gives a wrapped model the right kind of communication hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.agreement import agree, refuse
from distamp.comm_hooks.auto import as_it_is, choose_for_ddp, fits
from distamp.comm_hooks.choice import AUTO
from distamp.comm_hooks.ddp import wire_hook
from distamp.comm_hooks.state import CommHookState
from distamp.comm_hooks.wire import WireFormat, wire_format

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
) -> CommHookState:
    """Average the gradients of a wrapped model through a wire format.

    Unlike ``model.register_comm_hook``, it works for each wrapper, and checks that format,
    gradients and group fit. Call it on every rank at the same point, between any two backward
    passes.

    Args:
        model: DistributedDataParallel, the outermost FullyShardedDataParallel, or a module that
            contains modules to which ``fully_shard`` was applied; compiled or not.
        wire: ``"fp16"``, ``"bf16"``; under DDP also ``"int8"``, with error feedback. ``"auto"``
            times uncompressed gradients, ``"fp16"`` and under DDP ``"int8"`` for some seconds on
            the link between the ranks. It takes the most exact one that is not slower, the same on
            all ranks. ``stats().choice`` and, on rank 0, the logger report choice and reason.
        process_group: The ranks to average over: the model's own, or None for these.
        replicas: For replicas of a one-dimensional FSDP2: the ranks that have the same shard, to
            average between them in the wire format too.

    Returns:
        The state of the hook: it has ``stats()``, and is the argument of ``DistGradScaler.attach``.

    Raises:
        ValueError: The format is unknown; the module is not one of these wrappers, or has a hook
            already; the group has other ranks, or was destroyed; replicas hold another shard; the
            format is wider than the gradients.
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
    try:
        return _registered(model, wire, process_group, replicas)
    except (TypeError, ValueError):
        # The other ranks may have nothing to refuse, and wait for this one.
        refuse(_groups(model, process_group, replicas))
        raise


def _registered(
    model: nn.Module,
    wire: str,
    process_group: ProcessGroup | None,
    replicas: ProcessGroup | None,
) -> CommHookState:
    _check_exists(model)
    chosen = None if wire == AUTO else _named(wire)
    _check_groups(process_group=process_group, replicas=replicas)
    if replicas is not None and not _holds_fsdp2(model):
        raise ValueError(
            f"replicas are for a model that fully_shard was applied to, not {type(model).__name__}"
        )
    if isinstance(model, DistributedDataParallel):
        return _register_ddp(model, chosen, process_group)
    if torch_compat.is_fsdp1(model):
        # Imported here: torch's FSDP takes a second, which a user of DDP need not wait.
        from distamp.comm_hooks.fsdp1 import register_fsdp1

        _check_ranks(process_group, _ranks(model.process_group), "sharded")
        return register_fsdp1(model, chosen)  # type: ignore[arg-type]
    if _holds_fsdp2(model):
        from distamp.comm_hooks.fsdp2 import register_fsdp2

        ranks = next(
            list(each.device_mesh.mesh.flatten().tolist())
            for each in model.parameters()
            if hasattr(each, "device_mesh")
        )
        _check_ranks(process_group, ranks, "sharded")
        return register_fsdp2(model, chosen, replicas=replicas)
    raise ValueError(_unsuitable(model))


def _groups(model: Any, process_group: object, replicas: object) -> list[ProcessGroup]:
    """Return the groups that are to agree, in the order in which they do."""
    if isinstance(model, DistributedDataParallel):
        own = model.process_group
        given = _exists(process_group) and _ranks(process_group) == _ranks(own)
        return [process_group if given else own]  # type: ignore[list-item]
    if torch_compat.is_fsdp1(model):
        return [model.process_group]
    modules = filter(torch_compat.is_fsdp2, model.modules())
    found: dict[ProcessGroup, None] = {}
    for group in (group for each in modules for group in torch_compat.param_groups(each)):
        found |= dict.fromkeys(torch_compat.mesh_groups(group))
        if _exists(replicas):
            found[replicas] = None  # type: ignore[index]
    return [*found]


def _exists(group: object) -> bool:
    return isinstance(group, ProcessGroup) and not torch_compat.is_destroyed(group)


def _check_exists(model: nn.Module) -> None:
    """Refuse a model whose own groups are gone: no other rank can be told through them."""
    if not all(map(_exists, _groups(model, None, None))):
        raise RuntimeError(
            f"the process group of this {type(model).__name__} was destroyed: call "
            "torch.distributed.init_process_group, wrap the module again and register the hook on "
            "the new wrapper"
        )


def _named(name: str) -> WireFormat:
    try:
        return wire_format(name)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO}") from None


def _check_groups(**groups: object) -> None:
    for name, group in groups.items():
        known = group is None or isinstance(group, ProcessGroup)
        if not known and not torch_compat.is_non_member(group):
            raise TypeError(
                f"{name} must be a ProcessGroup or None, not {type(group).__name__}; of a "
                "DeviceMesh give mesh.get_group()"
            )
        if isinstance(group, ProcessGroup) and not _exists(group):
            raise ValueError(f"{name} was destroyed: give a group that exists")


def _holds_fsdp2(model: nn.Module) -> bool:
    return any(map(torch_compat.is_fsdp2, model.modules()))


def _check_ranks(given: ProcessGroup | None, own: list[int], how: str) -> None:
    if given is not None and _ranks(given) != own:
        raise ValueError(
            f"process_group holds ranks {_ranks(given)}, but the model is {how} over ranks {own}; "
            "leave process_group out to use the model's own"
        )


def _register_ddp(
    model: DistributedDataParallel, wire: WireFormat | None, process_group: ProcessGroup | None
) -> CommHookState:
    _check_ranks(process_group, _ranks(model.process_group), "replicated")
    group = model.process_group if process_group is None else process_group
    taken = torch_compat.ddp_hook_name(model)
    if taken is not None:
        built_in = taken.startswith("BuiltinCommHookType")
        raise ValueError(_second("one of torch's built-in hooks" if built_in else taken))
    trained = [p for p in model.parameters() if p.requires_grad]
    if wire is not None:
        _check_width(wire, trained)
    numel = sum(parameter.numel() for parameter in trained)
    agree(AUTO if wire is None else wire.name, {group: numel})
    choice = choose_for_ddp(model, group) if wire is None else None
    if choice is not None:
        wire = wire_format(choice.wire) if choice.compressed else None
    state = CommHookState(wire or as_it_is(trained[0].dtype), group, choice)
    state.name_parameters(model.module.named_parameters())
    if wire is None:
        return state
    if group.size() > 1:
        for device in {p.device for p in trained}:
            state.channel(device)
    model.register_comm_hook(state, wire_hook)
    return state


def _check_width(wire: WireFormat, parameters: list[nn.Parameter]) -> None:
    """Refuse gradients that would grow on the way."""
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        if not fits(wire, dtype):
            narrower = "no hook" if dtype is torch.float16 else "'bf16'"
            raise ValueError(
                f"format {wire.name!r} takes {wire.block_bytes / wire.block:.3g} bytes an "
                f"element, and gradients are {dtype}, which takes {dtype.itemsize}: choose "
                f"{narrower} or 'int8'"
            )


def _ranks(group: Any) -> list[int]:
    if torch_compat.is_non_member(group):
        return []
    return dist.get_process_group_ranks(group)


def _second(name: str) -> str:
    return (
        f"the model has a communication hook already ({name}), and can have only one; to register "
        "another, wrap the model again"
    )


def _unsuitable(model: object) -> str:
    kind = type(model)
    if kind.__name__ == "ShardedDataParallel" and kind.__module__.startswith("fairscale."):
        return (
            "fairscale's ShardedDataParallel has no place for a communication hook: its buckets "
            "are reduced as they are, or in plain fp16 by ShardedDataParallel(reduce_fp16=True)"
        )
    return f"cannot give {kind.__name__} a communication hook; give one of {_CHOICES}"
