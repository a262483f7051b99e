"""install: distamp's scaler in the places other packages take torch's from, on request alone."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.utils.checkpoint

import distamp.cpu.amp
import distamp.cuda.amp
from distamp.autocast import AutocastState, checkpoint_contexts, propagate
from distamp.scaler import DistGradScaler

__all__ = ["Installation", "ShardedGradScaler", "install", "uninstall"]


class ShardedGradScaler(DistGradScaler):
    """:class:`distamp.DistGradScaler` with the arguments of torch's ``ShardedGradScaler``.

    In that class, positional arguments have ``backoff_factor`` before ``growth_factor``, and
    float16 gradients are unscaled in place.

    Args:
        device: As in :class:`distamp.DistGradScaler`; so are the others.
        init_scale: The first loss scale.
        backoff_factor: What the scale is multiplied by when it shrinks.
        growth_factor: What it is multiplied by when it grows.
        growth_interval: Clean steps in a row before the scale grows.
        enabled: If False, ``step`` only steps the optimizer, and the rest does nothing.
        process_group: The ranks that have a part of the model; None for every rank.
        settings: More keyword settings of :class:`distamp.DistGradScaler`.
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
        settings.setdefault("fp16_grads", "inplace")
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            process_group=process_group,
            **settings,
        )


@dataclass(frozen=True)
class _Place:
    """A name in one of torch's modules, and what stands there after `install`."""

    module: str
    name: str
    ours: Callable[[Any], Any]
    """From what torch has there to what is put there."""

    optional: bool = False
    """Whether a torch without this name is one that needs nothing here."""

    @property
    def is_scaler(self) -> bool:
        return self.name.endswith("GradScaler")


