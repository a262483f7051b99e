"""How a recorder learns what runs: module hooks, and torch's two stacks of modes.

A TorchDispatchMode sees every kernel, below autograd and autocast, casts included. It cannot see
who asked for a cast; a TorchFunctionMode, above autocast, can: ``Tensor.to`` passes it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Call", "Functions", "Kernels", "ModuleHook", "Watcher", "any_autocast"]

# Python calls that ask for a dtype by name.
_CONVERSIONS = frozenset(
    ("to", "type", "type_as", "_to_copy", "asarray", "as_tensor", "tensor")
    + ("float", "half", "bfloat16", "double", "int", "long", "short", "char", "byte", "bool")
    + ("chalf", "cfloat", "cdouble")
)
# Code that calls them on autocast's behalf: op lists, custom_fwd.
_AUTOCASTS = ("distamp.autocast.", "torch.amp.")
_GETTERS = frozenset({"__get__", "__set__", "size", "dim", "stride", "numel", "is_floating_point"})

any_autocast = torch._C._is_any_autocast_enabled


class Call:
    """A torch function that is running: its name, and whether casts in it are the user's."""

    __slots__ = ("autocast", "explicit", "name")

    def __init__(self, name: str, explicit: bool, autocast: bool) -> None:
        self.name = name
        self.explicit = explicit
        self.autocast = autocast


class Caller(Protocol):
    """What a thread keeps of the torch function that runs in it."""

    call: Call | None


class Watcher(Protocol):
    """What a recorder is to those that tell it."""

    closed: bool

    def thread(self) -> Caller:
        """This thread's state."""

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A kernel has run."""

    def enter_module(self, module: nn.Module, name: str, inputs: Any) -> None:
        """A module's forward begins."""

    def leave_module(self, module: nn.Module, output: Any) -> None:
        """A module's forward has ended."""


class Kernels(TorchDispatchMode):
    """Shows a recorder every kernel call of this thread."""

    # flex_attention, cond and the like are one kernel; what they run inside is not seen.
    supports_higher_order_operators = True

    def __init__(self, recorder: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.recorder.record(func, args, kwargs, out)
        return out


class Functions(TorchFunctionMode):
    """Tells a recorder which torch function, called from Python, is running in this thread."""

    def __init__(self, recorder: Watcher) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in _GETTERS:
            return func(*args, **kwargs)
        thread = self.recorder.thread()
        before = thread.call
        explicit = name in _CONVERSIONS or kwargs.get("dtype") is not None
        thread.call = call = Call(name.strip("_"), explicit, any_autocast())
        if explicit and _caller(sys._getframe(1)).startswith(_AUTOCASTS):
            call.explicit, call.autocast = False, True
        try:
            return func(*args, **kwargs)
        finally:
            thread.call = before


class ModuleHook:
    """A module hook that a copied or pickled module does not take the recorder with."""

    __slots__ = ("entering", "name", "recorder")

    def __init__(self, recorder: Watcher | None, name: str, entering: bool) -> None:
        self.recorder = recorder
        self.name = name
        self.entering = entering

    def __call__(self, module: nn.Module, inputs: Any, output: Any = None) -> None:
        """Tell the recorder; torch gives pre-hooks no output."""
        recorder = self.recorder
        if recorder is None or recorder.closed:
            return
        if self.entering:
            recorder.enter_module(module, self.name, inputs)
        else:
            recorder.leave_module(module, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None, self.name, self.entering)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (None, self.name, self.entering)


def _caller(frame: FrameType | None) -> str:
    """The module that called a torch function, through modes that handed the call on."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
