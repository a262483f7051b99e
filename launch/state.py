"""What changes while a run goes on, under names that mean the same however it is spread."""

from __future__ import annotations

from collections.abc import Iterator
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

from distamp.initialize import Amp
from distamp.scaler import masters_of
from launch.spread import Spread

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

    spread: Spread
    amp: Amp
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        _make_state(self.optimizer)

    @property
    def model(self) -> nn.Module:
        """The module that was spread."""
        return self.spread.inner

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What the scaler steps."""
        return self.spread.optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of model and optimizer, by name.

        The tensors are the live ones, except FSDP1's; ``accept`` must follow a change to them.
        """
        if _is_fsdp1(self.model):
            return {**_named("model", get_model_state_dict(self.model)), **self._fsdp1_states()}
        parameters = _named("model", self.model.state_dict())
        return {**parameters, **{name: t.detach() for name, t in self._states()}}

    def accept(self, tensors: dict[str, Tensor]) -> None:
        """Take over what was written into the tensors that ``tensors`` returned."""
        if not _is_fsdp1(self.model):
            return
        split = len("model.")
        model: dict[str, Any] = {n[split:]: t for n, t in tensors.items() if n.startswith("model.")}
        set_model_state_dict(self.model, model)
        states: dict[str, Any] = dict(
            get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        )
        for name in states:
            if name.startswith("state."):
                states[name] = tensors[f"optimizer.{name.removeprefix('state.')}"]
        set_optimizer_state_dict(self.model, self.optimizer, states, options=_FLAT)

    def values(self) -> dict[str, Any]:
        """Return what is no tensor and the same on every rank, as JSON takes it."""
        scaler = self.amp.scaler.state_dict() if self._scale_moves else {}
        return {"progress": asdict(self.progress), "scaler": scaler}

    def accept_values(self, values: dict[str, Any]) -> None:
        """Take over what ``values`` returned."""
        self.progress = Progress(**values["progress"])
        if values["scaler"] and self._scale_moves:
            self.amp.scaler.load_state_dict(values["scaler"])

    @property
    def _scale_moves(self) -> bool:
        # A constant is the level's, whatever the run it goes on from had.
        return self.amp.precision.loss_scale == "dynamic"

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        # ZeRO and OSS keep the state of the parameters that this rank updates inside.
        state = getattr(self.optimizer, "optim", self.optimizer).state
        for name, parameter in self.model.named_parameters():
            for key, value in state.get(parameter, {}).items():
                yield f"optimizer.{name}.{key}", value

    def _fsdp1_states(self) -> dict[str, Tensor]:
        states = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        kept = {n.removeprefix("state."): t for n, t in states.items() if n.startswith("state.")}
        return _named("optimizer", kept)


def _named(prefix: str, values: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{prefix}.{n}": t for n, t in values.items() if isinstance(t, Tensor)}


def _is_fsdp1(model: nn.Module) -> bool:
    return isinstance(model, FullyShardedDataParallel)


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's state before its first step, so that it can be saved and read into.

    A run whose every step was skipped has taken none.
    """
    inner = getattr(optimizer, "optim", optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
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
