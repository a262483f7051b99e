"""Layouts of parameters: the part of each whole parameter that a rank holds, and its values.

A whole parameter is that of the reference, which one process holds. A rank holds a `Region` of it,
and other ranks may hold the same region or other regions. Weights travel to the reference region by
region, and gradients of the reference travel to all ranks, one parameter at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.error_text import similar_names
from distamp.errors import ConfigError
from distamp.fsdp_unit import FSDPUnit
from distamp.grads import is_dtensor, to_local
from distamp.module_names import module_names
from distamp.process_group import MessageGroup, call_collective
from distamp.report.flat_params import FlatParams
from distamp.report.tensors import model_tensors

__all__ = [
    "FSDP1",
    "FSDP2",
    "SHARDED_DDP",
    "Axis",
    "Holder",
    "LayoutPlan",
    "ParamPart",
    "ReferenceParam",
    "Region",
    "ShardGroupFn",
    "TensorMessenger",
    "find_parts",
    "is_wrapper",
    "reference_params",
]

#: Descriptions of process groups that torch writes itself, which name no axis.
_NO_NAMES = ("", "undefined", "default_pg")
#: Classes of wrappers.
DDP = "DistributedDataParallel"
FSDP1 = "FullyShardedDataParallel"
FSDP2 = "FSDPModule"
SHARDED_DDP = "ShardedDataParallel"


#: Takes a plain parameter, and returns over which ranks it is sharded.
ShardGroupFn = Callable[[Tensor], "bool | ProcessGroup | DeviceMesh | None"]
#: Numbers of ranks in the default group.
_Ranks = tuple[int, ...]
_Shape = tuple[int, ...]
#: Dimension, start and length.
_Slice = tuple[int, int, int]
#: A parameter of the reference with all its names.
_NamedParam = tuple["ReferenceParam", Sequence[str]]
#: The shapes of all ranks' parts, by name and rank.
_Shapes = dict[tuple[str, int], _Shape]


# -- the vocabulary --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """The part of a whole tensor that a rank holds.

    Attributes:
        slices: Dimension, start and length of each narrowing, in order.
        flat: Start and end in the flattened tensor, or None.
    """

    slices: tuple[_Slice, ...] = ()
    flat: tuple[int, int] | None = None

    def select(self, tensor: Tensor) -> Tensor:
        """Return the region of a whole tensor, as a view if the tensor is contiguous."""
        for dim, start, length in self.slices:
            tensor = tensor.narrow(dim, start, length)
        if self.flat is not None:
            start, end = self.flat
            tensor = tensor.reshape(-1)[start:end]
        return tensor

    def shape(self, full_shape: Sequence[int]) -> _Shape:
        """Return the shape of the region of a tensor of the shape ``full_shape``."""
        if self.flat is not None:
            start, end = self.flat
            return (end - start,)
        shape = list(full_shape)
        for dim, _, length in self.slices:
            shape[dim] = length
        return tuple(shape)


@dataclass(frozen=True)
class Axis:
    """One direction of the layout, in which ranks form groups.

    Attributes:
        name: The name of the mesh's dimension, or of the wrapper.
        groups: The ranks of each group, as numbers of the default group.
        is_data_parallel: Whether ranks of a group train on different samples under one wrapper.
        is_model_parallel: Whether ranks of a group have shards of a parameter without that.
    """

    name: str
    groups: tuple[_Ranks, ...]
    is_data_parallel: bool = False
    is_model_parallel: bool = False

    @property
    def size(self) -> int:
        """The number of ranks in a group."""
        return max(map(len, self.groups))

    def peers(self, rank: int) -> _Ranks:
        """Return the ranks in the group of a rank."""
        for group in self.groups:
            if rank in group:
                return group
        return (rank,)


@dataclass(frozen=True)
class ReferenceParam:
    """A parameter of the reference, as every rank knows it.

    Attributes:
        name: Its first name in the reference.
        shape: Its shape.
        dtype: The dtype of the parameter.
        requires_grad: Whether the reference trains it.
    """

    name: str
    shape: _Shape
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The name of the module that has the parameter."""
        return self.name.rpartition(".")[0]


