"""From optimizers to agreed flags: the local pass, the message, and the records they end up in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distamp.errors import SettingError
from distamp.scaler import host
from distamp.scaler.agreement import FlagsOf, Settled, settle_alone
from distamp.scaler.attached import checked_hook
from distamp.scaler.fused import takes_flags
from distamp.scaler.gradients import (
    check_finite,
    largest_magnitude,
    local_gradients,
    parameters_of,
)
from distamp.scaler.known import adopt_kin
from distamp.scaler.master import MasterParameters
from distamp.scaler.master_lookup import all_masters, carriers, masters_of
from distamp.scaler.process_group import Group
from distamp.scaler.settings import ScalerSettings
from distamp.scaler.stages import OptState, Record

__all__ = ["Settling"]


class Settling(ScalerSettings):
    """How a `DistGradScaler` looks at gradients and agrees with the other ranks on them."""

    def attach(self, hook_state: object) -> None:
        """Learn of inf and NaN from the communication hook that averages the gradients.

        Every rank calls it at the same point. From the second step of an optimizer on, all of whose
        gradients come through the hook, the ranks know from the exchange itself whether to skip:
        there is no message, and where a fused kernel unscales no pass over the gradients either.
        Steps are skipped as without. Ranks that drift apart are found out at the next exchange.

        Args:
            hook_state: What ``distamp.comm_hooks.register`` returned.

        Raises:
            ValueError: The state of torch's PowerSGD, which does not survive loss scaling.
            TypeError: Something else that is no hook's state.
        """
        self._attached.add(checked_hook(hook_state))

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
        if self._fp16_grads == "master":
            for masters in all_masters():
                optimizer = masters.optimizer
                known = optimizer is not None and self._known.get(optimizer) is not None
                # In bfloat16 another model of this process may train without a scaler.
                if known or masters.needs_scaler:
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
        *,
        speak: bool = False,
    ) -> Tensor | None:
        """Look at the gradients, agree with all ranks, and write the flags into the records.

        Args:
            call: The method the user called.
            optimizers: Those to settle.
            flags_of: Looks at the gradients of one of them.
            norm_words: Computes this rank's part of a norm.
            speak: Whether a message must be sent, whatever a communication hook knows.

        Returns:
            The norm words of all ranks, if ``norm_words`` is given.
        """
        words = None
        scale = self._scale_tensor()
        group = self._agreement.group_for(scale, self._known)
        # Gradients that are checked again are unscaled already.
        watches = self._schedule.watches_largest and call != "recheck"
        self._met = torch.zeros_like(scale) if watches else None
        largest = self._largest_met if watches else None
        # Alone, each is settled by itself, so that an error leaves the others as they are. A call
        # with more than a message has room for makes room for the next.
        most = 1 if group is None else group.traffic.flag_slots
        for start in range(0, max(len(optimizers), 1), most):
            part = optimizers[start : start + most]
            last = start + most >= len(optimizers)
            norms = norm_words if last else None
            try:
                settled = None
                if group is not None and not speak:
                    settled = self._settle_by_hooks(call, part, flags_of, norms, largest)
                if settled is None:
                    settled = self._settle_part(
                        group, call, part, len(optimizers), flags_of, norms, largest
                    )
                self._attached.settled(part)
            except Exception:
                if group is not None:
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

    def _settle_part(
        self,
        group: Group | None,
        call: str,
        optimizers: Sequence[torch.optim.Optimizer],
        total: int,
        flags_of: FlagsOf,
        norm_words: Callable[[], Tensor] | None,
        largest: Callable[[], Tensor] | None,
    ) -> Settled:
        """Settle what one message has room for."""
        scale = self._scale_tensor()
        if group is None:
            return settle_alone(optimizers, flags_of, scale, norm_words, largest)
        return self._agreement.settle(
            group,
            call,
            optimizers,
            total,
            flags_of,
            known=self._known,
            scale=scale,
            settings=lambda: self._attached.in_words(self._settings_in_words()),
            scale_called=self._scale_called or not self._enabled,
            norm_words=norm_words,
            largest=largest,
        )

    def _settle_by_hooks(
        self,
        call: str,
        optimizers: Sequence[torch.optim.Optimizer],
        flags_of: FlagsOf,
        norm_words: Callable[[], Tensor] | None,
        largest: Callable[[], Tensor] | None,
    ) -> Settled | None:
        """Settle by what the ranks learned from exchanging gradients; None if they must speak."""
        attached = self._attached
        if not attached.hooks:
            return None
        agreed = all(self._known[optimizer].agreed for optimizer in optimizers)
        flags = attached.flags(
            call,
            optimizers,
            self._agreement.ranks,
            agreed=agreed,
            measured=norm_words is not None or largest is not None,
        )
        if flags is None:
            return None
        attached.count(call, self._known.identities(optimizers))
        for optimizer in optimizers:
            known = self._known[optimizer]
            known.said = None
            # A fused kernel unscales by itself, so then nobody reads the gradients before it.
            if largest is not None or call != "step" or not takes_flags(optimizer, known):
                flags_of(optimizer)
        device = self._scale_tensor().device
        return Settled(
            [flag.to(device, non_blocking=True) for flag in flags],
            None if norm_words is None else norm_words()[None],
            None if largest is None else largest(),
        )

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
        self._per_optimizer_states[id(optimizer)].stage = OptState.UNSCALED
        return flags

    def _unscaled_flags(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        scale = self._scale_tensor()
        inv_scale = _inverse(scale)
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


def _inverse(scale: Tensor) -> Tensor:
    # In float64 as torch does: a float32 reciprocal can be off by one bit.
    if host.is_host(scale.device) and (value := scale.item()):
        return torch.full((), 1.0 / value, dtype=torch.float32)
    return scale.double().reciprocal().float()
