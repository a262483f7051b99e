"""The norm of a gradient whose parts lie on many ranks: who holds a replica, and how parts add up.

Each rank sends the part of the norm that its own gradients account for. What several ranks hold
alike counts once: DTensors say themselves how they are spread, and a plain tensor counts as a
replica among the ranks where its value and the norm of its gradient agree, unless it is declared.
Ranks compare this once; from then on a check travels beside each part and shows whether replicas
still have the same gradients.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distamp import host
from distamp.errors import SettingError
from distamp.gradients import is_dtensor, local_of, summed_values
from distamp.scaler.groups import Group

__all__ = [
    "UNMEASURED",
    "Declared",
    "NormPlan",
    "NormPlans",
    "Table",
    "kinds_of",
    "norms_of",
    "scale_by",
    "total_norm",
]

_NEAR = 1e-6
# Parameters of all plans that are kept together: about 20 MB.
_MOST_PLANNED = 100_000
_ODD = 0x9E3779B97F4A7C15

# How a parameter is spread over the ranks.
UNKNOWN, PART, REPLICA, COPY = "unknown", "part", "replica", "copy"

#: In place of a plan's number, of a rank that has none because of an error.
UNMEASURED = -1

Declared = Callable[[Tensor], bool]


class Entry(NamedTuple):
    """One parameter in a `Table`.

    Args:
        key: What its value on this rank is, as a number.
        kind: ``"part"``: counts for itself, by ``weight``; ``"replica"``: declared to be held
            alike; ``"copy"``: of a parameter on another rank, as Megatron marks it; or
            ``"unknown"``.
        weight: What this rank's part counts.
        norm: Of its gradient.
    """

    key: int
    kind: str
    weight: float
    norm: float


Table = Sequence[Entry]


@dataclass(eq=False)
class NormPlan:
    """How the gradients of some parameters on this rank add up to the norm of the whole model.

    Args:
        parameters: Those that are measured.
        kinds: What is declared of each.
        values: What the value of each is, as a number.
        weights: float64, what the part of each counts.
        checks: int64; the sum over ranks of these times the bits of the norms is 0 as long as
            replicas have the same gradients.
        key: A number that all ranks share if they hold the same plan.
    """

    parameters: list[weakref.ref[Tensor]]
    kinds: tuple[tuple[str, float], ...]
    values: list[int]
    weights: Tensor
    checks: Tensor | None
    key: int

    @classmethod
    def alone(cls, parameters: Sequence[Tensor], device: torch.device) -> NormPlan:
        """Return the plan of a rank that holds everything."""
        weights = torch.ones(len(parameters), dtype=torch.float64, device=device)
        return cls(list(map(weakref.ref, parameters)), (), [], weights, None, 0)

    @classmethod
    def guess(
        cls,
        parameters: Sequence[Tensor],
        kinds: tuple[tuple[str, float], ...],
        size: int,
        rank: int,
        device: torch.device,
    ) -> NormPlan:
        """Return the plan of ranks that all hold the same plain tensors, in the same order.

        The message tells whether they do: the values are part of its digest.
        """
        values = _values_of(parameters)
        weights, checks = [], []
        for index, (kind, weight) in enumerate(kinds):
            weights.append(weight if kind == PART else 1.0 / size)
            odd = _signed((2 * index + 1) * _ODD)
            checks.append(
                _signed((size - 1) * odd if rank == 0 else -odd) if kind == UNKNOWN else 0
            )
        alike = [
            None if kind == PART else (v, kind) for v, (kind, _) in zip(values, kinds, strict=True)
        ]
        key = _hash([entry for entry in alike if entry is not None])
        return cls(
            list(map(weakref.ref, parameters)),
            kinds,
            values,
            torch.tensor(weights, dtype=torch.float64, device=device),
            torch.tensor(checks, dtype=torch.int64, device=device),
            key,
        )

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether this is the plan of these very tensors."""
        return len(self.parameters) == len(parameters) and all(
            reference() is p for reference, p in zip(self.parameters, parameters, strict=True)
        )

    @property
    def lives(self) -> bool:
        """Whether all of its parameters are still there."""
        return all(reference() is not None for reference in self.parameters)

    def table(self, norms: Tensor) -> list[Entry]:
        """Return what the other ranks need to know to find replicas; reads all values anew."""
        # A plan of another rank may be newer than this one, of values that have moved since.
        parameters = [p for reference in self.parameters if (p := reference()) is not None]
        self.values = _values_of(parameters)
        return [
            Entry(value, kind, weight, norm)
            for value, (kind, weight), norm in zip(
                self.values, self.kinds, norms.tolist(), strict=True
            )
        ]

    def row(self, norms: Tensor, norm_type: float, largest: Tensor | None) -> Tensor:
        """Return the three words that travel: part of the norm, largest gradient, check; int64."""
        part = self.part(norms, norm_type)
        other = torch.zeros_like(part) if largest is None else largest.to(part)
        words = torch.stack((part, other)).view(torch.int64)
        check = words.new_zeros(1)
        if self.checks is not None:
            check = (self.checks * norms.view(torch.int64)).sum().view(1)
        return torch.cat((words, check))

    def part(self, norms: Tensor, norm_type: float) -> Tensor:
        """Return what this rank's gradients add to the power of the norm: 0-d float64."""
        if not norms.numel():
            return norms.sum()
        if math.isinf(norm_type):
            return (norms * (self.weights > 0)).max()
        return (self.weights * norms.pow(norm_type)).sum()

    def agree(self, tables: Sequence[Table], rank: int) -> None:
        """Set the weights by what all ranks hold; the same tables on every rank."""
        weights = [entry.weight for entry in tables[rank]]
        checks = [0] * len(weights)
        for number, members in enumerate(_replicas(tables)):
            most = max(_count_by_rank(members).values())
            odd = _signed((2 * number + 1) * _ODD)
            norms = [tables[r][i].norm for r, i in members]
            exact = len(set(norms)) == 1 and not _is_declared(tables, members)
            weight = most / len(members)
            if len(members) == 1 and tables[members[0][0]][members[0][1]].kind == REPLICA:
                weight = 1.0 / len(tables)
            for place, (r, i) in enumerate(members):
                if r != rank:
                    continue
                weights[i] = weight
                if exact and len(members) > 1:
                    checks[i] = _signed((len(members) - 1) * odd if place == 0 else -odd)
        device = self.weights.device
        self.weights = torch.tensor(weights, dtype=torch.float64, device=device)
        self.checks = torch.tensor(checks, dtype=torch.int64, device=device)
        if all(math.isfinite(entry.norm) for table in tables for entry in table):
            self.key = _hash([[(e.key, e.kind, e.norm.hex()) for e in table] for table in tables])
        # Else inf and NaN tell nothing of replicas: the keys still differ, so that the ranks
        # compare again at the next call.


