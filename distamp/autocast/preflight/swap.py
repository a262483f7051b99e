"""A model on fake tensors for a while: its own are put back, and everything else as it was.

Fake tensors take the place of parameters and buffers wherever the model refers to them, not in its
modules alone (recurrent layers keep lists of their weights), and stay through backward, where
checkpointing runs forward again. What forward leaves on the model (caches, counters, tensors, which
are fake) is taken off again.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["swapped"]

_LEFT_ALONE = (
    torch.Tensor,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.optim.Optimizer,
)
# Objects that are looked into; a model that leads to more (a dataset, say) is left alone there.
_MOST = 200_000


@contextmanager
def swapped(model: nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let ``stand_ins[id(tensor)]`` take the place of each tensor the model refers to.

    However the block ends, all modules, and the containers and plain objects they lead to, are as
    before after it; the model's parameters and buffers are checked to be.

    Raises:
        RuntimeError: A parameter or buffer is not as it was.
    """
    before = _tensors_of(model)
    kept = [(container, _copy(container)) for container in _containers(model)]
    try:
        for container, copy in kept:
            _replace(container, copy, stand_ins)
        yield
    finally:
        for container, copy in kept:
            _restore(container, copy)
        if _tensors_of(model) != before:
            raise RuntimeError("the model's parameters or buffers are not those it had")


def _tensors_of(model: nn.Module) -> list[tuple[str, int, int]]:
    """Every parameter and buffer under every name, and how often it was written to."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [(n, id(t), 0 if t.is_inference() else t._version) for n, t in tensors]


def _containers(model: nn.Module) -> list[Any]:
    """The dicts, lists, sets and deques that hold the model's state, each once."""
    found, seen, todo = [], {id(model)}, [model]
    while todo and len(seen) < _MOST:
        value: Any = todo.pop()
        if isinstance(value, dict):
            inside = [*value.values()]
        elif isinstance(value, list | set | deque | tuple):
            inside = [*value]
        elif isinstance(value, types.MethodType):
            inside = [value.__self__]
        elif isinstance(value, functools.partial):
            inside = [value.func, value.args, value.keywords]
        else:
            inside = [vars(value)]
        if isinstance(value, dict | list | set | deque):
            found.append(value)
        for each in inside:
            if id(each) not in seen and not isinstance(each, _LEFT_ALONE) and _has_state(each):
                seen.add(id(each))
                todo.append(each)
    return found


def _has_state(value: Any) -> bool:
    if isinstance(value, dict | list | set | deque | tuple | types.MethodType | functools.partial):
        return True
    # A logger or a lock is the whole process's.
    package = type(value).__module__.partition(".")[0]
    plain = isinstance(getattr(value, "__dict__", None), dict)
    return plain and package not in sys.stdlib_module_names


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return list(container.items())
    return list(container)


def _replace(container: Any, copy: Any, stand_ins: Mapping[int, torch.Tensor]) -> None:
    if isinstance(container, dict):
        for key, value in copy:
            if id(value) in stand_ins:
                dict.__setitem__(container, key, stand_ins[id(value)])
    elif isinstance(container, list | deque):
        for at, value in enumerate(copy):
            if id(value) in stand_ins:
                container[at] = stand_ins[id(value)]


def _restore(container: Any, copy: Any) -> None:
    if isinstance(container, dict):
        now = list(container.items())
        same = len(now) == len(copy) and all(
            a is c and b is d for (a, b), (c, d) in zip(now, copy, strict=True)
        )
        if not same:
            kind = OrderedDict if isinstance(container, OrderedDict) else dict
            kind.clear(container)
            for key, value in copy:
                kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        container.clear()
        container.update(copy)
    elif len(container) != len(copy) or any(
        a is not b for a, b in zip(container, copy, strict=True)
    ):
        container.clear()
        container.extend(copy)
