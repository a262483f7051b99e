"""The cells of layouts x optimizers x orders of calls x faults, each as a small program."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.scaler.matrix.layouts import ALL_LAYOUTS
from tests.scaler.matrix.programs import Fault, Iteration, Program
from tests.scaler.matrix.reference import KINDS

__all__ = ["FAULTS", "ORDERS", "cell", "cells", "chain", "chains", "sample"]

Names = Iterable[str]
Cell = tuple[str, str, str, str]


@dataclass(frozen=True)
class Order:
    """The calls of one step.

    Args:
        calls: As `Iteration.order`.
        microbatches: The number of backward passes before the step.
        optimizers: The number of optimizers.
    """

    calls: str
    microbatches: int = 1
    optimizers: int = 1


ORDERS: dict[str, Order] = {
    "step": Order("step"),
    "unscale": Order("unscale"),
    "clip": Order("clip"),
    "accumulate": Order("step", microbatches=2),
    "two optimizers": Order("unscale", optimizers=2),
    "grouped": Order("grouped", microbatches=2, optimizers=2),
}

ONE_INF = Fault(rank=1, value="inf", position=3)
ONE_NAN = Fault(rank=2, value="nan", position=1)
MINUS_INF_OF_RANK_0 = Fault(rank=0, value="-inf")
NAN_OF_RANK_3 = Fault(rank=3, value="nan", position=7)
INF_OF_EVERY_RANK = tuple(Fault(rank, "inf", position=rank) for rank in range(4))
INF_LOSS = Fault(rank=1, value="loss")
#: Only layouts that sum gradients in float16 have cells with this fault.
OVERFLOW_IN_SUM = Fault(rank=0, value="sum")

FAULTS: dict[str, tuple[Fault, ...]] = {
    "none": (),
    "inf": (ONE_INF,),
    "nan": (ONE_NAN,),
    "both": (MINUS_INF_OF_RANK_0, NAN_OF_RANK_3),
    "every rank": INF_OF_EVERY_RANK,
    "loss": (INF_LOSS,),
    "sum": (OVERFLOW_IN_SUM,),
}


def cell(layout: str, kind: str, order: str, fault: str) -> Program:
    """Return a clean step, a faulty one, and a clean one that must go on from the first."""
    return chain(layout, kind, order, [fault])


def chain(layout: str, kind: str, order: str, faults: Names) -> Program:
    """Return one program of several cells: a clean step, and another after each faulty step."""
    calls, microbatches = ORDERS[order].calls, ORDERS[order].microbatches
    clean_step = Iteration(calls, microbatches)
    steps = [clean_step]
    for fault in faults:
        faulty_step = Iteration(calls, microbatches, FAULTS[fault])
        steps += [faulty_step, clean_step]
    optimizers = ORDERS[order].optimizers
    init_scale = ALL_LAYOUTS[layout].init_scale
    return Program(layout, kind, tuple(steps), optimizers, init_scale)


def cells(
    layouts: Names = ALL_LAYOUTS,
    kinds: Names = KINDS,
    orders: Names = ORDERS,
    faults: Names = FAULTS,
) -> Iterator[Cell]:
    """Yield the cells that exist: layout, optimizer, order of calls and fault."""
    for layout in layouts:
        can_overflow_in_sum = ALL_LAYOUTS[layout].overflows_in_sum
        for kind in kinds:
            if kind not in _kinds_of(layout):
                continue
            for order in orders:
                for fault in faults:
                    if fault != "sum" or can_overflow_in_sum:
                        yield layout, kind, order, fault


def _kinds_of(layout: str) -> tuple[str, ...]:
    """Return the optimizers that train in a layout."""
    return ALL_LAYOUTS[layout].kinds or tuple(KINDS)


def chains(layout: str, kind: str) -> list[Program]:
    """Return every cell of a layout with an optimizer, as one program for each order.

    An overflow in a sum gets its own program: a second optimizer may step then, with gradients near
    the largest float16, and so large a step leaves a large rounding error.
    """
    programs: list[Program] = []
    for order in ORDERS:
        faults = [fault for _, _, _, fault in cells([layout], [kind], [order])]
        small_faults = [fault for fault in faults if fault != "sum"]
        programs.append(chain(layout, kind, order, small_faults))
        if "sum" in faults:
            programs.append(chain(layout, kind, order, ["sum"]))
    return programs


def sample(layout: str, seed: str = "") -> Program:
    """Return a faulty cell of a layout, drawn at random, and equal at every call."""
    generator = random.Random(f"{seed}{layout}")
    kind = generator.choice(_kinds_of(layout))
    faulty_cells: list[Cell] = []
    for candidate in cells([layout], [kind]):
        _, _, _, fault = candidate
        if fault != "none":
            faulty_cells.append(candidate)
    return cell(*generator.choice(faulty_cells))
