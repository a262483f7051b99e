"""Layouts of parameters: the part of each whole parameter that a rank holds, and its values.

A whole parameter is that of the reference, which one process holds. A rank holds a `Region` of it,
and other ranks may hold the same region or other regions. Weights travel to the reference region by
region, and gradients of the reference travel to all ranks, one parameter at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.clip_grad import LayoutFn
from distamp.error_text import similar_names
from distamp.errors import ConfigError
from distamp.fsdp_unit import FSDPUnit
from distamp.grads import is_dtensor, to_local
from distamp.levels.wrappers import DDP, FSDP1, FSDP2, SHARDED_DDP, wrapper_name
from distamp.module_names import module_names
from distamp.process_group import MessageGroup, call_collective
from distamp.report.tensors import model_tensors

__all__ = [
    "Axis",
    "LayoutPlan",
    "ParamPart",
    "ReferenceParam",
    "Region",
    "TensorMessenger",
    "find_parts",
    "reference_params",
]

#: Descriptions of process groups that torch writes itself, which name no axis.
_NO_NAMES = ("", "undefined", "default_pg")


# -- the vocabulary --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """The part of a whole tensor that a rank holds.

    Attributes:
        slices: Dimension, start and length of each narrowing, in order.
        flat: Start and end in the flattened tensor, or None.
    """

    slices: tuple[tuple[int, int, int], ...] = ()
    flat: tuple[int, int] | None = None

    def select(self, whole: Tensor) -> Tensor:
        """Return the region of a whole tensor, as a view if the whole is contiguous."""
        for dim, start, length in self.slices:
            whole = whole.narrow(dim, start, length)
        if self.flat is not None:
            start, end = self.flat
            whole = whole.reshape(-1)[start:end]
        return whole

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the region of a tensor of the shape ``whole``."""
        if self.flat is not None:
            return (self.flat[1] - self.flat[0],)
        shape = list(whole)
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
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    is_data_parallel: bool = False

    @property
    def size(self) -> int:
        """The number of ranks in a group."""
        return max(map(len, self.groups))

    def peers(self, rank: int) -> tuple[int, ...]:
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
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass
class ParamPart:
    """A parameter of the sharded model as this rank holds it.

    Attributes:
        name: Its name in the reference.
        param: The parameter with the gradient, or the flat parameter that contains it.
        region: The rank's region, or None if the shapes of the ranks decide it.
        offset: Start and length in a flat parameter, or None.
        shard_ranks: Ranks that have the other shards, as ``shard_group_fn`` declares them.
        axes: The names of the axes over which the parameter is sharded.
        owner_only: Whether the wrapper leaves the gradient on one rank.
        is_unreduced: Whether FSDP2 has a gradient of the parameter that was not reduced.
    """

    name: str
    param: Tensor
    region: Region | None
    offset: tuple[int, int] | None = None
    shard_ranks: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    owner_only: bool = False
    is_unreduced: bool = False

    @property
    def weight(self) -> Tensor:
        """The elements of the rank's region."""
        return self._region_of(to_local(self.param.detach()))

    @property
    def placements(self) -> str | None:
        """The placements of a gradient that is a DTensor of another layout, as text."""
        grad = self.param.grad
        if not (is_dtensor(grad) and is_dtensor(self.param)):
            return None
        return str(grad.placements) if grad.placements != self.param.placements else None

    def grad(self, redistribute: bool = False) -> Tensor | None:
        """Return the gradient of the rank's region, or None.

        Collective: if ``redistribute``, every rank of the parameter's mesh must call this.
        """
        grad: Any = self.param.grad
        if grad is None:
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
            self.name, tuple(weight.shape), weight.dtype, self.region, self.shard_ranks, self.axes
        )


@dataclass(frozen=True)
class _PartInfo:
    """A description of a `ParamPart` in a message."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region | None
    shard_ranks: tuple[int, ...]
    axes: tuple[str, ...]


# -- the parts of a model --------------------------------------------------------------------------


def reference_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the reference by all their names; tied ones occur several times.

    Raises:
        ConfigError: The reference is sharded.
    """
    params: dict[str, Tensor] = {}
    for row in model_tensors(module_names(model)):
        if row.kind == "parameter":
            if is_dtensor(row.tensor) or getattr(row.tensor, "_is_flat_param", False):
                raise ConfigError(
                    f"reference_model has the sharded parameter {row.name}. Pass a model that one "
                    "process holds, without FSDP and without parallelize_module."
                )
            params[row.name] = row.tensor
    return params