def _always(ours: type[Any]) -> Callable[[Any], Any]:
    return lambda theirs: ours


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _with_op_lists(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch's checkpointing recompute under all of the autocast state, op lists included."""
    signature = inspect.signature(generator)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if AutocastState.capture().lists is None:
            return generator(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        given.arguments["context_fn"] = _joined(given.arguments["context_fn"])
        return generator(*given.args, **given.kwargs)

    return checkpointed


def _joined(context_fn: Callable[[], _Contexts]) -> Callable[[], _Contexts]:
    def contexts() -> _Contexts:
        pairs = zip(checkpoint_contexts(), context_fn(), strict=True)
        forward, recomputed = (_both(*pair) for pair in pairs)
        return forward, recomputed

    return contexts


@contextlib.contextmanager
def _both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


def _reentrant_with_op_lists(function: Any) -> Any:
    class CheckpointFunction(function):
        @staticmethod
        def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return function.forward(ctx, propagate(run_function), *args)

    CheckpointFunction.__module__ = __name__
    return CheckpointFunction


_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # from torch 2.14 on
    _GENERATOR += "_impl"
_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
_PLACES = (
    _Place("torch", "GradScaler", _always(DistGradScaler)),
    _Place("torch.amp", "GradScaler", _always(DistGradScaler)),
    _Place("torch.amp.grad_scaler", "GradScaler", _always(DistGradScaler)),
    _Place("torch.cuda.amp", "GradScaler", _always(distamp.cuda.amp.GradScaler)),
    _Place("torch.cuda.amp.grad_scaler", "GradScaler", _always(distamp.cuda.amp.GradScaler)),
    _Place("torch.cpu.amp", "GradScaler", _always(distamp.cpu.amp.GradScaler)),
    _Place("torch.cpu.amp.grad_scaler", "GradScaler", _always(distamp.cpu.amp.GradScaler)),
    _Place(_SHARDED, "ShardedGradScaler", _always(ShardedGradScaler), optional=True),
    _Place("torch.utils.checkpoint", "CheckpointFunction", _reentrant_with_op_lists),
    _Place("torch.utils.checkpoint", _GENERATOR, _with_op_lists),
    _Place(_COMPOSABLE, _GENERATOR, _with_op_lists, optional=True),
)

# What was put onto torch: for each place (its module, what torch had there, what is there now).
# The one piece of process-wide state in distamp, since torch's own names are process-wide.
_put: dict[_Place, tuple[ModuleType, Any, Any]] = {}


@dataclass(frozen=True)
class Installation:
    """The result of `install`; a context manager whose end undoes it.

    Attributes:
        late: ``module.name`` of each place outside torch that imported torch's class before, and
            keeps it; and each class outside torch that was derived from it before.
        first: False if distamp was already installed; then the end of this one changes nothing.
    """

    late: tuple[str, ...]
    first: bool

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        if self.first:
            uninstall()
        return False


def install() -> Installation:
    """Replace ``torch.amp.GradScaler`` by `DistGradScaler`, for packages that create a scaler.

    Trainers create their own scaler, from one of torch's names. Call this in every process, before
    you import the trainer, and its scaler is distamp's. The names are ``torch.GradScaler``,
    ``torch.amp.GradScaler``, ``torch.amp.grad_scaler.GradScaler``, those of ``torch.cuda.amp`` and
    ``torch.cpu.amp`` with their signatures, and ``ShardedGradScaler`` with its signature.
    Activation checkpointing then also recomputes with the op lists of the forward pass.
    Nothing else of torch is changed; importing distamp changes nothing. A second call changes
    nothing.

    Returns:
        A context manager, which also lists what was imported too early.

    Warns:
        RuntimeWarning: Other modules imported torch's class before, or derived classes from it;
            they still use torch's. Names them.

    Example::

        import distamp
        distamp.install()
        from transformers import Trainer
    """
    if _put:
        return Installation(_late(), first=False)
    try:
        for place in _PLACES:
            _put_in(place)
    except BaseException:
        uninstall()
        raise
    late = _late()
    if late:
        shown = ", ".join(late[:8]) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
        warnings.warn(
            "distamp.install() was called after these had imported torch's GradScaler, and they "
            f"still use it: {shown}. Call install() before you import them",
            RuntimeWarning,
            stacklevel=2,
        )
    return Installation(late, first=True)


def uninstall() -> None:
    """Give torch's names back to torch's classes; scalers that were made keep being distamp's.

    Does nothing if distamp is not installed.

    Warns:
        RuntimeWarning: Something else has replaced a name since; that name does not change.
    """
    others = []
    for place, (module, theirs, ours) in list(_put.items()):
        if getattr(module, place.name, None) is ours:
            setattr(module, place.name, theirs)
        else:
            others.append(f"{place.module}.{place.name}")
        del _put[place]
    if others:
        warnings.warn(
            f"distamp.uninstall() left {', '.join(others)} alone: something else was put there "
            "after distamp.install(); undo that first",
            RuntimeWarning,
            stacklevel=2,
        )


def _put_in(place: _Place) -> None:
    try:
        module = importlib.import_module(place.module)
        theirs = getattr(module, place.name)
    except (ImportError, AttributeError):
        if place.optional:
            return
        raise
    ours = place.ours(theirs)
    setattr(module, place.name, ours)
    _put[place] = module, theirs, ours


def _late() -> tuple[str, ...]:
    """Return what outside torch still has one of torch's scaler classes."""
    torchs = [theirs for place, (_, theirs, _) in _put.items() if place.is_scaler]
    ids = set(map(id, torchs))
    found = {
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and not _is_exempt(name)
        for attribute, value in list(vars(module).items())
        if id(value) in ids
    }
    derived = {
        f"{cls.__module__}.{cls.__qualname__}"
        for cls in _subclasses(torchs)
        if not _is_exempt(cls.__module__)
    }
    return tuple(sorted(found | derived))


def _is_exempt(module: str) -> bool:
    return module.split(".")[0] in ("torch", "distamp")


def _subclasses(classes: list[type[Any]]) -> Iterator[type[Any]]:
    for cls in dict.fromkeys(classes):
        if isinstance(cls, type):
            with contextlib.suppress(TypeError):
                subclasses = cls.__subclasses__()
                yield from subclasses
                yield from _subclasses([each for each in subclasses if each is not DistGradScaler])
