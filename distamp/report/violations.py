"""Violation: a difference between a step and its contract, and the most likely correction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from distamp.report.contract_recorder import Observation, RankObservations
from distamp.report.formatting import collapse_indices, shorten

__all__ = ["Violation", "find_violations"]

_HALF = ("bf16", "fp16")
# Keys with the parameters' dtype unless the user sets another one.
_FOLLOW_PARAMETERS = ("param_all_gather", "grad_reduce", "master_weights", "optimizer_state")

Declared = Callable[[str, str], tuple[str, ...]]


@dataclass(frozen=True)
class Violation:
    """One way in which a step differed from its contract, with all places at which it did.

    Attributes:
        key: The field of the contract, such as ``"grad_reduce"``.
        where: Names of modules or parameters, without the indices in which they differ
            (``h.*.attn``).
        count: The number of these modules or parameters.
        of: The number of modules or parameters at which this key was observed at all.
        declared: The dtypes that were declared; empty if only ranks differ.
        found: The dtype that was observed; if ranks differ, the dtype of each rank.
        phase: ``"forward"``, ``"recompute"``, ``"backward"``, ``"after backward"``,
            ``"optimizer"``, or several; ``""`` for parameters, master weights and optimizer state.
        op: The kernels or collectives.
        group: The ranks of a collective, such as ``"mesh_tp[2]"``: the name of its mesh, and their
            number.
        calls: The number of calls on one rank.
        bytes: The bytes of the tensors on one rank.
        ranks: The ranks that differed.
        fix: The most likely correction; ``""`` if there is none.
    """

    key: str
    where: tuple[str, ...]
    count: int
    of: int
    declared: tuple[str, ...]
    found: str
    phase: str = ""
    op: str = ""
    group: str = ""
    calls: int = 0
    bytes: int = 0
    ranks: tuple[int, ...] = (0,)
    fix: str = ""

    def __str__(self) -> str:
        declared = " or ".join(self.declared) or "the same on all ranks"
        places = shorten([name or "(model)" for name in self.where])
        if self.count == self.of > 1:
            places = "every place"
        place = f"{self.phase} at {places} ({self.count} of {self.of})".lstrip()
        parts = [f"{self.key}: declared {declared}, found {self.found}", place]
        if self.group:
            parts.append(f"{self.op} over {self.group}")
        parts.append(f"{self.bytes:,} B in {self.calls:,}")
        text = ", ".join(parts)
        return f"{text}\n    fix: {self.fix}" if self.fix else text

    def to_dict(self) -> dict[str, Any]:
        """Return the violation as JSON types."""
        return asdict(self)


class _Place(NamedTuple):
    """A module or parameter, and a dtype that it used against the contract."""

    key: str
    name: str
    dtype: str
    group: str


class _Cause(NamedTuple):
    """The common part of violations at several places.

    Attributes:
        declared: The dtypes that were declared; empty if only ranks differ.
        phases: The phases of all places.
    """

    key: str
    declared: tuple[str, ...]
    dtype: str
    group: str
    phases: tuple[str, ...]


_Ranks = Sequence[RankObservations]


def find_violations(
    ranks: _Ranks, numbers: Sequence[int], declared: Declared, keys: Sequence[str]
) -> tuple[Violation, ...]:
    """Return the violations of a contract on all ranks, and the differences between ranks.

    Args:
        ranks: The observations of each rank.
        numbers: The numbers of the ranks in the default group.
        declared: A function that returns the dtypes that the contract declares for a key and a
            module or parameter.
        keys: The keys in the order of the result.
    """
    causes: dict[_Cause, set[str]] = defaultdict(set)
    violated = set()
    for place, phases in _violated_places(ranks, declared).items():
        dtypes = declared(place.key, place.name)
        cause = _Cause(place.key, dtypes, place.dtype, place.group, tuple(phases))
        causes[cause].add(place.name)
        violated.add((place.key, place.name))
    for (key, name), dtypes_by_rank in _dtypes_by_place(ranks, numbers).items():
        dtype_sets = {frozenset(dtypes) for dtypes in dtypes_by_rank.values()}
        if len(dtype_sets) > 1 and (key, name) not in violated:
            cause = _Cause(key, (), _join_dtypes(dtypes_by_rank), "", ())
            causes[cause].add(name)
    violations = []
    for cause, names in causes.items():
        violations.append(_violation(cause, names, ranks, numbers))
    violations.sort(key=lambda violation: (keys.index(violation.key), violation.where))
    return tuple(_with_fixes(violations))


def _violated_places(ranks: _Ranks, declared: Declared) -> dict[_Place, dict[str, None]]:
    """Return the places that differ from the contract, with the phases in which they do."""
    phases: dict[_Place, dict[str, None]] = defaultdict(dict)
    for observations in ranks:
        for row in observations.counts:
            if not _is_allowed(row, observations.unhooked_modules, declared):
                place = _Place(row.key, row.name, row.dtype, row.group)
                phases[place][row.phase] = None
    return phases


def _dtypes_by_place(
    ranks: _Ranks, numbers: Sequence[int]
) -> dict[tuple[str, str], dict[int, dict[str, None]]]:
    """Return the dtypes on each rank, by key and by module or parameter."""
    dtypes: dict[tuple[str, str], dict[int, dict[str, None]]] = {}
    for number, observations in zip(numbers, ranks, strict=True):
        for row in observations.counts:
            by_rank = dtypes.setdefault((row.key, row.name), {})
            by_rank.setdefault(number, {})[row.dtype] = None
    return dtypes


def _is_allowed(row: Observation, unhooked_modules: Sequence[str], declared: Declared) -> bool:
    """Return whether an observation is as declared, or nothing is declared for it.

    Compiled code hides its modules, so it may have the dtypes of any module that it may contain.
    """
    expected = declared(row.key, row.name)
    if not expected:
        return True
    dtypes = set(expected)
    if row.is_compiled:
        prefix = f"{row.name}." if row.name and row.name[0] != "(" else ""
        for name in unhooked_modules:
            if name.startswith(prefix):
                dtypes.update(declared(row.key, name))
    dtype = "fp8" if "float8" in row.dtype else row.dtype
    return dtype in dtypes


def _join_dtypes(dtypes_by_rank: Mapping[int, Iterable[str]]) -> str:
    parts = []
    for number, dtypes in sorted(dtypes_by_rank.items()):
        parts.append(f"{'/'.join(dtypes)} on rank {number}")
    return ", ".join(parts)


def _violation(
    cause: _Cause, names: set[str], ranks: Sequence[RankObservations], numbers: Sequence[int]
) -> Violation:
    """Return a cause as a violation, with the calls and bytes of all its observations."""
    phases: dict[str, None] = {}
    ops: dict[str, None] = {}
    observed_names = set()
    violation = Violation(cause.key, (), len(names), 0, cause.declared, cause.dtype)
    violating_ranks = []
    most_calls = most_bytes = 0
    for number, observations in zip(numbers, ranks, strict=True):
        calls = size = 0
        for row, (row_calls, row_size) in observations.counts.items():
            if row.key == cause.key:
                observed_names.add(row.name)
            if _belongs(row, cause, names):
                phases[row.phase] = None
                ops[row.op] = None
                calls += row_calls
                size += row_size
        most_calls = max(most_calls, calls)
        most_bytes = max(most_bytes, size)
        if calls:
            violating_ranks.append(number)
    labels = collapse_indices((name, "") for name in names)
    return replace(
        violation,
        where=tuple(sorted(set(labels.values()))),
        of=len(observed_names),
        phase=", ".join(phases),
        op=", ".join(ops),
        group=cause.group,
        calls=most_calls,
        bytes=most_bytes,
        ranks=tuple(violating_ranks),
    )


def _belongs(row: Observation, cause: _Cause, names: set[str]) -> bool:
    """Return whether an observation is part of a violation."""
    if row.key != cause.key or row.name not in names:
        return False
    return not cause.declared or (row.dtype, row.group) == (cause.dtype, cause.group)


def _with_fixes(violations: Sequence[Violation]) -> list[Violation]:
    """Return violations with the most likely correction of each."""
    param_dtypes = {violation.found for violation in violations if violation.key == "parameters"}
    corrected = []
    for violation in violations:
        fix = _likely_fix(violation)
        if violation.key in _FOLLOW_PARAMETERS and violation.found in param_dtypes:
            fix = "as the parameters are, so see there"
        corrected.append(replace(violation, fix=fix))
    return corrected


def _likely_fix(violation: Violation) -> str:
    """Return the most likely correction; ``""`` if there is none."""
    if not violation.declared:
        return (
            "ranks train in different precisions: build, cast and wrap the model alike on all of "
            "them"
        )
    fixes = {
        "parameters": _fix_parameters,
        "compute": _fix_compute,
        "norms": _fix_norms,
        "param_all_gather": _fix_param_all_gather,
        "grad_reduce": _fix_grad_reduce,
        "activations": _fix_activations,
        "master_weights": _fix_master_weights,
        "optimizer_state": _fix_optimizer_state,
    }
    return fixes[violation.key](violation)


def _fix_parameters(violation: Violation) -> str:
    if violation.found in _HALF:
        return (
            "the model was loaded or cast in half precision (from_pretrained(dtype=), .half(), "
            "cast_model): load it in float32, before it is wrapped"
        )
    return "cast the model before it is wrapped and before its optimizer is made: cast_model"


def _fix_compute(violation: Violation) -> str:
    if violation.found == "fp32":
        return (
            "run the forward pass in autocast(...) or with FSDP's param_dtype; look in these "
            "modules for autocast(enabled=False), .float(), pins, ops that no list has "
            "(grouped_mm), and attention without a fused kernel (dropout on a CPU), which torch "
            "computes in float32"
        )
    if {violation.found, *violation.declared} == set(_HALF):
        return "pass dtype= to autocast, whose own default on CUDA is float16"
    return "pin these modules: set_module_precision(module, 'fp32'); or leave autocast around them"


def _fix_norms(violation: Violation) -> str:
    if violation.found not in _HALF:
        return ""
    return (
        "keep these norms in float32: set_module_precision(norm, 'fp32'), and under FSDP2 a "
        "fully_shard of their own without param_dtype"
    )


def _fix_param_all_gather(violation: Violation) -> str:
    if "fp8" in violation.declared:
        return (
            "only FSDP2's fully_shard gathers float8: convert the model before it, with "
            "enable_fsdp_float8_all_gather; DTensor.redistribute gathers what the weight is cast to"
        )
    return "it is the dtype of the parameters, or MixedPrecisionPolicy(param_dtype=) of this part"


def _fix_grad_reduce(violation: Violation) -> str:
    if "all_reduce" in violation.op and violation.phase == "backward":
        return (
            "FSDP2 applies reduce_dtype to its own reduction alone, and sums over this mesh in "
            "param_dtype: shard these modules with param_dtype=torch.float32"
        )
    if "scatter" in violation.op:
        return (
            "pass reduce_dtype= to the MixedPrecisionPolicy of every part (FSDP1: MixedPrecision)"
        )
    return (
        "DDP sends gradients in their parameters' dtype, or in its communication hook's: look at "
        "both"
    )


def _fix_activations(violation: Violation) -> str:
    if "send" in violation.op:
        return (
            "a pipeline sends what its stage returns: return this dtype from the stage, and if "
            "initialize casts what it returns, pass "
            "PrecisionLevel.from_name(level).replace(output=dtype)"
        )
    return "cast before the layer that sends: the region's dtype does not reach DTensor's messages"


def _fix_master_weights(violation: Violation) -> str:
    if violation.found not in _HALF:
        return ""
    return (
        "updates below half an ulp of these weights are lost: MasterParameters(optimizer), level "
        "fp16-O2 or bf16-O2, or float32 shards with FSDP's param_dtype"
    )


def _fix_optimizer_state(violation: Violation) -> str:
    if violation.found not in _HALF:
        return ""
    return (
        "an optimizer makes its state in the dtype of what it steps: give it float32 masters, or "
        "load the state in float32"
    )