def find_parts(
    models: Sequence[nn.Module],
    shard_group_fn: LayoutFn | None,
    mesh: DeviceMesh | None,
    group_ranks: Sequence[int],
    reference_name_fn: Callable[[str], str] | None,
) -> tuple[list[ParamPart], list[Axis]]:
    """Return the parameters that this rank holds, and the axes that their layouts name.

    Args:
        models: The sharded model, or the pipeline stages that the rank has.
        shard_group_fn: Returns over which ranks a plain parameter is sharded.
        mesh: A mesh whose dimensions name further axes.
        group_ranks: The ranks of the comparison.
        reference_name_fn: Returns the name of a parameter in the reference.
    """
    parts: list[ParamPart] = []
    axes = _mesh_axes(mesh)
    seen: set[int] = set()
    for model in models:
        names = module_names(model)
        flat_parts, flat_axes = _flat_parts(names)
        axes += flat_axes
        seen.update(id(param) for _, param in _named(flat_parts))
        parts += flat_parts.values()
        owner_only = any(wrapper_name(module) == SHARDED_DDP for module in names)
        for row in model_tensors(names):
            param = row.tensor
            is_flat = getattr(param, "_is_flat_param", False)
            if row.kind != "parameter" or id(param) in seen or id(param) in flat_parts or is_flat:
                continue
            seen.add(id(param))
            part = ParamPart(row.name, param, Region(), owner_only=owner_only)
            if is_dtensor(param):
                param_axes = _mesh_axes(param.device_mesh)
                axes += param_axes
                part.region = _dtensor_region(row.name, param)
                part.axes = _sharded_axes(param)
            elif shard_group_fn is not None:
                shard_axis = _declared_axis(shard_group_fn(param), group_ranks)
                if shard_axis is not None:
                    axes.append(shard_axis)
                    part.region = None
                    part.shard_ranks = shard_axis.groups[0]
                    part.axes = (shard_axis.name,)
            parts.append(part)
        axes += _wrapper_axes(names, group_ranks)
    if reference_name_fn is not None:
        for part in parts:
            part.name = reference_name_fn(part.name)
    return parts, axes


def _named(parts: Mapping[int, ParamPart]) -> Iterable[tuple[str, Tensor]]:
    for part in parts.values():
        yield part.name, part.param


def _mesh_axes(mesh: DeviceMesh | None) -> list[Axis]:
    """Return the axes of a mesh with more than one rank, as this rank sees them."""
    axes: list[Axis] = []
    if mesh is None or mesh.get_coordinate() is None:
        return axes
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            ranks = dist.get_process_group_ranks(mesh.get_group(dim))
            axes.append(Axis(_mesh_dim_name(mesh, dim), (tuple(ranks),)))
    return axes


def _mesh_dim_name(mesh: DeviceMesh, dim: int) -> str:
    names = mesh.mesh_dim_names
    return f"mesh dimension {dim}" if names is None else names[dim]


def _sharded_axes(param: Any) -> tuple[str, ...]:
    names: list[str] = []
    for dim, placement in enumerate(param.placements):
        if not placement.is_replicate():
            names.append(_mesh_dim_name(param.device_mesh, dim))
    return tuple(names)


def _declared_axis(
    declaration: bool | ProcessGroup | DeviceMesh | None, group_ranks: Sequence[int]
) -> Axis | None:
    """Return the axis over which a user's function declares a plain parameter sharded."""
    if declaration is None or declaration is False:
        return None
    if declaration is True:
        return Axis("shards", (tuple(group_ranks),))
    if isinstance(declaration, DeviceMesh):
        ranks = tuple(int(rank) for rank in declaration.mesh.flatten())
        names = declaration.mesh_dim_names or ("shards",)
        return Axis(", ".join(names), (ranks,)) if len(ranks) > 1 else None
    ranks = tuple(dist.get_process_group_ranks(declaration))
    name = str(getattr(declaration, "group_desc", "")).removeprefix("mesh_")
    axis_name = "shards" if name in _NO_NAMES else name
    return Axis(axis_name, (ranks,)) if len(ranks) > 1 else None


