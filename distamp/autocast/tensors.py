"""The tensors among values of any nesting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, sets, dicts and the fields of data classes."""
    found: list[torch.Tensor] = []
    _gather(values, found)
    return found


def _gather(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | set):
            _gather(value, found)
        elif isinstance(value, dict):
            _gather(value.values(), found)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _gather((getattr(value, each.name) for each in dataclasses.fields(value)), found)
