"""PrecisionContract: the dtypes that a step is declared to use, checked on a real step."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import nn

from distamp.error_text import choices_text, similar_names
from distamp.errors import ConfigError
from distamp.precision_level import PrecisionLevel
from distamp.process_group import GroupLike
from distamp.report.contract_recorder import RankObservations
from distamp.report.formatting import NO_MODULE, JsonResult, dtype_abbr, text_table
from distamp.report.rank_group import RankGroup
from distamp.report.step_observer import StepObserver
from distamp.report.violations import Violation, find_violations

__all__ = ["ContractReport", "PrecisionContract"]

_DTYPE_ABBRS = ("fp32", "bf16", "fp16", "fp8", "fp64", "int8", "uint8")
_DESCRIPTIONS = {
    "parameters": "the model's parameters after the step",
    "compute": "matrix products, convolutions and attention",
    "norms": "inputs and weights of norms",
    "param_all_gather": "parameters sent between ranks",
    "grad_reduce": "gradients sent between ranks",
    "activations": "messages of tensor, sequence and pipeline parallel",
    "master_weights": "weights that the optimizer steps",
    "optimizer_state": "the optimizer's state, such as moments",
}
_KEYS = tuple(_DESCRIPTIONS)
# Compiled code hides the tensors of these keys, so a contract takes them from an eager run.
_EAGER_KEYS = ("compute", "norms")
# The keys of an exception that is written as a dtype alone.
_MODULE_KEYS = ("parameters", "compute", "norms")
_HEADINGS = ("", "declared", "found", "", "meaning")

Dtypes = str | torch.dtype | Sequence[str | torch.dtype]
Models = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class ContractReport(JsonResult, Sequence[Violation]):
    """Violations that a check found, the same on every rank. Empty, and so false, without one.

    Attributes:
        contract: The contract.
        seen: The number of calls or tensors, by key and dtype.
        unseen: Sentences about modules that were not checked, and that did not run.
        reasons: The reason for each key without a call or tensor, by key.
        judged_by: The run of the step that decided about a key, by key: ``"compiled step"`` or
            ``"eager step"``. Empty if no compiled code ran.
    """

    def __init__(self, contract: PrecisionContract) -> None:
        self.contract = contract
        self.seen: dict[str, dict[str, int]] = {}
        self.unseen: tuple[str, ...] = ()
        self.reasons: dict[str, str] = {}
        self.judged_by: dict[str, str] = {}
        self._violations: tuple[Violation, ...] = ()

    def __len__(self) -> int:
        return len(self._violations)

    def __getitem__(self, index: Any) -> Any:
        return self._violations[index]

    def set_observations(self, ranks: Sequence[RankObservations], numbers: Sequence[int]) -> None:
        """Compare the observations of all ranks with the contract.

        Args:
            ranks: The observations of each rank of the group.
            numbers: The numbers of these ranks in the default group.
        """
        sentences: dict[str, None] = {}
        reasons: dict[str, dict[str, None]] = {}
        for observations in ranks:
            for key, reason in observations.reasons.items():
                reasons.setdefault(key, {})[reason] = None
            sentences.update(dict.fromkeys(observations.not_checked))
            counts: Counter[tuple[str, str]] = Counter()
            for row, (calls, _) in observations.counts.items():
                counts[row.key, row.dtype] += calls
            for (key, dtype), count in sorted(counts.items()):
                by_dtype = self.seen.setdefault(key, {})
                by_dtype[dtype] = max(count, by_dtype.get(dtype, 0))
        self.unseen = tuple(sentences)
        for key in _KEYS:
            if key not in self.seen:
                self.reasons[key] = ", and ".join(reasons[key])
        self._violations = find_violations(ranks, numbers, self.contract.declared, _KEYS)

    def __str__(self) -> str:
        noun = "violation" if len(self) == 1 else "violations"
        verb = "did not run" if self else "ran"
        lines = [f"{len(self)} {noun}: the step {verb} in the precisions that were declared"]
        rows = [self._row(key) for key in _KEYS]
        lines += text_table(_HEADINGS, rows, numbers=0)
        lines += [f"{number}. {violation}" for number, violation in enumerate(self, 1)]
        lines += [f"not seen: {sentence}" for sentence in self.unseen]
        keys_by_run: dict[str, list[str]] = {}
        for key, run in self.judged_by.items():
            keys_by_run.setdefault(run, []).append(key)
        for run, keys in keys_by_run.items():
            key_list = ", ".join(keys)
            lines.append(f"judged by the {run}: {key_list}")
        return "\n".join(lines)

    def _row(self, key: str) -> tuple[str, ...]:
        """Return the cells of a key in the table."""
        declared = " or ".join(self.contract.declared(key)) or "-"
        counts = self.seen.get(key, {})
        cells = [f"{count:,} {dtype}" for dtype, count in counts.items()]
        counts_text = ", ".join(cells) or "-"
        status = "kept"
        description = _DESCRIPTIONS[key]
        if any(violation.key == key for violation in self):
            status = "BROKEN"
        elif declared == "-":
            status = "-"
        elif not counts:
            status = "nothing seen"
            reason = self.reasons.get(key, "the step has not ended")
            description = f"{description}: {reason}"
        return key, declared, counts_text, status, description

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        values: dict[str, Any] = {"contract": self.contract.to_dict()}
        values["violations"] = [violation.to_dict() for violation in self]
        values["seen"] = self.seen
        values["unseen"] = list(self.unseen)
        values["reasons"] = self.reasons
        values["judged_by"] = self.judged_by
        return values


@dataclass(frozen=True)
class PrecisionContract:
    """The dtypes that each part of a training step is declared to have.

    torch has no such thing: ``MixedPrecisionPolicy`` and ``autocast`` are requests, and nothing
    reports whether they are met. `check` runs one step and compares. A dtype is written ``"fp32"``,
    ``"bf16"``, ``"fp16"``, ``"fp8"`` or as a ``torch.dtype``; a tuple allows several. A field that
    is left out is not checked.

    Args:
        parameters: The model's parameters after the step.
        compute: The first operands of matrix products, convolutions and attention.
        norms: The inputs and weights of norms. The input of a norm in Python is the tensor before
            its mean.
        param_all_gather: Parameters between ranks: all-gathers of FSDP, broadcasts of sharded
            optimizers.
        grad_reduce: Gradients between ranks, in the dtype of the message.
        activations: Messages of tensor, sequence and pipeline parallel, forward and backward.
        master_weights: The masters or parameters that the optimizer steps.
        optimizer_state: The optimizer's state, except masters and numbers.
        modules: Exceptions, by shell patterns over module names. Of several matches the last one
            counts, for a module and all modules inside it. A dtype stands for parameters, compute
            and norms. A dict names the keys:
            ``{"lm_head": "fp32", "*.router": {"compute": "fp32"}}``. ``"(outside)"`` is for code
            outside of modules, such as the messages of a pipeline schedule.

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
        for key in _KEYS:
            object.__setattr__(self, key, _dtype_abbrs(key, getattr(self, key)))
        exceptions: dict[str, dict[str, tuple[str, ...]]] = {}
        for pattern, dtypes_by_key in self.modules.items():
            if not isinstance(dtypes_by_key, Mapping):
                dtypes_by_key = dict.fromkeys(_MODULE_KEYS, dtypes_by_key)
            exceptions[pattern] = {}
            for key, dtypes in dtypes_by_key.items():
                _check_key(key, pattern)
                exceptions[pattern][key] = _dtype_abbrs(key, dtypes)
        object.__setattr__(self, "modules", exceptions)

    @classmethod
    def from_level(cls, level: str | PrecisionLevel, *models: nn.Module) -> Self:
        """Return the contract of a level, such as ``"bf16"``, for these models.

        Without models the contract has neither batch norms that stay float32 nor pins; see
        `PrecisionLevel.contract`.
        """
        return cls(**PrecisionLevel.from_name(level).contract(*models))

    def declared(self, key: str, where: str = "") -> tuple[str, ...]:
        """Return the dtypes that are declared for a key at a module or parameter; () if none."""
        dtypes: Any = getattr(self, key)
        exceptions: Mapping[str, Any] = self.modules
        for pattern, dtypes_by_key in exceptions.items():
            if key in dtypes_by_key and _matches(where, pattern):
                dtypes = dtypes_by_key[key]
        return tuple(dtypes)

    def to_dict(self) -> dict[str, Any]:
        """Return the contract as JSON types, which are arguments of an equal contract."""
        values = {}
        for contract_field in fields(self):
            value = getattr(self, contract_field.name)
            if value:
                values[contract_field.name] = value
        return values

    def check(
        self,
        step: Callable[[], Any],
        model: Models,
        optimizer: Optimizers = None,
        hooks: Sequence[Any] = (),
        *,
        process_group: GroupLike = None,
    ) -> ContractReport:
        """Run one real step, and compare its dtypes with the contract.

        Compiled code hides its products and norms. If the step runs any, it runs a second time
        with compiled code run eagerly, and the second run decides about ``compute`` and ``norms``.
        It changes no parameter, gradient, buffer, random state or optimizer of torch. A loss scale,
        a guard or a schedule in the step counts two steps. `watch` leaves the second run out.

        Collective: every rank of `process_group` must call this. All return the same.

        Args:
            step: A function without arguments that runs forward, backward and optimizer, like the
                training loop.
            model: The model, wrapped or not, compiled or not; or several models.
            optimizer: The optimizer, or several. None leaves out master weights and states.
            hooks: The communication hooks that `distamp.comm_hooks.register_comm_hook` returned.
                Hooks of DDP and FSDP1 need not be passed.
            process_group: The ranks that train the model; the default group if None.

        Raises:
            ConfigError: A pattern matches no module.
            TypeError: ``model`` is not a module.
            RankMismatchError: Another rank makes another call.
            DistampError: ``step``, or the check itself, raised on another rank. The rank on which
                it raised has its own error.
        """
        group = RankGroup.begin("PrecisionContract.check()", process_group)
        observer = self._observer(group, model, optimizer, hooks)
        with observer.observe() as ranks:
            step()
        report = ContractReport(self)
        if any(observations.ran_compiled for observations in ranks):
            with observer.observe_eagerly() as eager_ranks:
                step()
            pairs = zip(ranks, eager_ranks, strict=True)
            ranks = [compiled.replace_keys(_EAGER_KEYS, eager) for compiled, eager in pairs]
            report.judged_by.update(dict.fromkeys(_KEYS, "compiled step"))
            report.judged_by.update(dict.fromkeys(_EAGER_KEYS, "eager step"))
        report.set_observations(ranks, group.ranks)
        return report

    @contextmanager
    def watch(
        self,
        model: Models,
        optimizer: Optimizers = None,
        hooks: Sequence[Any] = (),
        *,
        process_group: GroupLike = None,
    ) -> Iterator[ContractReport]:
        """Check the step in the block, like `check`; the result is complete after the block.

        Compiled code stays compiled, and the products and norms inside its kernels are not seen.

        Collective: every rank of `process_group` must call this.
        """
        group = RankGroup.begin("PrecisionContract.check()", process_group)
        observer = self._observer(group, model, optimizer, hooks)
        report = ContractReport(self)
        with observer.observe() as ranks:
            yield report
        report.set_observations(ranks, group.ranks)

    def _observer(
        self, group: RankGroup, model: Models, optimizer: Optimizers, hooks: Sequence[Any]
    ) -> StepObserver:
        with group.raise_together("the check of a contract"):
            optimizers = _optimizers(optimizer)
            observer = StepObserver(group, _models(model), optimizers, hooks)
        self._check_patterns(observer.names, group)
        return observer

    def _check_patterns(self, names: Sequence[str], group: RankGroup) -> None:
        """Raise for a pattern that matches no module on any rank."""
        matched = set()
        for pattern in self.modules:
            if any(_matches(name, pattern) for name in names):
                matched.add(pattern)
        matched.update(*group.gather(matched))
        for pattern in self.modules:
            if pattern not in matched and pattern != NO_MODULE:
                similar = difflib.get_close_matches(pattern, names, 3, 0.3) or names[1:4]
                raise ConfigError(
                    f"The contract's pattern {pattern!r} matches no module of the model. There are "
                    f"{', '.join(similar) or 'no modules with a name'}."
                )


