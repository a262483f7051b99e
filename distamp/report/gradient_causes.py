"""Evidence about the gradients of each rank, and rules that name the cause of a difference.

A rank sends a few sums about its region of each gradient, and a sketch of the gradient, which
consists of sums of elements with random signs. The sketch of a sum of gradients is the sum of their
sketches. So every rank can test whether the gradients of some ranks add up to the reference,
without another message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    "StatsRow",
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
#: The relative difference between two factors that count as equal, in float32.
_SMALLEST_MARGIN = 1e-3
#: The squared norm of a sketch is that of its vector on average, and may be larger.
_SKETCH_MARGIN = 16
#: A sum that equals the reference leaves less than this share of the difference between ranks.
_SUM_MARGIN = 1e-4


# -- sums of one rank ------------------------------------------------------------------------------


class GradientStats:
    """Sums over one rank's region of a gradient and of the reference's gradient.

    Attributes:
        width: The number of values in a row.
    """

    width = 6 + 2 * _SKETCH

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(0, 2, (_CHUNK,), generator=generator)
        self._signs = 2.0 * bits - 1.0

    def row(self, grad: Tensor | None, reference: Tensor) -> Tensor:
        """Return the sums as float64 on the host.

        Args:
            grad: The gradient of this rank, or None.
            reference: The same region of the reference's gradient.
        """
        device = reference.device if grad is None else grad.device
        row = torch.zeros(self.width, dtype=torch.float64, device=device)
        flat_reference = _real(reference.to(device).reshape(-1))
        flat_grad = None if grad is None else _real(grad.reshape(-1))
        self._signs = self._signs.to(device)
        for start in range(0, flat_reference.numel(), _CHUNK):
            expected = flat_reference[start : start + _CHUNK].double()
            actual = torch.zeros_like(expected)
            if flat_grad is not None:
                actual = flat_grad[start : start + _CHUNK].double()
            signs = self._signs[: expected.numel()]
            row[0] += (~actual.isfinite()).sum()
            row[1] += (~expected.isfinite()).sum()
            row[2] += actual.dot(actual)
            row[3] += actual.dot(expected)
            row[4] += expected.dot(expected)
            row[5] += (actual - expected).square().sum()
            row[6 : 6 + _SKETCH] += _sketch(actual * signs)
            row[6 + _SKETCH :] += _sketch(expected * signs)
        return row.cpu()


def _real(values: Tensor) -> Tensor:
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj()).reshape(-1)
    return values


def _sketch(values: Tensor) -> Tensor:
    padding = -values.numel() % _SKETCH
    return F.pad(values, (0, padding)).view(-1, _SKETCH).sum(0)


class StatsRow:
    """A row of `GradientStats` with names.

    Attributes:
        bad_count: The number of elements that are not finite.
        reference_bad_count: The same number of the reference.
        norm_sq: The squared norm of the gradient.
        dot: Its product with the reference's gradient.
        reference_sq: The squared norm of the reference's gradient in the region.
        error_sq: The squared norm of the difference.
        sketch: The sketch of the gradient.
        reference_sketch: The sketch of the reference's gradient.
    """

    def __init__(self, row: Tensor) -> None:
        bad_count, reference_bad_count, *sums = row[:6].tolist()
        self.bad_count = int(bad_count)
        self.reference_bad_count = int(reference_bad_count)
        self.norm_sq: float = sums[0]
        self.dot: float = sums[1]
        self.reference_sq: float = sums[2]
        self.error_sq: float = sums[3]
        self.sketch = row[6 : 6 + _SKETCH]
        self.reference_sketch = row[6 + _SKETCH :]


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

    def allowed_sq(self, mean_square: float, module_mean_square: float) -> float:
        """Return the squared difference that is allowed for each element.

        Args:
            mean_square: The mean square of the reference's gradient.
            module_mean_square: The largest mean square among the parameters of its module.
        """
        return self.relative**2 * mean_square + self.floor**2 * module_mean_square


@dataclass
class RankEvidence:
    """Facts about the gradient of one parameter on one rank.

    Attributes:
        rank: The rank in the default group.
        region: The rank's region.
        requires_grad: Whether the rank trains the parameter.
        unreduced_ranks: The ranks over which FSDP did not reduce the gradient, which it keeps.
        stats: Sums over the region.
        allowed_sq: The largest squared difference of a right gradient.
    """

    rank: int
    region: Region
    requires_grad: bool
    unreduced_ranks: tuple[int, ...]
    stats: StatsRow
    allowed_sq: float

    @property
    def is_right(self) -> bool:
        """True if the gradient is within the tolerance."""
        return self.stats.bad_count == 0 and self.stats.error_sq <= self.allowed_sq

    @property
    def needs_gradient(self) -> bool:
        """True if the reference's gradient is not zero in the region."""
        return self.stats.reference_sq > self.allowed_sq

    @property
    def is_zero(self) -> bool:
        """True if the rank lacks a gradient that the reference has."""
        return self.needs_gradient and self.stats.norm_sq == 0

    def error_after(self, factor: float) -> float:
        """Return the squared difference from ``factor`` times the reference."""
        stats = self.stats
        error_sq = stats.norm_sq + factor * factor * stats.reference_sq
        error_sq -= 2 * factor * stats.dot
        return max(error_sq, 0.0)

    def fits(self, factor: float) -> bool:
        """Return whether the gradient is ``factor`` times the reference, within the tolerance."""
        return self.error_after(factor) <= self.allowed_sq * factor**2


