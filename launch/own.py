"""Functions and classes of the user's own, which flags name as ``module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from launch.config import UsageError

__all__ = ["load_own"]


def load_own(flag: str, name: str) -> Any:
    """Import ``module:name``, also from the folder in which the run was started.

    Raises:
        UsageError: If it is not there.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{flag} {name}: {error}") from None
