"""Programs for real ranks from runs of the model, and their outcome on a scaler or a guard.

SPIN walks the model at random, and prints the calls of each rank, the findings in its gradients,
and the steps. The same calls on a `DistGradScaler` or `StepGuard` must step and raise in the same
places. walks.json stores the output for machines without SPIN, and ``python -m tests.model
--store`` writes it.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distamp import DistGradScaler, StepGuard
from distamp.errors import GradientError
from distamp.guard import Snapshots
from tests.model.check import FOLDER, run_tool

__all__ = [
    "STORED",
    "WALK_KINDS",
    "Call",
    "Program",
    "RankPrograms",
    "WalkKind",
    "load_programs",
    "run_programs",
    "spin_version",
    "walk_model",
]

STORED = FOLDER / "walks.json"


class WalkKind(NamedTuple):
    """The model and the macros of some walks.

    Args:
        model: ``guard`` or ``scaler``.
        num_ranks: The number of ranks.
        defines: Further macros of the model, without ``-D``.
    """

    model: str
    num_ranks: int
    defines: str

    @property
    def name(self) -> str:
        """The key in walks.json."""
        return f"{self.model} RANKS={self.num_ranks} {self.defines}"


WALK_KINDS = (
    WalkKind("scaler", 2, "CALLS=9"),
    WalkKind("scaler", 2, "CALLS=9 ERROR"),
    WalkKind("scaler", 3, "CALLS=9 ERROR"),
    WalkKind("guard", 2, "CALLS=9"),
    WalkKind("guard", 2, "CALLS=9 ERROR"),
    WalkKind("guard", 2, "CALLS=9 LIMIT=2"),
    WalkKind("guard", 3, "CALLS=9 ERROR"),
    WalkKind("guard", 2, "CALLS=9 ABSENT"),
    WalkKind("guard", 2, "CALLS=9 FAILS CATCHES"),
    WalkKind("guard", 2, "CALLS=9 REQUESTS"),
    WalkKind("guard", 2, "CALLS=9 UPDATES CATCHES"),
    WalkKind("guard", 2, "CALLS=9 REPLICAS CATCHES"),
    WalkKind("guard", 3, "CALLS=9 SNAPSHOTS UPDATES CATCHES"),
    WalkKind("guard", 2, "CALLS=9 SNAPSHOTS FAILS CATCHES"),
    WalkKind("scaler", 2, "CALLS=9 FAILS CATCHES"),
)
WALKS_PER_KIND = 6

# The model's scale is 0, 1 or 2: a power of two.
SCALES = {0: 1.0, 1: 2.0, 2: 4.0}
NUM_OPTIMIZERS = 2
# Gradients by the model's findings in a norm: fine, above the limit, not finite.
GRADIENTS = (1.0, 1e6, math.nan)
NOT_FINITE = 2


@dataclass
class Call:
    """A call of a rank, and the events in it.

    Args:
        name: The call by the model's name.
        optimizers: The optimizers of the call, a bit for each.
        value: The new scale of ``update``.
        findings: A bit for each optimizer that overflows. Of a norm 1 for a large one, 2 for NaN.
        raises: Whether reading the gradients raises on this rank.
        missing_grads: A bit for each optimizer without a gradient on this rank.
        failing_steps: A bit for each optimizer with a step that raises on this rank.
        requests_skip: Whether this rank requests a skip.
        inf_writes: A bit for each optimizer with a step that writes inf on this rank.
        drift_writes: A bit for each optimizer with a step that writes another value on this rank.
    """

    name: str
    optimizers: int
    value: int
    findings: int = 0
    raises: bool = False
    missing_grads: int = 0
    failing_steps: int = 0
    requests_skip: bool = False
    inf_writes: int = 0
    drift_writes: int = 0


class Step(NamedTuple):
    """A step that was counted.

    Args:
        optimizer: The index of the optimizer.
        is_taken: Whether it was taken.
        scale: The loss scale.
    """

    optimizer: int
    is_taken: bool
    scale: float


@dataclass
class Program:
    """The calls of one rank and their outcome.

    Args:
        calls: The calls.
        steps: The steps that were counted.
        num_errors: The number of calls that raise.
    """

    calls: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_errors: int = 0


#: The program of every rank.
RankPrograms = Sequence[Program]


# -- walks through the model -----------------------------------------------------------------------


def load_programs(kind: WalkKind) -> list[RankPrograms]:
    """Return the stored programs of a kind, except if a rank waits in vain."""
    stored = json.loads(STORED.read_text())[kind.name]
    programs: list[RankPrograms] = []
    for lines in stored:
        rank_programs = parse_walk(kind.num_ranks, lines)
        if rank_programs is not None:
            programs.append(rank_programs)
    return programs


def spin_version() -> str:
    """Return SPIN's version, because another version may walk differently."""
    return run_tool(["spin", "-V"], ".").strip()


