"""Errors that travel: one rank's error as all the others raise it."""

from __future__ import annotations

import torch

from distamp.errors import GradientError, SettingError, StageError

__all__ = ["portable", "raised_on"]

_KNOWN: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    OSError,
    RuntimeError,
    torch.OutOfMemoryError,
    GradientError,
    StageError,
    SettingError,
)


def portable(error: Exception) -> tuple[type[Exception], str]:
    """Return an error as another rank can raise it, which may not have its type."""
    kind = type(error)
    if kind in _KNOWN:
        return kind, str(error)
    return RuntimeError, f"{kind.__name__}: {error}"


def raised_on(rank: int, error: tuple[type[Exception], str]) -> Exception:
    """Return the error to raise where another rank has found one."""
    kind, text = error
    return kind(f"{text} (raised on rank {rank}; every rank stops here)")