@dataclass
class ParamEvidence:
    """Facts about the gradient of one parameter on all ranks that hold a part of it.

    Attributes:
        param: The parameter of the reference.
        axes: The axes of the layout.
        tolerance: The differences between right gradients.
        ranks: The facts of each rank.
        sharded_axes: The names of the axes over which the parameter is sharded.
        reference_bad_count: The number of elements of the reference that are not finite.
        exact_dtypes: Half precisions in which all elements of all ranks are exact.
    """

    param: ReferenceParam
    axes: list[Axis]
    tolerance: Tolerance
    ranks: list[RankEvidence] = field(default_factory=list)
    sharded_axes: tuple[str, ...] = ()
    reference_bad_count: int = 0
    exact_dtypes: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """True if all ranks have the gradient of the reference, or none trains the parameter."""
        if self.is_frozen_everywhere:
            return True
        for rank in self.ranks:
            is_trained_alike = rank.requires_grad is self.param.requires_grad
            if not is_trained_alike or rank.unreduced_ranks or not rank.is_right:
                return False
        return self.reference_bad_count == 0

    @property
    def is_frozen_everywhere(self) -> bool:
        """True if neither the reference nor a rank trains the parameter."""
        if self.param.requires_grad:
            return False
        return not any(rank.requires_grad for rank in self.ranks)

    @property
    def wrong_ranks(self) -> list[RankEvidence]:
        """The ranks with a gradient outside of the tolerance."""
        return [rank for rank in self.ranks if not rank.is_right]

    @property
    def reference_sq(self) -> float:
        """The sum of the squared norms of the reference's gradient on all ranks."""
        return sum(rank.stats.reference_sq for rank in self.ranks)

    @property
    def allowed_sq(self) -> float:
        """The sum of the squared differences that are allowed."""
        return sum(rank.allowed_sq for rank in self.ranks)

    @property
    def factor(self) -> float | None:
        """The factor of the reference that fits best to all ranks."""
        return best_factor(self.ranks)

    @property
    def error(self) -> float:
        """The relative norm of the difference."""
        return self.residual(1.0)

    def residual(self, factor: float | None) -> float:
        """Return the relative norm of the difference after the factor."""
        if factor is None or factor == 1.0:
            error_sq = sum(rank.stats.error_sq for rank in self.ranks)
        else:
            error_sq = sum(rank.error_after(factor) for rank in self.ranks)
        if error_sq == 0:
            return 0.0
        return math.sqrt(error_sq / self.reference_sq) if self.reference_sq else math.inf

    def find_replicas(self, rank: RankEvidence, axes: Sequence[Axis]) -> list[RankEvidence]:
        """Return the ranks with the same region that the axes connect with a rank."""
        connected = [rank]
        for current in connected:
            for axis in axes:
                peers = axis.peers(current.rank)
                for peer in self.ranks:
                    is_peer = peer.rank in peers and peer.region == rank.region
                    if is_peer and peer not in connected:
                        connected.append(peer)
        return connected


def best_factor(ranks: Sequence[RankEvidence]) -> float | None:
    """Return the factor of the reference that fits best, or None for a reference of zeros."""
    reference_sq = sum(rank.stats.reference_sq for rank in ranks)
    if not reference_sq:
        return None
    factor = sum(rank.stats.dot for rank in ranks) / reference_sq
    return factor if math.isfinite(factor) else None


# -- rules -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The cause of a difference.

    Attributes:
        cause: One of the causes of this module.
        axes: The names of the axes that fit, the likeliest first; several have the same size.
        factor: The factor of the reference, or None.
        ranks: The ranks with the wrong gradient; all if empty.
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
    axes = tuple(axis.name for axis in evidence.axes)
    if len(axes) > 1:
        axes = ()
    return Verdict(UNKNOWN, axes, evidence.factor, _numbers(evidence, evidence.wrong_ranks))


