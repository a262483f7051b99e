"""What changes while a run goes on, under names that mean the same however it is parallelized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from distamp.errors import StageError
from distamp.initialize import Amp
from distamp.scaler import MasterParameters, masters_of
from launch.overflows import Overflows
from launch.parallel import ParallelizedModel

__all__ = ["Progress", "RunState", "random_state", "restore_random_state"]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done, skipped ones included.
        position: Training examples read, over all ranks.
        skipped: Steps the scaler skipped.
    """

    step: int = 0
    position: int = 0
    skipped: int = 0

    @property
    def taken(self) -> int:
        """Steps that changed the model."""
        return self.step - self.skipped


@dataclass
class RunState:
    """What changes while a run goes on, but for the generators of random numbers."""

    parallel: ParallelizedModel
    amp: Amp
    progress: Progress = field(default_factory=Progress)
    overflows: Overflows = field(default_factory=Overflows)

    def __post_init__(self) -> None:
        _make_state(self.optimizer)

    @property
    def masters(self) -> MasterParameters | None:
        """What the optimizer steps in the place of a cast model's parameters, if it does."""
        return masters_of(self.optimizer)

    @property
    def model(self) -> nn.Module:
        """The module that was parallelized."""
        return self.parallel.inner

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What the scaler steps."""
        return self.parallel.optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of model and optimizer, by name.

        A parameter that has a master is its master here, so that a checkpoint holds every weight
        once, in the precision it is stepped in, and any level goes on from that of any other.

        The tensors are the live ones, except FSDP1's; ``accept`` must follow a change to them.
        """
        if _is_fsdp1(self.model):
            return self._fsdp1_tensors()
        # The names of tied parameters lead to one tensor.
        state = self.model.state_dict(keep_vars=True)
        named = {name: self._stepped(t) for name, t in state.items() if isinstance(t, Tensor)}
        found = {**_prefixed("model", named), **dict(self._states())}
        return {name: tensor.detach() for name, tensor in found.items()}

    def tensors_to_save(self) -> dict[str, Tensor]:
        """Return what of ``tensors`` this rank is to write.

        Of a weight whose master lies on another rank, that rank writes it (ZeRO and OSS).
        """
        tensors = self.tensors()
        if self.masters is None or _is_fsdp1(self.model):
            return tensors
        elsewhere = set(map(id, self.masters.elsewhere()))
        theirs = (n for n, p in self.model.state_dict(keep_vars=True).items() if id(p) in elsewhere)
        left_out = {f"model.{name}" for name in theirs}
        return {name: tensor for name, tensor in tensors.items() if name not in left_out}

    @torch.no_grad()
    def accept(self, tensors: dict[str, Tensor]) -> None:
        """Take over what was written into the tensors that ``tensors`` returned."""
        if _is_fsdp1(self.model):
            self._accept_fsdp1(tensors)
        elif self.masters is not None:
            self.masters.write_back()

    def count_overflow(self) -> None:
        """Note which parameters overflowed in a skipped step; every rank calls this.

        To be called while the step's gradients are still there.
        """
        # All of them finite, which every rank knows: what overflowed was no gradient.
        with suppress(StageError):
            self.overflows.add(self.amp.scaler.overflow_report(self.model))

    def values(self) -> dict[str, Any]:
        """Return what is no tensor and the same on every rank, as JSON takes it."""
        scaler = self.amp.scaler.state_dict() if self._scale_moves else {}
        return {
            "progress": asdict(self.progress),
            "scaler": scaler,
            "schedule": self.amp.scaler.schedule_state_dict() if self._scale_moves else {},
            "overflows": self.overflows.counts,
        }

    def accept_values(self, values: dict[str, Any]) -> None:
        """Take over what ``values`` returned."""
        self.progress = Progress(**values["progress"])
        self.overflows = Overflows.of(values.get("overflows", {}))
        if values["scaler"] and self._scale_moves:
            if values.get("schedule"):
                self.amp.scaler.load_schedule_state_dict(values["schedule"])
            self.amp.scaler.load_state_dict(values["scaler"])

    @property
    def _scale_moves(self) -> bool:
        # A constant is the level's, whatever the run it goes on from had.
        return self.amp.precision.loss_scale == "dynamic"

    def _stepped(self, parameter: Tensor) -> Tensor:
        master = None if self.masters is None else self.masters.master_of(parameter)
        return parameter if master is None else master

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        # ZeRO and OSS keep the state of the parameters that this rank updates inside.
        state = getattr(self.optimizer, "optim", self.optimizer).state
        for name, parameter in self.model.named_parameters():
            for key, value in state.get(self._stepped(parameter), {}).items():
                yield f"optimizer.{name}.{key}", value

    # FSDP1's parameters are parts of flat ones; torch alone knows which part is whose.

    def _fsdp1_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer if self.masters is None else self.masters.for_checkpoint()

    def _fsdp1_tensors(self) -> dict[str, Tensor]:
        found = get_optimizer_state_dict(self.model, self._fsdp1_optimizer(), options=_FLAT)
        states: dict[str, Any] = {
            n.removeprefix("state."): t for n, t in found.items() if n.startswith("state.")
        }
        weights: dict[str, Any] = get_model_state_dict(self.model)
        weights |= {n: states.pop(f"{n}.master") for n in weights if f"{n}.master" in states}
        return {**_prefixed("model", weights), **_prefixed("optimizer", states)}

    def _accept_fsdp1(self, tensors: dict[str, Tensor]) -> None:
        weights: dict[str, Any] = get_model_state_dict(self.model)
        read = {name: tensors[f"model.{name}"].to(own.dtype) for name, own in weights.items()}
        set_model_state_dict(self.model, dict(read))
        optimizer = self._fsdp1_optimizer()
        states: dict[str, Any] = dict(
            get_optimizer_state_dict(self.model, optimizer, options=_FLAT)
        )
        for name in states:
            of, _, key = name.removeprefix("state.").rpartition(".")
            if name.startswith("state."):
                states[name] = tensors[
                    f"model.{of}" if key == "master" else f"optimizer.{of}.{key}"
                ]
        set_optimizer_state_dict(self.model, optimizer, states, options=_FLAT)


def _prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{prefix}.{n}": t for n, t in values.items() if isinstance(t, Tensor)}


def _is_fsdp1(model: nn.Module) -> bool:
    return isinstance(model, FullyShardedDataParallel)


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's state before its first step, so that it can be saved and read into.

    A run whose every step was skipped has taken none.
    """
    inner = getattr(optimizer, "optim", optimizer)
    masters = masters_of(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if masters is not None:  # they take what lies in the model's gradients, and leave none
        parameters = [*masters.filled(), *masters.elsewhere()]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if masters is not None:
        masters.zero_grad()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for state in inner.state.values():
        state["step"].zero_()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators: the CPU's, and an accelerator's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Put this rank's generators back into a state that ``random_state`` returned."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type].cpu(), device)
