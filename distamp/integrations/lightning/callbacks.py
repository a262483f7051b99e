"""Callbacks for Lightning's Trainer: skipped steps, and gradients in fewer bytes."""

from __future__ import annotations

from typing import Any

from distamp.comm_hooks import CommHookState, register
from distamp.errors import SettingError
from distamp.integrations.packages import lightning_package
from distamp.integrations.scaling import skipped_steps, was_skipped
from distamp.scaler import DistGradScaler

__all__ = ["CommHook", "SkippedSteps"]

_Callback: Any = lightning_package("pytorch").Callback


def _scaler_of(trainer: Any) -> DistGradScaler | None:
    """Return the scaler of the Trainer's precision plugin; None where it scales nothing.

    Raises:
        SettingError: The scaler is another than ours.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, DistGradScaler):
        raise SettingError(
            f"the Trainer's precision plugin has a {type(scaler).__name__}, which does not report "
            "skipped steps; pass plugins=distamp.integrations.lightning.MixedPrecision(...) or "
            "FSDPPrecision(...), or call distamp.install() before importing Lightning"
        )
    return scaler


class SkippedSteps(_Callback):
    """Keep learning rates and ``trainer.global_step`` from moving on steps that were skipped.

    Lightning moves both on every step, taken or not. What depends on ``global_step``
    (``max_steps``, ``ModelCheckpoint(every_n_train_steps=)``) then counts steps that were taken.
    The loss scale and the skipped steps go to the progress bar and the loggers, under the names
    ``loss_scale`` and ``skipped_steps``, every ``log_every_n_steps``. With a fused optimizer on an
    accelerator this waits for the device once each step, as the host has to know.

    Args:
        hold_schedules: Whether schedules that move with steps stay where they are on a skip.
        hold_global_step: Whether ``global_step`` does.
        log: Whether to log.

    Raises:
        SettingError: At the start of training, if the Trainer's scaler is another than distamp's.
    """

    def __init__(
        self, hold_schedules: bool = True, hold_global_step: bool = True, log: bool = True
    ) -> None:
        self._hold_schedules = hold_schedules
        self._hold_global_step = hold_global_step
        self._log = log
        self._seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = _scaler_of(trainer)
        if scaler is None:
            return
        self._seen = skipped_steps(scaler, trainer.optimizers)
        if self._hold_schedules:
            # An attribute of the module, until training ends, in front of the hook it overrides.
            pl_module.lr_scheduler_step = _StepsWithOptimizer(trainer, pl_module, scaler)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._release(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release(pl_module)

    def _release(self, pl_module: Any) -> None:
        if isinstance(vars(pl_module).get("lr_scheduler_step"), _StepsWithOptimizer):
            del pl_module.lr_scheduler_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scaler = _scaler_of(trainer)
        if scaler is None:
            return
        skipped = skipped_steps(scaler, trainer.optimizers)
        if self._hold_global_step and skipped > self._seen:
            _take_back(trainer, pl_module, skipped - self._seen)
        self._seen = skipped
        if self._log and (batch_idx + 1) % max(1, trainer.log_every_n_steps) == 0:
            pl_module.log("loss_scale", scaler.get_scale(), prog_bar=True, batch_size=1)
            pl_module.log("skipped_steps", float(skipped), prog_bar=True, batch_size=1)


class _StepsWithOptimizer:
    """``LightningModule.lr_scheduler_step``, left out where the schedule's optimizer skipped."""

    def __init__(self, trainer: Any, pl_module: Any, scaler: DistGradScaler) -> None:
        self._trainer, self._scaler = trainer, scaler
        self._step = pl_module.lr_scheduler_step

    def __reduce__(self) -> Any:
        """Be the module's own hook in its copies, which have no Trainer."""
        return self._step.__reduce__()

    def __call__(self, scheduler: Any, metric: Any) -> None:
        by_step = any(
            config.scheduler is scheduler and config.interval == "step"
            for config in self._trainer.lr_scheduler_configs
        )
        optimizer = getattr(scheduler, "optimizer", None)
        if not (by_step and optimizer is not None and was_skipped(self._scaler, optimizer)):
            self._step(scheduler, metric)


def _take_back(trainer: Any, pl_module: Any, steps: int) -> None:
    """Make ``trainer.global_step`` forget ``steps`` steps."""
    loop = trainer.fit_loop.epoch_loop
    if pl_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    for tracker in (progress.total, progress.current):
        tracker.increment_by(-steps)


class CommHook(_Callback):
    """Average gradients through a wire format, and join the hook with the scaler.

    ``DDPStrategy(ddp_comm_hook=)`` is ignored by Lightning on a CPU and knows no scaler. Knows DDP,
    FSDP and ModelParallel strategies; does nothing on one device.

    Args:
        wire: What `distamp.comm_hooks.register` takes: ``"fp16"``, ``"int8"``, ``"auto"``, ...
        attach: Whether the scaler takes inf and NaN from the exchange; see
            `DistGradScaler.attach`. Off where gradients are changed between backward and step.

    Attributes:
        state: What ``register`` returned, with its ``stats()``; None before training.

    Raises:
        ValueError: At the start of training, where the format or the model does not fit.
    """

    state: CommHookState | None

    def __init__(self, wire: str = "fp16", attach: bool = True) -> None:
        self._wire = wire
        self._attach = attach
        self.state = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size == 1:
            return
        self.state = register(trainer.strategy.model, self._wire)
        scaler = _scaler_of(trainer) if self._attach else None
        if scaler is not None:
            scaler.attach(self.state)
