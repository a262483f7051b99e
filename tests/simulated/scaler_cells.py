"""The scaler's programs on simulated devices, beside the same on the CPU."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.ranks import RankError, RankPool
from tests.scaler.matrix.judge import Judge, complaints
from tests.scaler.matrix.layouts import ALL_LAYOUTS
from tests.scaler.matrix.programs import Fault, Outcome, Program
from tests.simulated.pools import SimPool

__all__ = ["FOUR_RANKS", "LAYOUTS", "Pair"]

# Made for four ranks: they run on four, but for what is drawn.
FOUR_RANKS = ("DDP, two groups", "pipeline")
# NCCL, and so this group, has no all_reduce of sparse tensors.
_EXCEPTION = "DDP, sparse"
# Those without a group come first: another group is new processes.
LAYOUTS = sorted(
    {*ALL_LAYOUTS} - {_EXCEPTION},
    key=lambda name: (ALL_LAYOUTS[name].group == "default", name),
)


@dataclass
class Pair:
    """The same program on the CPU and on devices, each judged, and both compared.

    Args:
        cpu: as many gloo ranks.
        sim: as many ranks with a device each.
    """

    cpu: RankPool
    sim: SimPool
    # What an optimizer itself refuses on a layout is asked once, here and there.
    _here: Judge = field(init=False)
    _there: Judge = field(init=False)

    def __post_init__(self) -> None:
        self._here, self._there = Judge(self.cpu), Judge(self.sim.under("late"))

    def wrong(self, program: Program) -> list[str]:
        """Everything that is not as it should be, under a schedule which the program draws."""
        fitted = _fitted(program, self.sim.world_size)
        chance = random.Random(repr(program))
        schedule = chance.choice([("late", 0), ("random", chance.randrange(10**6))])
        try:
            found = self._wrong(fitted, *schedule)
        except RankError as error:  # of either side: it says which
            found = [str(error)]
        if found:
            self.sim.close()
            self.cpu.close()
        return found

    def _wrong(self, program: Program, schedule: str, seed: int) -> list[str]:
        refused = self._there.refused(program)
        there = Judge(self.sim.under(schedule, seed)).run(program, "distamp")
        found = complaints(program, there, refused)
        if refused is not None or program.astray is not None:
            return found
        on_cpu = replace(program, kind=program.kind.replace("capturable", "foreach"))
        if self._here.refused(on_cpu) is not None:
            return found
        here = self._here.run(on_cpu, "distamp")
        # The tolerances and faults are those of four ranks: what is off on the CPU too, by however
        # much, is not the device's doing.
        known = {_without_size(each) for each in complaints(on_cpu, here)}
        found = [each for each in found if _without_size(each) not in known]
        # The CPU refuses what is capturable; no bits are compared.
        return found + (list(_differences(here, there)) if on_cpu == program else [])


def _fitted(program: Program, ranks: int) -> Program:
    """The program on this many ranks, and with its faults on them."""

    def on_ranks(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        return tuple(dict.fromkeys(replace(fault, rank=fault.rank % ranks) for fault in faults))

    there = program.layout != _EXCEPTION and (ranks == 4 or program.layout not in FOUR_RANKS)
    return replace(
        program,
        layout=program.layout if there else "DDP",
        iterations=tuple(replace(i, faults=on_ranks(i.faults)) for i in program.iterations),
        astray=program.astray and (program.astray[0], program.astray[1] % ranks),
    )


def _without_size(complaint: str) -> str:
    return re.sub(r"[\d.e+-]+ off the reference", "off the reference", complaint)


def _differences(here: list[list[Outcome]], there: list[list[Outcome]]) -> Iterator[str]:
    for rank, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            for what in ("error", "scale", "digests"):
                if (mine := getattr(a, what)) != (other := getattr(b, what)):
                    yield f"iteration {number}, rank {rank}: {what} {other}, on the CPU {mine}"
