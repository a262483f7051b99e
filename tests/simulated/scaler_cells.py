"""The scaler's cells and random programs on simulated devices, beside the same on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tests.ranks import RankError, RankPool
from tests.scaler.cells import cell, cells
from tests.scaler.judge import Judge, complaints
from tests.scaler.layouts_devices import DEVICE_LAYOUTS, layout_named
from tests.scaler.layouts_dtypes import ALL_LAYOUTS
from tests.scaler.programs import Fault, Outcome, Program
from tests.simulated.pools import SimPool

__all__ = ["EXCEPTIONS", "LAYOUTS", "Pair", "Programs", "cells_of", "fitted", "sample"]

# Made for four ranks: they run on four in the long run.
FOUR_RANKS = ("DDP, two groups", "pipeline")
LAYOUTS = (*ALL_LAYOUTS, *DEVICE_LAYOUTS)
# What these are on one device, for the cells that there are.
_LIKE = {"two devices": "alone", "DDP, two devices": "DDP"}
# Layouts that cannot be here, and why.
EXCEPTIONS = {"DDP, sparse": "NCCL, and so this group, has no all_reduce of sparse tensors"}

Cell = tuple[str, str, str, str]
Programs = Iterable[Program]


def cells_of(layout: str) -> Iterator[Cell]:
    """Every cell of a layout."""
    for _, kind, order, fault in cells([_LIKE.get(layout, layout)]):
        yield layout, kind, order, fault


def sample(layout: str, count: int) -> list[Cell]:
    """The same ``count`` cells of one layout at every call."""
    every = list(cells_of(layout))
    return random.Random(f"sim {layout}").sample(every, min(count, len(every)))


def fitted(program: Program, ranks: int) -> Program:
    """The program with its faults on this many ranks."""

    def on_ranks(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        return tuple(dict.fromkeys(replace(fault, rank=fault.rank % ranks) for fault in faults))

    astray = program.astray and (program.astray[0], program.astray[1] % ranks)
    iterations = tuple(replace(i, faults=on_ranks(i.faults)) for i in program.iterations)
    return replace(program, iterations=iterations, astray=astray)


def program_of(each: Cell, ranks: int) -> Program:
    """A cell as a program."""
    layout, kind, order, fault = each
    like = cell(_LIKE.get(layout, layout), kind, order, fault)
    return fitted(replace(like, layout=layout), ranks)


@dataclass
class Pair:
    """The same program on the CPU and on devices, each judged, and both compared.

    Args:
        cpu: as many gloo ranks.
        sim: as many ranks with a device each.
    """

    cpu: RankPool
    sim: SimPool

    def wrong(self, program: Program, schedule: str, seed: int = 0) -> list[str]:
        """Everything that is not as it should be under this schedule."""
        judge = Judge(self.sim.under(schedule, seed))
        refused = judge.refused(program)
        try:
            (there,) = judge.run([program], "distamp")
        except RankError as error:
            return [str(error)]
        found = complaints(program, there, refused)
        if refused is None and program.astray is None:
            on_cpu = Judge(self.cpu)
            if on_cpu.refused(program) is None:
                (here,) = on_cpu.run([program], "distamp")
                # The tolerances are those of four ranks: what is off on the CPU too is not the
                # device's doing.
                found = [each for each in found if each not in complaints(program, here)]
                found += _differences(here, there)
        if found:
            self.sim.close()
            self.cpu.close()
        return found


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


def group_of(program: Program) -> str:
    """Which kind of group a program wants; those of one kind run in the same processes."""
    return layout_named(program.layout).group