def _frozen(evidence: ParamEvidence) -> Verdict | None:
    """A rank does not train the parameter, and the reference or another rank does."""
    frozen = [rank for rank in evidence.ranks if not rank.requires_grad]
    if not frozen:
        return None
    axes = _separating_axes(evidence, frozen)
    return Verdict(FROZEN, axes, evidence.factor, _numbers(evidence, frozen))


def _not_finite(evidence: ParamEvidence) -> Verdict | None:
    """A gradient has inf or NaN."""
    bad = [rank for rank in evidence.ranks if rank.stats.bad_count]
    numbers = _numbers(evidence, bad)
    if evidence.reference_bad_count:
        return Verdict(NOT_FINITE, ranks=numbers, detail="in the reference too")
    return Verdict(NOT_FINITE, ranks=numbers) if bad else None


def _unreduced_by_fsdp(evidence: ParamEvidence) -> Verdict | None:
    """FSDP has a gradient that it did not reduce, because its gradient sync is switched off."""
    unreduced = [rank for rank in evidence.ranks if rank.unreduced_ranks]
    if not unreduced:
        return None
    names = []
    for axis in evidence.axes:
        for rank in unreduced:
            if axis.peers(rank.rank) == rank.unreduced_ranks and axis.name not in names:
                names.append(axis.name)
    detail = "the gradient sync of FSDP is off"
    return Verdict(NOT_REDUCED, tuple(names), evidence.factor, detail=detail)


def _missing_everywhere(evidence: ParamEvidence) -> Verdict | None:
    """No rank has a gradient, and the reference has one."""
    needing = [rank for rank in evidence.ranks if rank.needs_gradient]
    if needing and all(rank.is_zero for rank in needing):
        return Verdict(MISSING, factor=0.0)
    return None


def _differs_between_replicas(evidence: ParamEvidence) -> Verdict | None:
    """Ranks that hold the same region have different gradients.

    If their sums over some axes are one factor times the reference, the gradient was not reduced
    over these axes.
    """
    differing = [axis for axis in evidence.axes if _differs_over(evidence, axis)]
    if not differing:
        return None
    for size in range(1, len(differing) + 1):
        for axes in itertools.combinations(differing, size):
            if _adds_up(evidence, axes):
                return Verdict(NOT_REDUCED, (_joined(axes),), evidence.factor)
    zeros = [rank for rank in evidence.ranks if rank.is_zero]
    if len(zeros) == len(evidence.wrong_ranks):
        names = tuple(axis.name for axis in differing)
        return Verdict(MISSING, names, evidence.factor, _numbers(evidence, zeros))
    return Verdict(NOT_REDUCED, (_joined(differing),), evidence.factor, detail="ranks differ")


def _missing_on_ranks(evidence: ParamEvidence) -> Verdict | None:
    """Some shards have no gradient."""
    zeros = [rank for rank in evidence.ranks if rank.is_zero]
    if not zeros:
        return None
    axes = _separating_axes(evidence, zeros)
    return Verdict(MISSING, axes, evidence.factor, _numbers(evidence, zeros))


def _one_factor(evidence: ParamEvidence) -> Verdict | None:
    """All wrong ranks have one factor times the reference."""
    wrong = evidence.wrong_ranks
    factor = best_factor(wrong)
    if factor is None or not all(rank.fits(factor) for rank in wrong):
        return None
    numbers = _numbers(evidence, wrong)
    margin = max(2 * evidence.tolerance.relative, _SMALLEST_MARGIN)
    axes = _axes_of_factor(evidence, factor, margin)
    if axes:
        cause = COUNTED_REPEATEDLY if factor > 1 else NOT_REDUCED
        return Verdict(cause, axes, factor, numbers)
    nearest = round(factor)
    if nearest > 1 and abs(factor - nearest) <= margin * factor:
        return Verdict(COUNTED_REPEATEDLY, (), factor, numbers)
    return Verdict(SCALED, (), factor, numbers)


def _lower_precision(evidence: ParamEvidence) -> Verdict | None:
    """The difference is as large as the rounding of a reduction in half precision."""
    factor = evidence.factor
    if not evidence.tolerance.is_fp32 or factor is None:
        return None
    residual = evidence.residual(factor)
    if max(abs(factor - 1), residual) > _LARGEST_ROUNDING:
        return None
    dtype = "bf16" if residual > _BF16_ROUNDING else "fp16"
    if evidence.exact_dtypes:
        dtype = evidence.exact_dtypes[0]
    return Verdict(LOWER_PRECISION, _reducing_axes(evidence), factor, detail=dtype)


