"""Subclasses as frameworks write them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from distamp import DistGradScaler

__all__ = ["SCALERS", "TORCH_SCALERS"]


class _Logs:
    """Notes which of torch's methods are called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def unscale_(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("unscale_")
        return super().unscale_(*args, **kwargs)  # type: ignore[misc]

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("_unscale_grads_")
        return super()._unscale_grads_(*args, **kwargs)  # type: ignore[misc]

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("_maybe_opt_step")
        return super()._maybe_opt_step(*args, **kwargs)  # type: ignore[misc]

    def _check_inf_per_device(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("_check_inf_per_device")
        return super()._check_inf_per_device(*args, **kwargs)  # type: ignore[misc]

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("update")
        return super().update(*args, **kwargs)  # type: ignore[misc]


class _UpdatesByItself:
    """Moves the scale by itself and ends as ShardedGradScaler's ``update`` does."""

    def update(self: Any, new_scale: Any = None) -> None:
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            scale.fill_(float(new_scale))
        else:
            found = [
                flag
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            total = torch.stack([flag.reshape(()) for flag in found]).sum()
            torch._amp_update_scale_(
                scale,
                tracker,
                total,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


class Logged(_Logs, DistGradScaler):
    pass


class OwnUpdate(_UpdatesByItself, DistGradScaler):
    pass


class NoFlags(DistGradScaler):
    """Whose local pass has nothing to say."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        super()._unscale_grads_(*args, **kwargs)
        return {}


class _TorchLogged(_Logs, torch.amp.GradScaler):
    pass


class _TorchOwnUpdate(_UpdatesByItself, torch.amp.GradScaler):
    pass


SCALERS: dict[str, type[DistGradScaler]] = {
    "ours": DistGradScaler,
    "logged": Logged,
    "own update": OwnUpdate,
    "no flags": NoFlags,
}
# torch asserts where there are no flags at all; without an overflow its own class is the same.
TORCH_SCALERS: dict[str, type[torch.amp.GradScaler]] = {
    "logged": _TorchLogged,
    "own update": _TorchOwnUpdate,
    "no flags": torch.amp.GradScaler,
}
