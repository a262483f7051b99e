"""Checkpoints of an `Amp` by torch.distributed.checkpoint (DCP), in any layout with names.

A checkpoint contains these entries:

==============================  ================================================================
entry                           content
==============================  ================================================================
``model.NAME``, ``optimizer.*`` the flat state of `FlatState`
``amp``                         a tuple with the state dict of the `Amp`, without masters
``comm_hook.INDEX.RANK``        a tuple for each rank: the state dict of its hook, with the number
                                of tensors in the place of each list of residuals
``comm_hook.INDEX.NAME.NUMBER`` the residuals of one bucket of one rank
==============================  ================================================================

DCP flattens dicts and lists, and saves a tuple as one object.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.comm_hooks import CommHook
from distamp.comm_hooks.residuals import rank_label
from distamp.error_text import lines_by_rank
from distamp.errors import ConfigError
from distamp.levels.flat_state import FlatState
from distamp.levels.rank_errors import raise_on_every_rank

__all__ = ["load_checkpoint", "save_checkpoint"]

_logger = logging.getLogger("distamp.levels")
_AMP_ENTRY = "amp"


def save_checkpoint(
    path: str | os.PathLike[str],
    flat_state: FlatState,
    amp_state: Mapping[str, Any],
    comm_hooks: Sequence[CommHook],
    group: ProcessGroup | None,
) -> None:
    """Save a flat state, the state of an `Amp` and the states of hooks; see `Amp.save`.

    Collective: every rank of ``group`` must call this.

    Args:
        path: The directory.
        flat_state: The models and optimizers.
        amp_state: The state dict of the `Amp`, without masters.
        comm_hooks: The communication hooks.
        group: The ranks, or None for a single process.
    """
    import torch.distributed.checkpoint as dcp

    _refuse_different_paths(path, group)
    state = flat_state.get()
    state[_AMP_ENTRY] = (amp_state,)
    error: Exception | None = None
    try:
        for index, hook in enumerate(comm_hooks):
            state.update(_hook_entries(index, hook))
    except Exception as raised:
        error = raised
    raise_on_every_rank("amp.save()", error, group)
    with _quiet_alone(group):
        dcp.save(state, checkpoint_id=path, process_group=group, no_dist=group is None)


def _refuse_different_paths(path: str | os.PathLike[str], group: ProcessGroup | None) -> None:
    """Refuse a path for each rank, because each would write its part of the checkpoint there.

    Collective: every rank of ``group`` must call this.

    Raises:
        ConfigError: Ranks have different paths.
    """
    if group is None:
        return
    ranks = dist.get_process_group_ranks(group)
    paths = [""] * len(ranks)
    dist.all_gather_object(paths, str(path), group=group)
    if len(set(paths)) == 1:
        return
    texts = []
    for rank, rank_path in zip(ranks, paths, strict=True):
        texts.append((rank, f"path={rank_path!r}"))
    lines = lines_by_rank(texts)
    header = (
        "The ranks called amp.save() with different paths, and each would write its part of the "
        "checkpoint into its own directory."
    )
    fix = (
        "Choose the path on one rank, for example if it contains the time, and send it to the "
        "others by torch.distributed.broadcast_object_list()."
    )
    raise ConfigError("\n".join([header, *lines, fix]))


def load_checkpoint(
    path: str | os.PathLike[str],
    flat_state: FlatState,
    comm_hooks: Sequence[CommHook],
    group: ProcessGroup | None,
) -> dict[str, Any]:
    """Load a checkpoint of `save_checkpoint`; see `Amp.load`.

    Collective: every rank of ``group`` must call this.

    Args:
        path: The directory.
        flat_state: The models and optimizers to load.
        comm_hooks: The communication hooks to load.
        group: The ranks, or None for a single process.

    Returns:
        The state dict of the `Amp`, which is not loaded.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(path)
    state: dict[str, Any] = {}
    hook_states: list[dict[str, Any] | None] = []
    error: Exception | None = None
    try:
        saved = _read_saved_entries(reader, path)
        state = flat_state.get_empty(saved)
        _refuse_missing_weights(state, saved, path)
        for index in range(len(comm_hooks)):
            hook_states.append(_load_hook_state(reader, saved, index))
    except Exception as raised:
        error = raised
    raise_on_every_rank("amp.load()", error, group)
    state[_AMP_ENTRY] = ()
    with _quiet_alone(group):
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    amp_state: dict[str, Any]
    (amp_state,) = state.pop(_AMP_ENTRY)
    flat_state.set(state)
    for hook, hook_state in zip(comm_hooks, hook_states, strict=True):
        if hook_state is not None:
            hook.load_state_dict(hook_state)
    return amp_state


