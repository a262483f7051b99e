"""Programs for real ranks, drawn from the model's own runs, and what they do there.

SPIN walks the model at random and prints what each rank calls, what it finds in its gradients, and
what it steps; the same calls on a `DistGradScaler` or
`StepGuard` must step and raise alike. What it printed is
stored in walks.json, for machines without SPIN; ``python -m tests.model --store`` writes it anew.
"""

import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distamp import DistGradScaler, StepGuard
from distamp.errors import GradientError
from tests.model.check import FOLDER, tool

__all__ = ["DRAWN", "STORED", "Call", "Program", "draw", "run", "version", "walks"]

STORED = FOLDER / "walks.json"
# Of which model, on how many ranks, with what else.
DRAWN = (
    ("scaler", 2, "CALLS=9"),
    ("scaler", 2, "CALLS=9 ERROR"),
    ("scaler", 3, "CALLS=9 ERROR"),
    ("guard", 2, "CALLS=9"),
    ("guard", 2, "CALLS=9 ERROR"),
    ("guard", 2, "CALLS=9 LIMIT=2"),
    ("guard", 3, "CALLS=9 ERROR"),
    ("guard", 2, "CALLS=9 ABSENT"),
    ("guard", 2, "CALLS=9 FAILS CATCHES"),
    ("scaler", 2, "CALLS=9 FAILS CATCHES"),
)
COUNT = 6

# The model's scale is 0, 1 or 2: a power of two.
SCALES = {0: 1.0, 1: 2.0, 2: 4.0}


@dataclass
class Call:
    """What one rank calls, and what it finds where it looks.

    Args:
        name: The call, as the model has it.
        over: The optimizers it is about: a bit for each.
        value: What a scale is set to.
        found: A bit for each optimizer that overflows; of a norm, 1 for a large one, 2 for NaN.
        error: Whether this rank cannot look.
        lacks: A bit for each optimizer that has no gradient here.
        fails: A bit for each optimizer whose step raises here.
    """

    name: str
    over: int
    value: int
    found: int = 0
    error: bool = False
    lacks: int = 0
    fails: int = 0


@dataclass
class Program:
    """The calls of one rank and their outcome.

    Args:
        calls: The calls.
        steps: For each step the optimizer, whether it was taken, and the scale.
        raises: How many calls raise.
    """

    calls: list[Call] = field(default_factory=list)
    steps: list[tuple[int, bool, float]] = field(default_factory=list)
    raises: int = 0


def draw(model: str, ranks: int, defines: str) -> list[list[Program]]:
    """The stored programs, one a rank, which all end by themselves."""
    stored = json.loads(STORED.read_text())[f"{model} RANKS={ranks} {defines}"]
    return [program for lines in stored if (program := _program(ranks, lines))]


def version() -> str:
    """SPIN's own words; another version may walk otherwise."""
    return tool(["spin", "-V"], ".").strip()


def walks(model: str, ranks: int, defines: str) -> list[list[str]]:
    """What SPIN prints of so many random walks through the model as it is."""
    drawn = (_walk(model, ranks, seed, defines) for seed in range(1, 20 * COUNT))
    # Where a rank waits for one that is gone, no rank of a pool may follow.
    fit = (lines for lines in drawn if any(each.steps for each in _program(ranks, lines) or ()))
    return list(itertools.islice(fit, COUNT))


def _walk(model: str, ranks: int, seed: int, defines: str) -> list[str]:
    told = [f"-D{each}" for each in ("PROGRAMS", f"RANKS={ranks}", *defines.split())]
    with tempfile.TemporaryDirectory() as folder:  # SPIN writes beside where it runs
        said = tool(["spin", f"-n{seed}", "-T", *told, str(FOLDER / f"{model}.pml")], folder)
    lines = [line.split() for line in said.splitlines() if re.match(r" *\d [A-Za-z]", line)]
    return [" ".join(words) for words in lines if words[1] != "processes"]


def _program(ranks: int, lines: Sequence[str]) -> list[Program] | None:
    programs = [Program() for _ in range(ranks)]
    for line in lines:
        words = line.split()
        program = programs[int(words[0])]
        match words[1:]:
            case ["lost"] | ["timeout"]:
                return None
            case ["raised"] | ["alone"]:
                program.raises += 1
            case ["found", found, "error", error, *lacks]:
                call = program.calls[-1]
                call.found, call.error = int(found), error == "1"
                call.lacks = int(lacks[1]) if lacks else 0
            case ["fails", optimizer]:
                program.calls[-1].fails |= 1 << int(optimizer)
            case ["stepped", optimizer, "taken", taken, "scale", scale]:
                program.steps.append((int(optimizer), taken == "1", SCALES[int(scale)]))
            case [name, over, "value", value]:
                program.calls.append(Call(name, int(over), int(value)))
    return programs


