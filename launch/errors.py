"""What the launcher tells its user in one line."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """Something the user can put right; printed once, as one line, with exit code 2."""