def walk_model(kind: WalkKind, count: int = WALKS_PER_KIND) -> list[list[str]]:
    """Return SPIN's output of random walks that real ranks can follow to their end."""
    walks: list[list[str]] = []
    for seed in range(1, 20 * WALKS_PER_KIND):
        lines = walk_once(kind, seed)
        # A rank of a pool cannot wait for a rank that is gone.
        programs = parse_walk(kind.num_ranks, lines)
        if programs is not None and any(program.steps for program in programs):
            walks.append(lines)
        if len(walks) == count:
            break
    return walks


def walk_once(kind: WalkKind, seed: int) -> list[str]:
    """Return the lines that SPIN prints in one random walk."""
    macros = ["PROGRAMS", f"RANKS={kind.num_ranks}", *kind.defines.split()]
    defines = [f"-D{macro}" for macro in macros]
    model = str(FOLDER / f"{kind.model}.pml")
    with tempfile.TemporaryDirectory() as folder:  # SPIN writes into the current folder.
        output = run_tool(["spin", f"-n{seed}", "-T", *defines, model], folder)
    lines: list[str] = []
    for line in output.splitlines():
        words = line.split()
        if re.match(r" *\d [A-Za-z]", line) and words[1] != "processes":
            lines.append(" ".join(words))
    return lines


def parse_walk(num_ranks: int, lines: Sequence[str]) -> list[Program] | None:
    """Return the program of each rank; None if a rank waits in vain."""
    programs = [Program() for _ in range(num_ranks)]
    for line in lines:
        rank, *words = line.split()
        if words in (["lost"], ["timeout"]):
            return None
        add_line(programs[int(rank)], words)
    return programs


def add_line(program: Program, words: list[str]) -> None:
    """Add a line of SPIN's output to the program of its rank."""
    match words:
        case ["raised"] | ["alone"]:
            program.num_errors += 1
        case ["found", findings, "error", error, *missing]:
            call = program.calls[-1]
            call.findings, call.raises = int(findings), error == "1"
            call.missing_grads = int(missing[1]) if missing else 0
        case ["requests"]:
            program.calls[-1].requests_skip = True
        case ["writes", optimizer, "inf"]:
            program.calls[-1].inf_writes |= 1 << int(optimizer)
        case ["writes", optimizer, "drift"]:
            program.calls[-1].drift_writes |= 1 << int(optimizer)
        case ["fails", optimizer]:
            program.calls[-1].failing_steps |= 1 << int(optimizer)
        case ["stepped", optimizer, "taken", taken, "scale", scale]:
            program.steps.append(Step(int(optimizer), taken == "1", SCALES[int(scale)]))
        case [name, optimizers, "value", value]:
            program.calls.append(Call(name, int(optimizers), int(value)))


# -- the same calls on a scaler or a guard ---------------------------------------------------------


class _FailingReads:
    """Raises an error where gradients are read, if it is told to."""

    fails = False

    def _unscale_grads_(self, *args, **kwargs):
        self.is_sharded(None)
        return super()._unscale_grads_(*args, **kwargs)

    def is_sharded(self, parameter: object) -> bool:
        """Return True for each parameter, so that its gradients may differ between ranks."""
        if self.fails:
            raise GradientError("planted")
        return True

    def _note_layout_fns(self, *layout_fns: object) -> None:
        """Leave the comparison of replicas without that declaration."""


class _Scaler(_FailingReads, DistGradScaler):
    pass


class _Guard(_FailingReads, StepGuard):
    pass


