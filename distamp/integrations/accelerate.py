"""distamp in Hugging Face Accelerate: steps together, and gradients in fewer bytes."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import SCALER_NAME, DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import register_comm_hook
from distamp.comm_hooks.torch_private import awaits_first_reduction, unwrap_compiled
from distamp.errors import ConfigError
from distamp.guard import StepGuard
from distamp.integrations.shared import (
    Stepper,
    check_wire,
    checked_scaler,
    scales,
    stepper_for,
    was_skipped,
)
from distamp.scaler import DistGradScaler

__all__ = ["prepare"]

_logger = logging.getLogger(__name__)

# Steps any optimizer whose state is empty before it is saved or loaded.
_STATE_MAKER = getattr(getattr(state_dict, "_init_optim_state", None), "__code__", None)
_OWN_STEPS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepare(
    accelerator: Accelerator,
    *prepared: Any,
    comm_hook: str | None = None,
    scaler: DistGradScaler | None = None,
    **settings: Any,
) -> Stepper:
    """Let the ranks of an ``Accelerator`` step or skip together, in any of its precisions.

    Call it before or after ``accelerator.prepare`` (in fp16 on a CPU: before), on every rank. With
    ``mixed_precision="fp16"`` the accelerator's scaler is a `DistGradScaler`, on a CPU too, where
    Accelerate makes none; with ``"bf16"`` and ``"no"`` it is a `StepGuard`. Everything else works
    as before, and:

    - ``accelerator.optimizer_step_was_skipped`` is right for fused optimizers too, and waits for
      the device only when it is asked; schedules that Accelerate prepared follow it;
    - ``accelerator.clip_grad_norm_`` returns the norm of the whole model, and the step after it
      does not look at the gradients again;
    - ``accelerator.accumulate`` and ``accelerator.no_sync`` do not pause the first backward pass of
      DDP with ``static_graph=True``, in which torch records the graph;
    - ``save_state`` and ``load_state`` take its state along; Accelerate's own are read too.

    Args:
        accelerator: Of any ``mixed_precision`` but ``"fp8"``.
        prepared: What ``accelerator.prepare`` returned, where that was called before and
            ``comm_hook`` is given.
        comm_hook: A wire format for gradients, as `distamp.comm_hooks.register_comm_hook` takes it,
            for each wrapped model; ``DistributedDataParallelKwargs(comm_hook=)`` knows only
            torch's.
        scaler: In fp16 a `DistGradScaler`; None makes one, with the settings of
            ``GradScalerKwargs`` and the loss scale that the accelerator had.
        settings: Keyword settings of what is made, before those.

    Returns:
        The scaler, or the guard.

    Raises:
        ConfigError: Settings of a loss scale where there is none, or an accelerator whose steps
            are not its own: fp8, DeepSpeed, Megatron-LM, XLA.
        ValueError: The format or a model does not fit the hook.

    Example::

        accelerator = Accelerator(mixed_precision="bf16")
        prepare(accelerator)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    """
    precision = accelerator.mixed_precision
    stepper: Stepper = accelerator.scaler
    if precision == "fp8" or accelerator.distributed_type in _OWN_STEPS:
        what = "fp8" if precision == "fp8" else accelerator.distributed_type
        raise ConfigError(
            f"{what} in Accelerate scales and steps by itself, where distamp has no part; its "
            "steps are for fp16, bf16 and fp32 under DDP, FSDP and tensor parallel"
        )
    check_wire(comm_hook)
    if precision == "fp16":
        stepper = _give_scaler(accelerator, scaler, settings)
    elif settings or scaler is not None or not isinstance(stepper, StepGuard):  # of a call before
        stepper = stepper_for(False, precision, scaler, None, settings)
    accelerator.scaler = stepper
    adopt = _Adopts(accelerator, comm_hook, stepper)
    adopt(prepared)
    for name in ("prepare", "prepare_model", "prepare_optimizer"):
        _follow(accelerator, name, adopt)
    accelerator.clip_grad_norm_ = functools.partial(_clip, stepper)
    accelerator.no_sync = functools.partial(_no_sync, accelerator.no_sync)
    if not scales(stepper):
        accelerator.load_state = functools.partial(_load, accelerator, accelerator.load_state)
    return stepper


def _clip(
    stepper: Stepper, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Tensor:
    """In the place of ``Accelerator.clip_grad_norm_``."""
    trained = [each for each in parameters if each.requires_grad]
    return stepper.clip_grad_norm_(trained, max_norm, norm_type)


def _no_sync(no_sync: Callable[[Any], AbstractContextManager[None]], model: Any) -> Any:
    """In the place of ``Accelerator.no_sync``, which ``accumulate`` calls too.

    torch records a static graph in the first backward pass, and fails if that is not reduced.
    """
    wrapper = unwrap_compiled(model)
    if isinstance(wrapper, DistributedDataParallel) and awaits_first_reduction(wrapper):
        return nullcontext()
    return no_sync(model)


def _load(accelerator: Accelerator, load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """In the place of ``load_state``, which opens a scaler's file that bf16 runs did not write."""
    guard = accelerator.scaler
    try:
        load(*args, **kwargs)
    except FileNotFoundError as error:
        if SCALER_NAME not in str(error):
            raise
        _logger.warning("%s, as from a run without a guard; the rest is loaded", error)
        accelerator.scaler = None
        try:
            load(*args, **kwargs)
        finally:
            accelerator.scaler = guard


def _give_scaler(
    accelerator: Accelerator, scaler: DistGradScaler | None, settings: dict[str, Any]
) -> DistGradScaler:
    theirs = accelerator.scaler
    if scaler is None and not settings and isinstance(theirs, DistGradScaler):
        return theirs  # of distamp.patch_torch()
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
        raise ConfigError(
            "on a CPU Accelerate computes in float16 where it is told so first: call "
            "prepare(accelerator) before accelerator.prepare(model)"
        )
    accelerator.native_amp = True
    return made


def _kept(accelerator: Accelerator, kind: str) -> list[Any]:
    """Return what the accelerator has prepared so far; Accelerate has no public name for it."""
    return list(getattr(accelerator, f"_{kind}", ()))


class _SteppedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which asks whether the step was taken when it is asked itself."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if sys._getframe(1).f_code is _STATE_MAKER:
            # torch's checkpoints make state by a step of zero gradients, on no rank's account.
            self.optimizer.step()
        elif self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, **({} if closure is None else {"closure": closure}))
            self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        return was_skipped(self.scaler, self.optimizer)


class _Adopts:
    """Takes on what an accelerator has prepared: optimizers, and the hook of each wrapped model."""

    def __init__(self, accelerator: Accelerator, wire: str | None, stepper: Stepper) -> None:
        self._accelerator, self._wire, self._stepper = accelerator, wire, stepper
        self._models: dict[int, nn.Module] = {}

    def __call__(self, new: Iterable[Any]) -> None:
        for optimizer in _kept(self._accelerator, "optimizers"):
            # In place, as schedules and the user's variables refer to this very object.
            optimizer.__class__, optimizer.scaler = _SteppedOptimizer, self._stepper
            self._stepper.register_optimizers(optimizer)
        if self._wire is not None:
            for each in new:
                self._register(getattr(each, "_orig_mod", each), self._wire)  # not compiled

    def _register(self, model: Any, wire: str) -> None:
        if isinstance(model, nn.Module) and id(model) not in self._models and _is_wrapped(model):
            self._models[id(model)] = model
            self._stepper.attach_comm_hook(register_comm_hook(model, wire))


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