def _wrapper_axes(names: Mapping[nn.Module, str], group_ranks: Sequence[int]) -> list[Axis]:
    """Return the axes over which wrappers reduce gradients."""
    axes: list[Axis] = []
    for module in names:
        kind = wrapper_name(module)
        groups: list[ProcessGroup | None] = []
        if kind in (DDP, SHARDED_DDP):
            groups = [getattr(module, "process_group", None)]
        elif kind == FSDP2:
            unit = FSDPUnit(module)
            if unit.param_groups:
                groups = [unit.shard_group, unit.replicate_group]
        for group in groups:
            if group is not None and group.size() > 1:
                ranks = tuple(dist.get_process_group_ranks(group))
                axes.append(Axis("dp", (ranks,), is_data_parallel=True))
    return axes


def _dtensor_region(name: str, param: Any) -> Region:
    """Return this rank's region of a DTensor.

    FSDP2 shards a dimension that tensor parallel has sharded already, which torch writes as a
    placement with a split factor in front of the other one. Such placements come last here.

    Raises:
        ConfigError: The local shape is another, because the layout follows another rule.
    """
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    local_shape = tuple(to_local(param.detach()).shape)
    if coordinate is None:
        return Region(((0, 0, 0),) if param.dim() else (), None if param.dim() else (0, 0))
    plain: list[int] = []
    strided: list[int] = []
    for mesh_dim, placement in enumerate(param.placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise ConfigError(
                f"{name} is placed as {param.placements}. compare_gradients() compares parameters "
                "that are replicated or sharded."
            )
        (strided if hasattr(placement, "split_factor") else plain).append(mesh_dim)
    sizes = list(param.shape)
    slices: list[tuple[int, int, int]] = []
    for mesh_dim in [*plain, *reversed(strided)]:
        dim = param.placements[mesh_dim].dim
        chunk = math.ceil(sizes[dim] / mesh.size(mesh_dim))
        start = min(coordinate[mesh_dim] * chunk, sizes[dim])
        sizes[dim] = min(chunk, sizes[dim] - start)
        slices.append((dim, start, sizes[dim]))
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
        handle: Any = getattr(module, "_handle", None)
        if wrapper_name(module) != FSDP1 or handle is None:
            continue
        is_sharded = handle.uses_sharded_strategy
        for group in (handle.process_group, getattr(module, "_inter_node_pg", None)):
            if group is not None and group.size() > 1:
                name = "dp" if group is handle.process_group else "dp_replicate"
                ranks = tuple(dist.get_process_group_ranks(group))
                axes.append(Axis(name, (ranks,), is_data_parallel=True))
        flat_param = handle.flat_param
        originals = flat_param._params or [None] * flat_param._num_params
        offset = 0
        for index, (leaf, owner, _) in enumerate(flat_param._param_infos):
            name = f"{names[owner]}.{leaf}".lstrip(".")
            numel = flat_param._numels[index]
            start, length = offset, numel
            region = Region()
            offset += numel
            if is_sharded:
                info = flat_param._shard_param_infos[index]
                region = Region(flat=(0, 0))
                start, length = 0, 0
                if info.in_shard:
                    start, length = info.offset_in_shard, info.numel_in_shard
                    region = Region(flat=(info.intra_param_start_idx, info.intra_param_end_idx + 1))
            part_axes = ("dp",) if is_sharded else ()
            original = originals[index]
            if original is not None:
                parts[id(original)] = ParamPart(name, original, region, axes=part_axes)
            else:
                region = region if is_sharded else Region(flat=(0, numel))
                key = id(handle) + index
                parts[key] = ParamPart(name, flat_param, region, (start, length), axes=part_axes)
    return parts, axes


# -- the plan that all ranks share -----------------------------------------------------------------


@dataclass
class Holder:
    """A rank that holds a region of a parameter.

    Attributes:
        position: The place of the rank in the group.
        region: The region of the whole parameter.
        dtype: The dtype of the weights.
        axes: The axes over which the parameter is sharded.
    """

    position: int
    region: Region
    dtype: torch.dtype
    axes: tuple[str, ...]


@dataclass
class LayoutPlan:
    """The holders of each parameter, equal on all ranks.

    Attributes:
        params: The parameters of the reference, in its order.
        holders: The ranks that hold a part of each parameter, by name.
        axes: The axes of all layouts, each with the groups of all ranks.
        ranks: The ranks of the group, as numbers of the default group.
    """

    params: list[ReferenceParam]
    holders: dict[str, list[Holder]]
    axes: list[Axis]
    ranks: list[int] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        reference: Sequence[tuple[ReferenceParam, tuple[str, ...]]],
        infos: Sequence[tuple[Sequence[_PartInfo], Sequence[Axis]]],
        ranks: Sequence[int],
    ) -> LayoutPlan:
        """Compare the parts of all ranks with the reference.

        Args:
            reference: The parameters of the reference, with their further names.
            infos: The descriptions of all ranks' parts, and their axes.
            ranks: The ranks of the group.

        Raises:
            ConfigError: Names or shapes do not match, on every rank.
        """
        params = [param for param, _ in reference]
        plan = cls(params, {param.name: [] for param in params}, [], list(ranks))
        by_name: dict[str, ReferenceParam] = {}
        for param, names in reference:
            by_name.update(dict.fromkeys(names, param))
        shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        for position, (parts, _) in enumerate(infos):
            for part in parts:
                shapes[part.name, ranks[position]] = part.shape
        for position, (parts, _) in enumerate(infos):
            for part in parts:
                target = by_name.get(part.name)
                if target is None:
                    raise ConfigError(
                        f"The reference has no parameter {part.name!r}, which rank "
                        f"{ranks[position]} holds. {similar_names(part.name, list(by_name))} "
                        "Return the reference's name from reference_name_fn=."
                    )
                region = part.region
                if region is None:
                    region = _declared_region(part, target, ranks[position], shapes)
                _check_shape(part, target, region, ranks[position])
                if math.prod(part.shape):
                    holder = Holder(position, region, part.dtype, part.axes)
                    plan.holders[target.name].append(holder)
        plan._check_coverage()
        plan.axes = _merge_axes([axes for _, axes in infos], ranks)
        return plan

    def _check_coverage(self) -> None:
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
    shapes: Mapping[tuple[str, int], tuple[int, ...]],
) -> Region:
    """Return the region of a shard whose dimension is the one in which the reference is larger."""
    differing = []
    if len(part.shape) == len(target.shape):
        for dim, (size, whole) in enumerate(zip(part.shape, target.shape, strict=True)):
            if size != whole:
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
    for peer in part.shard_ranks:
        if peer == rank:
            break
        shape = shapes.get((part.name, peer))
        start += 0 if shape is None else shape[dim]
    return Region(((dim, start, part.shape[dim]),))


