"""patch_torch: distamp's scaler under the names of torch's, for packages that create their own."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

import distamp.cpu.amp
import distamp.cuda.amp
from distamp.errors import CallOrderError
from distamp.guard.step_guard import GUARD_KWARGS, StepGuard
from distamp.scaler import DistGradScaler

__all__ = ["Installation", "ShardedGradScaler", "patch_torch", "unpatch_torch"]


class ShardedGradScaler(DistGradScaler):
    """:class:`distamp.DistGradScaler` with the arguments of torch's ``ShardedGradScaler``.

    In that class, positional arguments have ``backoff_factor`` before ``growth_factor``, and
    float16 gradients are unscaled in place. ``settings`` are more of `DistGradScaler`'s.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        settings = {"fp16_grads": "inplace", "process_group": process_group, **settings}
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled, **settings
        )


# Where other packages take a scaler's class from, and ours in its place.
_OURS: dict[str, type[DistGradScaler]] = {
    "torch.GradScaler": DistGradScaler,
    "torch.amp.GradScaler": DistGradScaler,
    "torch.amp.grad_scaler.GradScaler": DistGradScaler,
    "torch.cuda.amp.GradScaler": distamp.cuda.amp.GradScaler,
    "torch.cuda.amp.grad_scaler.GradScaler": distamp.cuda.amp.GradScaler,
    "torch.cpu.amp.GradScaler": distamp.cpu.amp.GradScaler,
    "torch.cpu.amp.grad_scaler.GradScaler": distamp.cpu.amp.GradScaler,
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": ShardedGradScaler,
}

# What was put onto torch: for each place what torch had there, and what is there now. The one piece
# of process-wide state in distamp, since torch's own names are process-wide.
_put: dict[str, tuple[type[Any], type[Any]]] = {}


@dataclass(frozen=True)
class Installation:
    """The result of `patch_torch`; a context manager whose end undoes it.

    Attributes:
        late: The names of modules outside torch that took torch's class before, or derived one from
            it, and keep it. What keeps it otherwise (a default argument) is not found.
        first: False if distamp was already installed; then the end of this one changes nothing.
    """

    late: tuple[str, ...]
    first: bool

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        if self.first:
            unpatch_torch()
        return False


def patch_torch(*, guard: bool = False, **settings: Any) -> Installation:
    """Replace ``torch.amp.GradScaler`` by `DistGradScaler`, for packages that create a scaler.

    Trainers create their own scaler, from one of torch's names. Call this in every process, before
    you import the trainer, and its scaler is distamp's. The names are ``torch.GradScaler``,
    ``torch.amp.GradScaler``, ``torch.amp.grad_scaler.GradScaler``, those of ``torch.cuda.amp`` and
    ``torch.cpu.amp`` with their signatures, and ``ShardedGradScaler`` with its signature.
    Nothing else of torch is changed; importing distamp changes nothing. A second call changes
    nothing.

    Args:
        guard: Whether a scaler that the trainer makes with ``enabled=False``, as many do in bf16,
            is a `StepGuard`: then ranks step or skip together there, too.
        settings: Keyword settings of `DistGradScaler` for the scalers that are made so, such as
            ``process_group``, ``min_scale`` and ``max_consecutive_skips``; those that the trainer
            passes itself come first. Guards take those that they have.

    Returns:
        A context manager, which also lists what was imported too early.

    Raises:
        TypeError, ValueError: `DistGradScaler` has no such setting, or refuses its value.
        CallOrderError: It is installed already, and settings are given.

    Warns:
        RuntimeWarning: Other code took torch's class before; it still uses torch's. Names it.

    Example::

        import distamp
        distamp.patch_torch(max_consecutive_skips=100)
        from transformers import Trainer
    """
    if _put and (settings or guard):
        raise CallOrderError(
            "distamp is installed already; call unpatch_torch() before other settings"
        )
    if _put:
        return Installation(_late(), first=False)
    DistGradScaler("cpu", **settings)  # refuses settings here, and not where a trainer uses them
    made = {}
    for place, ours in _OURS.items():
        module, name = _found(place)
        if ours not in made:  # found, and so pickled, by the first of its names
            made[ours] = _made(ours, place, settings, guard) if settings or guard else ours
        _put[place] = getattr(module, name), made[ours]
        setattr(module, name, made[ours])
    late = _late()
    if late:
        shown = ", ".join(late[:8]) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
        warnings.warn(
            "distamp.patch_torch() was called after these had taken torch's GradScaler, and they "
            f"still use it: {shown}. Call patch_torch() before you import them",
            RuntimeWarning,
            stacklevel=2,
        )
    return Installation(late, first=True)


def unpatch_torch() -> None:
    """Give torch's names back to torch's classes; scalers that were made keep being distamp's.

    Does nothing if distamp is not installed, and to a name where something else was put since.
    """
    for place, (theirs, ours) in _put.items():
        module, name = _found(place)
        if getattr(module, name) is ours:
            setattr(module, name, theirs)
    _put.clear()


def _found(place: str) -> tuple[ModuleType, str]:
    module, _, name = place.rpartition(".")
    return importlib.import_module(module), name


def _made(ours: type[Any], place: str, settings: dict[str, Any], guard: bool) -> type[Any]:
    """Return a class that is found, and so pickled, under torch's name."""
    signature = inspect.signature(ours.__init__)
    guards = {name: settings[name] for name in GUARD_KWARGS if name in settings}

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(cls, *args, **kwargs).arguments
        if guard and not given.get("enabled", True):
            return StepGuard(**guards)
        return object.__new__(cls)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        ours.__init__(self, *args, **{**settings, **kwargs})

    module, _, name = place.rpartition(".")
    body = {"__new__": new, "__init__": init, "__module__": module, "__doc__": ours.__doc__}
    return type(name, (ours,), body)


def _late() -> tuple[str, ...]:
    """Return what modules outside torch still have one of torch's scaler classes, by name."""
    torchs = {theirs for theirs, _ in _put.values()}
    found = []
    for where, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and where.partition(".")[0] not in ("torch", "distamp"):
            for name, value in list(vars(module).items()):
                # isinstance() believes what proxies say that they are.
                bases = value.__mro__ if issubclass(type(value), type) else ()
                if not torchs.isdisjoint(bases) and DistGradScaler not in bases:
                    found.append(f"{where}.{name}")
    return tuple(sorted(found))
