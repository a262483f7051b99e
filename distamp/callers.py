"""The stack level of a warning that names the user's line."""

from __future__ import annotations

import sys

__all__ = ["stacklevel_of_caller"]


def stacklevel_of_caller(*also_skipped: str) -> int:
    """Return the ``stacklevel`` at which a warning of the caller names a line outside of distamp.

    A fixed number would name a line of distamp if a structure is walked recursively.

    Args:
        also_skipped: Prefixes of other module names to skip, such as ``"torch."`` in a hook that
            torch calls.
    """
    skipped_prefixes = ("distamp.", *also_skipped)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module_name = frame.f_globals.get("__name__", "")
        if not module_name.startswith(skipped_prefixes):
            break
        level += 1
        frame = frame.f_back
    return level
