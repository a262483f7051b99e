"""Modules that run in their caller's, or in a given, autocast state in whatever thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from distamp.autocast.mixin import Mixin, add, remove
from distamp.autocast.threads.state import AutocastState, propagate

__all__ = ["bind", "unbind"]

_M = TypeVar("_M", bound=nn.Module)


class _Bound(Mixin, nn.Module):
    _attribute = "_bound_to"
    _bound_to: AutocastState

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._bound_to.apply():
            return super().__call__(*args, **kwargs)


class _BoundParallel(Mixin, nn.DataParallel[Any]):
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        state = AutocastState.capture()
        bound = [propagate(replica, state) for replica in replicas]
        return super().parallel_apply(bound, inputs, kwargs)


def bind(module: _M) -> _M:
    """Have a module run in its binder's autocast state, in whatever thread it is called.

    A :class:`torch.nn.DataParallel` is bound to its caller's state, taken anew at each call, so
    that plain ones behave as :class:`distamp.DataParallel`. Any other module is bound to the
    calling thread's state, now. The module itself is changed, by a subclass of its class; its
    parameters and ``state_dict`` are not.

    Args:
        module: The module. One that is bound already is bound anew.

    Returns:
        The module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"bind needs a torch.nn.Module, got {type(module).__name__}; propagate(fn) binds a "
            "function"
        )
    if isinstance(module, nn.DataParallel):
        add(module, _BoundParallel)
    else:
        add(module, _Bound, AutocastState.capture())
    return module


def unbind(module: _M) -> _M:
    """Undo :func:`bind`; nothing where the module is not bound.

    Returns:
        The module.
    """
    for mixin in (_Bound, _BoundParallel):
        remove(module, mixin)
    return module