class Job:
    """A scaler or a guard on one rank, with a plain and a fused optimizer.

    Args:
        model: ``guard`` or ``scaler``.
        defines: The macros of the model.
    """

    def __init__(self, model: str, defines: str) -> None:
        self.guard: Any = self._create_guard(model, defines)
        self.weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(NUM_OPTIMIZERS)]
        self.optimizers = [
            torch.optim.SGD([self.weights[0]], 2.0**-4),
            torch.optim.SGD([self.weights[1]], 2.0**-4, fused=True),
        ]
        self.guard.register_optimizers(*self.optimizers)
        # The model's EVERY.
        parameters = torch.nn.ParameterList(self.weights)
        self.snapshots = Snapshots(parameters, self.optimizers, self.guard, every=2, keep=1)

    @staticmethod
    def _create_guard(model: str, defines: str) -> Any:
        if model == "scaler":
            low, first, high = SCALES.values()
            return _Scaler(
                "cpu", init_scale=first, growth_interval=1, min_scale=low, max_scale=high
            )
        return _Guard(
            max_consecutive_skips=2 if "LIMIT=2" in defines else None,
            check_update="UPDATES" in defines,
            check_replicas_every=1 if "REPLICAS" in defines else None,
        )

    def make_call(self, call: Call) -> Iterator[Step]:
        """Make a call, and yield the steps that it counts, also if it raises."""
        indices = [index for index in range(NUM_OPTIMIZERS) if call.optimizers >> index & 1]
        self._set_grads(call, indices)
        self.guard.fails = call.raises
        weights_before = [weight.detach().clone() for weight in self.weights]
        counts_before = [self.guard.step_counts(optimizer) for optimizer in self.optimizers]
        scale = self.guard.get_scale()
        hooks = self._plant_events(call)
        try:
            self._dispatch(call, [self.optimizers[index] for index in indices])
        finally:
            for hook in hooks:
                hook.remove()
            for index in indices:
                counts = self.guard.step_counts(self.optimizers[index])
                if counts == counts_before[index]:
                    continue
                is_taken = not torch.equal(weights_before[index], self.weights[index])
                has_grad = self.weights[index].grad is not None
                if not has_grad or not weights_before[index].isfinite().all():
                    # The step changes no weight of this rank.
                    is_taken = counts.taken > counts_before[index].taken
                yield Step(index, is_taken, scale)

    def _set_grads(self, call: Call, indices: Sequence[int]) -> None:
        """Set the gradients that are not unscaled yet, by the findings of the model."""
        by_norm = call.name == "STEP_BY_NORM"
        with_grads = [index for index in indices if not call.missing_grads >> index & 1]
        for index in indices:
            finding = NOT_FINITE if call.findings >> index & 1 else 0
            if by_norm:  # The norm is over all, so one gradient decides.
                finding = call.findings if index == min(with_grads, default=-1) else 0
            if not by_norm and self.guard.is_unscaled(self.optimizers[index]):
                continue
            self.weights[index].grad = None
            if index in with_grads:
                self.weights[index].grad = torch.full((3,), GRADIENTS[finding])

    def _plant_events(self, call: Call) -> list[Any]:
        """Register hooks for the steps that raise or write other values; return them."""
        hooks: list[Any] = []
        for index, optimizer in enumerate(self.optimizers):
            if call.failing_steps >> index & 1:
                hooks.append(optimizer.register_step_pre_hook(_raise))
            if call.inf_writes >> index & 1:
                hooks.append(optimizer.register_step_post_hook(_write_inf))
            if call.drift_writes >> index & 1:
                hooks.append(optimizer.register_step_post_hook(_write_drift))
        return hooks

    def _dispatch(self, call: Call, optimizers: list[torch.optim.Optimizer]) -> None:
        guard = self.guard
        match call.name:
            case "SCALE":
                guard.scale(torch.ones(()))
            case "UNSCALE_":
                guard.unscale_(*optimizers)
            case "CLIP_GRAD_NORM_":
                target: Any = optimizers[0]
                if len(optimizers) > 1:
                    target = self.weights
                guard.clip_grad_norm_(target, 1.0, shard_group_fn=guard.is_sharded)
            case "UPDATE":
                guard.update()
            case "UPDATE_TO":
                guard.update(SCALES[call.value])
            case "STEP":
                guard.step_all(optimizers)
            case "STEP_IF":
                guard.step_all(optimizers, skip_if=call.requests_skip)
            case "STEP_BY_NORM":
                guard.step_all(
                    optimizers,
                    max_norm=1.0,
                    skip_norm_above=1e3,
                    skip_if=call.requests_skip,
                    shard_group_fn=guard.is_sharded,
                )
            case "RECORD":
                self.snapshots.record()
            case "REWIND":
                self.snapshots.rewind()


def _raise(*_: object) -> None:
    raise RuntimeError("planted in a step")


def _write_inf(optimizer: torch.optim.Optimizer, *_: object) -> None:
    (weight,) = optimizer.param_groups[0]["params"]
    weight.data.fill_(math.inf)


def _write_drift(optimizer: torch.optim.Optimizer, *_: object) -> None:
    (weight,) = optimizer.param_groups[0]["params"]
    weight.data.add_(1.0)


def run_programs(
    programs: Sequence[RankPrograms], model: str, defines: str
) -> list[tuple[list[Step], int]]:
    """Make the calls of each program on this rank.

    Args:
        programs: The programs of all ranks.
        model: ``guard`` or ``scaler``.
        defines: The macros of the model.

    Returns:
        The steps of each program, and its number of calls that raised.
    """
    outcomes: list[tuple[list[Step], int]] = []
    for rank_programs in programs:
        job = Job(model, defines)
        steps: list[Step] = []
        num_errors = 0
        for call in rank_programs[dist.get_rank()].calls:
            try:
                steps.extend(job.make_call(call))
            except RuntimeError:
                num_errors += 1
                if "CATCHES" not in defines:
                    break
        outcomes.append((steps, num_errors))
    return outcomes
