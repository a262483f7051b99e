"""Which of Lightning's packages this process trains with."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["lightning_package"]


def lightning_package(name: str) -> Any:
    """Import ``lightning.pytorch`` or ``lightning.fabric``, or the package it is alone.

    Both come in two packages, whose classes are not each other's. The one that is imported already
    is taken; ``lightning``'s where both or none are.

    Args:
        name: ``"pytorch"`` or ``"fabric"``.

    Raises:
        ModuleNotFoundError: Neither is installed.
    """
    alone = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}[name]
    names = [f"lightning.{name}", alone]
    if alone in sys.modules and names[0] not in sys.modules:
        names.reverse()
    for each in names:
        try:
            return importlib.import_module(each)
        except ModuleNotFoundError as error:
            if error.name not in (each, each.split(".")[0]):
                raise
    raise ModuleNotFoundError(
        f"distamp's part for Lightning needs {names[0]} or {alone}, and neither is installed: "
        "pip install lightning",
        name="lightning",
    )
