"""Clipping and reporting over a gradient of which every rank may hold a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from distamp.errors import SettingError, StageError
from distamp.scaler.gradients import local_gradients, parameter_names, parameters_of
from distamp.scaler.known import own_share
from distamp.scaler.master_lookup import (
    master_params,
    masters_of,
    model_parameter,
    stepped_in_place_of,
    with_their_masters,
)
from distamp.scaler.norms import Parts, local_words, scale_by, total_norm
from distamp.scaler.overflow import OverflowReport, find_overflows
from distamp.scaler.settling import Settling
from distamp.scaler.stages import OptState

__all__ = ["WholeModel"]


class WholeModel(Settling):
    """What a `DistGradScaler` does with the gradient of the whole model at once."""

    def clip_grad_norm_(
        self,
        optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
    ) -> Tensor:
        """Clip the norm of the whole gradient, of which every rank may hold a part.

        As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, under DDP, FSDP, tensor and
        pipeline parallel and their mixtures. Gradients still scaled are unscaled first, in the same
        message. A norm that is inf or NaN leaves the gradients as they are: the step is skipped.

        Args:
            optimizer_or_parameters: An optimizer, or parameters that optimizers of this scaler
                hold.
            max_norm: The largest norm to leave; > 0.
            norm_type: The order of the norm; > 0, inf for the largest magnitude.

        Returns:
            The norm before clipping, unscaled: 0-d float32, the same on every rank.

        Raises:
            StageError: Parameters were given whose gradients were not unscaled, and no optimizer
                that this scaler has seen holds them.
            SettingError: ``max_norm`` or ``norm_type`` is not a positive number.
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not value > 0:
                raise SettingError(f"{name} must be > 0, not {value!r}")
        given = optimizer_or_parameters
        parameters, pending = self._to_clip(given)
        key = (tuple(map(id, parameters)), self._agreement.size)
        parts = self._parts.get(key)
        if parts is None:
            share = own_share(given) if isinstance(given, torch.optim.Optimizer) else None
            measured = parameters if share is None else share
            parts = self._parts[key] = Parts.of(measured, key[1], own=share is not None)
        scale = self._scale_tensor()

        def norm_words() -> Tensor:
            return local_words(parts, norm_type, scale.device)

        words = self._settle(
            "clip_grad_norm_",
            pending,
            self._unscaling,
            norm_words,
            speak=bool(self._attached.hooks) and not _all_of(pending, parameters),
        )
        assert words is not None
        norm = total_norm(words, norm_type).to(scale.device)
        with torch.no_grad():
            scale_by(local_gradients(parameters, allow_fp16=True), norm, max_norm)
        return norm

    def _to_clip(
        self, given: torch.optim.Optimizer | Iterable[Tensor] | Tensor
    ) -> tuple[list[Tensor], list[torch.optim.Optimizer]]:
        """Return the parameters, and their optimizers that are still to be unscaled."""
        if isinstance(given, torch.optim.Optimizer):
            parameters, owners = list(master_params(given)), [given]
        else:
            parameters = [given] if isinstance(given, Tensor) else list(given)
            owners = self._known.holding(parameters)
            parameters = stepped_in_place_of(parameters, owners)
        if not self._enabled:
            for owner in owners:
                if (masters := masters_of(owner)) is not None:
                    masters.receive()
            return parameters, []
        self._require_scale("clip_grad_norm_")
        for owner in owners:
            record = self._record(owner)
            if record.stage is OptState.STEPPED:
                record.check_unscale()
        return parameters, [o for o in owners if self._record(o).stage is OptState.READY]

    def overflow_report(self, model: torch.nn.Module | None = None) -> OverflowReport:
        """Return which gradients hold inf or NaN, on which rank; every rank must call it.

        To be called after a skipped step and before ``zero_grad``.

        Args:
            model: For names, and for parameters of no optimizer. Else ``named_parameters`` of the
                constructor, the optimizer's own names, or group and index.

        Raises:
            StageError: No rank holds such a gradient; raised on every rank.
        """
        report = self._overflows(model)
        if not report.overflows:
            raise StageError(
                "overflow_report() found no inf or NaN in any gradient of any rank: call it after "
                "a skipped step and before zero_grad()"
            )
        return report

    def _overflows(self, model: torch.nn.Module | None) -> OverflowReport:
        named: list[tuple[str, Tensor]] = []
        if model is not None:
            named.extend(model.named_parameters())
        else:
            for optimizer in self._known.optimizers():
                names = zip(parameter_names(optimizer), parameters_of(optimizer), strict=True)
                named.extend(
                    (self._names.get(id(model_parameter(p)), name), p) for name, p in names
                )
        named = list(with_their_masters(named))
        everyone = self._agreement.gather(find_overflows(named, self._agreement.rank))
        overflows = tuple(overflow for rank in everyone for overflow in rank)
        return OverflowReport(self.get_scale(), overflows)


def _all_of(optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> bool:
    """Return whether these optimizers, of which hooks know, hold all of ``parameters``."""
    held = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    return held.issuperset(map(id, parameters))