def _read_saved_entries(reader: Any, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the metadata of the entries in a checkpoint.

    Raises:
        ConfigError: The directory contains no whole checkpoint, or one of another program.
    """
    try:
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise ConfigError(
            f"{os.fspath(path)!r} contains no whole checkpoint, because it has no file .metadata, "
            "which amp.save() writes last. Pass the directory that was passed to amp.save()."
        ) from error
    if _AMP_ENTRY not in saved:
        raise ConfigError(
            f"The checkpoint in {os.fspath(path)!r} was not written by amp.save(), because it has "
            "no entry 'amp'. Load it by the functions that correspond to its save, such as "
            "amp.flat_state_dict(saved) and amp.load_flat_state_dict(state)."
        )
    return saved


def _refuse_missing_weights(
    state: Mapping[str, Any], saved: Mapping[str, Any], path: str | os.PathLike[str]
) -> None:
    """Refuse models with weights that the checkpoint does not contain, or has in another shape."""
    for name, value in state.items():
        if not name.startswith("model.") or not isinstance(value, Tensor):
            continue
        if name not in saved:
            raise ConfigError(
                f"The checkpoint in {os.fspath(path)!r} has no {name}. Build the model of the "
                "saved run."
            )
        shape = tuple(saved[name].size)
        if shape != tuple(value.shape):
            raise ConfigError(
                f"{name} has shape {shape} in the checkpoint in {os.fspath(path)!r}, and "
                f"{tuple(value.shape)} here. Build the model of the saved run."
            )


@contextmanager
def _quiet_alone(group: ProcessGroup | None) -> Iterator[None]:
    """Hide DCP's warning that a single process saves without torch.distributed."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# -- communication hooks ---------------------------------------------------------------------------


def _hook_entries(index: int, hook: CommHook) -> dict[str, Any]:
    """Return the entries of this rank for the hook of one model."""
    hook_state = hook.state_dict()
    residuals: Mapping[str, Sequence[Tensor]] = hook_state.pop("residuals")
    entries: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for name, tensors in residuals.items():
        counts[name] = len(tensors)
        for number, tensor in enumerate(tensors):
            entries[f"comm_hook.{index}.{name}.{number}"] = tensor
    entries[f"comm_hook.{index}.{rank_label()}"] = (hook_state, counts)
    return entries


def _load_hook_state(reader: Any, saved: Mapping[str, Any], index: int) -> dict[str, Any] | None:
    """Return the state of this rank's hook in a checkpoint, or None if it has no such state.

    Each rank reads its entries alone, without a message.
    """
    import torch.distributed.checkpoint as dcp

    entry = f"comm_hook.{index}.{rank_label()}"
    if entry not in saved:
        if any(name.startswith(f"comm_hook.{index}.") for name in saved):
            _logger.warning(
                "The checkpoint has the rounding errors of communication hook %d for other ranks "
                "than %s. They are dropped, which loses the rounding of one step.",
                index,
                rank_label(),
            )
        return None
    header: dict[str, Any] = {entry: ()}
    with _quiet_alone(None):
        dcp.load(header, storage_reader=reader, no_dist=True)
    hook_state, counts = header[entry]
    tensors: dict[str, Any] = {}
    for name, count in counts.items():
        for number in range(count):
            tensor_entry = f"comm_hook.{index}.{name}.{number}"
            tensors[tensor_entry] = torch.empty(saved[tensor_entry].size, dtype=torch.float32)
    with _quiet_alone(None):
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    residuals: dict[str, list[Tensor]] = {}
    for name, count in counts.items():
        numbers = range(count)
        residuals[name] = [tensors[f"comm_hook.{index}.{name}.{number}"] for number in numbers]
    return {**hook_state, "residuals": residuals}
