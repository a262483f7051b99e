"""Modules that run in their caller's, or in a given, autocast state in whatever thread."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn

from distamp.autocast.threads.state import AutocastState

__all__ = ["bind", "unbind"]

_M = TypeVar("_M", bound=nn.Module)
_KEYWORD = "_distamp_autocast_state"


class _Thread(threading.local):
    """The calls of bound modules this thread is in, and the state each applied."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, AbstractContextManager[Any]]] = []


_thread = _Thread()


class _Carried:
    """A state on its way from a DataParallel's caller to the replicas, among their arguments."""

    def __init__(self, state: AutocastState) -> None:
        self.state = state


class _Hook:
    """A hook of ours, which knows how it is taken off. Classes, so that modules can be pickled."""

    handle: Any = None


class _Send(_Hook):
    """On a DataParallel: add the caller's state to the arguments.

    A positional argument where there is one: keyword arguments without a tensor would make more
    replicas than a small batch has parts.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        carried = _Carried(AutocastState.capture())
        if args:
            return (*args, carried), kwargs
        return (args, {**kwargs, _KEYWORD: carried}) if kwargs else None


class _Begin(_Hook):
    """Before forward: apply the state that came with the arguments, or the one bound to."""

    def __init__(self, state: AutocastState | None) -> None:
        self.state = state

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        state, changed = self.state, None
        if args and isinstance(args[-1], _Carried):
            state, changed = args[-1].state, (args[:-1], kwargs)
        elif _KEYWORD in kwargs:
            rest = dict(kwargs)
            state, changed = rest.pop(_KEYWORD).state, (args, rest)
        if state is not None:
            applied = state.apply()
            applied.__enter__()
            _thread.calls.append((module, applied))
        return changed


class _End(_Hook):
    """After forward, whether it failed or not: put the thread's own state back."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = _thread.calls
        if calls and calls[-1][0] is module:
            calls.pop()[1].__exit__(None, None, None)


def bind(module: _M) -> _M:
    """Have a module run in its binder's autocast state, in whatever thread it is called.

    A :class:`torch.nn.DataParallel` is bound to its caller's state, taken anew at each call, so
    that plain ones behave as :class:`distamp.autocast.DataParallel`. Any other module is bound to
    the calling thread's state, now. The module itself is changed, by forward hooks; its parameters
    and ``state_dict`` are not.

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
    unbind(module)
    inner: nn.Module = module
    state: AutocastState | None = AutocastState.capture()
    if isinstance(module, nn.DataParallel):
        inner, state = module.module, None
        send = _Send()
        send.handle = module.register_forward_pre_hook(send, with_kwargs=True)
    begin, end = _Begin(state), _End()
    begin.handle = inner.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
    end.handle = inner.register_forward_hook(end, always_call=True)
    return module


def unbind(module: _M) -> _M:
    """Undo :func:`bind`; nothing where the module is not bound.

    Returns:
        The module.
    """
    targets = [module, module.module] if isinstance(module, nn.DataParallel) else [module]
    for target in targets:
        hooks = (*target._forward_pre_hooks.values(), *target._forward_hooks.values())
        for hook in hooks:
            if isinstance(hook, _Hook):
                hook.handle.remove()
    return module
