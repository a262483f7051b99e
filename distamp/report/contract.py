"""The contract of precisions: what was declared, checked on what one real step uses."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup

from distamp.error_text import choices_text, similar_names
from distamp.errors import ConfigError
from distamp.precision_level import PrecisionLevel
from distamp.process_group import GroupLike
from distamp.report.following import (
    begin_call,
    every_rank,
    global_ranks,
    raised_on_every_rank,
)
from distamp.report.observing import Observer, Seen
from distamp.report.op_row import collapsed
from distamp.report.rows import OUTSIDE, Written, short, text_table

__all__ = ["ContractReport", "PrecisionContract", "Violation"]

_NAMES = ("fp32", "bf16", "fp16", "fp8", "fp64", "int8", "uint8")
_KEYS = {
    "parameters": "the model's parameters, as they stand after the step",
    "compute": "matrix products, convolutions and attention",
    "norms": "what norms take: inputs and weights",
    "param_all_gather": "parameters sent between ranks",
    "grad_reduce": "gradients sent between ranks",
    "activations": "what tensor, sequence and pipeline parallel send",
    "master_weights": "what the optimizer steps",
    "optimizer_state": "the optimizer's state, such as moments",
}

# What has the parameters' dtype where nothing else is said.
_FOLLOW = ("param_all_gather", "grad_reduce", "master_weights", "optimizer_state")

Dtypes = str | torch.dtype | Sequence[str | torch.dtype]


@dataclass(frozen=True)
class Violation:
    """One way in which a step was not as declared, with all the places where it was so.

    Attributes:
        key: The field of the contract, such as ``"grad_reduce"``.
        where: Module or parameter names, those alike but for an index as one (``h.*.attn``).
        count: How many modules or parameters these are.
        of: How many there are, of which this key was seen at all.
        declared: The dtypes that were declared; empty where only ranks differ.
        found: The dtype that was found; where ranks differ, that of each.
        phase: ``"forward"``, ``"recompute"``, ``"backward"``, ``"after backward"``,
            ``"optimizer"``, or several; ``""`` of what stands.
        op: The kernels or collectives.
        group: The ranks of a collective, such as ``"mesh_tp[2]"``: its mesh's name, and how many.
        calls: How often, on one rank.
        bytes: Of the tensors, on one rank.
        ranks: On which ranks.
        fix: What most likely puts it right; ``""`` where that is not known.
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
        places = ", ".join(each or "(model)" for each in self.where[:4])
        more = f" and {len(self.where) - 4} more" if len(self.where) > 4 else ""
        if self.count == self.of > 1:
            places, more = "every place", ""
        wanted = " or ".join(self.declared) or "the same on all ranks"
        parts = [f"{self.key}: declared {wanted}, found {self.found}"]
        parts.append(
            f"{self.phase + ' ' if self.phase else ''}at {places}{more} ({self.count} of {self.of})"
        )
        if self.group:
            parts.append(f"{self.op} over {self.group}")
        parts.append(f"{self.bytes:,} B in {self.calls:,}")
        return ", ".join(parts) + (f"\n    fix: {self.fix}" if self.fix else "")


