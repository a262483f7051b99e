"""Precision plugins and callbacks for Lightning's Trainer.

The plugins extend classes of ``lightning`` or ``pytorch_lightning``. If both are installed, import
the package of your program before this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from distamp import comm_hooks
from distamp.errors import ConfigError
from distamp.guard import StepGuard
from distamp.integrations.lightning_plugins import (
    FSDPPrecisionMixin,
    FullPrecisionMixin,
    MixedPrecisionMixin,
    import_lightning,
    step_and_update,
)
from distamp.integrations.trainer_scaler import (
    Scaler,
    ensure_unscaled,
    is_loss_scaler,
    skipped_steps,
    validate_format,
    was_skipped,
)
from distamp.optim_utils import unwrap_optimizer
from distamp.scaler import DistGradScaler

__all__ = [
    "CommHook",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "SkippedSteps",
]

_package: Any = import_lightning("pytorch")
_plugins: Any = _package.plugins.precision
_Callback: Any = _package.Callback


# -- precision plugins -----------------------------------------------------------------------------


class _StepMixin(_plugins.Precision):
    """The methods in which the plugins differ from Lightning's: backward pass, step, checkpoint."""

    scaler: DistGradScaler | StepGuard

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Register every optimizer before the first step."""
        self.scaler.register_optimizers(*optimizers)
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        # Lightning's MixedPrecision.pre_backward would scale the loss again.
        loss = self.scaler.scale(tensor)
        return _plugins.Precision.pre_backward(self, loss, module)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale and clip gradients, and step on all ranks or on none."""
        if isinstance(unwrap_optimizer(optimizer), LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss inside its step, so a rank cannot decide before the step "
                "whether to skip it. Train with Lightning's own plugin, in float32 or bfloat16."
            )
        result = closure()
        # In automatic optimization, a training_step that returns None has run no backward pass.
        has_gradients = result is not None or not model.automatic_optimization
        if has_gradients:
            ensure_unscaled(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        if not has_gradients:
            return None
        return step_and_update(self.scaler, optimizer, **kwargs)

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip unscaled gradients, also of fused optimizers, by the norm over all ranks.

        Manual optimization calls ``self.clip_gradients`` before ``step``.
        """
        if clip_val <= 0:
            _plugins.Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == "value":
            ensure_unscaled(self.scaler, optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            self.scaler.clip_grad_norm_(unwrap_optimizer(optimizer), clip_val)

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning's plugins without a loss scale save an empty state.
        if state_dict:
            self.scaler.load_state_dict(state_dict)


class Precision(FullPrecisionMixin, _StepMixin):
    """Lightning's ``Precision``, ``"32-true"``, with ranks that step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class HalfPrecision(FullPrecisionMixin, _StepMixin, _plugins.HalfPrecision):
    """Lightning's ``HalfPrecision``, ``"bf16-true"``, with ranks that step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class MixedPrecision(MixedPrecisionMixin, _StepMixin, _plugins.MixedPrecision):
    """Lightning's ``MixedPrecision``, with ranks that step or skip together.

    The plugin is for one device, DDP and ModelParallelStrategy. Pass it as
    ``Trainer(plugins=MixedPrecision("bf16-mixed", "cuda"))``, without ``precision=``. Unlike
    Lightning's plugin, at ``"16-mixed"`` it clips the gradients of fused optimizers and computes in
    float16 on a CPU. Checkpoints are compatible with Lightning's plugin in both directions.

    Source: Lightning's documentation of precision plugins.
    """


class FSDPPrecision(FSDPPrecisionMixin, _StepMixin, _plugins.FSDPPrecision):
    """Lightning's ``FSDPPrecision``, with ranks that step or skip together.

    The plugin is for FSDPStrategy. Pass it as
    ``Trainer(strategy="fsdp", plugins=FSDPPrecision("bf16-mixed"))``. Unlike Lightning's plugin, it
    clips by the norm, and at ``"16-mixed"`` it accepts a scaler and steps fused optimizers.

    Source: Lightning's documentation of precision plugins.
    """

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the gradient shards of this rank by value, which clips the whole gradients."""
        params = list(self.main_params(optimizer))
        torch.nn.utils.clip_grad_value_(params, clip_value=clip_val)


# -- callbacks -------------------------------------------------------------------------------------


class SkippedSteps(_Callback):
    """Keep learning rates and ``trainer.global_step`` unchanged on skipped steps.

    Lightning advances both on every step, taken or skipped. With this callback, ``max_steps``,
    ``ModelCheckpoint(every_n_train_steps=)`` and everything else that depends on ``global_step``
    count the steps that were taken. The callback logs ``skipped_steps``, and ``loss_scale`` if
    losses are scaled, every ``log_every_n_steps``, to the progress bar and the loggers. With a
    fused optimizer on an accelerator it waits for the device once a step, because the host must
    know whether the step was taken.

    Raises:
        ConfigError: At the start of training, if the Trainer has no precision plugin of distamp's.
    """

    def __init__(self) -> None:
        self._last_count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = _scaler_of(trainer)
        self._last_count = skipped_steps(scaler, trainer.optimizers)
        # An instance attribute hides the module's method until training ends.
        pl_module.lr_scheduler_step = _SchedulerGate(trainer, pl_module, scaler)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _remove_scheduler_gate(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        _remove_scheduler_gate(pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scaler = _scaler_of(trainer)
        count = skipped_steps(scaler, trainer.optimizers)
        _subtract_steps(trainer, pl_module, count - self._last_count)
        self._last_count = count
        log_interval = max(1, trainer.log_every_n_steps)
        if (batch_idx + 1) % log_interval == 0:
            if is_loss_scaler(scaler):
                pl_module.log("loss_scale", scaler.get_scale(), prog_bar=True, batch_size=1)
            pl_module.log("skipped_steps", float(count), prog_bar=True, batch_size=1)


def _subtract_steps(trainer: Any, pl_module: Any, count: int) -> None:
    """Subtract skipped steps from the counters that ``trainer.global_step`` reads."""
    loop = trainer.fit_loop.epoch_loop
    if pl_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    progress.total.increment_by(-count)
    progress.current.increment_by(-count)


def _remove_scheduler_gate(pl_module: Any) -> None:
    vars(pl_module).pop("lr_scheduler_step", None)


def _scaler_of(trainer: Any) -> DistGradScaler | StepGuard:
    """Return the scaler or guard of the Trainer's precision plugin.

    Raises:
        ConfigError: The plugin is not one of distamp's.
    """
    plugin = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, DistGradScaler | StepGuard):
        return scaler
    plugin_type = type(plugin)
    raise ConfigError(
        f"The Trainer has the precision plugin {plugin_type.__module__}.{plugin_type.__name__}, "
        "which does not report skipped steps. Pass a plugin of distamp.integrations.lightning as "
        "plugins=: Precision(), HalfPrecision('bf16-true'), MixedPrecision(...) or "
        "FSDPPrecision(...)."
    )


class _SchedulerGate:
    """A module's ``lr_scheduler_step``, called only if the scheduler's optimizer has stepped.

    A scheduler that advances once an epoch advances in any case.
    """

    def __init__(self, trainer: Any, pl_module: Any, scaler: Scaler) -> None:
        self._trainer = trainer
        self._scaler = scaler
        self._lr_scheduler_step = pl_module.lr_scheduler_step

    def __reduce__(self) -> Any:
        """Copy the module's own method, because a copied module has no Trainer."""
        return self._lr_scheduler_step.__reduce__()

    def __call__(self, scheduler: Any, metric: Any) -> None:
        if not self._waits_for_step(scheduler):
            self._lr_scheduler_step(scheduler, metric)

    def _waits_for_step(self, scheduler: Any) -> bool:
        """Return whether the scheduler advances with an optimizer that has just skipped a step."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return False
        for config in self._trainer.lr_scheduler_configs:
            if config.scheduler is scheduler and config.interval == "step":
                return was_skipped(self._scaler, optimizer)
        return False


class CommHook(_Callback):
    """Average gradients in a communication format, with a hook that follows the loss scale.

    Lightning ignores ``DDPStrategy(ddp_comm_hook=)`` on a CPU, and connects no scaler to that hook.
    The callback works with the strategies DDP, FSDP and ModelParallel, and does nothing on one
    device.

    Args:
        format: Communication format of `distamp.comm_hooks.register_comm_hook`: ``"fp16"``,
            ``"bf16"`` or ``"int8"``.

    Attributes:
        state: The result of ``register_comm_hook``, with its ``stats()``; None before training.

    Raises:
        ValueError: The format does not exist, or at the start of training, it does not fit the
            model.
    """

    state: comm_hooks.CommHook | None

    def __init__(self, format: str = "fp16") -> None:
        validate_format(format)
        self._format = format
        self.state = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size == 1:
            return
        self.state = comm_hooks.register_comm_hook(trainer.strategy.model, self._format)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if isinstance(scaler, DistGradScaler | StepGuard):
            scaler.attach_comm_hook(self.state)
