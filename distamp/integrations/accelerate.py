"""An adapter for Hugging Face Accelerate: ranks step together and send compressed gradients."""

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
from distamp.integrations.trainer_scaler import (
    Scaler,
    is_loss_scaler,
    make_guard,
    make_loss_scaler,
    validate_format,
    was_skipped,
)
from distamp.scaler import DistGradScaler

__all__ = ["prepare"]

_logger = logging.getLogger(__name__)

_UNSUPPORTED_BACKENDS = (
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)
# The code of torch's function that steps an optimizer without state before it saves or loads a
# checkpoint.
_INIT_OPTIM_STATE = getattr(getattr(state_dict, "_init_optim_state", None), "__code__", None)


def prepare(
    accelerator: Accelerator,
    *prepared: Any,
    comm_hook: str | None = None,
    scaler: DistGradScaler | None = None,
    **settings: Any,
) -> DistGradScaler | StepGuard:
    """Make the ranks of an ``Accelerator`` step or skip together, in any of its precisions.

    Call it before or after ``accelerator.prepare`` (in fp16 on a CPU: before), on every rank. With
    ``mixed_precision="fp16"`` the accelerator's scaler becomes a `DistGradScaler`, also on a CPU,
    for which Accelerate makes no scaler. With ``"bf16"`` and ``"no"`` it becomes a `StepGuard`.
    Everything else works as before, except that:

    - ``accelerator.optimizer_step_was_skipped`` is right for fused optimizers too, and waits for
      the device only when it is read; schedules that Accelerate prepared follow it;
    - ``accelerator.clip_grad_norm_`` returns the norm of the whole model, and the step after it
      does not check the gradients again;
    - ``accelerator.accumulate`` and ``accelerator.no_sync`` do not pause the first backward pass of
      DDP with ``static_graph=True``, in which torch records the graph;
    - ``save_state`` and ``load_state`` include the state of the scaler or guard, and Accelerate's
      own checkpoints load too.

    Args:
        accelerator: An accelerator of any ``mixed_precision`` except ``"fp8"``.
        prepared: The results of ``accelerator.prepare``, if it was called before and ``comm_hook``
            is set.
        comm_hook: A communication format of `distamp.comm_hooks.register_comm_hook`, for the
            gradients of each wrapped model; ``DistributedDataParallelKwargs(comm_hook=)`` has only
            torch's hooks.
        scaler: A `DistGradScaler`, in fp16. None makes one with the settings of
            ``GradScalerKwargs`` and the accelerator's present loss scale.
        settings: Keyword settings of a new scaler or guard, which override the settings of
            ``GradScalerKwargs``.

    Returns:
        The scaler or the guard.

    Raises:
        ConfigError: Settings of a loss scale were passed for bf16 or fp32, or a backend of the
            accelerator scales and steps by itself: fp8, DeepSpeed, Megatron-LM, XLA.
        ValueError: The format or a model does not fit the hook.

    Example::

        accelerator = Accelerator(mixed_precision="bf16")
        prepare(accelerator)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    """
    _check_backend(accelerator)
    validate_format(comm_hook)
    installed: DistGradScaler | StepGuard
    if accelerator.mixed_precision == "fp16":
        installed = _install_loss_scaler(accelerator, scaler, settings)
    else:
        installed = _install_guard(accelerator, scaler, settings)
    prepared_objects = _PreparedObjects(accelerator, comm_hook, installed)
    prepared_objects.update(prepared)
    for name in ("prepare", "prepare_model", "prepare_optimizer"):
        _wrap_method(accelerator, name, prepared_objects.update)
    accelerator.clip_grad_norm_ = functools.partial(_clip_grad_norm, installed)
    accelerator.no_sync = functools.partial(_no_sync, accelerator.no_sync)
    if not is_loss_scaler(installed):
        load_state = accelerator.load_state
        accelerator.load_state = functools.partial(_load_state, accelerator, load_state)
    return installed


def _check_backend(accelerator: Accelerator) -> None:
    backend = None
    if accelerator.mixed_precision == "fp8":
        backend = "fp8"
    elif accelerator.distributed_type in _UNSUPPORTED_BACKENDS:
        backend = str(accelerator.distributed_type)
    if backend is not None:
        raise ConfigError(
            f"prepare() does not support {backend}, because Accelerate scales and steps in its own "
            f"way with {backend}. Use fp16, bf16 or fp32 under DDP, FSDP or tensor parallel."
        )


# -- the scaler or guard ---------------------------------------------------------------------------


def _install_guard(accelerator: Accelerator, scaler: object, settings: dict[str, Any]) -> StepGuard:
    """Make a guard the accelerator's scaler; a guard of an earlier call stays."""
    guard = accelerator.scaler
    if scaler is not None or settings or not isinstance(guard, StepGuard):
        guard = make_guard(accelerator.mixed_precision, scaler, settings)
        accelerator.scaler = guard
    return guard


def _install_loss_scaler(
    accelerator: Accelerator, scaler: DistGradScaler | None, settings: dict[str, Any]
) -> DistGradScaler:
    """Make a `DistGradScaler` the accelerator's scaler.

    A `DistGradScaler` of an earlier call, or of `distamp.patch_torch`, stays.
    """
    current_scaler = accelerator.scaler
    if scaler is None and not settings and isinstance(current_scaler, DistGradScaler):
        return current_scaler
    if scaler is None:
        new_scaler = _replace_scaler(accelerator, settings)
    else:
        new_scaler = make_loss_scaler(scaler, None, settings)
    if not accelerator.native_amp and _get_prepared(accelerator, "models"):
        raise ConfigError(
            "accelerator.prepare(model) was called before prepare(accelerator). It prepared the "
            "model for float32, as Accelerate does on a CPU. Call prepare(accelerator) before "
            "accelerator.prepare(model)."
        )
    accelerator.native_amp = True
    accelerator.scaler = new_scaler
    return new_scaler


