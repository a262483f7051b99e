"""An adapter for Hugging Face's Trainer and for TRL's trainers, which are its subclasses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distamp.integrations.accelerate import prepare
from distamp.integrations.trainer_scaler import is_loss_scaler, skipped_steps

if TYPE_CHECKING:
    from distamp.scaler import DistGradScaler

__all__ = ["DistTrainerMixin"]

# A type checker takes the base class of the mixin for any class, because the next class in the
# method resolution order is a Trainer.
_NextTrainer: Any = object


class DistTrainerMixin(_NextTrainer):
    """A mixin for ``Trainer`` and TRL's trainers, with which all ranks step or skip together.

    It comes before the trainer in the list of bases, as in ``class MyTrainer(DistTrainerMixin,
    SFTTrainer): pass``. In fp16, bf16 and fp32, learning rates do not advance on a skipped step
    with any optimizer, ``grad_norm`` in the logs is the norm of the whole model, and the logs have
    ``skipped_steps``. With ``fp16=True`` the logs also have ``loss_scale``, and training works on a
    CPU. The mixin loads checkpoints of the Trainer, and the Trainer loads checkpoints of the mixin.

    Args:
        args: The trainer's own arguments.
        comm_hook: A communication format of `distamp.comm_hooks.register_comm_hook`.
        scaler: A `distamp.DistGradScaler` with ``fp16=True``; None makes one.
        scaler_settings: Keyword settings of a new scaler or guard, such as ``init_scale`` and
            ``max_consecutive_skips``.
        kwargs: The trainer's own arguments.

    Raises:
        ConfigError: ``scaler`` or settings of a loss scale were passed without ``fp16=True``, or
            the Trainer uses DeepSpeed.
        ValueError: The format or the model does not fit the hook.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if base is DistTrainerMixin:
                return
            defines_method = "create_accelerator_and_postprocess" in vars(base)
            if defines_method and not issubclass(base, DistTrainerMixin):
                raise TypeError(
                    f"{cls.__name__} has {base.__name__} before DistTrainerMixin, so the methods "
                    f"of {base.__name__} hide the mixin's. Instead, write class "
                    f"{cls.__name__}(DistTrainerMixin, {base.__name__})."
                )

    def __init__(
        self,
        *args: Any,
        comm_hook: str | None = None,
        scaler: DistGradScaler | None = None,
        scaler_settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # The Trainer's constructor calls create_accelerator_and_postprocess.
        arguments = {"comm_hook": comm_hook, "scaler": scaler, **(scaler_settings or {})}
        self._prepare_kwargs: dict[str, Any] = {}
        for name, value in arguments.items():
            if value is not None:
                self._prepare_kwargs[name] = value
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare(self.accelerator, **self._prepare_kwargs)

    def _save_scaler(self, output_dir: str) -> None:
        # A Trainer without the mixin would not load the state of a guard, which is empty.
        if is_loss_scaler(self.accelerator.scaler):
            super()._save_scaler(output_dir)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        scaler = self.accelerator.scaler
        if "loss" in logs:
            if is_loss_scaler(scaler):
                logs["loss_scale"] = scaler.get_scale()
            logs["skipped_steps"] = skipped_steps(scaler, [self.optimizer])
        super().log(logs, *args, **kwargs)
