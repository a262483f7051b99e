"""Faults as data: what goes wrong, on which rank, in which step, and programs drawn of them."""

import random
from dataclasses import dataclass

from tests.scaler.matrix.layouts import LAYOUTS
from tests.scaler.matrix.programs import Fault as Value
from tests.scaler.matrix.programs import Iteration
from tests.scaler.matrix.programs import Program as Training

__all__ = ["CONNECTION", "Fault", "Program", "draw"]

WORLD = 4
NO_MEMORY = "no memory is left on this device"
# What gloo says where a peer is gone, and what the scaler adds.
CONNECTION = r"Connection (closed|reset)|Broken pipe|[Ss]ocket|lost its peers"
ALREADY = r"already been called|called after step"
LOCKSTEP = "LockstepError"


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        what: ``"inf_at"`` a gradient of optimizer ``which``; ``"error_at"`` a call, which finds no
            memory; ``"delay"`` before a call; ``"kill"`` or ``"cut_link"`` at one; ``"leave_out"``
            one; ``"damage_checkpoint"`` that this rank loads, in the ``which``-th way; another
            ``"scale"``, ``"max_norm"`` or ``"order"`` of optimizers than the other ranks;
            ``"regroup"``: the scaler's group is made anew on all ranks, and this one is replaced.
        rank: Where.
        step: When, from 0.
        call: The scaler's method, where the fault is at one.
        which: See above.
    """

    what: str
    rank: int
    step: int
    call: str = ""
    which: int = 0


# What ends a program, with what each rank must say: the faulty rank, and the others.
ENDS = {
    "error_at": (NO_MEMORY, NO_MEMORY),
    "scale": (LOCKSTEP, LOCKSTEP),
    "max_norm": (LOCKSTEP, LOCKSTEP),
    "order": (LOCKSTEP, LOCKSTEP),
    "leave_out step": (LOCKSTEP, LOCKSTEP),
    # The arguments of a clip are compared, so the others hear of it before its process ends.
    "clip leave_out update": (ALREADY, f"{ALREADY}|{CONNECTION}"),
    "leave_out update": (ALREADY, CONNECTION),
    "kill": (CONNECTION, CONNECTION),
    "cut_link": (CONNECTION, CONNECTION),
}
# After these, processes and groups are as good as new.
LOUD = {NO_MEMORY, LOCKSTEP}


@dataclass(frozen=True)
class Program:
    """Some steps of one layout with faults in them, of which at most one ends it."""

    layout: str
    kind: str
    order: str
    optimizers: int
    steps: int
    faults: tuple[Fault, ...] = ()

    def training(self) -> Training:
        """What the ranks do: the overflows are part of it, the other faults happen to it."""
        iterations = [
            Iteration(
                self.order,
                faults=tuple(
                    Value(fault.rank, "inf", fault.which, fault.which)
                    for fault in self.faults
                    if fault.what == "inf_at" and fault.step == step
                ),
            )
            for step in range(self.steps)
        ]
        return Training(self.layout, self.kind, tuple(iterations), self.optimizers)

    def ending(self) -> tuple[Fault, tuple[str, str]] | None:
        """The fault that ends it, with what the faulty rank and the others must say."""
        for fault in self.faults:
            at = f"{fault.what} {fault.call}"
            for name in (f"{self.order} {at}", at, fault.what):
                if name in ENDS:
                    return fault, ENDS[name]
        return None

    def fatal(self) -> bool:
        """Whether its processes are of no use afterwards."""
        ending = self.ending()
        return ending is not None and not LOUD.issuperset(ending[1])


def draw(count: int, seed: int, fatal: float = 0.05) -> list[Program]:
    """So many programs, the same for the same seed; ``fatal``: how many lose a rank."""
    chance = random.Random(seed)
    return [_program(chance, fatal) for _ in range(count)]


def _program(chance: random.Random, fatal: float) -> Program:
    names = [name for name, each in LAYOUTS.items() if each.group == "default"]
    # Of those that send much in each step, which take three times as long, fewer are drawn.
    weights = [1 if name.startswith(("FSDP", "HSDP", "TP", "two")) else 3 for name in names]
    (layout,) = chance.choices(names, weights)
    layout = "DDP" if layout == "DDP, two groups" else layout
    order = chance.choice(["step", "unscale", "clip" if LAYOUTS[layout].clips else "unscale"])
    optimizers, steps = chance.randint(1, 2), chance.randint(3, 4)
    # torch's fused kernels refuse DTensors, and foreach those of several meshes.
    fused = (
        ["SGD fused", "Adam fused"] if layout.startswith(("DDP", "FSDP1", "ZeRO", "OSS")) else []
    )
    mixed = layout in ("plain and DTensor", "two meshes")
    kind = chance.choice(["SGD for-loop"] if mixed else ["SGD for-loop", "AdamW foreach", *fused])

    def fault(what: str, *calls: str, step: int | None = None) -> Fault:
        at = chance.randrange(1, steps - 1) if step is None else step
        call = chance.choice(calls) if calls else ""
        return Fault(what, chance.randrange(WORLD), at, call, chance.randrange(5))

    looks = {"step": ["step"], "unscale": ["unscale_", "step"], "clip": ["clip_grad_norm_", "step"]}
    calls = looks[order]
    harmless = [
        fault("inf_at", step=chance.randrange(steps)),
        fault("inf_at"),
        fault("delay", *calls, "update"),
        fault("damage_checkpoint"),
        fault("regroup"),
    ]
    if order == "unscale":
        harmless.append(fault("leave_out", "unscale_"))
    faults = chance.sample(harmless, chance.randint(0, 3))
    ending = [fault("error_at", calls[0]), fault("scale")]
    if order != "step" and layout not in ("OSS", "ZeRO"):  # whose steps are collectives
        ending.append(fault("leave_out", "step"))
    if order == "clip":
        ending.append(fault("max_norm", calls[0]))
    if optimizers == 2:
        ending.append(fault("order"))
    lost = [
        fault("kill", *calls, "update"),
        fault("cut_link", *calls, "update"),
        fault("leave_out", "update"),
    ]
    drawn = chance.random()
    last = chance.choice(lost) if drawn < fatal else chance.choice(ending) if drawn < 0.4 else None
    if last is not None:
        faults = [each for each in faults if _tells(each, last)] + [last]
    return Program(layout, kind, order, optimizers, steps, tuple(faults))


def _tells(before: Fault, last: Fault) -> bool:
    """Whether what ends a program is the same with another fault before it."""
    if before.what == "regroup":
        # A new group learns the order of optimizers from its first messages, is not made where a
        # rank is lost, and a new scaler knows of no step.
        return last.what in ("error_at", "scale", "max_norm")
    # Where a rank leaves out a look, it meets no error there; without both it finds alone that it
    # has none to update by.
    return before.what != "leave_out" or last.rank != before.rank