class ContractReport(Written, Sequence[Violation]):
    """Violations that a check found, the same on every rank. Empty, and so false, without one.

    Attributes:
        contract: What was declared.
        seen: What was found of each key, by dtype: how many calls, or how many tensors.
        unseen: What the check could not look into, and what did not run, a sentence each.
    """

    def __init__(self, contract: PrecisionContract) -> None:
        self.contract = contract
        self.seen: dict[str, dict[str, int]] = {}
        self.unseen: tuple[str, ...] = ()
        self._found: tuple[Violation, ...] = ()

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def fill(
        self,
        ranks: Sequence[tuple[dict[Seen, tuple[int, int]], list[str]]],
        numbers: Sequence[int],
    ) -> None:
        """Take what was seen on every rank: calls and bytes, and what was not.

        Args:
            ranks: The observations of each rank of the group.
            numbers: The numbers of these ranks in the default group.
        """
        sums: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        for rank, (rows, _) in enumerate(ranks):
            for row, (calls, _) in rows.items():
                sums[row.key, row.found][rank] += calls
        for (key, found), by_rank in sorted(sums.items()):
            self.seen.setdefault(key, {})[found] = max(by_rank.values())
        self.unseen = tuple(dict.fromkeys(line for _, lines in ranks for line in lines))
        judged = [*self.contract.judge([rows for rows, _ in ranks], numbers)]
        judged.sort(key=lambda it: ([*_KEYS].index(it.key), it.where))
        cast = {each.found for each in judged if each.key == "parameters"}
        self._found = tuple(
            replace(each, fix="as the parameters are, so see there")
            if each.key in _FOLLOW and each.found in cast
            else each
            for each in judged
        )

    def __str__(self) -> str:
        title = f"{len(self)} violation{'' if len(self) == 1 else 's'}: the step "
        title += f"{'did not run' if self else 'ran'} in the precisions that were declared"
        rows = []
        for key, meaning in _KEYS.items():
            declared = " or ".join(self.contract.declared(key)) or "-"
            found = ", ".join(f"{n:,} {dtype}" for dtype, n in self.seen.get(key, {}).items())
            broken = any(each.key == key for each in self)
            kept = "-" if declared == "-" else "kept" if found else "nothing seen"
            rows.append((key, declared, found or "-", "BROKEN" if broken else kept, meaning))
        lines = [title, *text_table(("", "declared", "found", "", "what it is"), rows, numbers=0)]
        lines += [f"{i}. {each}" for i, each in enumerate(self, 1)]
        lines += [f"not seen: {each}" for each in self.unseen]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {
            "contract": self.contract.to_dict(),
            "violations": [asdict(each) for each in self],
            "seen": self.seen,
            "unseen": list(self.unseen),
        }