class NormPlans:
    """The plans of a scaler, each as long as its parameters live; the latest of very many.

    Parameters that have a gradient may be others at each call, as those of experts are.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], NormPlan] = {}

    def of(
        self,
        parameters: Sequence[Tensor],
        kinds: tuple[tuple[str, float], ...],
        group: Group,
        device: torch.device,
    ) -> NormPlan:
        """Return the plan of these parameters on these ranks, made at the first call for them."""
        key = (device, *group.global_ranks, None, *map(id, parameters))
        plan = self._plans.pop(key, None)
        if plan is None or not plan.is_of(parameters) or plan.kinds != kinds:
            self._forget_some()
            plan = NormPlan.guess(parameters, kinds, group.size, group.rank, device)
        self._plans[key] = plan
        return plan

    def _forget_some(self) -> None:
        """Keep the plans of living parameters, and of so many of them, the latest used."""
        left = _MOST_PLANNED
        kept = []
        for key, plan in reversed(self._plans.items()):
            left -= len(plan.parameters)
            if left >= 0 and plan.lives:
                kept.append((key, plan))
        self._plans = dict(reversed(kept))


def _replicas(tables: Sequence[Table]) -> list[list[tuple[int, int]]]:
    """Return sets of (rank, index) that count as one parameter, or as several of one rank."""
    by_value: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for index, entry in enumerate(table):
            if entry.kind != PART:
                by_value[entry.key].append((rank, index))
    sets: list[list[tuple[int, int]]] = []
    for members in by_value.values():
        if _is_declared(tables, members):
            sets.append(members)
            continue
        members.sort(key=lambda at: (tables[at[0]][at[1]].norm, at))
        alike = members[:1]
        for at in members[1:]:
            if _near(tables, alike[0], tables[at[0]][at[1]].norm):
                alike.append(at)
            else:
                sets.append(alike)
                alike = [at]
        sets.append(alike)
    return [sorted(members) for members in sets]


def _is_declared(tables: Sequence[Table], members: list[tuple[int, int]]) -> bool:
    return any(tables[rank][index].kind in (REPLICA, COPY) for rank, index in members)


def _near(tables: Sequence[Table], at: tuple[int, int], norm: float) -> bool:
    first = tables[at[0]][at[1]].norm
    return abs(norm - first) <= _NEAR * abs(first)


def _count_by_rank(members: list[tuple[int, int]]) -> dict[int, int]:
    counts: dict[int, int] = defaultdict(int)
    for rank, _ in members:
        counts[rank] += 1
    return counts


def total_norm(rows: Tensor, norm_type: float) -> tuple[Tensor, Tensor]:
    """Return the norm and the largest gradient, from the rows of all ranks.

    Args:
        rows: int64 of shape (ranks, 3).
        norm_type: The order of the norm; inf for the largest magnitude.

    Returns:
        0-d float32 and 0-d float32.
    """
    values = rows[:, :2].contiguous().view(torch.float64)
    parts = values[:, 0]
    norm = parts.max() if math.isinf(norm_type) else parts.sum().pow(1.0 / norm_type)
    return norm.float(), values[:, 1].max().float()


def kinds_of(
    parameters: Sequence[Tensor],
    size: int,
    *,
    own: bool,
    replicated: Declared | None,
    sharded: Declared | None,
) -> tuple[tuple[str, float], ...]:
    """Return how each parameter is spread, as far as it is known, and what a part counts.

    Args:
        parameters: The model's own.
        size: Ranks that agree.
        own: Whether plain tensors among them are known to be this rank's share.
        replicated: Says of a parameter that every rank holds the same.
        sharded: Says of a parameter that every rank holds another part.

    Raises:
        SettingError: A parameter is declared to be both.
    """
    kinds: list[tuple[str, float]] = []
    for parameter in parameters:
        is_replica = replicated is not None and bool(replicated(parameter))
        is_part = sharded is not None and bool(sharded(parameter))
        if is_replica and is_part:
            raise SettingError(
                f"a parameter of shape {tuple(parameter.shape)} is declared both replicated= and "
                "sharded=; declare it replicated if every rank has the same values, else sharded"
            )
        if is_part:
            kinds.append((PART, 1.0))
        elif is_replica:
            kinds.append((REPLICA, 1.0))
        elif is_dtensor(parameter) and parameter.device_mesh.size() == size:
            kinds.append((PART, _share(parameter)))
        elif getattr(parameter, "shared", None) is True:
            kinds.append((COPY, 1.0))
        elif own or getattr(parameter, "tensor_model_parallel", None) is True:
            kinds.append((PART, 1.0))
        else:
            kinds.append((UNKNOWN, 1.0))
    return tuple(kinds)


def _share(parameter: Tensor) -> float:
    assert is_dtensor(parameter)
    mesh = parameter.device_mesh
    replicas = [mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_replicate()]
    return 1.0 / math.prod(replicas)


@torch.no_grad()
def norms_of(parameters: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of each local gradient, float64 of shape (parameters,); 0 for none."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        local = local_of(gradient)
        local = summed_values(local) if local.is_sparse else local
        if local.numel():
            places, tensors = alike.setdefault((local.device, local.dtype), ([], []))
            places.append(index)
            tensors.append(local)
    none = torch.zeros((), dtype=torch.float64, device=device)
    each = [none] * len(parameters)
    for (_, dtype), (places, tensors) in alike.items():
        # float16 squares overflow from 256 on.
        wide = torch.float32 if dtype.itemsize < 4 else None
        norms = torch.stack(torch._foreach_norm(tensors, norm_type, wide)).double().to(device)
        if len(places) == len(parameters):
            return norms
        # One by one: places are known on the host, and as an index they would be waited for.
        for place, one in zip(places, norms.unbind(), strict=True):
            each[place] = one
    return torch.stack(each) if each else none.new_zeros(0)


@torch.no_grad()
def scale_by(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients so that ``norm`` becomes at most ``max_norm``, as torch's clip does.

    A norm that is not finite changes nothing: the step will be skipped, and what overflowed stays
    to be reported.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    coefficient = torch.where(norm.isfinite(), coefficient, 1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, group in by_device.items():
        torch._foreach_mul_(group, host.moved(coefficient, device))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _values_of(parameters: Sequence[Tensor]) -> list[int]:
    """Return a number for the value of each parameter on this rank; reads all of them once."""
    sums: list[Tensor] = []
    for parameter in parameters:
        local = local_of(parameter.detach())
        if local.device.type == "meta":
            local = torch.zeros(0, dtype=torch.float32, device="cpu")
        flat = torch.view_as_real(local) if local.is_complex() else local
        bits = flat.reshape(-1).view(_BITS[flat.element_size()])
        sums.append(torch.stack((bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64))))
    if not sums:
        return []
    device = sums[0].device
    read = torch.stack([s.to(device) for s in sums]).tolist()
    return [
        _hash((tuple(p.shape), str(p.dtype), _place(p), *both))
        for p, both in zip(parameters, read, strict=True)
    ]


def _place(parameter: Tensor) -> tuple[int, ...]:
    """Return where a DTensor's part lies in its mesh; elsewhere lies another part."""
    if not is_dtensor(parameter):
        return ()
    coordinate: list[int] = list(parameter.device_mesh.get_coordinate() or [])
    return tuple(
        -1 if placement.is_replicate() else at
        for at, placement in zip(coordinate, parameter.placements, strict=True)
    )


def _hash(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >> 63 else number
