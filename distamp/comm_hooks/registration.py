"""One call that gives a wrapped model the right kind of communication hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.auto import FLAT, Trial, as_it_is, averaging, timed_choice
from distamp.comm_hooks.buckets import reals_in
from distamp.comm_hooks.choice import AUTO, Choice
from distamp.comm_hooks.ddp import wire_hook
from distamp.comm_hooks.formats import WireFormat, wire_format
from distamp.comm_hooks.hosts import Hosts, agree, gathered, hosts_of, own_row
from distamp.comm_hooks.state import CommHookState, check_sharded, fits
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
    groups = _groups(model, process_group, replicas)
    if not all(map(_exists, _groups(model, None, None))):
        raise RuntimeError(
            f"the process group of this {type(model).__name__} was destroyed: call "
            "torch.distributed.init_process_group, wrap the module again and register the hook on "
            "the new wrapper"
        )
    failure: Exception | None = None
    what: str | None = None
    try:
        chosen = None if wire == AUTO else _named(wire)
        _check_groups(process_group=process_group, replicas=replicas)
        if replicas is not None and not any(map(torch_compat.is_fsdp2, model.modules())):
            raise ValueError(
                "replicas are for a model that fully_shard was applied to, not "
                f"{type(model).__name__}"
            )
        _check_hosts(ranks_per_host, groups)
        numel = _checked(model, chosen, process_group, replicas)
        what = f"{wire} for {numel} elements"
    except (TypeError, ValueError) as error:
        failure = error
    tables: dict[ProcessGroup, Hosts] = {}
    for group in groups:
        # The other ranks may have nothing to refuse, and wait for this one in every group.
        rows = gathered(own_row(None if failure else what, ranks_per_host), group)
        try:
            agree(rows)
            tables[group] = hosts_of(rows)
        except LockstepError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    if isinstance(model, DistributedDataParallel):
        return _register_ddp(model, chosen, tables)
    if torch_compat.is_fsdp1(model):
        return _register_fsdp1(model, chosen, tables)
    return _register_fsdp2(model, chosen, tables, replicas)


# -- checks -----------------------------------------------------------------------------------


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


def _ranks(group: Any) -> list[int]:
    return [] if torch_compat.is_non_member(group) else dist.get_process_group_ranks(group)


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


def _check_hosts(ranks_per_host: int | None, groups: list[ProcessGroup]) -> None:
    for group in groups if ranks_per_host is not None else ():
        if ranks_per_host < 1 or group.size() % ranks_per_host:  # type: ignore[operator]
            raise ValueError(
                f"ranks_per_host is {ranks_per_host}, and a group has {group.size()} ranks: give "
                "a number that divides it, or leave it out"
            )


def _check_ranks(given: ProcessGroup | None, own: list[int], how: str) -> None:
    if given is not None and _ranks(given) != own:
        raise ValueError(
            f"process_group holds ranks {_ranks(given)}, but the model is {how} over ranks {own}; "
            "leave process_group out to use the model's own"
        )


def _checked(
    model: Any,
    wire: WireFormat | None,
    process_group: ProcessGroup | None,
    replicas: ProcessGroup | None,
) -> int:
    """Refuse what cannot be registered; return the number of elements that it is for."""
    if isinstance(model, DistributedDataParallel):
        _check_ranks(process_group, _ranks(model.process_group), "replicated")
        taken = torch_compat.ddp_hook_name(model)
        if taken is not None:
            built_in = taken.startswith("BuiltinCommHookType")
            name = "one of torch's built-in hooks" if built_in else taken
            raise ValueError(
                f"the model has a communication hook already ({name}), and can have only one; to "
                "register another, wrap the model again"
            )
        trained = [p for p in model.parameters() if p.requires_grad]
        for each in trained if wire is not None else ():
            _check_width(wire, each.dtype)  # type: ignore[arg-type]
        return sum(each.numel() for each in trained)
    if torch_compat.is_fsdp1(model):
        _check_ranks(process_group, _ranks(model.process_group), "sharded")
        for unit in torch_compat.fsdp1_units(model):
            _check_fsdp1(unit, wire)
        if not model.check_is_root():
            raise ValueError(
                "this FullyShardedDataParallel is inside another: register on the outermost one"
            )
        return sum(map(torch_compat.fsdp1_numel, torch_compat.fsdp1_units(model)))
    if any(map(torch_compat.is_fsdp2, model.modules())):
        from distamp.comm_hooks import fsdp2

        groups = fsdp2.modules_of(model)
        if groups:
            mesh = groups[0][1].fsdp_params[0].sharded_param.device_mesh
            _check_ranks(process_group, mesh.mesh.flatten().tolist(), "sharded")
        fsdp2.check(groups, replicas)
        for _, group in groups if wire is not None else ():
            check_sharded(wire, fsdp2.reduced_in(group))  # type: ignore[arg-type]
        return sum(map(_numel, groups))
    raise ValueError(_unsuitable(model))


def _check_width(wire: WireFormat, dtype: torch.dtype) -> None:
    """Refuse gradients that would not get smaller."""
    if not fits(wire, dtype):
        narrower = "'int8', or no hook" if dtype is torch.float16 else "'bf16' or 'int8'"
        raise ValueError(
            f"format {wire.name!r} takes {wire.block_bytes / 256:.3g} bytes an element, and "
            f"gradients are {dtype}, which takes {dtype.itemsize}: choose {narrower}"
        )


def _check_fsdp1(unit: Any, wire: WireFormat | None) -> None:
    if torch_compat.take_fsdp1_hook(unit) is not None:
        raise ValueError("this FSDP1 model has a communication hook already: register one only")
    if "HYBRID" in unit.sharding_strategy.name:
        raise ValueError(
            f"FSDP1 takes no communication hook with {unit.sharding_strategy}: use FSDP2, or "
            "one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
        )
    if wire is not None:
        check_sharded(wire, _reduced_in(unit), "MixedPrecision")


def _reduced_in(unit: Any) -> torch.dtype:
    precision, parameters = unit.mixed_precision, unit.parameters()
    own = next((each.dtype for each in parameters), torch.float32)
    dtype: torch.dtype = precision.reduce_dtype or precision.param_dtype or own
    return dtype


def _numel(group: tuple[Any, Any]) -> int:
    return sum(each.sharded_param.numel() for each in group[1].fsdp_params)


def _unsuitable(model: object) -> str:
    kind = type(model)
    if kind.__name__ == "ShardedDataParallel" and kind.__module__.startswith("fairscale."):
        return (
            "fairscale's ShardedDataParallel has no place for a communication hook: its buckets "
            "are reduced as they are, or in plain fp16 by ShardedDataParallel(reduce_fp16=True)"
        )
    return f"cannot give {kind.__name__} a communication hook; give one of {_CHOICES}"


# -- wrappers ---------------------------------------------------------------------------------

_Tables = Mapping[ProcessGroup, Hosts]


def _register_ddp(
    model: DistributedDataParallel, wire: WireFormat | None, tables: _Tables
) -> CommHookState:
    (group,) = tables
    trained = [p for p in model.parameters() if p.requires_grad]
    choice = None
    if wire is None:
        kinds: dict[tuple[torch.dtype, torch.device], int] = {}
        for each in trained:
            kind = (each.dtype.to_real(), each.device)
            kinds[kind] = kinds.get(kind, 0) + reals_in(each)
        dtype, device = max(kinds, key=lambda kind: kinds[kind])
        numel = min(kinds[dtype, device], max(1, model.bucket_bytes_cap // dtype.itemsize))
        fit = [
            name
            for name in ("fp16", "int8")
            if all(fits(wire_format(name), each.dtype) for each in trained)
        ]
        states = _trial_states(fit, tables, [group], device)
        trials: dict[str, Trial] = {
            name: averaging(state.wire, state.exchange(group, device))
            for name, state in states.items()
        }
        trials = {as_it_is(dtype).name: partial(_all_reduce, group), **trials}
        choice = timed_choice(trials, numel, dtype, device, [group])
        wire, tables = _settled(choice, dtype, tables)
    state = CommHookState(wire, group, choice)
    state.name_parameters(model.module.named_parameters())
    if choice is None or choice.compressed:
        for device in dict.fromkeys(each.device for each in trained):
            state.connect(group, device, tables[group])
        model.register_comm_hook(state, wire_hook)
    return state


def _register_fsdp1(model: Any, wire: WireFormat | None, tables: _Tables) -> CommHookState:
    # Imported here: torch's FSDP takes a second, which a user of DDP need not wait.
    from distamp.comm_hooks import fsdp1

    (group,) = tables
    device, dtype, choice = model.compute_device, _reduced_in(model), None
    if wire is None:
        whole = model.sharding_strategy.name == "NO_SHARD"
        largest = max(map(torch_compat.fsdp1_numel, torch_compat.fsdp1_units(model)))
        numel = -(-largest // group.size()) * group.size()
        shards, replicas = (None, group) if whole else (group, None)
        choice = _chosen_for_shards(numel, dtype, device, shards, replicas, tables)
        wire, tables = _settled(choice, dtype, tables)
    state = CommHookState(wire, group, choice)
    if choice is None or choice.compressed:
        state.connect(group, device, tables[group])
        hooks = {"fp16": fsdp1.fsdp_fp16_compress_hook, "bf16": fsdp1.fsdp_bf16_compress_hook}
        own = next((each.dtype for each in model.parameters()), torch.float32)
        low = fsdp1.LowPrecisionState(group, own, hook=state)
        model.register_comm_hook(low, hooks[state.wire.name])
    return state


def _register_fsdp2(
    model: nn.Module, wire: WireFormat | None, tables: _Tables, replicas: ProcessGroup | None
) -> CommHookState:
    from distamp.comm_hooks import fsdp2

    groups = fsdp2.modules_of(model)
    largest = max(groups, key=_numel)
    shards, device, choice = largest[1].mesh_info.shard_process_group, largest[1].device, None
    if wire is None:
        dtype = min((fsdp2.reduced_in(group) for _, group in groups), key=lambda d: d.itemsize)
        numel = -(-_numel(largest) // shards.size()) * shards.size()
        choice = _chosen_for_shards(numel, dtype, device, shards, replicas, tables)
        wire, tables = _settled(choice, dtype, tables)
    state = CommHookState(wire, shards, choice)
    compressed = choice is None or choice.compressed
    used = {group.mesh_info.shard_process_group: None for _, group in groups}
    for group in [*used, *([] if replicas is None else [replicas])] if compressed else ():
        state.connect(group, device, tables[group])
    fsdp2.attach(groups, state, replicas, compressed=compressed)
    return state


# -- auto -------------------------------------------------------------------------------------


def _trial_states(
    names: Sequence[str], tables: _Tables, over: Sequence[ProcessGroup], device: torch.device
) -> dict[str, CommHookState]:
    """Return states to time: of each format, in two levels where there are, and in one."""
    found = {}
    several = any(tables[group].local_size > 1 for group in over)
    for name in names if any(group.size() > 1 for group in over) else ():
        for way in (name, name + FLAT) if several else (name,):
            found[way] = CommHookState(name, over[0])
            for group in over:
                hosts = tables[group].flat() if way.endswith(FLAT) else tables[group]
                found[way].connect(group, device, replace(hosts, name=f"{hosts.name}/{way}"))
    return found


def _chosen_for_shards(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    shards: ProcessGroup | None,
    replicas: ProcessGroup | None,
    tables: _Tables,
) -> Choice:
    """Choose between the collectives of a sharded model and fp16."""
    over = [group for group in (shards, replicas) if group is not None]
    names = ["fp16"] if dtype.itemsize > wire_format("fp16").payload.itemsize else []
    shard = torch.empty(0 if shards is None else numel // shards.size(), dtype=dtype, device=device)

    def trial(state: CommHookState | None, sent: Tensor) -> None:
        part = sent
        if shards is not None:
            part = shard[: sent.numel() // shards.size()]
            if state is None:
                torch_compat.reduce_scatter(part, sent, shards)
            else:
                state.reduce(sent, shards, 1.0, part)
        if replicas is not None:
            if state is None:
                _all_reduce(replicas, part)
            else:
                state.reduce(part, replicas, 1.0)

    states = _trial_states(names, tables, over, device)
    trials: dict[str, Trial] = {as_it_is(dtype).name: partial(trial, None)}
    trials |= {name: partial(trial, state) for name, state in states.items()}
    return timed_choice(trials, numel, dtype, device, list(tables))


def _settled(choice: Choice, dtype: torch.dtype, tables: _Tables) -> tuple[WireFormat, _Tables]:
    """Return the format, and the hosts as the ranks are to see them, of a choice."""
    if not choice.compressed:
        return as_it_is(dtype), tables
    if choice.wire.endswith(FLAT):
        tables = {group: hosts.flat() for group, hosts in tables.items()}
    return wire_format(choice.wire.removesuffix(FLAT)), tables


def _all_reduce(group: ProcessGroup, sent: Tensor) -> None:
    dist.all_reduce(sent, group=group)