def _reduced_shards(evidence: ParamEvidence) -> Verdict | None:
    """Each rank has a factor times the sum of all shards of the reference.

    The signs of a sketch depend on the place of an element in its region, so the sketches of
    shards add up to the sketch of their sum.
    """
    for axis in evidence.axes:
        if axis.name not in evidence.sharded_axes:
            continue
        pairs = []
        for rank in evidence.ranks:
            peers = axis.peers(rank.rank)
            total = torch.zeros_like(rank.stats.sketch)
            for peer in evidence.ranks:
                if peer.rank in peers:
                    total += peer.stats.reference_sketch
            pairs.append((rank.stats.sketch, total))
        if _fit_error(pairs) <= _SKETCH_MARGIN * evidence.allowed_sq:
            detail = "shards were reduced as if they were replicas"
            return Verdict(COUNTED_REPEATEDLY, (axis.name,), evidence.factor, detail=detail)
    return None


def _factor_by_rank(evidence: ParamEvidence) -> Verdict | None:
    """The factor of the reference differs between the shards."""
    wrong = evidence.wrong_ranks
    for rank in wrong:
        factor = best_factor([rank])
        if factor is None or not rank.fits(factor):
            return None
    numbers = _numbers(evidence, wrong)
    detail = "another factor on each rank"
    return Verdict(SCALED, evidence.sharded_axes, evidence.factor, numbers, detail)


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
    """Replace verdicts about single parameters by a cause that all parameters have in common.

    Args:
        evidences: The evidence of every parameter.
        verdicts: The verdict of each wrong parameter, by name. Changed in place.
    """
    trained = {}
    for evidence in evidences:
        if evidence.reference_sq > 0:
            trained[evidence.param.name] = evidence
    wrong = [name for name in trained if name in verdicts]
    if len(trained) > 1 and len(wrong) >= _ALL_SHARE * len(trained):
        _find_common_factor(trained, wrong, verdicts)
        _find_common_weights(trained, wrong, verdicts)
    _follow_later_causes(evidences, verdicts)


def _find_common_factor(
    trained: Mapping[str, ParamEvidence], wrong: Sequence[str], verdicts: dict[str, Verdict]
) -> None:
    """Name the count of tokens or micro-batches if all parameters have the same factor."""
    factors = []
    margin = _SMALLEST_MARGIN
    for name in wrong:
        factor = verdicts[name].factor
        evidence = trained[name]
        if not factor or verdicts[name].detail:
            return
        if not all(rank.fits(factor) for rank in evidence.ranks):
            return
        factors.append(factor)
        margin = max(margin, 4 * evidence.tolerance.relative)
    if max(factors) - min(factors) > margin * abs(factors[0]):
        return
    for name in wrong:
        if verdicts[name].cause in (SCALED, COUNTED_REPEATEDLY, NOT_REDUCED):
            verdicts[name] = replace(verdicts[name], cause=OTHER_COUNT)


def _find_common_weights(
    trained: Mapping[str, ParamEvidence], wrong: Sequence[str], verdicts: dict[str, Verdict]
) -> None:
    """Name the weights of ranks if no parameter has a factor, and replicas are equal."""
    unexplained = []
    for name in wrong:
        verdict = verdicts[name]
        if verdict.cause in (UNKNOWN, SCALED, LOWER_PRECISION):
            unexplained.append(name)
    is_rounding = all(verdicts[name].cause == LOWER_PRECISION for name in unexplained)
    if is_rounding or len(unexplained) < _ALL_SHARE * len(trained):
        return
    if all(verdicts[name].cause == SCALED for name in unexplained):
        return
    for name in unexplained:
        evidence = trained[name]
        axes = _reducing_axes(evidence)
        detail = "another weight for each rank"
        verdicts[name] = Verdict(OTHER_COUNT, axes, evidence.factor, detail=detail)


def _follow_later_causes(evidences: Sequence[ParamEvidence], verdicts: dict[str, Verdict]) -> None:
    """Copy the cause of a later parameter to earlier parameters without a cause.

    A wrong gradient of an activation makes all earlier gradients wrong, by no factor. The backward
    pass computes the gradients of later parameters first.
    """
    later_name = ""
    for evidence in reversed(evidences):
        name = evidence.param.name
        if name not in verdicts:
            continue
        verdict = verdicts[name]
        if verdict.cause == NOT_REDUCED and verdict.axes:
            later_name = name
        elif verdict.cause == UNKNOWN and later_name:
            axes = verdicts[later_name].axes
            detail = f"follows from {later_name}"
            verdicts[name] = replace(verdict, cause=NOT_REDUCED, axes=axes, detail=detail)


