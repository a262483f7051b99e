"""The scaler's programs on simulated devices, compared with the same programs on the CPU."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.ranks import RankError, RankPool
from tests.scaler.matrix.judge import Judge, complaints
from tests.scaler.matrix.layouts import ALL_LAYOUTS
from tests.scaler.matrix.programs import Fault, Outcome, Program
from tests.simulated.pools import SimPool

__all__ = ["FOUR_RANKS", "LAYOUTS", "Pair"]

# Layouts for four ranks. A drawn program runs on two ranks and then has another layout.
FOUR_RANKS = ("DDP, two groups", "pipeline")
# NCCL has no all_reduce of sparse tensors, and therefore the simulated group has none.
_UNSUPPORTED_LAYOUT = "DDP, sparse"


def _order_of_layout(name: str) -> tuple[bool, str]:
    """Sort layouts with a group last, because a change of the group starts new processes."""
    return ALL_LAYOUTS[name].group == "default", name


LAYOUTS = sorted({*ALL_LAYOUTS} - {_UNSUPPORTED_LAYOUT}, key=_order_of_layout)


@dataclass
class Pair:
    """Runs a program on the CPU and on devices, judges both runs, and compares them.

    Args:
        cpu: A pool of gloo ranks.
        sim: A pool of as many ranks with a device each.
    """

    cpu: RankPool
    sim: SimPool
    # These judges remember the errors of optimizers without a scaler.
    _cpu_judge: Judge = field(init=False)
    _sim_judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self._cpu_judge = Judge(self.cpu)
        self._sim_judge = Judge(self.sim.under("late"))

    def find_faults(self, program: Program) -> list[str]:
        """Return a sentence for each violation on a device under the schedule of the program."""
        fitted_program = _fit(program, self.sim.world_size)
        generator = random.Random(repr(program))
        random_seed = generator.randrange(10**6)
        schedule, seed = generator.choice([("late", 0), ("random", random_seed)])
        try:
            faults = self._run_and_compare(fitted_program, schedule, seed)
        except RankError as error:
            # The text of the error contains the side that failed.
            faults = [str(error)]
        if faults:
            self.sim.close()
            self.cpu.close()
        return faults

    def _run_and_compare(self, program: Program, schedule: str, seed: int) -> list[str]:
        refusal = self._sim_judge.refused(program)
        judge = Judge(self.sim.under(schedule, seed))
        sim_outcomes = judge.run(program, "distamp")
        sim_violations = complaints(program, sim_outcomes, refusal)
        if refusal is not None or program.astray is not None:
            return sim_violations
        cpu_program = _without_capturable(program)
        if self._cpu_judge.refused(cpu_program) is not None:
            return sim_violations
        cpu_outcomes = self._cpu_judge.run(cpu_program, "distamp")
        cpu_violations = complaints(cpu_program, cpu_outcomes)
        faults = _violations_of_device_only(sim_violations, cpu_violations)
        # A capturable optimizer and its replacement on the CPU have different bits.
        if cpu_program == program:
            faults += _find_differences(cpu_outcomes, sim_outcomes)
        return faults


def _fit(program: Program, num_ranks: int) -> Program:
    """Return the program on this many ranks, with its faults on these ranks."""
    iterations = []
    for iteration in program.iterations:
        faults = _move_to_ranks(iteration.faults, num_ranks)
        iterations.append(replace(iteration, faults=faults))
    astray = program.astray
    if astray is not None:
        deviation, deviating_rank = astray
        astray = (deviation, deviating_rank % num_ranks)
    return replace(
        program,
        layout=_fit_layout(program.layout, num_ranks),
        iterations=tuple(iterations),
        astray=astray,
    )


def _fit_layout(layout: str, num_ranks: int) -> str:
    """Return the layout, or DDP if the simulated group or the number of ranks excludes it."""
    if layout == _UNSUPPORTED_LAYOUT:
        return "DDP"
    if layout in FOUR_RANKS and num_ranks != 4:
        return "DDP"
    return layout


def _move_to_ranks(faults: tuple[Fault, ...], num_ranks: int) -> tuple[Fault, ...]:
    """Return the faults with ranks below `num_ranks`, without duplicates, in their order."""
    moved_faults: list[Fault] = []
    for fault in faults:
        moved_fault = replace(fault, rank=fault.rank % num_ranks)
        if moved_fault not in moved_faults:
            moved_faults.append(moved_fault)
    return tuple(moved_faults)


def _without_capturable(program: Program) -> Program:
    """Return the program for the CPU, on which torch refuses capturable optimizers."""
    kind = program.kind.replace("capturable", "foreach")
    return replace(program, kind=kind)


def _violations_of_device_only(sim_violations: list[str], cpu_violations: list[str]) -> list[str]:
    """Return the violations that the CPU does not have.

    Tolerances and faults are those of four ranks. A violation on the CPU, of any size, is therefore
    not a fault of the device.
    """
    known_violations = {_without_size(violation) for violation in cpu_violations}
    return [
        violation
        for violation in sim_violations
        if _without_size(violation) not in known_violations
    ]


def _without_size(violation: str) -> str:
    return re.sub(r"[\d.e+-]+ off the reference", "off the reference", violation)


def _find_differences(
    cpu_outcomes: Sequence[Sequence[Outcome]], sim_outcomes: Sequence[Sequence[Outcome]]
) -> list[str]:
    """Return a sentence for each error, scale and digest that differs between CPU and device."""
    differences = []
    ranks = zip(cpu_outcomes, sim_outcomes, strict=True)
    for rank, (cpu_iterations, sim_iterations) in enumerate(ranks):
        iterations = zip(cpu_iterations, sim_iterations, strict=False)
        for number, (cpu_outcome, sim_outcome) in enumerate(iterations):
            for name in ("error", "scale", "digests"):
                cpu_value = getattr(cpu_outcome, name)
                sim_value = getattr(sim_outcome, name)
                if sim_value != cpu_value:
                    place = f"iteration {number}, rank {rank}"
                    differences.append(f"{place}: {name} {sim_value}, on the CPU {cpu_value}")
    return differences
