"""distamp in Hugging Face's Trainer, and in TRL's trainers, which are made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distamp.integrations.accelerate import prepare
from distamp.integrations.shared import scales, skipped_steps

if TYPE_CHECKING:
    from distamp.scaler import DistGradScaler

__all__ = ["DistTrainerMixin"]


class DistTrainerMixin:
    """Put before ``Trainer``, or one of TRL's trainers, so that ranks step or skip together.

    ``class MyTrainer(DistTrainerMixin, SFTTrainer): pass``, and everything else stays. In fp16,
    bf16 and fp32 schedules stay where they are on a skip with any optimizer, ``grad_norm`` in the
    logs is the norm of the whole model, and logs get ``skipped_steps``; with ``fp16=True`` also
    ``loss_scale``, and it works on a CPU. Checkpoints are the Trainer's own: each loads the
    other's.

    Args:
        args: The trainer's own arguments.
        comm_hook: A wire format for gradients, as `distamp.comm_hooks.register_comm_hook` takes it.
        scaler: With ``fp16=True`` a `distamp.DistGradScaler`; None makes one.
        scaler_settings: Keyword settings of the scaler or the guard that is made, such as
            ``init_scale`` and ``max_consecutive_skips``.
        kwargs: The trainer's own arguments.

    Raises:
        ConfigError: ``scaler`` or settings of a loss scale without ``fp16=True``; DeepSpeed.
        ValueError: The format or the model does not fit the hook.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        makers = [
            each for each in cls.__mro__ if "create_accelerator_and_postprocess" in vars(each)
        ]
        trainers = [each for each in makers if not issubclass(each, DistTrainerMixin)]
        if trainers and cls.__mro__.index(trainers[0]) < cls.__mro__.index(DistTrainerMixin):
            raise TypeError(
                f"{cls.__name__} has DistTrainerMixin after {trainers[0].__name__}, whose methods "
                f"hide it: write class {cls.__name__}(DistTrainerMixin, {trainers[0].__name__})"
            )

    def __init__(
        self,
        *args: Any,
        comm_hook: str | None = None,
        scaler: DistGradScaler | None = None,
        scaler_settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._distamp: dict[str, Any] = {"comm_hook": comm_hook, "scaler": scaler}
        self._distamp |= scaler_settings or {}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        wanted = {name: value for name, value in self._distamp.items() if value is not None}
        prepare(self.accelerator, **wanted)  # type: ignore[attr-defined]

    def _save_scaler(self, output_dir: str) -> None:
        # A guard's state is empty, and a plain Trainer in bf16 has nothing that would load it.
        if scales(self.accelerator.scaler):  # type: ignore[attr-defined]
            super()._save_scaler(output_dir)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        stepper = self.accelerator.scaler  # type: ignore[attr-defined]
        if "loss" in logs:
            if scales(stepper):
                logs["loss_scale"] = stepper.get_scale()
            logs["skipped_steps"] = skipped_steps(stepper, [self.optimizer])  # type: ignore[attr-defined]
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
