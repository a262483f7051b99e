"""Everything a run needs to go on to the same numbers, written so that half of it never counts."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from distamp import DistGradScaler
from launch.errors import UsageError

__all__ = ["NAME", "Progress", "RunState", "load", "random_state", "restore_random_state", "save"]

NAME = "checkpoint.pt"
_FORMAT = "distamp launch checkpoint 1"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done, skipped ones included.
        position: Training windows read, over all ranks.
        skipped: Steps the scaler skipped.
    """

    step: int = 0
    position: int = 0
    skipped: int = 0


@dataclass
class RunState:
    """What changes while a run goes on, but for the generators of random numbers."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    scaler: DistGradScaler
    progress: Progress = field(default_factory=Progress)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint in one step: whoever reads the path sees the old one or the new one.

    Raises:
        UsageError: If the folder cannot take it; the checkpoint that was there is untouched.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save({"format": _FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        # The new name is on the disk only once the folder is.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def load(resume: Path, device: torch.device) -> dict[str, Any]:
    """Read the checkpoint that ``--resume`` names, by its folder or itself.

    Raises:
        UsageError: If there is none, or it is none of ours.
    """
    path = resume / NAME if resume.is_dir() else resume
    if not path.is_file():
        what = f"no {NAME} in it" if resume.is_dir() else "no such run"
        raise UsageError(f"--resume {resume}: {what}")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    # What a file that is not a checkpoint makes torch.load raise depends on its first bytes.
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        state = None
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise UsageError(f"--resume {resume}: {path} is not a checkpoint of this launcher")
    loaded: dict[str, Any] = state
    return loaded


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of this rank's generators: the CPU's, and an accelerator's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def restore_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Put this rank's generators back into a state that ``random_state`` returned."""
    torch.set_rng_state(states[0].cpu())
    if device.type != "cpu" and len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1].cpu(), device)
