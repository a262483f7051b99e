"""Tensors with replicas on several ranks, by the layout of each parameter."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.clip_grad import LayoutFn
from distamp.grads import is_dtensor, to_local
from distamp.optim_utils import OptimizerView, param_names, params_of, view_of

__all__ = ["ReplicaSet", "ReplicaTensor", "SetKey", "find_replica_sets"]

#: The ranks with replicas of a set of tensors: ``("all",)``; ``("ranks", 0, 2)`` for the replicas
#: of a mesh; ``("place", size, index)`` for the ranks at the same place of groups of this size.
SetKey: TypeAlias = tuple[Any, ...]
_ALL: SetKey = ("all",)


@dataclass
class ReplicaTensor:
    """A tensor with replicas, or a number of the optimizer's state.

    Args:
        name: The parameter's name; for state and masters with the kind before it, such as
            ``"exp_avg of head.weight"``.
        value: This rank's part, or the number.
        owner: The dict that has the number, and its key, so that it can be replaced.
    """

    name: str
    value: Any
    owner: tuple[dict[Any, Any], Any] | None = None

    def structure(self) -> str:
        """Return name, shape and dtype, which must be equal on all ranks for a comparison."""
        if isinstance(self.value, Tensor):
            shape = tuple(self.value.shape)
            return f"{self.name} {shape} {self.value.dtype}"
        return f"{self.name} {type(self.value).__name__}"


@dataclass
class ReplicaSet:
    """The tensors of this rank with replicas on the same other ranks.

    Args:
        tensors: The tensors and numbers, in the same order on all ranks.
    """

    tensors: list[ReplicaTensor] = field(default_factory=list)

    @functools.cached_property
    def structure_hash(self) -> int:
        """A hash of names, shapes and dtypes."""
        text = "\n".join(tensor.structure() for tensor in self.tensors)
        return zlib.crc32(text.encode())

    def numbers_hash(self) -> int:
        """Return a hash of the numbers."""
        numbers: list[Any] = []
        for tensor in self.tensors:
            if not isinstance(tensor.value, Tensor):
                numbers.append(tensor.value)
        return zlib.crc32(repr(numbers).encode())


def find_replica_sets(
    optimizers: Iterable[Any],
    names: Mapping[Tensor, str],
    is_replicated_fn: LayoutFn | None,
    shard_group_fn: LayoutFn | None,
) -> tuple[dict[SetKey, ReplicaSet], list[str]]:
    """Return the sets of tensors with replicas, and the names of parameters without.

    Args:
        optimizers: Their parameters, masters and state are compared.
        names: Names of parameters. Parameters that no optimizer steps are compared, too; buffers,
            which may rightly differ, are not.
        is_replicated_fn: Returns whether every rank holds the same values of a parameter.
        shard_group_fn: Returns over which ranks a parameter is sharded.
    """
    sets: dict[SetKey, ReplicaSet] = {}
    not_compared: list[str] = []
    added: set[int] = set()

    def add(name: str, param: Tensor, view: OptimizerView | None, stepped: Tensor) -> None:
        if id(param) in added:
            return
        added.add(id(param))
        key = _set_key(param, view, is_replicated_fn, shard_group_fn)
        tensors = [ReplicaTensor(name, to_local(param))]
        if key is not None and view is not None and not view.is_zero_sharded:
            tensors += _state_tensors(name, view, stepped)
        if key is None or not all(map(_has_bits, tensors)):
            not_compared.append(name)
            return
        sets.setdefault(key, ReplicaSet()).tensors.extend(tensors)

    with torch.no_grad():  # With autograd, to_local() returns a view of the local tensor.
        for optimizer in optimizers:
            view = view_of(optimizer)
            model_params: dict[int, Tensor] = {}
            for param, stepped in view.param_pairs():
                model_params[id(stepped)] = param
            holder = view.holder
            for name, stepped in zip(param_names(holder), params_of(holder), strict=True):
                param = model_params.get(id(stepped), stepped)
                add(names.get(param, name), param, view, stepped)
        for param, name in names.items():
            if isinstance(param, nn.Parameter):
                add(name, param, None, param)
    return sets, not_compared


def _set_key(
    param: Tensor,
    view: OptimizerView | None,
    is_replicated_fn: LayoutFn | None,
    shard_group_fn: LayoutFn | None,
) -> SetKey | None:
    """Return the key of the ranks with a replica of a parameter; None without a known replica."""
    if is_replicated_fn is not None and is_replicated_fn(param):
        return _ALL
    shard_group = None if shard_group_fn is None else shard_group_fn(param)
    if shard_group:
        if isinstance(shard_group, (ProcessGroup, DeviceMesh)):
            return _place_key(param, shard_group)
        return None
    if is_dtensor(param):
        return _mesh_key(param)
    if view is not None and view.is_zero_sharded:
        return _ALL
    for mark in ("tensor_model_parallel", "shared", "_fsdp_flattened", "_local_type"):
        if getattr(param, mark, None):
            return None
    return None if type(param).__name__ == "FlatParameter" else _ALL


def _place_key(param: Tensor, group: ProcessGroup | DeviceMesh) -> SetKey:
    """Return the key of the ranks at the same place of the groups over which a tensor is cut."""
    if is_dtensor(param) and isinstance(group, DeviceMesh):
        coordinate = param.device_mesh.get_coordinate() or ()
        places: list[int] = []
        for index, placement in zip(coordinate, param.placements, strict=True):
            if not placement.is_replicate():
                places.append(index)
        return ("place", group.size(), *places)
    if isinstance(group, DeviceMesh):
        coordinate = group.get_coordinate() or ()
        return ("place", group.size(), *coordinate)
    return ("place", group.size(), group.rank())


def _mesh_key(param: Any) -> SetKey | None:
    """Return the ranks along the Replicate dimensions of a DTensor's mesh; None without others."""
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in param.placements):
        return None
    index: list[Any] = []
    for place, placement in zip(coordinate, param.placements, strict=True):
        index.append(slice(None) if placement.is_replicate() else place)
    replicas = mesh.mesh[tuple(index)]
    ranks = sorted(replicas.reshape(-1).tolist())
    return ("ranks", *ranks) if len(ranks) > 1 else None


def _state_tensors(name: str, view: OptimizerView, stepped: Tensor) -> list[ReplicaTensor]:
    """Return the master and the optimizer's state of a parameter, sorted by key."""
    tensors: list[ReplicaTensor] = []
    for kind, tensor in view.master_tensors(stepped):
        full_name = f"{kind} of {name}"
        tensors.append(ReplicaTensor(full_name, to_local(tensor)))
    state = view.base.state.get(stepped, {})
    for key in sorted(state, key=str):
        value = state[key]
        full_name = f"{key} of {name}"
        if isinstance(value, Tensor):
            tensors.append(ReplicaTensor(full_name, to_local(value)))
        elif isinstance(value, (bool, int, float)):
            tensors.append(ReplicaTensor(full_name, value, (state, key)))
    return tensors


def _has_bits(tensor: ReplicaTensor) -> bool:
    """Return whether a value is a number, or a dense tensor with readable bits."""
    value = tensor.value
    if not isinstance(value, Tensor):
        return True
    is_plain = type(value) in (Tensor, nn.Parameter)
    is_dense = value.layout is torch.strided and not value.is_quantized
    return is_plain and is_dense and not value.is_meta