def _models(model: Models) -> tuple[nn.Module, ...]:
    models = (model,) if isinstance(model, nn.Module) else tuple(model)
    for module in models:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"model= is a torch.nn.Module or several of them, not {type(module).__name__}."
            )
    return models


def _optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    # A wrapper of an optimizer need not be a subclass of torch's.
    if hasattr(optimizer, "step"):
        return (optimizer,)
    if isinstance(optimizer, Iterable):
        optimizers = tuple(optimizer)
        if all(hasattr(candidate, "step") for candidate in optimizers):
            return optimizers
    raise TypeError(
        f"optimizer= is a torch.optim.Optimizer or several of them, not {type(optimizer).__name__}."
    )


def _check_key(key: str, pattern: str) -> None:
    if key not in _KEYS:
        hint = similar_names(key, list(_KEYS))
        raise ConfigError(
            f"modules= of a PrecisionContract has the key {key!r} for the pattern {pattern!r}. The "
            f"keys are {choices_text(_KEYS)}. {hint}"
        )


def _dtype_abbrs(key: str, dtypes: Any) -> tuple[str, ...]:
    """Return the short names of the dtypes that were passed for a key."""
    if isinstance(dtypes, str | torch.dtype):
        dtypes = [dtypes]
    names: dict[str, None] = {}
    for dtype in dtypes:
        name = dtype_abbr(dtype)
        if name.startswith("float8"):
            name = "fp8"
        if name not in _DTYPE_ABBRS:
            choices = choices_text(_DTYPE_ABBRS)
            hint = similar_names(name, _DTYPE_ABBRS)
            raise ConfigError(
                f"{key}= of a PrecisionContract was {name!r}, which is no dtype. Choose from "
                f"{choices}, or pass a torch.dtype. {hint}"
            )
        names[name] = None
    return tuple(names)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a module, or a module around it."""
    components = name.split(".")
    for count in range(1, len(components) + 1):
        if fnmatch.fnmatchcase(".".join(components[:count]), pattern):
            return True
    return False
