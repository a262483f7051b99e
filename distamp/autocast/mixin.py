"""One module made an instance of a subclass, which runs it otherwise.

A class and not a wrapped ``module.forward``, which copies and replicas of the module would share
with it, weights and all; and not forward hooks, which a KeyboardInterrupt passes by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Mixin", "add", "remove"]


class Mixin:
    """What is put before a module's class; hooks, FSDP2, torch.compile and isinstance hold."""

    # The class that this was put before, what this is for it, and a value that goes with it; the
    # last is also an attribute of this name.
    _before: type[nn.Module]
    _mixin: type[Mixin]
    _value: Any
    _attribute: str = "_value"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the class before does, by its own methods, and put the mixin on again."""
        cls = type(self)
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        args = tuple(cls._before if each is cls else each for each in args)
        return (_remake, (cls._mixin, cls._value, function, args), *rest)


def _remake(
    mixin: type[Mixin], value: Any, function: Callable[..., nn.Module], args: tuple[Any, ...]
) -> nn.Module:
    module = function(*args)
    module.__class__ = _subclass(mixin, value, type(module))
    return module


_subclasses: dict[tuple[Any, Any, Any], Any] = {}


def _subclass(mixin: Any, value: Any, before: Any) -> Any:
    """The one class for these, so that modules of it are of one type, before and after pickling."""
    key = mixin, value, before
    if key not in _subclasses:
        body = {"_before": before, "_mixin": mixin, "_value": value, mixin._attribute: value}
        body["__doc__"] = before.__doc__
        made = type(before.__name__, (mixin, before), body)
        made.__module__, made.__qualname__ = before.__module__, before.__qualname__
        return _subclasses.setdefault(key, made)
    return _subclasses[key]


def add(module: nn.Module, mixin: type[Mixin], value: Any = None) -> None:
    """Make a module an instance of ``mixin`` too, in the place of an earlier one of its kind."""
    module.__class__ = _subclass(mixin, value, _without(type(module), mixin))


def remove(module: nn.Module, mixin: type[Mixin]) -> None:
    """Undo :func:`add`, whatever was added after it."""
    module.__class__ = _without(type(module), mixin)


def _without(cls: Any, mixin: type[Mixin]) -> Any:
    added: type[Mixin] | None = vars(cls).get("_mixin")
    if added is None:
        return cls
    if added is mixin:
        return cls._before
    return _subclass(added, cls._value, _without(cls._before, mixin))
