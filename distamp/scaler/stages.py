"""READY -> UNSCALED -> STEPPED, for each optimizer in each iteration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from distamp.errors import StageError

__all__ = ["OptState", "Record", "Records"]


class Record(dict[str, Any]):
    """One optimizer in one iteration, under the two keys that torch's own record has.

    ``"stage"`` is an `OptState`; ``"found_inf_per_device"`` maps a device to a 0-d float32 flag
    that all ranks agree on.
    """

    def __init__(self) -> None:
        super().__init__(stage=OptState.READY, found_inf_per_device={})
        # Set by the backward guard: gradients arrived after they had been unscaled.
        self.late_gradients = False

    @property
    def stage(self) -> OptState:
        """Where this optimizer is in the iteration."""
        stage: OptState = self["stage"]
        return stage

    @stage.setter
    def stage(self, stage: OptState) -> None:
        self["stage"] = stage

    @property
    def found_inf(self) -> Tensor | None:
        """The agreed flag as one 0-d tensor, or None before the check."""
        flags = list(self["found_inf_per_device"].values())
        if not flags:
            return None
        total: Tensor = flags[0]
        for flag in flags[1:]:
            total = torch.maximum(total, flag.to(total.device))
        return total

    @found_inf.setter
    def found_inf(self, flag: Tensor) -> None:
        self["found_inf_per_device"] = {flag.device: flag}

    def check_unscale(self) -> None:
        """Refuse ``unscale_`` where it was called already, with torch's own words."""
        if self.stage is OptState.UNSCALED:
            raise StageError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if self.stage is OptState.STEPPED:
            raise StageError("unscale_() is being called after step().")

    def check_step(self) -> None:
        """Refuse a second ``step``, and one over gradients that arrived after ``unscale_``."""
        if self.stage is OptState.STEPPED:
            raise StageError("step() has already been called since the last update().")
        if self.late_gradients:
            raise StageError(
                "backward() through a scaled loss added gradients after unscale_(): scaled and "
                "unscaled gradients are now summed. Call unscale_() after the last backward() of "
                "the iteration; nothing was stepped"
            )


class Records(dict[int, Record]):
    """Records by ``id(optimizer)``; asking for a missing one makes it, as torch's dict does."""

    def __missing__(self, key: int) -> Record:
        record = self[key] = Record()
        return record
