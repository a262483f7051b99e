"""Where a warning should point: the line of the user that led to it."""

from __future__ import annotations

import sys

__all__ = ["stacklevel_of_caller"]


def stacklevel_of_caller(*also_skipped: str) -> int:
    """Return the ``stacklevel`` with which the caller's warning names the first line outside us.

    A fixed number would name a line of this package wherever a structure is walked recursively.

    Args:
        also_skipped: The beginnings of other modules' names to skip, such as ``"torch."`` in a
            hook that torch calls.
    """
    level, frame = 1, sys._getframe(1)
    skipped = ("distamp.", *also_skipped)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(skipped):
        level, frame = level + 1, frame.f_back
    return level
