"""distamp in Hugging Face Accelerate: its scaler, and gradients in fewer bytes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import register
from distamp.errors import SettingError
from distamp.integrations.shared import checked_scaler, was_skipped
from distamp.scaler import DistGradScaler

__all__ = ["prepare"]

# Steps any optimizer whose state is empty before it is saved or loaded.
_STATE_MAKER = getattr(getattr(state_dict, "_init_optim_state", None), "__code__", None)
_OWN_SCALING = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepare(
    accelerator: Accelerator,
    *prepared: Any,
    comm_hook: str | None = None,
    scaler: DistGradScaler | None = None,
    **settings: Any,
) -> DistGradScaler | None:
    """Give an ``Accelerator`` a :class:`distamp.DistGradScaler`, and a communication hook.

    Call it before or after ``accelerator.prepare`` (on a CPU: before), on every rank.
    ``accelerator.backward``, ``clip_grad_norm_``, ``save_state`` and the rest work as before, and:
    ``accelerator.optimizer_step_was_skipped`` is right for fused optimizers too and waits for the
    device only when it is asked; schedules that Accelerate prepared follow it; and
    ``mixed_precision="fp16"`` scales losses on a CPU, where Accelerate makes no scaler.

    Args:
        accelerator: With ``mixed_precision="fp16"``; of another precision for a hook alone.
        prepared: What ``accelerator.prepare`` returned, where that was called before and
            ``comm_hook`` is given.
        comm_hook: A wire format for gradients, as `distamp.comm_hooks.register` takes it, for each
            wrapped model; ``DistributedDataParallelKwargs(comm_hook=)`` knows only torch's.
        scaler: A `DistGradScaler`; None makes one, with the settings of ``GradScalerKwargs`` and
            the loss scale that the accelerator had.
        settings: Keyword settings of the scaler that is made, before those.

    Returns:
        The scaler; None at a precision that needs none.

    Raises:
        SettingError: The precision needs no scaler and there is nothing else to do, or DeepSpeed,
            Megatron-LM or XLA scale by themselves.
        ValueError: The format or a model does not fit the hook.

    Example::

        accelerator = Accelerator(mixed_precision="fp16")
        prepare(accelerator)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    """
    _check(accelerator, comm_hook, scaler, settings)
    made = None
    if accelerator.mixed_precision == "fp16":
        made = _give_scaler(accelerator, scaler, settings)
    adopt = _Adopts(accelerator, comm_hook, made)
    adopt(prepared)
    for name in ("prepare", "prepare_model", "prepare_optimizer"):
        _follow(accelerator, name, adopt)
    return made


def _check(
    accelerator: Accelerator, comm_hook: str | None, scaler: object, settings: dict[str, Any]
) -> None:
    """Refuse what `prepare` cannot do for this accelerator."""
    if accelerator.distributed_type in _OWN_SCALING:
        raise SettingError(
            f"{accelerator.distributed_type} scales losses by itself; distamp's scaler is for the "
            "others: DDP, FSDP and tensor parallel"
        )
    given = [*(["scaler"] if scaler is not None else []), *sorted(settings)]
    if accelerator.mixed_precision != "fp16" and (given or comm_hook is None):
        what = f"so {', '.join(given)} cannot be set" if given else "and no comm_hook was given"
        raise SettingError(
            f"the accelerator's mixed_precision is {accelerator.mixed_precision!r}, which scales "
            f"no losses, {what}; make it with Accelerator(mixed_precision='fp16')"
        )


def _give_scaler(
    accelerator: Accelerator, scaler: DistGradScaler | None, settings: dict[str, Any]
) -> DistGradScaler:
    theirs = accelerator.scaler
    if scaler is None and not settings and isinstance(theirs, DistGradScaler):
        return theirs  # of distamp.install()
    if scaler is None:
        handler = accelerator.scaler_handler
        given = {**({} if handler is None else handler.to_kwargs()), **settings}
        made = checked_scaler(None, accelerator.device.type, given)
        if theirs is not None and theirs.is_enabled() and "init_scale" not in settings:
            before = theirs.state_dict()
            kept = {name: before[name] for name in ("scale", "_growth_tracker")}
            made.load_state_dict({**made.state_dict(), **kept})
    else:
        made = checked_scaler(scaler, None, settings)
    if not accelerator.native_amp and _kept(accelerator, "models"):
        raise SettingError(
            "on a CPU Accelerate computes in float16 where it is told so first: call "
            "prepare(accelerator) before accelerator.prepare(model)"
        )
    accelerator.scaler, accelerator.native_amp = made, True
    return made


def _kept(accelerator: Accelerator, kind: str) -> list[Any]:
    """Return what the accelerator has prepared so far; Accelerate has no public name for it."""
    return list(getattr(accelerator, f"_{kind}", ()))


class _ScaledOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which asks the scaler whether the step was taken, when it is asked."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if sys._getframe(1).f_code is _STATE_MAKER:
            # torch's checkpoints make state by a step of zero gradients that nothing has scaled.
            self.optimizer.step()
        elif self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, **({} if closure is None else {"closure": closure}))
            self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        return was_skipped(self.scaler, self.optimizer)


class _Adopts:
    """Takes on what an accelerator has prepared: optimizers, and the hook of each wrapped model."""

    def __init__(
        self, accelerator: Accelerator, wire: str | None, scaler: DistGradScaler | None
    ) -> None:
        self._accelerator, self._wire, self._scaler = accelerator, wire, scaler
        self._models: dict[int, nn.Module] = {}

    def __call__(self, new: Iterable[Any]) -> None:
        if self._scaler is not None:
            for optimizer in _kept(self._accelerator, "optimizers"):
                # In place, as schedules and the user's variables refer to this very object.
                optimizer.__class__, optimizer.scaler = _ScaledOptimizer, self._scaler
                self._scaler.add_optimizer(optimizer)
        if self._wire is not None:
            for each in new:
                self._register(getattr(each, "_orig_mod", each), self._wire)  # not compiled

    def _register(self, model: Any, wire: str) -> None:
        if isinstance(model, nn.Module) and id(model) not in self._models and _is_wrapped(model):
            self._models[id(model)] = model
            state = register(model, wire)
            if self._scaler is not None:
                self._scaler.attach(state)


def _is_wrapped(model: nn.Module) -> bool:
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        return True
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _follow(accelerator: Accelerator, name: str, then: Callable[[Iterable[Any]], None]) -> None:
    """Call ``then`` with what a method of this accelerator returns, each time."""
    method = getattr(accelerator, name)

    @functools.wraps(method)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then(result if isinstance(result, tuple | list) else [result])
        return result

    setattr(accelerator, name, followed)