@dataclass(frozen=True)
class PrecisionContract:
    """The dtypes that each part of a training step was declared to have.

    torch has nothing like it: ``MixedPrecisionPolicy`` and ``autocast`` say what is wished, and
    nobody tells whether it happens. `check` runs one step and compares. A dtype is written
    ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp8"`` or as a ``torch.dtype``; a tuple allows several.
    What is left out is not checked.

    Args:
        parameters: The model's parameters, as they stand after the step.
        compute: Matrix products, convolutions and attention: their first operand.
        norms: What norms take, inputs and weights; of norms written in Python, what they average.
        param_all_gather: Parameters between ranks: all-gathers of FSDP, broadcasts of sharded
            optimizers.
        grad_reduce: Gradients between ranks, as they are sent.
        activations: What tensor, sequence and pipeline parallel send, forward and backward.
        master_weights: What the optimizer steps: its own masters, or the parameters it was given.
        optimizer_state: Its state, but for masters and numbers.
        modules: Exceptions, by shell patterns over module names, in order; the last that matches
            counts, for a module and all below it. A dtype stands for parameters, compute and norms;
            or name the keys: ``{"lm_head": "fp32", "*.router": {"compute": "fp32"}}``.
            ``"(outside)"`` is for everything that runs in no module, such as what a pipeline
            schedule sends.

    Raises:
        ConfigError: There is no such dtype or key.

    Example::

        contract = distamp.PrecisionContract(parameters="fp32", compute="bf16", grad_reduce="fp32")
        violations = contract.check(step, model, optimizer)
        print(violations)
    """

    parameters: Dtypes = ()
    compute: Dtypes = ()
    norms: Dtypes = ()
    param_all_gather: Dtypes = ()
    grad_reduce: Dtypes = ()
    activations: Dtypes = ()
    master_weights: Dtypes = ()
    optimizer_state: Dtypes = ()
    modules: Mapping[str, Dtypes | Mapping[str, Dtypes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _KEYS:
            object.__setattr__(self, name, _dtypes(name, getattr(self, name)))
        exceptions: dict[str, dict[str, tuple[str, ...]]] = {}
        for pattern, dtypes_by_key in self.modules.items():
            if not isinstance(dtypes_by_key, Mapping):
                dtypes_by_key = dict.fromkeys(("parameters", "compute", "norms"), dtypes_by_key)
            for key in dtypes_by_key.keys() - _KEYS.keys():
                keys = choices_text(_KEYS)
                hint = similar_names(key, list(_KEYS))
                raise ConfigError(
                    f"modules= of a PrecisionContract has the key {key!r} for the pattern "
                    f"{pattern!r}. The keys are {keys}. {hint}"
                )
            exceptions[pattern] = {
                key: _dtypes(key, dtypes) for key, dtypes in dtypes_by_key.items()
            }
        object.__setattr__(self, "modules", exceptions)

    @classmethod
    def from_level(cls, level: str | PrecisionLevel, *models: nn.Module) -> Self:
        """Return the contract of a level, such as ``"bf16"``, for these models.

        Without models it knows neither batch norms that stay float32 nor pins; see
        `PrecisionLevel.contract`.
        """
        return cls(**PrecisionLevel.from_name(level).contract(*models))

    def declared(self, key: str, where: str = "") -> tuple[str, ...]:
        """Return what is declared for a key, of a module or parameter; empty: nothing."""
        found: Any = getattr(self, key)
        for pattern, exceptions in self.modules.items():
            if key in exceptions and _matches(where, pattern):  # type: ignore[operator]
                found = exceptions[key]  # type: ignore[index, call-overload]
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """What was declared, as JSON types; arguments of another one."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value}

    def check(
        self,
        step: Callable[[], Any],
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        hooks: Sequence[Any] = (),
        *,
        process_group: GroupLike = None,
    ) -> ContractReport:
        """Run one step, really, and compare what it used with what was declared.

        Collective: every rank of `process_group` must call this. All return the same.

        Args:
            step: Takes nothing; runs forward, backward and optimizer, as the loop does.
            model: That it trains, wrapped or not, compiled or not; or several.
            optimizer: That it steps, or several; None leaves out what stands in it.
            hooks: The states of communication hooks that `distamp.comm_hooks.register_comm_hook`
                returned; those of DDP and FSDP1 are found without.
            process_group: The ranks that train the model. None is the default group.

        Raises:
            ConfigError: A pattern matches no module.
            TypeError: ``model`` is not a module.
            RankMismatchError: Another rank makes another call.
            DistampError: ``step``, or the check itself, raised on another rank. Where it raises
                here, that is raised.
        """
        with self.watch(model, optimizer, hooks, process_group=process_group) as found:
            step()
        return found

    @contextmanager
    def watch(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        hooks: Sequence[Any] = (),
        *,
        process_group: GroupLike = None,
    ) -> Iterator[ContractReport]:
        """Check what runs in the block, like `check`; the result is filled when the block ends.

        Collective: every rank of `process_group` must call this.
        """
        group = begin_call("PrecisionContract.check()", process_group)
        with raised_on_every_rank("the check of a contract", group):
            observer = _observer_of(model, optimizer, hooks)
        self._require_matches([*observer.names.values()], group)
        found = ContractReport(self)
        with raised_on_every_rank("the step that a contract watches", group), observer.observing():
            yield found
        with raised_on_every_rank("the check of a contract", group):
            observed = observer.seen, observer.unseen()
        found.fill(every_rank(observed, group), global_ranks(group))

    def judge(
        self, ranks: Sequence[Mapping[Seen, tuple[int, int]]], numbers: Sequence[int]
    ) -> Iterator[Violation]:
        """Yield what is not as declared among what each rank saw, and where ranks differ.

        Args:
            ranks: The observations of each rank of the group.
            numbers: The numbers of these ranks in the default group.
        """
        phases: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
        dtypes: dict[tuple[str, str], dict[int, dict[str, None]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for rank, rows in enumerate(ranks):
            for row in rows:
                dtypes[row.key, row.where][rank][row.found] = None
                if not self.allows(row):
                    phases[row.key, row.where, row.found, row.group][row.phase] = None
        causes: dict[tuple[Any, ...], set[str]] = defaultdict(set)
        for (key, where, found, group), when in phases.items():
            causes[key, self.declared(key, where), found, group, tuple(when)].add(where)
            dtypes.pop((key, where), None)
        for (key, where), by_rank in dtypes.items():
            if len({frozenset(each) for each in by_rank.values()}) > 1:
                each_rank = [
                    f"{'/'.join(by_rank[rank])} on rank {numbers[rank]}" for rank in sorted(by_rank)
                ]
                causes[key, (), ", ".join(each_rank), "", None].add(where)
        for (key, declared, found, group, _), names in causes.items():
            of = [
                {
                    row: n
                    for row, n in rows.items()
                    if row.key == key
                    and row.where in names
                    and (not declared or (row.found, row.group) == (found, group))
                }
                for rows in ranks
            ]
            everywhere = {row.where for rows in ranks for row in rows if row.key == key}
            violation = _violation(key, declared, found, group, names, len(everywhere), of)
            yield replace(violation, ranks=tuple(numbers[rank] for rank in violation.ranks))

    def allows(self, row: Seen) -> bool:
        """Return whether what was seen is as declared, or nothing was."""
        declared = self.declared(row.key, row.where)
        return not declared or ("fp8" if "float8" in row.found else row.found) in declared

    def _require_matches(self, names: Sequence[str], group: ProcessGroup | None) -> None:
        """Raise for a pattern that matches no module on any rank."""
        matched = {each for each in self.modules if any(_matches(name, each) for name in names)}
        anywhere = set().union(*every_rank(matched, group))
        for pattern in self.modules.keys() - anywhere - {OUTSIDE}:
            near = difflib.get_close_matches(pattern, names, 3, 0.3) or names[1:4]
            raise ConfigError(
                f"the contract's pattern {pattern!r} matches no module of the model; there are "
                f"{', '.join(near) or 'none with a name'}"
            )


def _observer_of(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    hooks: Sequence[Any],
) -> Observer:
    models = (model,) if isinstance(model, nn.Module) else tuple(model)
    for each in models:
        if not isinstance(each, nn.Module):
            raise TypeError(f"model is a torch.nn.Module or several, got {type(each).__name__}")
    given: Any = () if optimizer is None else optimizer
    optimizers = (given,) if hasattr(given, "step") else tuple(given)
    return Observer(models, optimizers, hooks)


def _dtypes(key: str, given: Any) -> tuple[str, ...]:
    """Short names of the dtypes that were given for a key."""
    values = [given] if isinstance(given, str | torch.dtype) else given
    names = tuple(short(value) for value in values)
    names = tuple(dict.fromkeys("fp8" if n.startswith("float8") else n for n in names))
    for name in names:
        if name not in _NAMES:
            choices = choices_text(_NAMES)
            hint = similar_names(name, _NAMES)
            raise ConfigError(
                f"{key}= of a PrecisionContract was {name!r}, which is no dtype. Choose from "
                f"{choices}, or pass a torch.dtype. {hint}"
            )
    return names


def _matches(where: str, pattern: str) -> bool:
    """Whether a shell pattern matches a module, or one that it is in."""
    parts = where.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def _violation(
    key: str,
    declared: tuple[str, ...],
    found: str,
    group: str,
    names: set[str],
    total: int,
    of: Sequence[Mapping[Seen, tuple[int, int]]],
) -> Violation:
    """One cause as a violation; ``of`` has what each rank saw of it."""
    rows = dict.fromkeys(row for rows in of for row in rows)
    shown = collapsed((name, "") for name in names)
    violation = Violation(
        key,
        tuple(sorted(set(shown.values()))),
        len(names),
        total,
        declared,
        found,
        ", ".join(dict.fromkeys(row.phase for row in rows)),
        ", ".join(dict.fromkeys(row.op for row in rows)),
        group,
        max(sum(calls for calls, _ in rows.values()) for rows in of),
        max(sum(size for _, size in rows.values()) for rows in of),
        tuple(rank for rank, rows in enumerate(of) if rows),
    )
    return replace(violation, fix=next((fix for applies, fix in _FIXES if applies(violation)), ""))


_HALF = ("bf16", "fp16")


def _half(violation: Violation) -> bool:
    return violation.found in _HALF


# When, and what most likely puts it right; the first that applies.
_FIXES: tuple[tuple[Callable[[Violation], bool], str], ...] = (
    (
        lambda it: not it.declared,
        "ranks train in different precisions: build, cast and wrap the model alike on all of them",
    ),
    (
        lambda it: it.key == "parameters" and _half(it),
        "the model was loaded or cast in half precision (from_pretrained(dtype=), .half(), "
        "cast_model): load it in float32, before it is wrapped",
    ),
    (
        lambda it: it.key == "parameters",
        "cast the model before it is wrapped and before its optimizer is made: cast_model",
    ),
    (
        lambda it: it.key == "compute" and it.found == "fp32",
        "run the forward pass in autocast(...) or with FSDP's param_dtype; look in these modules "
        "for autocast(enabled=False), .float(), pins, ops that no list has (grouped_mm), and "
        "attention without a fused kernel (dropout on a CPU), which torch computes in float32",
    ),
    (
        lambda it: it.key == "compute" and {it.found, *it.declared} == {*_HALF},
        "pass dtype= to autocast, whose own default on CUDA is float16",
    ),
    (
        lambda it: it.key == "compute",
        "pin these modules: set_module_precision(module, 'fp32'); or leave autocast around them",
    ),
    (
        lambda it: it.key == "norms" and _half(it),
        "keep these norms in float32: set_module_precision(norm, 'fp32'), and under FSDP2 a "
        "fully_shard of their own without param_dtype",
    ),
    (
        lambda it: it.key == "param_all_gather" and "fp8" in it.declared,
        "only FSDP2's fully_shard gathers float8: convert the model before it, with "
        "enable_fsdp_float8_all_gather; DTensor.redistribute gathers what the weight is cast to",
    ),
    (
        lambda it: it.key == "param_all_gather",
        "it is the dtype of the parameters, or MixedPrecisionPolicy(param_dtype=) of this part",
    ),
    (
        lambda it: it.key == "grad_reduce" and "all_reduce" in it.op and it.phase == "backward",
        "FSDP2 applies reduce_dtype to its own reduction alone, and sums over this mesh in "
        "param_dtype: shard these modules with param_dtype=torch.float32",
    ),
    (
        lambda it: it.key == "grad_reduce" and "scatter" in it.op,
        "pass reduce_dtype= to the MixedPrecisionPolicy of every part (FSDP1: MixedPrecision)",
    ),
    (
        lambda it: it.key == "grad_reduce",
        "DDP sends gradients in their parameters' dtype, or in its communication hook's: look at "
        "both",
    ),
    (
        lambda it: it.key == "activations" and "send" in it.op,
        "a pipeline sends what its stage returns: return this dtype from the stage, and if "
        "initialize casts what it returns, pass "
        "PrecisionLevel.from_name(level).replace(output=dtype)",
    ),
    (
        lambda it: it.key == "activations",
        "cast before the layer that sends: the region's dtype does not reach DTensor's messages",
    ),
    (
        lambda it: it.key == "master_weights" and _half(it),
        "updates below half an ulp of these weights are lost: MasterParameters(optimizer), level "
        "fp16-O2 or bf16-O2, or float32 shards with FSDP's param_dtype",
    ),
    (
        lambda it: it.key == "optimizer_state" and _half(it),
        "an optimizer makes its state in the dtype of what it steps: give it float32 masters, or "
        "load the state in float32",
    ),
)
