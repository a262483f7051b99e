"""The scaler's cells and random programs on simulated devices, beside the same on the CPU."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.ranks import RankError, RankPool
from tests.scaler.matrix.cells import cells, chain
from tests.scaler.matrix.judge import Judge, complaints
from tests.scaler.matrix.layouts import ALL_LAYOUTS, DEVICE_LAYOUTS, layout_named
from tests.scaler.matrix.programs import Fault, Outcome, Program
from tests.scaler.matrix.reference import KINDS
from tests.scaler.test_random_programs import _draw as draw
from tests.simulated.pools import SimPool

__all__ = [
    "EXCEPTIONS",
    "FOUR_RANKS",
    "LAYOUTS",
    "Pair",
    "Wrong",
    "cells_of",
    "drawn_programs",
    "fitted",
    "program_of",
    "sample",
    "wrong_cells",
    "wrong_programs",
]

# Made for four ranks: they run on four in the long run.
FOUR_RANKS = ("DDP, two groups", "pipeline")
# Those without a group come first: another group is new processes.
LAYOUTS = sorted(
    (*ALL_LAYOUTS, *DEVICE_LAYOUTS), key=lambda name: layout_named(name).group == "default"
)
# What these are on one device, for the cells that there are.
_LIKE = {"two devices": "alone", "DDP, two devices": "DDP"}
# Layouts that cannot be here, and why.
EXCEPTIONS = {"DDP, sparse": "NCCL, and so this group, has no all_reduce of sparse tensors"}

Cell = tuple[str, str, str, str]
Schedule = tuple[str, int]
Wrong = tuple[Schedule, Program, list[str]]


def cells_of(layout: str, *kinds: str) -> Iterator[Cell]:
    """Every cell of a layout, of these optimizers or of all."""
    for _, kind, order, fault in cells([_LIKE.get(layout, layout)], kinds or KINDS):
        yield layout, kind, order, fault


# What the CPU has in place of an optimizer that only devices have.
_ON_CPU = {"Adam capturable": "Adam foreach"}
# torch has no rule for it with DTensors; which of two errors says so depends on what ran before.
_DTENSORS = ("FSDP2", "HSDP", "TP", "two meshes", "plain and DTensor")


def sample(layout: str, count: int) -> list[Cell]:
    """The same ``count`` cells of one layout at every call."""
    refused = "Adagrad fused" if layout.startswith(_DTENSORS) else ""
    every = [each for each in cells_of(layout) if each[1] != refused]
    return random.Random(f"sim {layout}").sample(every, min(count, len(every)))


def fitted(program: Program, ranks: int) -> Program:
    """The program with its faults on this many ranks."""

    def on_ranks(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        return tuple(dict.fromkeys(replace(fault, rank=fault.rank % ranks) for fault in faults))

    astray = program.astray and (program.astray[0], program.astray[1] % ranks)
    iterations = tuple(replace(i, faults=on_ranks(i.faults)) for i in program.iterations)
    return replace(program, iterations=iterations, astray=astray)


def program_of(cells: Sequence[Cell], ranks: int) -> Program:
    """Cells that differ in their fault alone, one after the other on one model."""
    layout, kind, order, _ = cells[0]
    like = chain(_LIKE.get(layout, layout), kind, order, [fault for *_, fault in cells])
    return fitted(replace(like, layout=layout), ranks)


def wrong_cells(pair: Pair, layout: str, *kinds: str) -> Iterator[Wrong]:
    """The programs of a layout, with these optimizers or all, that are not as they should be.

    Cells that differ in their fault alone are one program, which spares most of the time. Where it
    is wrong each of them runs by itself, under the same schedule, which its name draws.
    """
    chains: dict[str, list[Cell]] = {}
    for each in cells_of(layout, *kinds):
        chains.setdefault(" ".join(each[:3]), []).append(each)
    for name, links in chains.items():
        schedule = drawn_schedule(name)
        together = program_of(links, pair.ranks)
        if not (wrong := pair.wrong(together, *schedule)):
            continue
        alone = [program_of([link], pair.ranks) for link in links]
        found = [(schedule, each, pair.wrong(each, *schedule)) for each in alone]
        yield from [each for each in found if each[2]] or [(schedule, together, wrong)]


def drawn_programs(pair: Pair, draws: int, seed: int) -> list[tuple[Schedule, Program]]:
    """So many programs drawn from a seed, and the schedule of each."""
    drawn: list[Program] = []
    draw(drawn.append, draws, seed)
    found = []
    for number, program in enumerate(drawn):
        if program.layout in (*EXCEPTIONS, *FOUR_RANKS):
            program = replace(program, layout="DDP")
        found.append((drawn_schedule(f"{seed} {number}"), fitted(program, pair.ranks)))
    return found


def wrong_programs(pair: Pair, programs: Iterable[tuple[Schedule, Program]]) -> Iterator[Wrong]:
    """Those that are not as they should be."""
    for schedule, program in programs:
        if wrong := pair.wrong(program, *schedule):
            yield schedule, program, wrong


def drawn_schedule(name: str) -> Schedule:
    """``late``, or a random schedule: the same for a name at every call."""
    chance = random.Random(name)
    return ("late", 0) if chance.random() < 0.5 else ("random", chance.randrange(10**6))


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

    @property
    def ranks(self) -> int:
        """How many ranks each has."""
        return self.sim.world_size

    def wrong(self, program: Program, schedule: str, seed: int = 0) -> list[str]:
        """Everything that is not as it should be under this schedule."""
        try:
            found = self._wrong(program, schedule, seed)
        except RankError as error:  # of either side: it says which
            found = [str(error)]
        if found:
            self.close()
        return found

    def _wrong(self, program: Program, schedule: str, seed: int) -> list[str]:
        refused = self._there.refused(program)
        (there,) = Judge(self.sim.under(schedule, seed)).run([program], "distamp")
        found = complaints(program, there, refused)
        if refused is not None or program.astray is not None:
            return found
        alike = self._here.refused(program) is None
        if not alike and program.kind not in _ON_CPU:
            return found
        on_cpu = program if alike else replace(program, kind=_ON_CPU[program.kind])
        (here,) = self._here.run([on_cpu], "distamp")
        # The tolerances and faults are those of four ranks: what is off on the CPU too is not the
        # device's doing. By how much differs with the optimizer.
        named = str if alike else _without_size
        known = set(map(named, complaints(on_cpu, here)))
        found = [each for each in found if named(each) not in known]
        return found + list(_differences(here, there)) if alike else found

    def close(self) -> None:
        """End all processes; the next program starts new ones."""
        self.sim.close()
        self.cpu.close()


def _without_size(complaint: str) -> str:
    return re.sub(r"[\d.e+-]+ off the reference", "off the reference", complaint)


def _differences(here: list[list[Outcome]], there: list[list[Outcome]]) -> Iterator[str]:
    for rank, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a.error or b.error:
                yield f"iteration {number}, rank {rank}: {a.error} on the CPU, {b.error} here"
            elif a.scale != b.scale:
                yield f"iteration {number}, rank {rank}: scale {b.scale}, on the CPU {a.scale}"
            elif a.digests != b.digests:
                names = [name for name in a.digests if a.digests[name] != b.digests.get(name)]
                yield f"iteration {number}, rank {rank}: not the CPU's bits in {names}"
