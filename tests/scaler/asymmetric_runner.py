"""Run asymmetric programs on this rank, and note what it saw of each iteration."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.place import device_type, here
from tests.scaler import asymmetric_events as events
from tests.scaler.asymmetric_programs import ENDING, WORLD, Event, Program, Seen, Setting
from tests.scaler.asymmetric_reference import (
    INIT_SCALE,
    TIED,
    TIED_VALUE,
    gradient_of,
    initial_values,
    size_of,
)
from tests.scaler.wrappers import Accelerated, Lightning

__all__ = ["Runner", "Slot", "run_on_rank"]

GROUP_TIMEOUT = timedelta(seconds=8)
WRAPPERS: dict[str | None, Any] = {
    None: lambda optimizer: optimizer,
    "Lightning": Lightning,
    "Accelerate": Accelerated,
}
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"foreach": False},
    "SGD foreach": {"foreach": True},
    "SGD fused": {"fused": True},
}


class Slot:
    """An optimizer with its parameters, its wrapper and its masters."""

    def __init__(self, setting: Setting, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.inner = torch.optim.SGD(parameters, lr=1.0, **KINDS[setting.kind])
        self.masters = MasterParameters(self.inner) if setting.masters else None
        self.outer = WRAPPERS[setting.wrapper](self.inner)

    def values(self) -> list[float]:
        """One number for each parameter; NaN where its elements differ."""
        return [
            p.flatten()[0].item() if bool((p == p.flatten()[0]).all()) else float("nan")
            for p in self.parameters
        ]


class Runner:
    """One rank's part of a program."""

    def __init__(self, program: Program) -> None:
        self.program, self.setting = program, program.setting
        self.rank = int(os.environ["RANK"])
        self.number = 0
        self.kept: list[Any] = []  # what must not die before the program ends
        self.group = self.new_group()
        self.scaler: Any = self.new_scaler()
        self.slots = [
            self.new_slot(index, initial_values(self.setting, index))
            for index in range(self.setting.optimizers)
        ]
        self.seen = Seen()

    # -- what a program is made of -----------------------------------------------------------------

    def new_group(self) -> Any:
        return dist.new_group(list(range(WORLD)), timeout=GROUP_TIMEOUT)

    def new_scaler(self) -> Any:
        return DistGradScaler(
            device_type(),
            init_scale=INIT_SCALE,
            growth_interval=self.setting.growth_interval,
            process_group=self.group,
            fp16_grads="master" if self.setting.masters else "error",
            **({"max_scale": 2.0**24} if self.setting.bounded else {}),
        )

    def new_slot(self, index: int, values: Sequence[float]) -> Slot:
        dtype = torch.float16 if self.setting.masters else torch.float32
        sizes = [size_of(self.setting, index, self.rank), *[TIED] * (len(values) - 1)]
        if index >= self.setting.optimizers:
            sizes = [1]
        parameters = [
            nn.Parameter(torch.full((size,), value, dtype=dtype, device=here()))
            for size, value in zip(sizes, values, strict=True)
        ]
        if len(parameters) > 1 and self.rank == 1:
            parameters.reverse()  # the tied one is not at the same place on every rank
        assert len(values) == 1 or values[-1] == TIED_VALUE or self.number
        return Slot(self.setting, parameters)

    # -- one iteration, in pieces that events put together -----------------------------------------

    def zero_grad(self) -> None:
        for slot in self.slots:
            slot.inner.zero_grad()

    def backward(self, index: int, factor: float = 1.0) -> None:
        """Gradients of every parameter of one optimizer, through a scaled loss."""
        gradient = gradient_of(self.number, index) * factor
        for parameter in self.slots[index].parameters:
            self.backward_of(parameter, gradient)

    def backward_of(self, parameter: Tensor, gradient: float) -> None:
        weight = torch.tensor(gradient).to(here())
        self.scaler.scale((parameter.float() * weight).sum()).backward()

    def through(self, index: int, event: Event) -> Any:
        """What the scaler is given for an optimizer: itself or its wrapper."""
        slot = self.slots[index]
        # A wrapper hides where torch's fused optimizers look for their flags.
        wrapped = event.flavour % 2 and self.setting.kind != "SGD fused"
        return slot.outer if wrapped else slot.inner

    def look(self, indices: Sequence[int], event: Event) -> None:
        """What comes before the step: nothing, unscale_ or a clip that changes nothing."""
        for index in indices:
            if event.how == "unscale":
                self.scaler.unscale_(self.through(index, event))
            elif event.how == "clip":
                norm = self.clip(self.slots[index].inner)
                self.seen.norms.append(norm.item())
            elif event.how == "clip parameters":
                self.scaler.unscale_(self.slots[index].inner)
                norm = self.clip(self.slots[index].parameters)
                self.seen.norms.append(norm.item())

    def clip(self, given: Any) -> Tensor:
        if self.setting.structure == "replicas":
            return self.scaler.clip_grad_norm_(given, 1e6)
        own = set()
        for slot in self.slots[: self.setting.optimizers]:
            tied = len(slot.parameters) > 1
            first = int(tied and self.rank == 1)
            own.update(map(id, slot.parameters[first : first + 1] if tied else slot.parameters))
        return self.scaler.clip_grad_norm_(given, 1e6, sharded=lambda p: id(p) in own)

    def step(self, indices: Sequence[int], event: Event) -> None:
        if event.how == "step_all":
            self.scaler.step_all([self.through(index, event) for index in indices])
        else:
            for index in indices:
                self.look([index], event)
                self.scaler.step(self.through(index, event))

    def every(self) -> list[int]:
        return list(range(len(self.slots)))

    def plain(self, event: Event) -> None:
        for index in self.every():
            self.backward(index)
        self.step(self.every(), event)
        self.scaler.update()

    # -- the program -------------------------------------------------------------------------------

    def run(self) -> list[Seen]:
        outcomes: list[Seen] = []
        try:
            for number, event in enumerate(self.program.events):
                self.number = number
                outcomes.append(self.iterate(event, event.what in ENDING))
                if event.what in ENDING:
                    # A trainer that catches it and goes on with the next batch.
                    self.number = number + 1
                    self.scaler_update_quietly()
                    outcomes.append(self.iterate(Event(), ending=True))
                    break
                if outcomes[-1].error is not None and event.what not in events.GO_ON:
                    break
        finally:
            self.close()
        return outcomes

    def iterate(self, event: Event, ending: bool = False) -> Seen:
        self.seen = Seen()
        self.zero_grad()
        try:
            events.run(self, event)
        except Exception as error:
            self.seen.error = (type(error).__name__, str(error))
            if event.what in events.GO_ON:
                self.scaler_update_quietly()
        self.observe(ending)
        return self.seen

    def scaler_update_quietly(self) -> None:
        try:
            self.scaler.update()
        except Exception as error:
            self.seen.wrong.append(f"update() after an error raised {error}")

    def observe(self, ending: bool) -> None:
        seen = self.seen
        seen.values = [self.in_order(slot) for slot in self.slots]
        seen.scale = self.scaler.get_scale()
        seen.tracker = self.scaler.state_dict()["_growth_tracker"]
        if seen.error is not None or ending:
            return
        # Ranks that parted within a collective show here, on another group.
        total = torch.ones(2)
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            seen.wrong.append(f"a collective of the test's own was not answered: {error}")
        if total.tolist() != [float(WORLD)] * 2:
            seen.wrong.append(f"a collective of the test's own returned {total.tolist()}")
        seen.answers = [self.answer(slot) for slot in self.slots]

    def answer(self, slot: Slot) -> Any:
        """What the scaler says of an optimizer, or the error that it raises."""
        scaler = self.scaler
        try:
            counts = scaler.step_counts(slot.outer)
            return scaler.stepped(slot.outer), counts.taken, counts.skipped
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def in_order(self, slot: Slot) -> list[float]:
        values = slot.values()
        return values[::-1] if len(values) > 1 and self.rank == 1 else values

    def close(self) -> None:
        self.slots.clear()
        self.kept.clear()
        gc.collect(0)


def run_on_rank(programs: Sequence[Program]) -> list[list[Seen]]:
    """Run each program here; every rank of the pool does the same."""
    outcomes = []
    for program in programs:
        with _quiet():
            outcomes.append(Runner(program).run())
    return outcomes


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
