"""Small helpers of these tests: what a call raised, and trainers that are born and gone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RaiseAt", "error_of", "no_garbage"]


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str] | None:
    """The name and the text of what ``function`` raised, to be sent to the test; None if nothing.

    Every error counts, that of a collective that nobody answered as well: a test that wants an
    error says which.
    """
    try:
        function(*args, **kwargs)
    except pytest.skip.Exception:
        raise
    except Exception as error:
        return type(error).__name__, str(error)
    return None


class RaiseAt(TorchDispatchMode):
    """Raises ``error`` instead of running the first op whose name contains ``name``.

    An op is where a device runs out of memory.
    """

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__()
        self.name, self.error = name, error
        self.raised = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.raised and self.name in func.name():
            self.raised = True
            raise self.error
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Collect before and after, so that what is counted inside is what something refers to."""
    gc.collect()
    yield
    gc.collect()


def value_of(tensor: Tensor) -> list[float]:
    """A parameter's values as Python floats, to be compared and sent."""
    return torch.as_tensor(tensor.detach()).flatten().tolist()
