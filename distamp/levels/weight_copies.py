"""Comparison of the weights that ranks hold under one name: equal copies, or different weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distamp.errors import ConfigError
from distamp.grads import is_dtensor, to_local

__all__ = ["SEPARATE_STATES", "check_weight_copies", "is_wrapper_subclass"]

#: The states that work in every layout, for the end of a refusal.
SEPARATE_STATES = "model.state_dict(), optimizer.state_dict() and amp.state_dict()"


def is_wrapper_subclass(value: object) -> bool:
    """Return whether a tensor consists of others that ``__tensor_flatten__`` names.

    torch's own function narrows the type to a protocol that no Tensor has.
    """
    return bool(is_traceable_wrapper_subclass(value))


def check_weight_copies(weights: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
    """Raise on every rank if a name means different weights on two ranks.

    A checkpoint keeps one tensor for each name and place in it. Replicas hold equal bits there, and
    shards of a DTensor lie in different places. Plain experts and equally named pipeline stages
    have one name and different values, and a checkpoint would keep one value only.

    Collective: every rank of ``group`` must call this.

    Args:
        weights: By name, plain tensors and DTensors.
        group: The ranks to compare, or None for a single process.

    Raises:
        ConfigError: Ranks hold different weights under one name.
    """
    if group is None or group.size() == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    gathered: list[Any] = [None] * len(ranks)
    dist.all_gather_object(gathered, _fingerprints(weights), group=group)
    rows_by_rank = dict(zip(ranks, gathered, strict=True))
    conflicts = _find_conflicts(rows_by_rank)
    if conflicts:
        _raise_conflict(conflicts, weights, group)


def _find_conflicts(rows_by_rank: Mapping[int, Tensor]) -> dict[int, tuple[int, int]]:
    """Return the digest of each name with different weights, and two ranks that hold them."""
    layouts: dict[int, tuple[int, int]] = {}
    values: dict[tuple[int, int], tuple[int, int]] = {}
    conflicts: dict[int, tuple[int, int]] = {}
    for rank, rows in rows_by_rank.items():
        for name, layout, place, checksum in rows.tolist():
            first_rank, first_layout = layouts.setdefault(name, (rank, layout))
            if first_layout != layout:
                conflicts.setdefault(name, (first_rank, rank))
                continue
            first_rank, first_checksum = values.setdefault((name, place), (rank, checksum))
            if first_checksum != checksum:
                conflicts.setdefault(name, (first_rank, rank))
    return conflicts


def _raise_conflict(
    conflicts: Mapping[int, tuple[int, int]], weights: Mapping[str, Tensor], group: ProcessGroup
) -> None:
    """Raise one error on every rank, also on a rank that has no weight of such a name.

    Collective: every rank of ``group`` must call this.
    """
    first_conflict: tuple[str, tuple[int, int]] | None = None
    for weight_name in weights:
        digest = _digest(weight_name)
        if digest in conflicts:
            first_conflict = weight_name, conflicts[digest]
            break
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, first_conflict, group=group)
    name, (first_rank, second_rank) = next(conflict for conflict in gathered if conflict)
    more = ""
    if len(conflicts) > 1:
        more = f" (and under {len(conflicts) - 1} more)"
    raise ConfigError(
        f"A flat state has one place for {name!r}, and ranks {first_rank} and "
        f"{second_rank} hold different weights under that name{more}. A checkpoint would keep "
        "one of them. Such weights are experts or shards that are plain tensors, pipeline stages "
        "whose modules have the same names, or replicas that have diverged. Give the modules of "
        f"different stages different names, or save {SEPARATE_STATES} in a file for each rank. To "
        "load a checkpoint into weights that still differ, call amp.flat_state_dict(saved)"
    )


@torch.no_grad()
def _fingerprints(weights: Mapping[str, Tensor]) -> Tensor:
    """Return one row for each weight: digests of its name, layout and place, and its checksum."""
    digests: list[list[int]] = []
    sums: list[Tensor] = []
    for name, weight in weights.items():
        layout: list[object] = [tuple(weight.shape), weight.dtype]
        place: list[object] = []
        if is_dtensor(weight):
            coordinate = weight.device_mesh.get_coordinate()
            for dim, placement in enumerate(weight.placements):
                if not placement.is_replicate():
                    layout.append((str(placement), weight.device_mesh.size(dim)))
                    place.append(None if coordinate is None else coordinate[dim])
        digests.append([_digest(name), _digest(str(layout)), _digest(str(place))])
        sums.append(_checksum(to_local(weight)))
    rows = torch.empty(len(digests), 4, dtype=torch.int64, device="cpu")
    for row, digest, checksum in zip(rows, digests, sums, strict=True):
        row[:3] = torch.tensor(digest, device="cpu")
        row[3] = checksum.cpu()  # after every sum was launched, so that the device waits once
    return rows


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, read as integers: 0-d int64 on its device."""
    if is_wrapper_subclass(tensor):  # such as torchao's weights for a float8 all-gather
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return torch.stack([_checksum(getattr(tensor, name)) for name in names]).sum()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().contiguous().view(-1)
    size = flat.element_size()
    start = flat.storage_offset() * size
    integer_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    if flat.nbytes % 8 == 0 and start % 8 == 0:
        integer_dtype = torch.int64  # fewer elements to add
    return flat.view(integer_dtype).sum(dtype=torch.int64)


def _digest(text: str) -> int:
    """Return 64 bits that are the same for equal texts on all ranks."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
