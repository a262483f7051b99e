"""A function over a tensor, or over every tensor of a nested structure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

__all__ = ["map_tensors"]


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
        result.update(items)
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
