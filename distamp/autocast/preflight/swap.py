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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["modules_of", "swapped"]

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
def swapped(models: Sequence[nn.Module], stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let ``stand_ins[id(tensor)]`` take the place of each tensor that the models refer to.

    However the block ends, all modules, and the containers and plain objects they lead to, are as
    before after it; the parameters and buffers are checked to be.

    Raises:
        RuntimeError: A parameter or buffer is not as it was.
    """
    before = [_tensors_of(model) for model in models]
    kept = [(container, list(_items(container))) for container in _containers(models)]
    try:
        for container, copy in kept:
            _replace(container, copy, stand_ins)
        yield
    finally:
        for container, copy in kept:
            _restore(container, copy)
        if [_tensors_of(model) for model in models] != before:
            raise RuntimeError("the model's parameters or buffers are not those it had")


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that a function, such as a loss function, is or refers to by name."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        inside = [function.func, *function.args, *function.keywords.values()]
        return [module for each in inside for module in modules_of(each)]
    if isinstance(function, types.MethodType):
        return modules_of(function.__self__) + modules_of(function.__func__)
    if not isinstance(function, types.FunctionType):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    names = [function.__globals__.get(name) for name in function.__code__.co_names]
    given = [*cells, *names, *(function.__defaults__ or ())]
    return [each for each in given if isinstance(each, nn.Module)]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _tensors_of(model: nn.Module) -> list[tuple[str, int, int]]:
    """Every parameter and buffer under every name, and how often it was written to."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [(n, id(t), 0 if t.is_inference() else t._version) for n, t in tensors]


def _containers(models: Sequence[nn.Module]) -> list[Any]:
    """The dicts, lists, sets and deques that hold the models' state, each once."""
    found, seen = [], set(map(id, models))
    todo: list[Any] = list(models)
    while todo and len(seen) < _MOST:
        value = todo.pop()
        if isinstance(value, dict | list | set | deque):
            found.append(value)
            inside = list(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            inside = list(value)
        elif isinstance(value, types.MethodType):
            inside = [value.__self__]
        elif isinstance(value, functools.partial):
            inside = [value.func, value.args, value.keywords]
        else:
            inside = [vars(value)]
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


def _items(container: Any) -> Iterable[Any]:
    return container.items() if isinstance(container, dict) else container


def _replace(container: Any, items: list[Any], stand_ins: Mapping[int, torch.Tensor]) -> None:
    if isinstance(container, dict):
        for key, value in items:
            if id(value) in stand_ins:
                dict.__setitem__(container, key, stand_ins[id(value)])
    elif not isinstance(container, set):
        for at, value in enumerate(items):
            if id(value) in stand_ins:
                container[at] = stand_ins[id(value)]


def _restore(container: Any, items: list[Any]) -> None:
    now = list(_items(container))
    if isinstance(container, dict):
        pairs = zip(now, items, strict=False)
        if len(now) != len(items) or any(a is not c or b is not d for (a, b), (c, d) in pairs):
            kind = OrderedDict if isinstance(container, OrderedDict) else dict
            kind.clear(container)
            kind.update(container, items)
    elif len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(items)
