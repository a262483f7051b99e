"""Where a run and its checkpoints lie, and which of them a path means."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["CHECKPOINTS", "is_checkpoint", "run_of"]

# The folder of a run's checkpoints, in its own.
CHECKPOINTS = "checkpoints"


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint, and not the folder of a run."""
    named = re.fullmatch(r"step-\d{8,}", path.absolute().name) is not None
    return named and not (path / CHECKPOINTS).is_dir()


def run_of(resume: Path) -> Path | None:
    """Return the folder of the run that ``--resume`` names: itself, its checkpoints or one of them.

    None for a checkpoint that lies in no run.
    """
    path = resume.absolute()
    if is_checkpoint(path):
        return _above(resume, 2) if path.parent.name == CHECKPOINTS else None
    if path.name == CHECKPOINTS and not (path / CHECKPOINTS).is_dir():
        return _above(resume, 1)
    return resume


def _above(path: Path, levels: int) -> Path:
    parents = path.parents if len(path.parts) > levels else path.absolute().parents
    return parents[levels - 1]
