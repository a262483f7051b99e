"""Take a step by the flag that all ranks agree on, or skip it."""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distamp import host
from distamp.errors import LossScaleCollapse, StageError
from distamp.scaler import overflow
from distamp.scaler.flow import Subject, look_and_agree
from distamp.scaler.look import Local
from distamp.scaler.optimizer_state import OptState, leaves_garbage
from distamp.scaler.settings import stacklevel_of_caller
from distamp.scaler.torch_compat import MAYBE_OPT_STEP, overrides

if TYPE_CHECKING:
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["agree_on_flags_of_others", "apply"]


_HOST = torch.device("cpu")
_device = operator.attrgetter("device")


def agree_on_flags_of_others(scaler: DistGradScaler, subject: Subject) -> None:
    """Agree on flags that an override, or a framework itself, has written down."""
    state = subject.state
    if state.flag_agreed or not state["found_inf_per_device"] or scaler._ranks.alone:
        return
    flags = list(state["found_inf_per_device"].values())
    look_and_agree(scaler, "step", [subject], lambda *_: Local(flags))


def apply(
    scaler: DistGradScaler, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step by the flag, or skip."""
    given, optimizer, state, source = subject
    flag = state.flag()
    if flag is None:
        raise StageError("No inf checks were recorded for this optimizer.")
    on_host = host.is_host(flag.device)
    skipped = bool(flag.item()) if on_host else None
    result = None
    if state.wants_scaler:
        result = _step_with_scaler(scaler, subject, args, kwargs)
    elif state.takes_flags(optimizer):
        there = flag
        if skipped is None and any(map(host.is_host, set(map(_device, source.stepped())))):
            # torch's fused optimizers copy the flag to where parameters are and do not wait for it:
            # on the host they would read what has not arrived. So they are given one of the host's.
            scaler._ranks.drain()
            there = host.moved(flag, _HOST)
            skipped = bool(there.item())
        if skipped is False or not _must_not_skip_inside(optimizer, there, skipped):
            result = _step_with_flags(scaler, subject, there, args, kwargs)
    else:
        # Where the host must wait for the flag, it learns first of what the ranks differ in.
        scaler._ranks.drain()
        if skipped is None or overrides(scaler, MAYBE_OPT_STEP):
            result = scaler._maybe_opt_step(given, state, *args, **kwargs)
        elif not skipped:
            result = given.step(*args, **kwargs)
    _finish(scaler, subject, flag, skipped)
    return result


def _must_not_skip_inside(optimizer: Any, flag: Tensor, skipped: bool | None) -> bool:
    """Return whether an optimizer that skips in its own kernel is not to be called this time.

    torch calls it always. Its own optimizers do nothing on an overflow, so they are not called
    where the host knows of it; another one may count its calls.
    """
    garbage = leaves_garbage(optimizer)
    if skipped is None:
        return garbage and bool(flag.item())
    return skipped and (garbage or type(optimizer).__module__.startswith("torch.optim."))


def _step_with_flags(
    scaler: DistGradScaler,
    subject: Subject,
    flag: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step by torch's protocol: the kernel divides by the scale, or does nothing."""
    given, optimizer, state, _ = subject
    grad_scale = getattr(optimizer, "grad_scale", None)
    if state["stage"] is not OptState.UNSCALED:
        scale = scaler._scale_tensor() if state.made_with is None else state.made_with
        if host.is_host(flag.device) and not host.is_host(scale.device):
            scale = host.moved(scale, flag.device)
        grad_scale = scale if grad_scale is None else scale * grad_scale
    try:
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = flag
        return given.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf
        state.in_place = True


def _step_with_scaler(
    scaler: DistGradScaler, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step by torch's older protocol, whose optimizers unscale and skip with the scaler.

    torch calls them always, and so does a process alone. Where ranks agree, an overflow of another
    rank is not seen by an optimizer that looks at its own gradients: it would step alone.
    """
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
        stacklevel=stacklevel_of_caller(),
    )
    if not scaler._ranks.alone:
        flag = subject.state.flag()
        if flag is not None and flag.item():
            return None
    return subject.given.step(*args, **{**kwargs, "grad_scaler": scaler})


def _finish(scaler: DistGradScaler, subject: Subject, flag: Tensor, skipped: bool | None) -> None:
    _, optimizer, state, source = subject
    state.end_step()
    state.count(flag, skipped=skipped)
    if scaler._hooks.joined:
        scaler._hooks.step_ended(optimizer, flag)
    source.finish_step()
    scaler._skips.note(scaler, subject, flag, skipped)
    limit = scaler._max_consecutive_skips
    if limit is not None and state.reaches_skips(limit, flag, skipped=skipped):
        report = overflow.report(scaler, None)
        raise LossScaleCollapse(
            f"{limit} steps in a row were skipped; the loss scale is "
            f"{scaler.get_scale():g}\n{report}",
            report,
        )
