"""Evidence about the gradients of each rank, and rules that name the cause of a difference.

A rank sends a few sums about its region of each gradient, and a sketch: sums of its elements with
random signs. The sketch of a sum of gradients is the sum of their sketches. So every rank can test
whether the gradients of some ranks add up to the reference, without another message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from distamp.report.gathered_gradients import Axis, ReferenceParam, Region

__all__ = [
    "COUNTED_REPEATEDLY",
    "FROZEN",
    "LOWER_PRECISION",
    "MISSING",
    "NOT_FINITE",
    "NOT_REDUCED",
    "OTHER_COUNT",
    "SCALED",
    "UNKNOWN",
    "GradientStats",
    "ParamEvidence",
    "RankEvidence",
    "Tolerance",
    "Verdict",
    "apply_to_all",
    "find_cause",
]

NOT_REDUCED = "not reduced"
COUNTED_REPEATEDLY = "counted more than once"
LOWER_PRECISION = "reduced in lower precision"
OTHER_COUNT = "another number of tokens or micro-batches"
SCALED = "multiplied by a factor"
FROZEN = "frozen"
MISSING = "missing"
NOT_FINITE = "not finite"
UNKNOWN = "differs, and no factor fits"

_SKETCH = 16
_CHUNK = 1 << 18
#: The largest relative error that rounding of gradients to bfloat16 leaves.
_LARGEST_ROUNDING = 2.0**-6
#: A larger rounding error comes from bfloat16, a smaller one from float16.
_BF16_ROUNDING = 2.0**-11
#: A verdict about all parameters needs this share of them.
_ALL_SHARE = 0.9


# -- sums of one rank ------------------------------------------------------------------------------


class GradientStats:
    """Sums over one rank's region of a gradient and of the reference's gradient.

    Attributes:
        WIDTH: The number of values in a row.
    """

    WIDTH = 7 + 2 * _SKETCH

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.float32)
        self._signs = (2 * signs - 1).to(device)

    def row(self, grad: Tensor | None, reference: Tensor) -> Tensor:
        """Return the sums as float64, on the device of the reference.

        Args:
            grad: The gradient of this rank, or None.
            reference: The same region of the reference's gradient.
        """
        row = torch.zeros(self.WIDTH, dtype=torch.float64, device=reference.device)
        row[0] = grad is not None
        flat_reference = reference.reshape(-1)
        flat_grad = None if grad is None else grad.reshape(-1)
        signs = self._signs
        for start in range(0, flat_reference.numel(), _CHUNK):
            expected = _real(flat_reference[start : start + _CHUNK])
            actual = torch.zeros_like(expected)
            if flat_grad is not None:
                actual = _real(flat_grad[start : start + _CHUNK])
            chunk_signs = signs.repeat(2) if reference.is_complex() else signs
            chunk_signs = chunk_signs[: expected.numel()]
            row[1] += (~actual.isfinite()).sum()
            row[2] += (~expected.isfinite()).sum()
            row[3] += actual.dot(actual)
            row[4] += actual.dot(expected)
            row[5] += expected.dot(expected)
            row[6] += (actual - expected).square().sum()
            row[7 : 7 + _SKETCH] += _sketch(actual * chunk_signs)
            row[7 + _SKETCH :] += _sketch(expected * chunk_signs)
        return row


def _real(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).reshape(-1)
    return values.double()


def _sketch(values: Tensor) -> Tensor:
    padded = F.pad(values, (0, -values.numel() % _SKETCH))
    return padded.view(-1, _SKETCH).sum(0)


class Tolerance(NamedTuple):
    """The differences between two right gradients.

    Args:
        relative: Relative to the norm of the reference's gradient.
        floor: Relative to the gradients of the same module, for gradients that cancel to zero.
        is_fp32: Whether the model computes in float32 or better, so that the rounding of a
            reduction in half precision shows.
    """

    relative: float
    floor: float
    is_fp32: bool


@dataclass
class RankEvidence:
    """Facts about the gradient of one parameter on one rank.

    Attributes:
        rank: The rank in the default group.
        region: The rank's region.
        requires_grad: Whether the rank trains the parameter.
        has_grad: Whether the rank has a gradient.
        unreduced_ranks: The ranks over which FSDP did not reduce the gradient, which it keeps.
        bad_count: The number of elements that are not finite.
        norm_sq: The squared norm of the gradient.
        dot: Its product with the reference's gradient.
        reference_sq: The squared norm of the reference's gradient in the region.
        error_sq: The squared norm of the difference.
        sketch: The sketch of the gradient.
        reference_sketch: The sketch of the reference's gradient.
        allowed_sq: The largest squared difference of a right gradient.
    """

    rank: int
    region: Region
    requires_grad: bool
    has_grad: bool
    unreduced_ranks: tuple[int, ...]
    bad_count: int
    norm_sq: float
    dot: float
    reference_sq: float
    error_sq: float
    sketch: Tensor
    reference_sketch: Tensor
    allowed_sq: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the gradient is within the tolerance."""
        return self.bad_count == 0 and self.error_sq <= self.allowed_sq

    @property
    def is_zero(self) -> bool:
        """Whether the rank lacks a gradient that the reference has."""
        return self.norm_sq == 0 and self.reference_sq > self.allowed_sq

    def error_after(self, factor: float) -> float:
        """Return the squared difference from ``factor`` times the reference."""
        error_sq = self.norm_sq - 2 * factor * self.dot + factor**2 * self.reference_sq
        return max(error_sq, 0.0)

    def fits(self, factor: float) -> bool:
        """Return whether the gradient is ``factor`` times the reference, within the tolerance."""
        return self.error_after(factor) <= self.allowed_sq * factor**2


