"""patch_torch: distamp's scaler under torch's names, for packages that create their own scaler."""

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


# The largest number of names in a warning.
_MAX_NAMES = 8


class ShardedGradScaler(DistGradScaler):
    """:class:`distamp.DistGradScaler` with the arguments of torch's ``ShardedGradScaler``.

    ``backoff_factor`` comes before ``growth_factor`` in the positional arguments, and float16
    gradients are unscaled in place. ``settings`` are other arguments of `DistGradScaler`.
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


# The names from which other packages import a scaler's class, and the class that replaces it.
_REPLACEMENTS: dict[str, type[DistGradScaler]] = {
    "torch.GradScaler": DistGradScaler,
    "torch.amp.GradScaler": DistGradScaler,
    "torch.amp.grad_scaler.GradScaler": DistGradScaler,
    "torch.cuda.amp.GradScaler": distamp.cuda.amp.GradScaler,
    "torch.cuda.amp.grad_scaler.GradScaler": distamp.cuda.amp.GradScaler,
    "torch.cpu.amp.GradScaler": distamp.cpu.amp.GradScaler,
    "torch.cpu.amp.grad_scaler.GradScaler": distamp.cpu.amp.GradScaler,
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": ShardedGradScaler,
}

# The names that are replaced now, with torch's class and its replacement. No other state in distamp
# is process-wide; this one is, because torch's names are.
_replaced: dict[str, tuple[type[Any], type[Any]]] = {}


@dataclass(frozen=True)
class Installation:
    """The result of `patch_torch`; a context manager that restores torch's names at its end.

    Attributes:
        late: The names in modules outside torch that already referred to torch's class, or to a
            subclass of it, and still do. Other references (a default argument) are not found.
        first: False if torch was patched already; then the end of this context changes nothing.
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

    Trainers create their own scaler from one of torch's names. If every process calls this before
    it imports the trainer, the trainer creates distamp's scaler. The names are
    ``torch.GradScaler``, ``torch.amp.GradScaler``, ``torch.amp.grad_scaler.GradScaler``, the names
    in ``torch.cuda.amp`` and ``torch.cpu.amp`` with their signatures, and ``ShardedGradScaler``
    with its signature. Nothing else of torch is changed. Importing distamp changes nothing, and
    neither does a second call.

    Args:
        guard: Whether ``enabled=False``, which many trainers pass in bf16, creates a `StepGuard`,
            so that ranks also step or skip together in bf16.
        settings: Keyword arguments of `DistGradScaler` for scalers that are created by torch's
            names, such as ``process_group``, ``min_scale`` and ``max_consecutive_skips``. Arguments
            that the trainer passes have priority. Guards use the settings that `StepGuard` has.

    Returns:
        A context manager, which also lists the names that were imported too early.

    Raises:
        TypeError, ValueError: `DistGradScaler` has no such setting, or refuses its value.
        CallOrderError: torch is patched already, and settings are given.

    Warns:
        RuntimeWarning: Other modules imported torch's class before, and still use it. The warning
            names them.

    Example::

        import distamp
        distamp.patch_torch(max_consecutive_skips=100)
        from transformers import Trainer
    """
    if _replaced and (settings or guard):
        raise CallOrderError(
            "patch_torch() was called before, so these settings would have no effect. Call "
            "unpatch_torch() first, or pass the settings to the first call."
        )
    if _replaced:
        return Installation(_imported_too_early(), first=False)
    # A wrong setting raises here, instead of where a trainer creates its scaler.
    DistGradScaler("cpu", **settings)
    replacements: dict[type[Any], type[Any]] = {}
    for path, scaler_class in _REPLACEMENTS.items():
        module, name = _import_target(path)
        if scaler_class not in replacements:
            replacement: type[Any] = scaler_class
            if settings or guard:
                replacement = _subclass_with_defaults(scaler_class, path, settings, guard)
            replacements[scaler_class] = replacement
        replacement = replacements[scaler_class]
        _replaced[path] = getattr(module, name), replacement
        setattr(module, name, replacement)
    late = _imported_too_early()
    if late:
        names = ", ".join(late[:_MAX_NAMES])
        if len(late) > _MAX_NAMES:
            names += f" and {len(late) - _MAX_NAMES} more"
        warnings.warn(
            "distamp.patch_torch() was called after other modules had imported torch's GradScaler. "
            f"They still use torch's: {names}. Call patch_torch() before you import them.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Installation(late, first=True)


def unpatch_torch() -> None:
    """Restore torch's names; scalers that exist remain distamp's.

    Does nothing if torch is not patched, and skips a name that other code has replaced since.
    """
    for path, (torch_class, replacement) in _replaced.items():
        module, name = _import_target(path)
        if getattr(module, name) is replacement:
            setattr(module, name, torch_class)
    _replaced.clear()


def _import_target(path: str) -> tuple[ModuleType, str]:
    """Return the module of a dotted path, imported, and the name in it."""
    module_name, _, name = path.rpartition(".")
    return importlib.import_module(module_name), name


def _subclass_with_defaults(
    scaler_class: type[Any], path: str, settings: dict[str, Any], guard: bool
) -> type[Any]:
    """Return a subclass with other defaults, which pickle finds under torch's name.

    Args:
        scaler_class: The class to derive from.
        path: The first of torch's names that the subclass replaces.
        settings: The defaults.
        guard: Whether ``enabled=False`` creates a `StepGuard`.
    """
    signature = inspect.signature(scaler_class.__init__)
    guard_settings = {name: settings[name] for name in GUARD_KWARGS if name in settings}

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(cls, *args, **kwargs).arguments
        if guard and not arguments.get("enabled", True):
            return StepGuard(**guard_settings)
        return object.__new__(cls)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        scaler_class.__init__(self, *args, **{**settings, **kwargs})

    module_name, _, name = path.rpartition(".")
    attributes = {
        "__new__": new,
        "__init__": init,
        "__module__": module_name,
        "__doc__": scaler_class.__doc__,
    }
    return type(name, (scaler_class,), attributes)


def _imported_too_early() -> tuple[str, ...]:
    """Return the names in modules outside torch that refer to torch's scaler or a subclass."""
    torch_classes = {torch_class for torch_class, _ in _replaced.values()}
    late: list[str] = []
    for module_name, module in list(sys.modules.items()):
        package = module_name.partition(".")[0]
        if package in ("torch", "distamp") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            # isinstance() would return True for a proxy that claims to be a class.
            if not issubclass(type(value), type):
                continue
            bases = value.__mro__
            if not torch_classes.isdisjoint(bases) and DistGradScaler not in bases:
                late.append(f"{module_name}.{name}")
    return tuple(sorted(late))
