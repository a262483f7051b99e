"""The cells of layouts x optimizers x orders x faults, each a small program."""

import itertools
import random
from collections.abc import Iterable, Iterator

from tests.scaler.matrix.layouts import ALL_LAYOUTS
from tests.scaler.matrix.programs import Fault, Iteration, Program
from tests.scaler.matrix.reference import KINDS

__all__ = ["FAULTS", "ORDERS", "cell", "cells", "chain", "chains", "sample"]

# How a step is made: (order of calls, microbatches, optimizers).
ORDERS: dict[str, tuple[str, int, int]] = {
    "step": ("step", 1, 1),
    "unscale": ("unscale", 1, 1),
    "clip": ("clip", 1, 1),
    "accumulate": ("step", 2, 1),
    "two optimizers": ("unscale", 1, 2),
    "grouped": ("grouped", 2, 2),
}
FAULTS: dict[str, tuple[Fault, ...]] = {
    "none": (),
    "inf": (Fault(1, "inf", where=3),),
    "nan": (Fault(2, "nan", where=1),),
    "both": (Fault(0, "-inf"), Fault(3, "nan", where=7)),
    "every rank": tuple(Fault(rank, "inf", where=rank) for rank in range(4)),
    "loss": (Fault(1, "loss"),),
    "sum": (Fault(0, "sum"),),
}


def cell(layout: str, kind: str, order: str, fault: str) -> Program:
    """A clean step, the faulty one, and a clean one that must go on from the first."""
    return chain(layout, kind, order, [fault])


def chain(layout: str, kind: str, order: str, faults: Iterable[str]) -> Program:
    """Several cells in one program: a clean step, and after each faulty one another clean one."""
    how, micro, optimizers = ORDERS[order]
    clean = Iteration(how, micro)
    steps = [clean]
    for fault in faults:
        steps += [Iteration(how, micro, FAULTS[fault]), clean]
    return Program(layout, kind, tuple(steps), optimizers, ALL_LAYOUTS[layout].init_scale)


def cells(
    layouts: Iterable[str] = tuple(ALL_LAYOUTS),
    kinds: Iterable[str] = tuple(KINDS),
    orders: Iterable[str] = tuple(ORDERS),
    faults: Iterable[str] = tuple(FAULTS),
) -> Iterator[tuple[str, str, str, str]]:
    """Every cell there is: only a sum in float16 overflows."""
    for each in itertools.product(layouts, kinds, orders, faults):
        layout, kind, _, fault = ALL_LAYOUTS[each[0]], *each[1:]
        if kind in (KINDS if layout.kinds is None else layout.kinds) and (
            fault != "sum" or layout.overflows_in_sum
        ):
            yield each


def chains(layout: str, kind: str) -> list[Program]:
    """Return every cell of a layout with an optimizer, as one program for each order.

    An overflow in a sum gets its own program: a second optimizer may step then, with gradients near
    the largest float16, and so large a step leaves a large rounding error.
    """
    programs = []
    for order in ORDERS:
        faults = [fault for *_, fault in cells([layout], [kind], [order])]
        programs.append(chain(layout, kind, order, [fault for fault in faults if fault != "sum"]))
        if "sum" in faults:
            programs.append(chain(layout, kind, order, ["sum"]))
    return programs


def sample(layout: str, seed: str = "") -> Program:
    """The same cell of a layout at every call; one without a fault is the first step of any."""
    chance = random.Random(f"{seed}{layout}")
    kind = chance.choice(ALL_LAYOUTS[layout].kinds or tuple(KINDS))
    return cell(*chance.choice([each for each in cells([layout], [kind]) if each[3] != "none"]))
