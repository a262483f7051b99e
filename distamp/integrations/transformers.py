"""distamp in Hugging Face's Trainer, and in TRL's trainers, which are made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distamp.integrations.accelerate import prepare
from distamp.integrations.shared import skipped_steps

if TYPE_CHECKING:
    from distamp.scaler import DistGradScaler

__all__ = ["DistTrainerMixin"]


class DistTrainerMixin:
    """Put before ``Trainer``, or one of TRL's trainers, to train with distamp's scaler.

    ``class MyTrainer(DistTrainerMixin, SFTTrainer): pass``, and everything else stays. With
    ``fp16=True`` ranks step or skip together, schedules stay where they are on a skip with any
    optimizer, and fp16 works on a CPU. Logs get ``loss_scale`` and ``skipped_steps``. Checkpoints
    are the Trainer's own: each loads the other's.

    Args:
        args: The trainer's own arguments.
        comm_hook: A wire format for gradients, as `distamp.comm_hooks.register` takes it.
        scaler: A `distamp.DistGradScaler`; None makes one.
        scaler_settings: Keyword settings of the scaler that is made, such as ``init_scale``.
        kwargs: The trainer's own arguments.

    Raises:
        SettingError: ``scaler`` or ``scaler_settings`` without ``fp16=True``.
        ValueError: The format or the model does not fit the hook.
    """

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
        accelerator = self.accelerator  # type: ignore[attr-defined]
        wanted = {name: value for name, value in self._distamp.items() if value is not None}
        if accelerator.mixed_precision == "fp16" or wanted:
            prepare(accelerator, **wanted)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if accelerator.scaler is not None and "loss" in logs:
            logs["loss_scale"] = accelerator.scaler.get_scale()
            optimizer = self.optimizer  # type: ignore[attr-defined]
            logs["skipped_steps"] = skipped_steps(accelerator.scaler, [optimizer])
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