@dataclass
class ParamPart:
    """A parameter of the sharded model as this rank holds it.

    Attributes:
        name: Its name in the reference.
        param: The parameter with the gradient, or the flat parameter that contains it.
        region: The rank's region, or None if the shapes of the ranks decide it.
        offset: Start and length in a flat parameter, or None.
        shard_groups: The groups of ranks over which the parameter is sharded.
        owner_only: Whether the wrapper leaves the gradient on one rank.
        flat_params: The flat parameter of FSDP1 that contains it, or None.
    """

    name: str
    param: Tensor
    region: Region | None
    offset: tuple[int, int] | None = None
    shard_groups: tuple[_Ranks, ...] = ()
    owner_only: bool = False
    flat_params: FlatParams | None = None

    @property
    def weight(self) -> Tensor:
        """The elements of the rank's region."""
        return self._region_of(to_local(self.param.detach()))

    @property
    def unreduced_ranks(self) -> _Ranks:
        """The ranks over which FSDP1 did not reduce the gradient, which then is whole."""
        if self.flat_params is None or not self.flat_params.has_unreduced_gradient:
            return ()
        return _ranks_of(self.flat_params.groups["dp"])

    @property
    def has_other_placements(self) -> bool:
        """True if the gradient is a DTensor with other placements than the parameter."""
        grad = self.param.grad
        if not is_dtensor(grad) or not is_dtensor(self.param):
            return False
        return grad.placements != self.param.placements

    def grad(self, redistribute: bool = False) -> Tensor | None:
        """Return the gradient of the rank's region, or None.

        Collective: if ``redistribute``, every rank of the parameter's mesh must call this.
        """
        grad: Any = self.param.grad
        if grad is None or self.unreduced_ranks:
            return None
        grad = grad.detach()
        if redistribute:
            grad = grad.redistribute(placements=self.param.placements)  # type: ignore[attr-defined]
        grad = to_local(grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        return self._region_of(grad)

    def _region_of(self, local: Tensor) -> Tensor:
        if self.offset is None:
            return local
        start, length = self.offset
        return local.reshape(-1)[start : start + length]

    def describe(self) -> _PartInfo:
        """Return the description that other ranks need."""
        weight = self.weight
        return _PartInfo(
            self.name,
            tuple(weight.shape),
            weight.dtype,
            self.region,
            self.shard_groups,
        )


@dataclass(frozen=True)
class _PartInfo:
    """A description of a `ParamPart` in a message."""

    name: str
    shape: _Shape
    dtype: torch.dtype
    region: Region | None
    shard_groups: tuple[_Ranks, ...]


#: The descriptions of a rank's parts, and its axes.
_RankInfo = tuple[Sequence[_PartInfo], Sequence[Axis]]


# -- the parts of a model --------------------------------------------------------------------------


def reference_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the reference by all their names; tied ones occur several times.

    Raises:
        ConfigError: The reference is sharded.
    """
    params: dict[str, Tensor] = {}
    for row in model_tensors(module_names(model)):
        if row.kind == "parameter":
            if is_dtensor(row.tensor) or _is_flat(row.tensor):
                raise ConfigError(
                    f"reference_model has the sharded parameter {row.name}. Pass a model that one "
                    "process holds, without FSDP and without parallelize_module."
                )
            params[row.name] = row.tensor
    return params


def find_parts(
    models: Sequence[nn.Module],
    shard_group_fn: ShardGroupFn | None,
    mesh: DeviceMesh | None,
    group_ranks: Sequence[int],
    reference_name_fn: Callable[[str], str] | None,
) -> tuple[list[ParamPart], list[Axis]]:
    """Return the parameters that this rank holds, and the axes that their layouts name.

    Args:
        models: The sharded model, or the pipeline stages that the rank has.
        shard_group_fn: Returns over which ranks a plain parameter is sharded.
        mesh: A mesh with the names of further axes.
        group_ranks: The ranks of the comparison.
        reference_name_fn: Returns the name of a parameter in the reference.
    """
    parts: list[ParamPart] = []
    axes = _mesh_axes(mesh)
    seen: set[int] = set()
    for model in models:
        names = module_names(model)
        flat_parts, flat_axes = _flat_parts(names)
        parts += flat_parts.values()
        axes += flat_axes
        seen.update(flat_parts)
        owner_only = any(is_wrapper(module, SHARDED_DDP) for module in names)
        for row in model_tensors(names):
            param = row.tensor
            if row.kind != "parameter" or id(param) in seen or _is_flat(param):
                continue
            seen.add(id(param))
            part = ParamPart(row.name, param, Region(), owner_only=owner_only)
            parts.append(part)
            if is_dtensor(param):
                axes += _mesh_axes(param.device_mesh)
                part.region = _dtensor_region(row.name, param)
                part.shard_groups = _shard_groups(param)
            elif shard_group_fn is not None:
                shard_axis = _declared_axis(shard_group_fn(param), group_ranks)
                if shard_axis is not None:
                    axes.append(shard_axis)
                    part.region = None
                    part.shard_groups = shard_axis.groups
        axes += _wrapper_axes(names)
    if reference_name_fn is not None:
        for part in parts:
            part.name = reference_name_fn(part.name)
    return parts, axes


def _is_flat(param: Tensor) -> bool:
    return getattr(param, "_is_flat_param", False)


def is_wrapper(module: nn.Module, class_name: str) -> bool:
    """Return whether a module is of a wrapper's class, without an import of the wrapper."""
    return any(cls.__name__ == class_name for cls in type(module).__mro__)


def _mesh_axes(mesh: DeviceMesh | None) -> list[Axis]:
    """Return the axes of a mesh with more than one rank, as this rank sees them."""
    axes: list[Axis] = []
    if mesh is None or mesh.get_coordinate() is None:
        return axes
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            ranks = _ranks_of(mesh.get_group(dim))
            axes.append(Axis(_mesh_dim_name(mesh, dim), (ranks,)))
    return axes


def _mesh_dim_name(mesh: DeviceMesh, dim: int) -> str:
    names = mesh.mesh_dim_names
    return f"mesh dimension {dim}" if names is None else names[dim]


def _shard_groups(param: Any) -> tuple[_Ranks, ...]:
    groups: list[_Ranks] = []
    for dim, placement in enumerate(param.placements):
        if not placement.is_replicate():
            group = param.device_mesh.get_group(dim)
            groups.append(_ranks_of(group))
    return tuple(groups)


def _declared_axis(declaration: Any, group_ranks: Sequence[int]) -> Axis | None:
    """Return the axis over which a user's function declares a plain parameter sharded."""
    if declaration is None or declaration is False:
        return None
    if declaration is True:
        return Axis("shards", (tuple(group_ranks),))
    if isinstance(declaration, DeviceMesh):
        ranks = tuple(int(rank) for rank in declaration.mesh.flatten())
        names = declaration.mesh_dim_names or ("shards",)
        return Axis(", ".join(names), (ranks,)) if len(ranks) > 1 else None
    ranks = _ranks_of(declaration)
    name = str(getattr(declaration, "group_desc", "")).removeprefix("mesh_")
    axis_name = "shards" if name in _NO_NAMES else name
    return Axis(axis_name, (ranks,)) if len(ranks) > 1 else None


def _wrapper_axes(names: Mapping[nn.Module, str]) -> list[Axis]:
    """Return the axes over which wrappers reduce gradients."""
    axes: list[Axis] = []
    for module in names:
        groups: list[Any] = []
        if is_wrapper(module, DDP) or is_wrapper(module, SHARDED_DDP):
            groups = [getattr(module, "process_group", None)]
        elif is_wrapper(module, FSDP2):
            unit = FSDPUnit(module)
            if unit.param_groups:
                groups = [unit.shard_group, unit.replicate_group]
        for group in groups:
            if group is not None and group.size() > 1:
                axes.append(Axis("dp", (_ranks_of(group),), is_data_parallel=True))
    return axes


def _dtensor_region(name: str, param: Any) -> Region:
    """Return this rank's region of a DTensor.

    FSDP2 shards a dimension that tensor parallel has sharded already. torch writes its placement
    first and with a split factor. In the order of the sharding, such placements come last.

    Raises:
        ConfigError: The local shape is another, because the layout follows another rule.
    """
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Region(flat=(0, 0))
    plain: list[int] = []
    strided: list[int] = []
    for mesh_dim, placement in enumerate(param.placements):
        if hasattr(placement, "split_factor"):
            strided.append(mesh_dim)
        elif hasattr(placement, "dim"):
            plain.append(mesh_dim)
        elif not placement.is_replicate():
            raise ConfigError(
                f"{name} is placed as {param.placements}. compare_gradients() compares parameters "
                "that are replicated or sharded."
            )
    sizes = list(param.shape)
    slices: list[_Slice] = []
    for mesh_dim in [*plain, *reversed(strided)]:
        dim = param.placements[mesh_dim].dim
        chunk = math.ceil(sizes[dim] / mesh.size(mesh_dim))
        start = min(coordinate[mesh_dim] * chunk, sizes[dim])
        sizes[dim] = min(chunk, sizes[dim] - start)
        slices.append((dim, start, sizes[dim]))
    local_shape = tuple(to_local(param.detach()).shape)
    if tuple(sizes) != local_shape:
        raise ConfigError(
            f"{name} is placed as {param.placements} on {mesh}, and this rank holds a shape of "
            f"{local_shape} where {tuple(sizes)} follows from the placements. compare_gradients() "
            "cannot find the rank's part in this layout."
        )
    return Region(tuple(slices))


def _flat_parts(names: Mapping[nn.Module, str]) -> tuple[dict[int, ParamPart], list[Axis]]:
    """Return the parameters in flat parameters of FSDP1, by the id of the original parameter."""
    parts: dict[int, ParamPart] = {}
    axes: list[Axis] = []
    for module in names:
        flat_params = FlatParams.find(module) if is_wrapper(module, FSDP1) else None
        if flat_params is None:
            continue
        for axis_name, group in flat_params.groups.items():
            if group.size() > 1:
                axes.append(Axis(axis_name, (_ranks_of(group),), is_data_parallel=True))
        shard_groups = (_ranks_of(flat_params.groups["dp"]),) if flat_params.is_sharded else ()
        for shard in flat_params.shards():
            name = f"{names[shard.owner]}.{shard.leaf}".lstrip(".")
            part = ParamPart(name, flat_params.flat_param, Region(), shard_groups=shard_groups)
            part.flat_params = flat_params
            if shard.first is not None:
                part.region = Region(flat=(shard.first, shard.first + shard.length))
            if shard.original is not None:
                part.param = shard.original
                parts[id(shard.original)] = part
                continue
            part.offset = shard.start, shard.length
            if part.region == Region():
                part.region = Region(flat=(0, shard.length))
            parts[id(part)] = part
    return parts, axes


def _ranks_of(group: ProcessGroup) -> _Ranks:
    return tuple(dist.get_process_group_ranks(group))


# -- the plan that all ranks share -----------------------------------------------------------------


@dataclass
class Holder:
    """A rank that holds a region of a parameter.

    Attributes:
        position: The place of the rank in the group.
        region: The region of the whole parameter.
        dtype: The dtype of the weights.
        shard_groups: The groups of ranks over which the parameter is sharded.
    """

    position: int
    region: Region
    dtype: torch.dtype
    shard_groups: tuple[_Ranks, ...]


class LayoutPlan:
    """The holders of each parameter, equal on all ranks.

    Args:
        ranks: The ranks of the group, as numbers of the default group.

    Attributes:
        ranks: The same ranks.
        params: The parameters of the reference, in its order.
        first_names: The first name of each parameter of the reference, by all names.
        holders: The ranks that hold a part of each parameter, by name.
        axes: The axes of all layouts, each with the groups of all ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.params: list[ReferenceParam] = []
        self.first_names: dict[str, str] = {}
        self.holders: dict[str, list[Holder]] = {}
        self.axes: list[Axis] = []

    @classmethod
    def make(
        cls,
        reference: Sequence[_NamedParam],
        infos: Sequence[_RankInfo],
        ranks: Sequence[int],
    ) -> LayoutPlan:
        """Compare the parts of all ranks with the reference.

        Args:
            reference: The parameters of the reference, with all their names.
            infos: The descriptions of all ranks' parts, and their axes.
            ranks: The ranks of the group.

        Raises:
            ConfigError: Names or shapes do not match, on every rank.
        """
        plan = cls(ranks)
        for param, names in reference:
            plan.params.append(param)
            plan.holders[param.name] = []
            plan.first_names.update(dict.fromkeys(names, param.name))
        shapes: _Shapes = {}
        for rank, (parts, _) in zip(ranks, infos, strict=True):
            for part in parts:
                shapes[part.name, rank] = part.shape
        for position, (parts, _) in enumerate(infos):
            for part in parts:
                plan.add_part(part, position, shapes)
        plan.check_coverage()
        plan.axes = _merge_axes([axes for _, axes in infos], ranks, plan.shard_groups())
        return plan

    def add_part(self, part: _PartInfo, position: int, shapes: _Shapes) -> None:
        """Add the part of the rank at a position.

        Args:
            part: The description of the part.
            position: The place of the rank in the group.
            shapes: The shapes of all ranks' parts, by name and rank.

        Raises:
            ConfigError: The reference has no such parameter, or another shape.
        """
        rank = self.ranks[position]
        name = self.first_names.get(part.name)
        if name is None:
            hint = similar_names(part.name, list(self.first_names))
            raise ConfigError(
                f"The reference has no parameter {part.name!r}, which rank {rank} holds. {hint} "
                "Return the reference's name from reference_name_fn=."
            )
        target = next(param for param in self.params if param.name == name)
        region = part.region
        if region is None:
            region = _declared_region(part, target, rank, shapes)
        _check_shape(part, target, region, rank)
        if math.prod(part.shape):
            holder = Holder(position, region, part.dtype, part.shard_groups)
            self.holders[name].append(holder)

    def shard_groups(self) -> set[_Ranks]:
        """Return all groups of ranks over which a parameter is sharded."""
        groups: set[_Ranks] = set()
        for holders in self.holders.values():
            for holder in holders:
                groups.update(holder.shard_groups)
        return groups

    def holder_at(self, name: str, position: int) -> Holder | None:
        """Return the holder of a parameter at a position, or None."""
        for holder in self.holders[name]:
            if holder.position == position:
                return holder
        return None

    def sharded_axes(self, name: str) -> tuple[str, ...]:
        """Return the names of the axes over which a parameter is sharded."""
        names: list[str] = []
        for axis in self.axes:
            for holder in self.holders[name]:
                if set(holder.shard_groups).intersection(axis.groups):
                    names.append(axis.name)
                    break
        return tuple(names)

    def check_coverage(self) -> None:
        """Raise if the ranks do not hold all elements of a parameter."""
        for param in self.params:
            regions = {holder.region for holder in self.holders[param.name]}
            held = sum(math.prod(region.shape(param.shape)) for region in regions)
            if held < param.numel:
                raise ConfigError(
                    f"The ranks hold {held} of the {param.numel} elements of {param.name}, so the "
                    "reference cannot get its weights. Call compare_gradients() on every rank that "
                    "has a part of the model, with each rank's own pipeline stages."
                )


def _check_shape(part: _PartInfo, target: ReferenceParam, region: Region, rank: int) -> None:
    shape = region.shape(target.shape)
    if math.prod(shape) != math.prod(part.shape) or (region == Region() and shape != part.shape):
        raise ConfigError(
            f"{part.name} has the shape {part.shape} on rank {rank} and {target.shape} in the "
            "reference. If the ranks hold shards of it, return their group or mesh from "
            "shard_group_fn=."
        )


def _declared_region(
    part: _PartInfo,
    target: ReferenceParam,
    rank: int,
    shapes: _Shapes,
) -> Region:
    """Return the region of a shard, which is shorter than the reference in one dimension."""
    differing = []
    if len(part.shape) == len(target.shape):
        for dim, size in enumerate(part.shape):
            if size != target.shape[dim]:
                differing.append(dim)
    if len(differing) != 1:
        raise ConfigError(
            f"shard_group_fn= declares {part.name} sharded, with the shape {part.shape} on rank "
            f"{rank} and {target.shape} in the reference. A shard is shorter in one dimension. If "
            "the ranks hold whole parameters of other names, return the names from "
            "reference_name_fn= and None from shard_group_fn=."
        )
    dim = differing[0]
    start = 0
    for peer in part.shard_groups[0]:
        if peer == rank:
            break
        shape = shapes.get((part.name, peer))
        if shape is not None:
            start += shape[dim]
    return Region(((dim, start, part.shape[dim]),))


def _merge_axes(
    axes_by_rank: Sequence[Sequence[Axis]], ranks: Sequence[int], shard_groups: Collection[_Ranks]
) -> list[Axis]:
    """Return each axis once, with the groups that all ranks have; names of meshes come first."""
    groups_by_key: dict[tuple[bool, str], list[_Ranks]] = {}
    for axes in axes_by_rank:
        for axis in axes:
            key = axis.is_data_parallel, axis.name
            groups_by_key.setdefault(key, []).extend(axis.groups)
    data_parallel: set[_Ranks] = set()
    for (is_data_parallel, _), groups in groups_by_key.items():
        if is_data_parallel:
            data_parallel.update(groups)
    merged: list[Axis] = []
    names: set[str] = set()
    listed: set[_Ranks] = set()
    for (is_from_wrapper, name), groups in sorted(groups_by_key.items(), key=_is_from_wrapper):
        new_groups = []
        for group in dict.fromkeys(groups):
            if group not in listed and set(ranks).issuperset(group):
                new_groups.append(group)
        if not new_groups:
            continue
        listed.update(new_groups)
        if is_from_wrapper and name in names:
            name = f"{name} of the wrapper"
        names.add(name)
        is_data_parallel = not data_parallel.isdisjoint(new_groups)
        is_sharded = not set(shard_groups).isdisjoint(new_groups)
        is_model_parallel = is_sharded and not is_data_parallel
        merged.append(Axis(name, tuple(new_groups), is_data_parallel, is_model_parallel))
    if not merged and len(ranks) > 1:
        merged.append(Axis("all ranks", (tuple(ranks),), is_data_parallel=True))
    return merged


def _is_from_wrapper(item: tuple[tuple[bool, str], Any]) -> bool:
    (is_from_wrapper, _), _ = item
    return is_from_wrapper


# -- messages --------------------------------------------------------------------------------------


class TensorMessenger:
    """Messages of tensors between the ranks of a comparison.

    Args:
        process_group: The ranks, or None for a single process.
        device: The device of the parameters.
    """

    def __init__(self, process_group: ProcessGroup | None, device: torch.device) -> None:
        self.group = None if process_group is None else MessageGroup(process_group, device)
        self.position = 0 if process_group is None else dist.get_rank(process_group)

    def broadcast(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor of the first rank, on the device of messages.

        Collective: every rank of the group must call this.

        Args:
            tensor: The tensor; None on all ranks except the first.
            shape: The shape of the tensor.
            dtype: The dtype of the tensor.
        """
        if self.group is None:
            assert tensor is not None
            return tensor
        if self.position == 0:
            assert tensor is not None
            sent = tensor.to(self.group.device).contiguous()
        else:
            sent = torch.empty(tuple(shape), dtype=dtype, device=self.group.device)
        source = self.group.global_ranks[0]
        call_collective(self.group, dist.broadcast, sent, source, self.group.process_group)
        return sent

    def send_to_first(
        self, position: int, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Send a tensor from the rank at ``position`` to the first rank, which gets it back.

        The ranks at ``position`` and 0 must call this.
        """
        if position == 0 or self.group is None:
            return tensor
        process_group = self.group.process_group
        if self.position == 0:
            received = torch.empty(tuple(shape), dtype=dtype, device=self.group.device)
            dist.recv(received, self.group.global_ranks[position], group=process_group)
            return received
        assert tensor is not None
        sent = tensor.to(self.group.device).contiguous()
        dist.send(sent, self.group.global_ranks[0], group=process_group)
        return None
