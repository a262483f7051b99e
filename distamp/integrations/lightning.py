"""distamp in Lightning's Trainer: precision plugins and callbacks.

Serves the packages ``lightning`` and ``pytorch_lightning``: import the one you use first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from distamp import comm_hooks
from distamp.errors import ConfigError
from distamp.integrations.shared import (
    MixedMixin,
    PlainMixin,
    ShardedMixin,
    Stepper,
    check_wire,
    lightning_package,
    scales,
    skipped_steps,
    unscale_once,
    was_skipped,
)
from distamp.optim_utils import unwrap_optimizer

__all__ = [
    "CommHook",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "SkippedSteps",
]

_package: Any = lightning_package("pytorch")
_plugins: Any = _package.plugins.precision
_Callback: Any = _package.Callback


class _Stepped(_plugins.Precision):
    """What the plugins do together: step on all ranks or on none. The rest is Lightning's."""

    scaler: Stepper

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Make every optimizer known before the first step."""
        self.scaler.register_optimizers(*optimizers)
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return _plugins.Precision.pre_backward(self, self.scaler.scale(tensor), module)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip and step, on all ranks or on none."""
        if isinstance(unwrap_optimizer(optimizer), LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss inside its step, so no rank knows before whether to skip "
                "it: train it in float32 or bfloat16 with Lightning's own plugin"
            )
        result = closure()
        # Automatic optimization whose training_step returned None: no backward, so no step.
        steps = result is not None or not model.automatic_optimization
        if steps:
            unscale_once(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        if not steps:
            return None
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip unscaled gradients, of fused optimizers too, by the norm over all ranks.

        In manual optimization too, where ``self.clip_gradients`` comes before ``step``.
        """
        if clip_val <= 0:
            _plugins.Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == "value":
            unscale_once(self.scaler, optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            self.scaler.clip_grad_norm_(unwrap_optimizer(optimizer), clip_val)

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:  # Lightning's own plugins have none where they scale nothing
            self.scaler.load_state_dict(state_dict)


class Precision(PlainMixin, _Stepped):
    """Lightning's ``Precision``, ``"32-true"``, whose ranks step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class HalfPrecision(PlainMixin, _Stepped, _plugins.HalfPrecision):
    """Lightning's ``HalfPrecision``, ``"bf16-true"``, whose ranks step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class MixedPrecision(MixedMixin, _Stepped, _plugins.MixedPrecision):
    """Lightning's ``MixedPrecision``, whose ranks step or skip together.

    For one device, DDP and ModelParallelStrategy: ``Trainer(plugins=MixedPrecision("bf16-mixed",
    "cuda"))``, without ``precision=``. Unlike Lightning's, at ``"16-mixed"`` it clips with fused
    optimizers and computes in float16 on a CPU. Checkpoints are Lightning's: each loads the
    other's.

    Source: Lightning's documentation of precision plugins.
    """


class FSDPPrecision(ShardedMixin, _Stepped, _plugins.FSDPPrecision):
    """Lightning's ``FSDPPrecision``, whose ranks step or skip together.

    For FSDPStrategy: ``Trainer(strategy="fsdp", plugins=FSDPPrecision("bf16-mixed"))``. Unlike
    Lightning's it clips by the norm, and at ``"16-mixed"`` takes a scaler and steps fused
    optimizers.

    Source: Lightning's documentation of precision plugins.
    """

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each rank's part of the gradients: the same as clipping the whole."""
        torch.nn.utils.clip_grad_value_(list(self.main_params(optimizer)), clip_value=clip_val)


class SkippedSteps(_Callback):
    """Keep learning rates and ``trainer.global_step`` from moving on steps that were skipped.

    Lightning moves both on every step, taken or not. What depends on ``global_step``
    (``max_steps``, ``ModelCheckpoint(every_n_train_steps=)``) then counts steps that were taken.
    ``skipped_steps``, and ``loss_scale`` if there is one, go to the progress bar and the loggers,
    every ``log_every_n_steps``. With a fused optimizer on an accelerator this waits for the device
    once each step, as the host has to know.

    Raises:
        ConfigError: At the start of training, if the Trainer's steps are not distamp's.
    """

    def __init__(self) -> None:
        self._seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        stepper = _stepper_of(trainer)
        self._seen = skipped_steps(stepper, trainer.optimizers)
        # An attribute of the module, until training ends, in front of the hook it overrides.
        pl_module.lr_scheduler_step = _StepsWithOptimizer(trainer, pl_module, stepper)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        vars(pl_module).pop("lr_scheduler_step", None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        vars(pl_module).pop("lr_scheduler_step", None)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepper = _stepper_of(trainer)
        skipped = skipped_steps(stepper, trainer.optimizers)
        loop = trainer.fit_loop.epoch_loop
        progress = loop.manual_optimization.optim_step_progress
        if pl_module.automatic_optimization:
            progress = loop.automatic_optimization.optim_progress.optimizer.step
        for tracker in (progress.total, progress.current):
            tracker.increment_by(self._seen - skipped)
        self._seen = skipped
        if (batch_idx + 1) % max(1, trainer.log_every_n_steps) == 0:
            if scales(stepper):
                pl_module.log("loss_scale", stepper.get_scale(), prog_bar=True, batch_size=1)
            pl_module.log("skipped_steps", float(skipped), prog_bar=True, batch_size=1)


def _stepper_of(trainer: Any) -> Stepper:
    """Return what takes the steps of the Trainer's precision plugin.

    Raises:
        ConfigError: It is not ours.
    """
    plugin = trainer.precision_plugin
    stepper = getattr(plugin, "scaler", None)
    if not isinstance(stepper, Stepper):
        raise ConfigError(
            f"the Trainer's steps are those of {type(plugin).__module__}.{type(plugin).__name__}, "
            "which does not report skipped steps; pass plugins= a plugin of "
            "distamp.integrations.lightning: Precision(), HalfPrecision('bf16-true'), "
            "MixedPrecision(...) or FSDPPrecision(...)"
        )
    return stepper


class _StepsWithOptimizer:
    """``LightningModule.lr_scheduler_step``, left out where the schedule's optimizer skipped."""

    def __init__(self, trainer: Any, pl_module: Any, stepper: Stepper) -> None:
        self._trainer, self._stepper = trainer, stepper
        self._step = pl_module.lr_scheduler_step

    def __reduce__(self) -> Any:
        """Be the module's own hook in its copies, which have no Trainer."""
        return self._step.__reduce__()

    def __call__(self, scheduler: Any, metric: Any) -> None:
        configs = [c for c in self._trainer.lr_scheduler_configs if c.scheduler is scheduler]
        by_step = any(config.interval == "step" for config in configs)
        optimizer = getattr(scheduler, "optimizer", None)
        if not (by_step and optimizer is not None and was_skipped(self._stepper, optimizer)):
            self._step(scheduler, metric)


class CommHook(_Callback):
    """Average gradients through a wire format, and tell the hook of the loss scale and of skips.

    ``DDPStrategy(ddp_comm_hook=)`` is ignored by Lightning on a CPU and knows no scaler. Knows DDP,
    FSDP and ModelParallel strategies; does nothing on one device.

    Args:
        format: Communication format that `distamp.comm_hooks.register_comm_hook` takes: ``"fp16"``,
            ``"bf16"`` or ``"int8"``.

    Attributes:
        state: What ``register_comm_hook`` returned, with its ``stats()``; None before training.

    Raises:
        ValueError: There is no such format; at the start of training, where it does not fit.
    """

    state: comm_hooks.CommHook | None

    def __init__(self, format: str = "fp16") -> None:
        check_wire(format)
        self._format = format
        self.state = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size == 1:
            return
        self.state = comm_hooks.register_comm_hook(trainer.strategy.model, self._format)
        stepper = getattr(trainer.precision_plugin, "scaler", None)
        if isinstance(stepper, Stepper):
            stepper.attach_comm_hook(self.state)