def _replace_scaler(accelerator: Accelerator, settings: dict[str, Any]) -> DistGradScaler:
    """Make a scaler with the settings and the present loss scale of the accelerator's scaler."""
    all_settings = {}
    if accelerator.scaler_handler is not None:
        all_settings.update(accelerator.scaler_handler.to_kwargs())
    all_settings.update(settings)
    scaler = make_loss_scaler(None, accelerator.device.type, all_settings)
    old_scaler = accelerator.scaler
    if old_scaler is not None and old_scaler.is_enabled() and "init_scale" not in settings:
        old_state = old_scaler.state_dict()
        state = scaler.state_dict()
        for name in ("scale", "_growth_tracker"):
            state[name] = old_state[name]
        scaler.load_state_dict(state)
    return scaler


# -- methods of the accelerator --------------------------------------------------------------------


def _clip_grad_norm(
    scaler: Scaler, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Tensor:
    """Replace ``Accelerator.clip_grad_norm_``."""
    trainable = [param for param in parameters if param.requires_grad]
    return scaler.clip_grad_norm_(trainable, max_norm, norm_type)


def _no_sync(no_sync: Callable[[Any], AbstractContextManager[None]], model: Any) -> Any:
    """Replace ``Accelerator.no_sync``, which ``accumulate`` also calls.

    torch records a static graph in the first backward pass, and raises an error if DDP does not
    reduce the gradients of that pass.
    """
    wrapper = unwrap_compiled(model)
    if isinstance(wrapper, DistributedDataParallel) and awaits_first_reduction(wrapper):
        return nullcontext()
    return no_sync(model)


def _load_state(
    accelerator: Accelerator, load_state: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Replace ``Accelerator.load_state``, which reads a scaler's file if there is a scaler.

    Accelerate writes no such file in bf16 and fp32 without a guard.
    """
    guard = accelerator.scaler
    try:
        load_state(*args, **kwargs)
    except FileNotFoundError as error:
        if SCALER_NAME not in str(error):
            raise
        _logger.warning(
            "%s. The checkpoint was saved without a guard. Everything else is loaded.", error
        )
        accelerator.scaler = None
        try:
            load_state(*args, **kwargs)
        finally:
            accelerator.scaler = guard


def _wrap_method(
    accelerator: Accelerator, name: str, callback: Callable[[Iterable[Any]], None]
) -> None:
    """Let a method of this accelerator pass its results to a callback, too."""
    method = getattr(accelerator, name)

    @functools.wraps(method)
    def call_method(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        callback(result if isinstance(result, tuple | list) else [result])
        return result

    setattr(accelerator, name, call_method)


# -- prepared objects ------------------------------------------------------------------------------


class _SteppedOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer wrapper, which queries the scaler only for ``step_was_skipped``."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if sys._getframe(1).f_code is _INIT_OPTIM_STATE:
            # torch creates the optimizer's state by a step with zero gradients, which is no step of
            # the training.
            self.optimizer.step()
        elif self.gradient_state.sync_gradients:
            scaler: Scaler = self.scaler
            if closure is None:
                scaler.step(self.optimizer)
            else:
                scaler.step(self.optimizer, closure=closure)
            scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        return was_skipped(self.scaler, self.optimizer)


class _PreparedObjects:
    """The optimizers and models that an accelerator has prepared.

    ``update`` gives every optimizer the scaler, and every wrapped model the communication hook.
    """

    def __init__(
        self, accelerator: Accelerator, comm_format: str | None, scaler: DistGradScaler | StepGuard
    ) -> None:
        self._accelerator = accelerator
        self._comm_format = comm_format
        self._scaler = scaler
        self._hooked_models: dict[int, nn.Module] = {}

    def update(self, results: Iterable[Any]) -> None:
        """Process new optimizers of the accelerator, and new models among the results."""
        for optimizer in _get_prepared(self._accelerator, "optimizers"):
            # Schedules and the user's variables refer to this object, so its class changes.
            optimizer.__class__ = _SteppedOptimizer
            optimizer.scaler = self._scaler
            self._scaler.register_optimizers(optimizer)
        if self._comm_format is not None:
            for result in results:
                model = unwrap_compiled(result)
                if _is_wrapped_model(model):
                    self._register_comm_hook(model, self._comm_format)

    def _register_comm_hook(self, model: nn.Module, comm_format: str) -> None:
        if id(model) not in self._hooked_models:
            self._hooked_models[id(model)] = model
            hook = register_comm_hook(model, comm_format)
            self._scaler.attach_comm_hook(hook)


def _get_prepared(accelerator: Accelerator, kind: str) -> list[Any]:
    """Return the prepared objects of a kind, for which Accelerate has no public name."""
    return list(getattr(accelerator, f"_{kind}", ()))


def _is_wrapped_model(result: Any) -> bool:
    if isinstance(result, DistributedDataParallel | FullyShardedDataParallel):
        return True
    if not isinstance(result, nn.Module):
        return False
    return any(isinstance(module, FSDPModule) for module in result.modules())
