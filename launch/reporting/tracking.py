"""The same records in programs that people watch runs with: TensorBoard, Weights & Biases.

A new one is one class and one row below.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from launch.compare import Record
from launch.config import Config
from launch.errors import UsageError

__all__ = ["TRACKERS", "Kind", "Tracker", "check_trackers", "trackers_for"]


class Tracker(Protocol):
    """Takes a run's records."""

    def write(self, record: Record) -> None:
        """Take the record of a step or of a validation."""

    def flush(self) -> None:
        """Put on the disk what was taken: a checkpoint is about to be written."""

    def close(self) -> None:
        """Put everything on the disk; nothing more comes."""


class TensorBoard:
    """Scalars in event files, in a folder of the run.

    A resumed run goes on in the same folder; TensorBoard hides what came after the checkpoint.

    Args:
        folder: The run's.
        config: The run's settings.
        history: Records of the run so far, for a folder that does not hold them.
        first: Steps done before; 0 begins anew.
    """

    def __init__(self, folder: Path, config: Config, history: list[Record], first: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        events = folder / "tensorboard"
        if first == 0:
            shutil.rmtree(events, ignore_errors=True)
        known = any(events.glob("events.*"))
        purge = first + 1 if known else None
        self._writer: Any = SummaryWriter(str(events), purge_step=purge, flush_secs=10)
        for record in () if known else history:
            self.write(record)

    def write(self, record: Record) -> None:
        """Take a record."""
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        """Write the events."""
        self._writer.flush()

    def close(self) -> None:
        """Write and close the events."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases: offline, unless WANDB_MODE says otherwise.

    ``wandb sync`` uploads an offline run. A resumed run has the same id as before.

    Args:
        folder: The run's.
        config: The run's settings.
        history: Records of the run so far; they were taken before.
        first: Steps done before; 0 begins anew.
    """

    def __init__(self, folder: Path, config: Config, history: list[Record], first: int) -> None:
        wandb: Any = import_module("wandb")
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing is sent anywhere
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "distamp"),
            name=folder.resolve().name,
            id=_own_id(folder, anew=first == 0),
            dir=str(folder),
            config=asdict(config),
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, record: Record) -> None:
        """Take a record; those of one step are one row."""
        self._run.log(dict(_scalars(record)), step=record["step"])

    def flush(self) -> None:
        """Nothing: W&B's own process writes what it is given."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Return a record's numbers under the names of panels: train/loss, validation/loss."""
    for name, value in record.items():
        if name == "step" or not isinstance(value, bool | int | float):
            continue
        group, short = "train", name
        if name.startswith("validation_"):
            group, short = "validation", name.removeprefix("validation_")
        if math.isfinite(value):
            yield f"{group}/{short}", float(value)


def _own_id(folder: Path, *, anew: bool) -> str:
    """Return the id that a run keeps while it is resumed."""
    path = folder / "wandb" / "id.txt"
    if not anew and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    own = uuid.uuid4().hex[:8]
    path.write_text(f"{own}\n", encoding="utf-8")
    return own


@dataclass(frozen=True)
class Kind:
    """A program to watch runs with.

    Attributes:
        make: Begins a run in it.
        package: What must be installed; also the name of the extra that brings it.
        leaves: What it leaves in the run's folder, and how to look at it.
    """

    make: Callable[[Path, Config, list[Record], int], Tracker]
    package: str
    leaves: str


# By flag.
TRACKERS = {
    "tensorboard": Kind(TensorBoard, "tensorboard", "tensorboard --logdir {folder} shows it"),
    "wandb": Kind(WeightsAndBiases, "wandb", "wandb sync {folder}/wandb/offline-run-* uploads it"),
}


def check_trackers(config: Config) -> None:
    """Refuse one that is not installed.

    Raises:
        UsageError: Naming the flag and what brings the package.
    """
    for flag, kind in _asked_for(config):
        if find_spec(kind.package) is None:
            raise UsageError(
                f"--{flag}: no {kind.package} here; pip install -e '.[{kind.package}]' brings it"
            )


def trackers_for(
    folder: Path, config: Config, history: list[Record], first: int
) -> dict[str, Tracker]:
    """Begin what the flags ask for.

    Raises:
        UsageError: It is installed and cannot begin.
    """
    made: dict[str, Tracker] = {}
    for flag, kind in _asked_for(config):
        try:
            made[flag] = kind.make(folder, config, history, first)
        except Exception as error:  # of any class that these packages have
            for begun in made.values():
                with contextlib.suppress(Exception):
                    begun.close()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(f"--{flag}: {kind.package} cannot begin a run ({reason})") from None
    return made


def _asked_for(config: Config) -> list[tuple[str, Kind]]:
    return [(flag, kind) for flag, kind in TRACKERS.items() if getattr(config, flag)]
