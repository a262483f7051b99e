"""From optimizers to agreed flags: the local pass, the message, and the records they end up in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distamp.errors import SettingError
from distamp.scaler.gradients import (
    check_finite,
    largest_magnitude,
    local_gradients,
    parameters_of,
)
from distamp.scaler.known import adopt_kin
from distamp.scaler.master import MasterParameters
from distamp.scaler.master_lookup import all_masters, carriers, masters_of
from distamp.scaler.settings import ScalerSettings
from distamp.scaler.stages import OptState, Record

__all__ = ["Settling"]

FlagsOf: TypeAlias = Callable[[torch.optim.Optimizer], Sequence[Tensor]]


class Settling(ScalerSettings):
    """How a `DistGradScaler` looks at gradients and agrees with the other ranks on them."""

    def _record(self, optimizer: torch.optim.Optimizer) -> Record:
        known = self._known[optimizer]
        if known.kin:
            adopt_kin(optimizer, self._known, self._per_optimizer_states)
        return self._per_optimizer_states[id(optimizer)]

    def _masters(self, optimizer: torch.optim.Optimizer) -> MasterParameters | None:
        """Return the optimizer's master parameters, which must be what ``fp16_grads`` says.

        Raises:
            SettingError: There are masters and the scaler was not told, or the other way round.
        """
        masters = masters_of(optimizer)
        if (self._fp16_grads == "master") == (masters is not None):
            return masters
        name = type(optimizer).__name__
        if masters is not None:
            raise SettingError(
                f"{name} has master parameters and the scaler has fp16_grads="
                f"{self._fp16_grads!r}: make it with fp16_grads='master', which unscales on the "
                "way to them"
            )
        if any(p.dtype is torch.float16 for p in parameters_of(optimizer)):
            raise SettingError(
                f"fp16_grads='master', and {name} holds float16 parameters without masters: call "
                "MasterParameters(optimizer) before the first step"
            )
        return None

    def _backward_begins(self) -> list[tuple[Record, list[Tensor]]]:
        """Return records and parameters that a backward pass must leave alone."""
        for masters in all_masters():
            masters.before_backward()
        return self._unscaled()

    def _unscaled(self) -> list[tuple[Record, list[Tensor]]]:
        records = self._per_optimizer_states
        return [
            (record, carriers(optimizer))
            for optimizer in self._known.optimizers()
            if (record := records.get(id(optimizer))) is not None
            and record.stage is OptState.UNSCALED
        ]

    def _require_scale(self, call: str) -> None:
        # Where ranks agree, another rank may hold the loss (the last stage of a pipeline): there
        # the message itself tells whether any rank called scale().
        if self._scale is None and self._agreement.alone:
            self._check_scale_growth_tracker(call)

    def _settle(
        self,
        call: str,
        optimizers: Sequence[torch.optim.Optimizer],
        flags_of: FlagsOf,
        norm_words: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """Look at the gradients, agree with all ranks, and write the flags into the records.

        Returns the norm words of all ranks, if ``norm_words`` computes this rank's.
        """
        words = None
        # Gradients that are checked again are unscaled already.
        watches = self._schedule.watches_largest and call != "recheck"
        self._met = torch.zeros_like(self._scale_tensor()) if watches else None
        most = self._agreement.most_at_once
        for start in range(0, max(len(optimizers), 1), most):
            part = optimizers[start : start + most]
            last = start + most >= len(optimizers)
            try:
                settled = self._agreement.settle(
                    call,
                    part,
                    len(optimizers),
                    flags_of,
                    known=self._known,
                    scale=self._scale_tensor(),
                    settings=self._settings_in_words,
                    scale_called=self._scale_called or not self._enabled,
                    norm_words=norm_words if last else None,
                    largest=self._largest_met if watches else None,
                )
            except Exception:
                if not self._agreement.alone:
                    self._close(part)
                raise
            words = settled.norms
            if settled.largest is not None:
                met = self._largest
                new = settled.largest
                self._largest = new if met is None else torch.maximum(met, new)
            for optimizer, flag in zip(part, settled.flags, strict=True):
                self._per_optimizer_states[id(optimizer)].found_inf = flag
                self._known[optimizer].found_inf = flag
        return words

    def _largest_met(self) -> Tensor:
        assert self._met is not None
        return self._met

    def _watch(self, gradients: list[Tensor], met: Tensor) -> Tensor:
        """Return the largest gradient here, having added it to what this message's pass met."""
        largest = largest_magnitude(gradients, met.device)
        self._met = torch.maximum(met, largest)
        return largest

    def _close(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Skip the optimizers for the rest of the iteration, on every rank.

        Some ranks have unscaled their gradients when another finds that it cannot: a second try
        would unscale them twice, or find other ranks elsewhere. ``update`` begins anew.
        """
        flag = torch.ones((), device=self._scale_tensor().device)
        for optimizer in optimizers:
            record = self._record(optimizer)
            record.stage, record.found_inf = OptState.STEPPED, flag

    def _is_clean(self, flag: Tensor) -> bool:
        clean = not flag.item()
        self._agreement.drain()
        return clean

    def _unscaling(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        """Unscale, and note at once that it is done."""
        flags = self._unscaled_flags(optimizer)
        self._record(optimizer).stage = OptState.UNSCALED
        return flags

    def _unscaled_flags(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        scale = self._scale_tensor()
        # In float64 as torch does: a float32 reciprocal can be off by one bit.
        inv_scale = scale.double().reciprocal().float()
        found = torch.zeros((), device=scale.device)
        allow_fp16 = self._fp16_grads == "inplace"
        masters = self._masters(optimizer)
        if self._met is not None:
            with torch.no_grad():
                sources = parameters_of(optimizer) if masters is None else masters.sources()
                gradients = local_gradients(
                    sources, allow_fp16=allow_fp16 or masters is not None, owner=optimizer
                )
                self._watch(gradients, self._met)
        if masters is not None:
            return masters.take_gradients(inv_scale, found)
        return list(self._unscale_grads_(optimizer, inv_scale, found, allow_fp16).values())

    def _checked_flags(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        found = torch.zeros((), device=self._scale_tensor().device)
        with torch.no_grad():
            gradients = local_gradients(carriers(optimizer), allow_fp16=True, owner=optimizer)
            if self._met is not None:  # one pass tells both
                return [self._watch(gradients, self._met).isinf().float()]
            return check_finite(gradients, found)

    def _rechecked_flags(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        # An overflow stays one, though a clip may have put finite numbers in its place.
        before = self._record(optimizer).found_inf
        return [*self._checked_flags(optimizer), *([] if before is None else [before])]

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        self._require_scale("_check_inf_per_device")
        self._settle("_check_inf_per_device", (optimizer,), self._checked_flags)
        return self._found_inf_per_device(optimizer)