# -- sums of sketches ------------------------------------------------------------------------------


def _differs_over(evidence: ParamEvidence, axis: Axis) -> bool:
    """Return whether two ranks of a group hold the same region and different gradients."""
    for rank in evidence.ranks:
        for peer in evidence.find_replicas(rank, [axis]):
            difference = rank.stats.sketch - peer.stats.sketch
            allowed_sq = max(rank.allowed_sq, peer.allowed_sq)
            if float(difference.square().sum()) > _SKETCH_MARGIN * allowed_sq:
                return True
    return False


def _adds_up(evidence: ParamEvidence, axes: Sequence[Axis]) -> bool:
    """Return whether the sums over the axes are one factor times the reference."""
    pairs = []
    difference_sq = 0.0
    for rank in evidence.ranks:
        sketches = [replica.stats.sketch for replica in evidence.find_replicas(rank, axes)]
        total = torch.stack(sketches).sum(0)
        pairs.append((total, rank.stats.reference_sketch))
        difference = rank.stats.sketch - total / len(sketches)
        difference_sq += float(difference.square().sum())
    scale = max(_fit_factor(pairs) ** 2, 1.0)
    allowed_sq = _SKETCH_MARGIN * evidence.allowed_sq * scale
    return _fit_error(pairs) <= max(allowed_sq, _SUM_MARGIN * difference_sq)


def _fit_factor(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the factor of the second sketches that fits best to the first sketches."""
    norm_sq = 0.0
    dot = 0.0
    for actual, expected in pairs:
        norm_sq += float(expected.dot(expected))
        dot += float(actual.dot(expected))
    return dot / norm_sq if norm_sq else 0.0


def _fit_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the squared difference that the best factor leaves."""
    factor = _fit_factor(pairs)
    error_sq = 0.0
    for actual, expected in pairs:
        difference = actual - factor * expected
        error_sq += float(difference.dot(difference))
    return error_sq


# -- axes ------------------------------------------------------------------------------------------


def _axes_of_factor(evidence: ParamEvidence, factor: float, margin: float) -> tuple[str, ...]:
    """Return the axes with as many ranks as the factor or its inverse, the likeliest first."""
    if factor <= 0:
        return ()
    ratio = max(factor, 1 / factor)
    names = []
    for axes in _axes_by_likelihood(evidence):
        size = math.prod(axis.size for axis in axes)
        if size > 1 and abs(ratio / size - 1) <= margin:
            names.append(_joined(axes))
    return tuple(names)


def _axes_by_likelihood(evidence: ParamEvidence) -> Iterator[tuple[Axis, ...]]:
    """Yield single axes and then pairs; axes without data parallel come first.

    Data parallel averages, so a mean in the place of a sum is likelier on another axis.
    """
    holders = {rank.rank for rank in evidence.ranks}

    def order(axis: Axis) -> tuple[bool, bool, bool]:
        is_sharded = axis.name in evidence.sharded_axes
        return axis.is_data_parallel, not is_sharded, not axis.is_model_parallel

    axes = []
    for axis in evidence.axes:
        members = itertools.chain(*axis.groups)
        if holders.intersection(members):
            axes.append(axis)
    axes.sort(key=order)
    for axis in axes:
        yield (axis,)
    yield from itertools.combinations(axes, 2)


def _joined(axes: Sequence[Axis]) -> str:
    return " and ".join(axis.name for axis in axes)


def _reducing_axes(evidence: ParamEvidence) -> tuple[str, ...]:
    """Return the axes over which wrappers reduce the gradient, else the axes of replicas."""
    data_parallel = [axis.name for axis in evidence.axes if axis.is_data_parallel]
    replicated = [axis.name for axis in evidence.axes if axis.name not in evidence.sharded_axes]
    return tuple(data_parallel or replicated)


def _separating_axes(evidence: ParamEvidence, ranks: Sequence[RankEvidence]) -> tuple[str, ...]:
    """Return the axes along which some ranks have peers that are not among these ranks."""
    numbers = {rank.rank for rank in ranks}
    peers_outside = {rank.rank for rank in evidence.ranks} - numbers
    names = []
    for axis in evidence.axes:
        if any(peers_outside.intersection(axis.peers(number)) for number in numbers):
            names.append(axis.name)
    return tuple(names)


def _numbers(evidence: ParamEvidence, ranks: Sequence[RankEvidence]) -> tuple[int, ...]:
    """Return the numbers of ranks, or () for all ranks that hold the parameter."""
    if len(ranks) == len(evidence.ranks):
        return ()
    return tuple(rank.rank for rank in ranks)
