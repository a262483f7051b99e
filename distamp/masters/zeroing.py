"""Notice ``optimizer.zero_grad()``, which reaches masters and not the model, as it happens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distamp.gradients import is_dtensor
from distamp.masters.convert import placed_like

__all__ = ["ZeroGradWitness"]

_ZEROES = {Tensor.zero_, torch._foreach_zero_, torch.zero_}


class _Placeholder(Tensor):
    """A gradient of zeros that takes no memory, and knows when it is zeroed."""

    zeroed: Callable[[], None]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, zeroed: Callable[[], None]) -> _Placeholder:
        made: _Placeholder = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=torch.float32, device=like.device
        )
        made.zeroed = zeroed
        return made

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"no gradient of shape {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith("aten::detach"):
            return args[0]
        if "zero" in name:
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            others = [each for each in given if not isinstance(each, _Placeholder)]
            if others:
                torch._foreach_zero_(others)
            for each in given:
                if isinstance(each, _Placeholder):
                    each.zeroed()
            return args[0] if isinstance(args[0], Tensor) else None
        return func(*_filled(args), **{k: _filled(v) for k, v in (kwargs or {}).items()})


def _filled(value: Any) -> Any:
    """Return arguments with zeros in the place of placeholders."""
    if isinstance(value, _Placeholder):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_filled, value))
    return value


class _Watched(Tensor):
    """A gradient that was stepped, and knows when it is zeroed in place."""

    zeroed: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _ZEROES:
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for each in given:
                if isinstance(each, _Watched):
                    each.zeroed()
        return result


class ZeroGradWitness:
    """Gradients of two masters that notice when ``zero_grad`` takes them away, or empties them.

    While a backward pass is under way masters have no gradients, so placeholders without memory
    are laid on two of them; after a step two of the gradients that were stepped serve. Two, because
    in the very moment in which one is taken away none can be laid in its place.

    Args:
        zeroed: Called when ``zero_grad`` was called.
        begins: Called in each backward pass through a parameter that is followed.
    """

    def __init__(self, zeroed: Callable[[], None], begins: Callable[[], None]) -> None:
        self._zeroed = zeroed
        self._begins = begins
        self._followed: set[int] = set()
        self._laid: dict[int, tuple[weakref.ref[Tensor], weakref.finalize[Any, Any]]] = {}
        self._masters: list[weakref.ref[Tensor]] = []

    def lay(self, masters: Sequence[Tensor]) -> None:
        """Lay placeholders on the smallest masters that have no gradient."""
        self._masters = [weakref.ref(master) for master in _smallest(masters)]
        self._lay(but=None)

    def _lay(self, but: int | None) -> None:
        for reference in self._masters:
            master = reference()
            if master is None or id(master) == but or master.grad is not None:
                continue
            placeholder: Tensor = _Placeholder(_local(master), self._notice_in_place)
            self._watch(master, placeholder)
            master.grad = placed_like(placeholder, master)

    def follow(self, parameter: Tensor) -> None:
        """Hear of backward passes: for one master alone nothing else can lay another witness."""
        if parameter.requires_grad and id(parameter) not in self._followed:
            self._followed.add(id(parameter))
            begins = self._begins
            parameter.register_hook(lambda _: begins())

    def watch_stepped(self, masters: Sequence[Tensor]) -> None:
        """Let gradients that were stepped serve, and placeholders where there are too few."""
        self.lift()
        stepped = _smallest([m for m in masters if m.grad is not None])
        for master in stepped:
            gradient = master.grad
            assert gradient is not None
            if type(gradient) is Tensor and not gradient.is_sparse:
                gradient = gradient.as_subclass(_Watched)
                gradient.zeroed = self._notice_in_place
                master.grad = gradient
            self._watch(master, gradient)
        others = _smallest([m for m in masters if m.grad is None])
        self._masters = [weakref.ref(master) for master in (stepped + others)[:2]]
        if len(stepped) < 2:
            self._lay(but=None)

    def _watch(self, master: Tensor, gradient: Tensor) -> None:
        me, key = weakref.ref(self), id(master)

        def gone() -> None:
            if (witness := me()) is not None:
                witness._notice_gone(key)

        final = weakref.finalize(gradient, gone)
        final.atexit = False
        self._laid[key] = (weakref.ref(master), final)

    def _notice_in_place(self) -> None:
        self._zeroed()

    def _notice_gone(self, key: int) -> None:
        if self._laid.pop(key, None) is None:
            return
        self._zeroed()
        self._lay(but=key)

    def lift(self) -> None:
        """Take away what was laid, without a word."""
        laid, self._laid = self._laid, {}
        for reference, final in laid.values():
            final.detach()
            master = reference()
            gradient = None if master is None else master.grad
            if master is None or gradient is None:
                continue
            if isinstance(_local(gradient), _Placeholder):
                master.grad = None
            elif isinstance(gradient, _Watched):
                master.grad = gradient.as_subclass(Tensor)


def _smallest(masters: Sequence[Tensor]) -> list[Tensor]:
    return sorted((m for m in masters if m.numel()), key=Tensor.numel)[:2]


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if is_dtensor(tensor) else tensor
