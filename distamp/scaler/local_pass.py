"""The pass over the gradients of one optimizer on this rank: unscale them, or check them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distamp import host
from distamp.errors import SettingError
from distamp.gradients import check_finite, flag_of, local_gradients
from distamp.scaler.look import Local
from distamp.scaler.optimizer_state import OptState
from distamp.scaler.torch_compat import UNSCALE_GRADS, overrides
from distamp.sources import GradientSource

if TYPE_CHECKING:
    from distamp.scaler.flow import Subject
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["before_step", "check", "only_checks", "unscale"]


def only_checks(subject: Subject) -> bool:
    """Return whether the optimizer's own kernel unscales."""
    return subject.state.takes_flags(subject.optimizer) and not subject.source.has_masters


def before_step(scaler: DistGradScaler, subject: Subject) -> Local:
    """Look at an optimizer's gradients as its ``step`` needs it."""
    check_alone = subject.state.wants_scaler or only_checks(subject)
    return check(scaler, subject) if check_alone else unscale(scaler, subject)


def unscale(scaler: DistGradScaler, subject: Subject) -> Local:
    """Divide an optimizer's gradients by the scale, through torch's own name for it.

    Raises:
        StageError: They were made with several scales.
        SettingError: The optimizer has masters and the scaler does not know, or the other way.
        ValueError: float16 gradients under ``fp16_grads="error"``.
        GradientError: A gradient cannot be read.
    """
    _, optimizer, state, source = subject
    if source.has_masters != (scaler._fp16_grads == "master"):
        _refuse_masters(scaler, optimizer, source)
    scale = scaler._watch.scale_of(optimizer, state, source, scaler._scale_tensor())
    way: Callable[[Tensor, Tensor, bool], Sequence[Tensor]] = source.unscale
    if not source.has_masters and overrides(scaler, UNSCALE_GRADS):
        way = partial(_flags_of_override, scaler, optimizer)
    found = flag_of(False, scale.device)
    flags = way(_inverse(scale), found, scaler._fp16_grads == "inplace")
    state["stage"] = OptState.UNSCALED
    state.in_place = True
    return Local(flags or [found])


def check(scaler: DistGradScaler, subject: Subject) -> Local:
    """Look for inf and NaN and leave the gradients as they are; raises as `unscale` does."""
    _, optimizer, state, source = subject
    if source.has_masters != (scaler._fp16_grads == "master"):
        _refuse_masters(scaler, optimizer, source)
    own = scaler._scale_tensor()
    state.made_with = scaler._watch.scale_of(optimizer, state, source, own)
    if overrides(scaler, UNSCALE_GRADS):
        one, found = flag_of(True, own.device), flag_of(False, own.device)
        return Local(_flags_of_override(scaler, optimizer, one, found, True) or [found])
    return _check(optimizer, source, own.device)


def _flags_of_override(
    scaler: DistGradScaler, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> Sequence[Tensor]:
    return list(scaler._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16).values())


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale as torch computes it: in float64, as float32 can be off by one bit."""
    if host.is_host(scale.device) and (value := scale.item()):
        return torch.full((), 1.0 / value, dtype=torch.float32, device=scale.device)
    return scale.double().reciprocal().float()


@torch.no_grad()
def _check(optimizer: Any, source: GradientSource, device: torch.device) -> Local:
    gradients = local_gradients(source.watched(), optimizer)
    return Local(check_finite(gradients, flag_of(False, device)))


def _refuse_masters(scaler: DistGradScaler, optimizer: Any, source: GradientSource) -> None:
    """Refuse masters that the scaler does not know of, and the other way round."""
    name = type(optimizer).__name__
    if source.has_masters:
        raise SettingError(
            f"{name} has master parameters and the scaler has fp16_grads={scaler._fp16_grads!r}: "
            "make it with fp16_grads='master', which unscales on the way to them"
        )
    if any(p.dtype is torch.float16 for p in source.filled()):
        raise SettingError(
            f"fp16_grads='master', and {name} holds float16 parameters without masters: call "
            "MasterParameters(optimizer) before the first step"
        )