def _merge_axes(axes_by_rank: Sequence[Sequence[Axis]], ranks: Sequence[int]) -> list[Axis]:
    """Return each axis once, with the groups that all ranks have; names of meshes come first."""
    groups_by_name: dict[tuple[str, bool], dict[tuple[int, ...], None]] = {}
    data_parallel: set[tuple[int, ...]] = set()
    for axes in axes_by_rank:
        for axis in axes:
            key = axis.name, axis.is_data_parallel
            groups_by_name.setdefault(key, {}).update(dict.fromkeys(axis.groups))
            if axis.is_data_parallel:
                data_parallel.update(axis.groups)
    merged: list[Axis] = []
    known: set[tuple[int, ...]] = set()
    members = set(ranks)
    for name, is_wrapper in sorted(groups_by_name, key=lambda key: key[1]):
        groups = groups_by_name[name, is_wrapper]
        kept = [group for group in groups if members.issuperset(group) and group not in known]
        if kept:
            known.update(kept)
            is_data_parallel = any(group in data_parallel for group in kept)
            if any(axis.name == name for axis in merged):
                name = f"{name} of the wrapper"
            merged.append(Axis(name, tuple(kept), is_data_parallel))
    everyone = tuple(ranks)
    if not merged and len(everyone) > 1:
        merged.append(Axis("all ranks", (everyone,), is_data_parallel=True))
    return merged


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