class _Failing:
    """Raises where it looks, when it is told to."""

    fails = False

    def _unscale_grads_(self, *args, **kwargs):
        self.look()
        return super()._unscale_grads_(*args, **kwargs)

    def look(self, parameter: object = None) -> bool:
        """Be asked of each parameter whether it is sharded, which they all are."""
        if self.fails:
            raise GradientError("planted")
        return True


class _Scaler(_Failing, DistGradScaler):
    pass


class _Guard(_Failing, StepGuard):
    pass


def run(
    programs: Sequence[Sequence[Program]], model: str, limit: int | None, catches: bool
) -> list[tuple[list[tuple[int, bool, float]], int]]:
    """On one rank: do what each program says; return the steps, and how many calls raised.

    Args:
        programs: For each program that of every rank.
        model: ``guard`` or ``scaler``.
        limit: ``max_consecutive_skips``.
        catches: Whether a rank goes on after an error.
    """
    done = []
    low, first, high = SCALES.values()
    scales = {"init_scale": first, "growth_interval": 1, "min_scale": low, "max_scale": high}
    for program in programs:
        guarded = model == "guard"
        made = _Guard(max_consecutive_skips=limit) if guarded else _Scaler("cpu", **scales)
        weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        optimizers = [torch.optim.SGD([w], 2.0**-4, fused=i == 1) for i, w in enumerate(weights)]
        made.register_optimizers(*optimizers)
        steps: list[tuple[int, bool, float]] = []
        raises = 0
        for call in program[dist.get_rank()].calls:
            try:
                steps.extend(_steps(made, call, weights, optimizers))
            except RuntimeError:
                raises += 1
                if not catches:
                    break
        done.append((steps, raises))
    return done


def _fail(*_: object) -> None:
    raise RuntimeError("planted in a step")


def _steps(
    made: Any,
    call: Call,
    weights: Sequence[torch.nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[int, bool, float]]:
    """Make one call by a scaler or a guard; yield each step that it counts."""
    over = [index for index in range(2) if call.over >> index & 1]
    by_norm = call.name == "STEP_BY_NORM"
    have_grads = [index for index in over if not call.lacks >> index & 1]
    for index in over:
        bad = call.found * (index in have_grads[:1]) if by_norm else 2 * (call.found >> index & 1)
        value = (1.0, 1e6, math.nan)[bad]
        if by_norm or not made.is_unscaled(optimizers[index]):
            weights[index].grad = torch.full((3,), value) if index in have_grads else None
    made.fails = call.error
    given, clipped = ([these[index] for index in over] for these in (optimizers, weights))
    before = [weight.detach().clone() for weight in weights]
    counts = [made.step_counts(optimizer) for optimizer in optimizers]
    scale = made.get_scale()
    failing = [optimizers[index] for index in over if call.fails >> index & 1]
    hooks = [optimizer.register_step_pre_hook(_fail) for optimizer in failing]
    try:
        match call.name:
            case "SCALE":
                made.scale(torch.ones(()))
            case "UNSCALE_":
                made.unscale_(*given)
            case "CLIP_GRAD_NORM_":
                target = given[0] if len(given) == 1 else clipped
                made.clip_grad_norm_(target, 1.0, shard_group_fn=made.look)
            case "UPDATE":
                made.update()
            case "UPDATE_TO":
                made.update(SCALES[call.value])
            case "STEP":
                made.step_all(given)
            case "STEP_BY_NORM":
                made.step_all(given, max_norm=1.0, skip_norm_above=1e3, shard_group_fn=made.look)
    finally:  # a step at the limit of skips raises, and counts
        for hook in hooks:
            hook.remove()
        for index in over:
            if made.step_counts(optimizers[index]) != counts[index]:
                taken = not torch.equal(before[index], weights[index])
                if weights[index].grad is None:  # the step changes no weight of this rank
                    taken = made.step_counts(optimizers[index]).taken > counts[index].taken
                yield index, taken, scale