@dataclass
class ParamEvidence:
    """Facts about the gradient of one parameter on all ranks that hold a part of it.

    Attributes:
        param: The parameter of the reference.
        ranks: The facts of each rank.
        axes: The axes of the layout.
        sharded_axes: The names of the axes over which the parameter is sharded.
        tolerance: The differences between right gradients.
        reference_has_grad: Whether the reference has a gradient.
        reference_bad_count: The number of elements of the reference that are not finite.
        exact_dtypes: Half precisions in which all elements of all ranks are exact.
    """

    param: ReferenceParam
    ranks: list[RankEvidence]
    axes: list[Axis]
    sharded_axes: tuple[str, ...]
    tolerance: Tolerance
    reference_has_grad: bool = True
    reference_bad_count: int = 0
    exact_dtypes: tuple[str, ...] = ()
    _by_rank: dict[int, RankEvidence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_rank = {rank.rank: rank for rank in self.ranks}

    @property
    def is_right(self) -> bool:
        """Whether all ranks have the gradient of the reference, or all do not train."""
        if self.is_frozen_everywhere:
            return True
        if any(rank.requires_grad is not self.param.requires_grad for rank in self.ranks):
            return False
        if any(rank.unreduced_ranks for rank in self.ranks):
            return False
        return self.reference_bad_count == 0 and all(rank.is_right for rank in self.ranks)

    @property
    def is_frozen_everywhere(self) -> bool:
        """Whether neither the reference nor a rank trains the parameter."""
        return not (self.param.requires_grad or any(rank.requires_grad for rank in self.ranks))

    @property
    def reference_sq(self) -> float:
        """The squared norm of the reference's gradient, once for each rank."""
        return sum(rank.reference_sq for rank in self.ranks)

    @property
    def factor(self) -> float | None:
        """The factor of the reference that fits best to all ranks."""
        return best_factor(self.ranks)

    @property
    def error(self) -> float:
        """The relative norm of the difference."""
        return _relative(sum(rank.error_sq for rank in self.ranks), self.reference_sq)

    def residual(self, factor: float | None) -> float:
        """Return the relative norm of the difference after the factor."""
        factor = 1.0 if factor is None else factor
        error_sq = sum(rank.error_after(factor) for rank in self.ranks)
        return _relative(error_sq, self.reference_sq)

    def replicas(self, rank: RankEvidence, axes: Sequence[Axis]) -> list[RankEvidence]:
        """Return the ranks with the same region that the axes connect with a rank."""
        connected = {rank.rank}
        waiting = [rank.rank]
        while waiting:
            current = waiting.pop()
            for axis in axes:
                for peer in axis.peers(current):
                    evidence = self._by_rank.get(peer)
                    is_new = peer not in connected and evidence is not None
                    if is_new and evidence.region == rank.region:  # type: ignore[union-attr]
                        connected.add(peer)
                        waiting.append(peer)
        return [self._by_rank[number] for number in sorted(connected)]


def best_factor(ranks: Sequence[RankEvidence]) -> float | None:
    """Return the factor of the reference that fits best, or None for a reference of zeros."""
    reference_sq = sum(rank.reference_sq for rank in ranks)
    if not reference_sq:
        return None
    factor = sum(rank.dot for rank in ranks) / reference_sq
    return factor if math.isfinite(factor) else None


def _relative(error_sq: float, reference_sq: float) -> float:
    if not error_sq:
        return 0.0
    return math.sqrt(error_sq / reference_sq) if reference_sq else math.inf


# -- rules -----------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The cause of a difference.

    Args:
        cause: One of the causes of this module.
        axes: The names of the axes that fit, the likeliest first; several are one size.
        factor: The factor of the reference, or None.
        ranks: The ranks that the cause is about; all if empty.
        detail: Further words, such as the dtype of a reduction.
    """

    cause: str
    axes: tuple[str, ...] = ()
    factor: float | None = None
    ranks: tuple[int, ...] = ()
    detail: str = ""


def find_cause(evidence: ParamEvidence) -> Verdict:
    """Return the verdict of the first rule that fits."""
    for rule in _RULES:
        verdict = rule(evidence)
        if verdict is not None:
            return verdict
    names = tuple(axis.name for axis in evidence.axes)
    axes = names if len(names) == 1 else ()
    return Verdict(UNKNOWN, axes, evidence.factor, _wrong_ranks(evidence))


def _frozen(evidence: ParamEvidence) -> Verdict | None:
    """A rank does not train the parameter, and the reference or another rank does."""
    frozen = tuple(rank.rank for rank in evidence.ranks if not rank.requires_grad)
    if not frozen:
        return None
    axes = _separating_axes(evidence, frozen)
    return Verdict(FROZEN, axes, _ratio_on_ranks(evidence), _unless_all(evidence, frozen))


def _not_finite(evidence: ParamEvidence) -> Verdict | None:
    """A gradient has inf or NaN."""
    ranks = tuple(rank.rank for rank in evidence.ranks if rank.bad_count)
    if evidence.reference_bad_count:
        return Verdict(NOT_FINITE, ranks=_unless_all(evidence, ranks), detail="in the reference")
    if ranks:
        return Verdict(NOT_FINITE, ranks=_unless_all(evidence, ranks))
    return None


def _unreduced_by_fsdp(evidence: ParamEvidence) -> Verdict | None:
    """FSDP has a gradient that it did not reduce, because its gradient sync is switched off."""
    names: dict[str, None] = {}
    is_reduced = True
    for rank in evidence.ranks:
        is_reduced = is_reduced and not rank.unreduced_ranks
        for axis in evidence.axes:
            if rank.unreduced_ranks and axis.peers(rank.rank) == rank.unreduced_ranks:
                names[axis.name] = None
    if is_reduced:
        return None
    return Verdict(NOT_REDUCED, tuple(names), evidence.factor, detail="FSDP's sync is off")


def _missing_everywhere(evidence: ParamEvidence) -> Verdict | None:
    """No rank has a gradient, and the reference has one."""
    lacking = [rank for rank in evidence.ranks if rank.reference_sq > rank.allowed_sq]
    if lacking and all(rank.norm_sq == 0 for rank in lacking):
        return Verdict(MISSING, factor=0.0)
    return None


def _differs_between_replicas(evidence: ParamEvidence) -> Verdict | None:
    """Ranks that hold one region have different gradients, whose sum or mean is the reference."""
    differing = [axis for axis in evidence.axes if _differs_over(evidence, axis)]
    for size in range(1, len(differing) + 1):
        for axes in itertools.combinations(differing, size):
            if _adds_up(evidence, axes):
                name = " and ".join(axis.name for axis in axes)
                return Verdict(NOT_REDUCED, (name,), evidence.factor)
    if differing:
        zeros = tuple(rank.rank for rank in evidence.ranks if rank.is_zero)
        names = tuple(axis.name for axis in differing)
        others_are_right = all(rank.is_right for rank in evidence.ranks if rank.rank not in zeros)
        if zeros and others_are_right:
            return Verdict(MISSING, names, _ratio_on_ranks(evidence), zeros)
        name = " and ".join(names)
        return Verdict(NOT_REDUCED, (name,), evidence.factor, detail="ranks differ")
    return None


def _missing_on_ranks(evidence: ParamEvidence) -> Verdict | None:
    """Some shards have no gradient."""
    zeros = tuple(rank.rank for rank in evidence.ranks if rank.is_zero)
    if not zeros:
        return None
    axes = _separating_axes(evidence, zeros)
    return Verdict(MISSING, axes, _ratio_on_ranks(evidence), zeros)


def _one_factor(evidence: ParamEvidence) -> Verdict | None:
    """All wrong ranks have one factor times the reference."""
    wrong = [rank for rank in evidence.ranks if not rank.is_right]
    factor = best_factor(wrong)
    if factor is None or not all(rank.fits(factor) for rank in wrong):
        return None
    numbers = _unless_all(evidence, tuple(rank.rank for rank in wrong))
    margin = max(2 * evidence.tolerance.relative, 1e-3)
    axes = _axes_of_factor(evidence, factor, margin)
    if axes:
        cause = COUNTED_REPEATEDLY if factor > 1 else NOT_REDUCED
        return Verdict(cause, axes, factor, numbers)
    if factor > 1.5 and abs(factor - round(factor)) <= margin * factor:
        return Verdict(COUNTED_REPEATEDLY, (), factor, numbers)
    return Verdict(SCALED, (), factor, numbers)


def _factor_by_rank(evidence: ParamEvidence) -> Verdict | None:
    """Each shard has a factor of its own."""
    wrong = [rank for rank in evidence.ranks if not rank.is_right]
    for rank in wrong:
        factor = best_factor([rank])
        if factor is None or not rank.fits(factor):
            return None
    names = []
    for axis in evidence.axes:
        if axis.name in evidence.sharded_axes:
            names.append(axis.name)
    numbers = _unless_all(evidence, tuple(rank.rank for rank in wrong))
    detail = "another factor on each rank"
    return Verdict(SCALED, tuple(names), evidence.factor, numbers, detail)


def _reduced_shards(evidence: ParamEvidence) -> Verdict | None:
    """Each rank has a factor times the sum of all shards of the reference.

    The signs of a sketch depend on the place of an element in its region, so the sketches of
    shards add up to the sketch of their sum.
    """
    if len({rank.reference_sketch.numel() for rank in evidence.ranks}) > 1:
        return None
    for axis in evidence.axes:
        if axis.name not in evidence.sharded_axes:
            continue
        sums: list[tuple[Tensor, Tensor]] = []
        for rank in evidence.ranks:
            peers = axis.peers(rank.rank)
            shards = [other for other in evidence.ranks if other.rank in peers]
            total = torch.stack([shard.reference_sketch for shard in shards]).sum(0)
            sums.append((rank.sketch, total))
        allowed_sq = 16 * sum(rank.allowed_sq for rank in evidence.ranks)
        if _fit_error(sums) <= allowed_sq:
            detail = "shards were reduced as if they were replicas"
            return Verdict(COUNTED_REPEATEDLY, (axis.name,), evidence.factor, detail=detail)
    return None


def _lower_precision(evidence: ParamEvidence) -> Verdict | None:
    """The difference is as large as the rounding of a reduction in half precision."""
    factor = evidence.factor
    if not evidence.tolerance.is_fp32 or factor is None:
        return None
    residual = evidence.residual(factor)
    if abs(factor - 1) > _LARGEST_ROUNDING or residual > _LARGEST_ROUNDING:
        return None
    dtype = "bf16" if residual > _BF16_ROUNDING else "fp16"
    if evidence.exact_dtypes:
        dtype = evidence.exact_dtypes[0]
    return Verdict(LOWER_PRECISION, _reducing_axes(evidence), factor, detail=dtype)


_RULES: tuple[Callable[[ParamEvidence], Verdict | None], ...] = (
    _frozen,
    _not_finite,
    _unreduced_by_fsdp,
    _missing_everywhere,
    _differs_between_replicas,
    _missing_on_ranks,
    _one_factor,
    _lower_precision,
    _reduced_shards,
    _factor_by_rank,
)


# -- rules about all parameters --------------------------------------------------------------------


def apply_to_all(evidences: Sequence[ParamEvidence], verdicts: dict[str, Verdict]) -> None:
    """Replace verdicts that hold for all parameters by the cause that all have in common.

    Args:
        evidences: The evidence of every parameter.
        verdicts: The verdict of each wrong parameter, by name. Changed in place.
    """
    trained = [evidence for evidence in evidences if evidence.reference_sq > 0]
    if len(trained) < 2:
        return
    single_factor = (SCALED, COUNTED_REPEATEDLY, NOT_REDUCED)
    scaled: dict[str, float] = {}
    unknown: list[str] = []
    for evidence in trained:
        verdict = verdicts.get(evidence.param.name)
        if verdict is None:
            continue
        if verdict.cause in single_factor and verdict.factor and not verdict.detail:
            if all(rank.fits(verdict.factor) for rank in evidence.ranks):
                scaled[evidence.param.name] = verdict.factor
        elif verdict.cause in (UNKNOWN, LOWER_PRECISION) or verdict.detail.startswith("another"):
            unknown.append(evidence.param.name)
    needed = _ALL_SHARE * len(trained)
    if len(scaled) >= needed:
        factors = sorted(scaled.values())
        margin = max(4 * trained[0].tolerance.relative, 2e-3) * abs(factors[0])
        if factors[-1] - factors[0] <= margin:
            for name in scaled:
                verdicts[name] = verdicts[name]._replace(cause=OTHER_COUNT)
    _follow_later_causes(evidences, verdicts)
    differs = [name for name in unknown if verdicts[name].cause != LOWER_PRECISION]
    if len(unknown) >= needed and differs:
        for evidence in trained:
            name = evidence.param.name
            if name in unknown:
                axes = _reducing_axes(evidence)
                factor = evidence.factor
                verdicts[name] = Verdict(OTHER_COUNT, axes, factor, detail="a weight on each rank")


def _follow_later_causes(evidences: Sequence[ParamEvidence], verdicts: dict[str, Verdict]) -> None:
    """Give parameters without a cause the cause of a later one, which the backward pass met first.

    The gradient of an activation that is wrong on some ranks makes all earlier gradients wrong, by
    no factor.
    """
    later: tuple[str, Verdict] | None = None
    for evidence in reversed(evidences):
        name = evidence.param.name
        verdict = verdicts.get(name)
        if verdict is None:
            continue
        if verdict.cause == NOT_REDUCED and verdict.axes:
            later = name, verdict
        elif verdict.cause == UNKNOWN and later is not None:
            detail = f"follows from {later[0]}"
            verdicts[name] = verdict._replace(
                cause=later[1].cause, axes=later[1].axes, detail=detail
            )


# -- axes ------------------------------------------------------------------------------------------


def _differs_over(evidence: ParamEvidence, axis: Axis) -> bool:
    """Return whether two ranks of a group hold one region and different gradients."""
    for rank in evidence.ranks:
        for other in evidence.replicas(rank, [axis]):
            difference_sq = float((rank.sketch - other.sketch).square().sum())
            if difference_sq > 16 * max(rank.allowed_sq, other.allowed_sq):
                return True
    return False


def _adds_up(evidence: ParamEvidence, axes: Sequence[Axis]) -> bool:
    """Return whether the sums over the axes are one factor times the reference."""
    sums: list[tuple[Tensor, Tensor]] = []
    difference_sq = 0.0
    for rank in evidence.ranks:
        replicas = evidence.replicas(rank, axes)
        total = torch.stack([replica.sketch for replica in replicas]).sum(0)
        sums.append((total, rank.reference_sketch))
        mean = total / len(replicas)
        difference_sq += float((rank.sketch - mean).square().sum())
    factor = _fit_factor(sums)
    allowed_sq = 16 * sum(rank.allowed_sq for rank in evidence.ranks) * max(factor**2, 1.0)
    return _fit_error(sums) <= max(allowed_sq, 1e-4 * difference_sq)


def _fit_factor(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the factor of the second sketches that fits best to the first ones."""
    norm_sq = sum(float(expected.square().sum()) for _, expected in pairs)
    dot = sum(float(actual.dot(expected)) for actual, expected in pairs)
    return dot / norm_sq if norm_sq else 0.0


def _fit_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the squared difference that the best factor leaves."""
    factor = _fit_factor(pairs)
    return sum(float((actual - factor * expected).square().sum()) for actual, expected in pairs)


def _axes_of_factor(evidence: ParamEvidence, factor: float, margin: float) -> tuple[str, ...]:
    """Return the axes whose size is the factor or its inverse, the likeliest first."""
    if factor <= 0:
        return ()
    ratio = factor if factor > 1 else 1 / factor
    names: list[str] = []
    for axes in _axes_by_likelihood(evidence):
        size = math.prod(axis.size for axis in axes)
        if size > 1 and abs(ratio / size - 1) <= margin:
            names.append(" and ".join(axis.name for axis in axes))
    return tuple(names)


def _axes_by_likelihood(evidence: ParamEvidence) -> Iterator[tuple[Axis, ...]]:
    """Yield single axes and then pairs: shards without data parallel, replicas, data parallel."""
    numbers = {rank.rank for rank in evidence.ranks}

    def order(axis: Axis) -> tuple[bool, bool, bool]:
        is_sharded = axis.name in evidence.sharded_axes
        return axis.is_data_parallel, not is_sharded, not axis.is_model_parallel

    axes = [axis for axis in evidence.axes if any(numbers & set(group) for group in axis.groups)]
    axes.sort(key=order)
    for axis in axes:
        yield (axis,)
    yield from itertools.combinations(axes, 2)


def _reducing_axes(evidence: ParamEvidence) -> tuple[str, ...]:
    """Return the axes over which the gradient is reduced: of wrappers, else of replicas."""
    data_parallel = [axis.name for axis in evidence.axes if axis.is_data_parallel]
    if data_parallel:
        return tuple(data_parallel)
    return tuple(axis.name for axis in evidence.axes if axis.name not in evidence.sharded_axes)


def _separating_axes(evidence: ParamEvidence, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the axes along which ranks of a set have peers outside of it."""
    numbers = {rank.rank for rank in evidence.ranks}
    names: list[str] = []
    for axis in evidence.axes:
        for rank in ranks:
            if set(axis.peers(rank)) & numbers - set(ranks):
                names.append(axis.name)
                break
    return tuple(names)


def _wrong_ranks(evidence: ParamEvidence) -> tuple[int, ...]:
    wrong = tuple(rank.rank for rank in evidence.ranks if not rank.is_right)
    return _unless_all(evidence, wrong)


def _unless_all(evidence: ParamEvidence, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return () if len(ranks) == len(evidence.ranks) else ranks


def _ratio_on_ranks(evidence: ParamEvidence) -> float | None:
    return evidence.factor
