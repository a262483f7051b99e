"""Multiply a tensor, or every tensor of a nested structure, by the loss scale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from distamp import host

__all__ = ["PerDevice", "map_tensors"]


class PerDevice:
    """Copies of one 0-d tensor on the devices that ask for it."""

    def __init__(self, source: Tensor) -> None:
        self._copies = {source.device: source}
        self._source = source

    def on(self, device: torch.device) -> Tensor:
        """Return the copy on ``device``; the source itself where it already lies there."""
        found = self._copies.get(device)
        if found is None:
            found = host.moved(self._source, device)
            self._copies[device] = found
        return found


def map_tensors(structure: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to every tensor, keeping lists, tuples, namedtuples and mappings.

    A read-only mapping comes back as a dict; other iterables come back lazily, as from
    torch.amp.GradScaler.

    Raises:
        ValueError: A leaf is not a tensor.
    """
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        items = {key: map_tensors(value, function) for key, value in structure.items()}
        if type(structure) is dict or not isinstance(structure, MutableMapping):
            return items
        result = copy.copy(structure)
        for key, value in items.items():
            result[key] = value
        return result
    if isinstance(structure, Iterable) and not isinstance(structure, (str, bytes)):
        mapped = (map_tensors(value, function) for value in structure)
        if isinstance(structure, tuple) and hasattr(structure, "_fields"):
            return type(structure)(*mapped)
        if isinstance(structure, (list, tuple)):
            return type(structure)(mapped)
        return mapped
    raise ValueError(
        "outputs must be a Tensor or an iterable of Tensors, not "
        f"{type(structure).__name__} ({structure!r:.80})"
    )
