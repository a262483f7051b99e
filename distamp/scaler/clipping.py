"""Clip the norm of a gradient of which every rank may hold a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distamp.errors import SettingError, StageError
from distamp.gradients import local_gradients
from distamp.optimizers import parameters_of, unwrapped
from distamp.scaler.flow import Norm, Subject, look_and_agree, subject_of
from distamp.scaler.message import Group
from distamp.scaler.norms import Declared, NormPlan, kinds_of, scale_by
from distamp.scaler.optimizer_state import OptimizerStates, OptState
from distamp.sources import source_of

if TYPE_CHECKING:
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["clip", "clip_disabled"]

Given = "torch.optim.Optimizer | Iterable[Tensor] | Tensor"


def clip(
    scaler: DistGradScaler,
    given: Any,
    max_norm: float,
    norm_type: float,
    replicated: Declared | None,
    sharded: Declared | None,
) -> Tensor:
    """Clip as `DistGradScaler.clip_grad_norm_` says; every error on the way reaches all ranks."""
    refused: Exception | None = None
    subjects: list[Subject] = []
    measured: list[Tensor] = []
    pending: list[Subject] = []
    own = False
    try:
        _check_numbers(max_norm, norm_type)
        scaler._require_scale("clip_grad_norm_")
        measured, subjects = _to_clip(scaler, given)
        for subject in subjects:
            if subject.state["stage"] is OptState.STEPPED:
                subject.state.check_unscale()
        pending = [s for s in subjects if s.state["stage"] is OptState.READY]
        share = subjects[0].source.share() if _is_optimizer(given) else None
        if share is not None:
            measured, own = share, True
    except Exception as error:
        refused = error
    clipped = measured if not own else parameters_of(unwrapped(given))
    sources = [subject.source for subject in subjects]

    def make_plan(group: Group | None) -> NormPlan:
        device = scaler._scale_tensor().device
        if group is None:
            kinds_of(measured, 1, own=own, replicated=replicated, sharded=sharded)
            return NormPlan.alone(measured, device)
        models = [_model_parameter(sources, p) for p in measured]
        kinds = kinds_of(models, group.size, own=own, replicated=replicated, sharded=sharded)
        return scaler._plans.of(measured, kinds, group.size, group.rank, device)

    norm = Norm(measured, norm_type, make_plan)
    look_and_agree(
        scaler,
        "clip_grad_norm_",
        pending,
        scaler._unscaled,
        refused=refused,
        norm=norm,
        by_hooks=_all_of(pending, clipped),
    )
    assert norm.total is not None
    gradients = local_gradients(clipped, allow_fp16=True)
    scale_by(gradients, norm.total, max_norm)
    return norm.total


def clip_disabled(given: Any, states: OptimizerStates, max_norm: float, norm_type: float) -> Tensor:
    """Clip what this rank holds, as torch does: a disabled scaler sends nothing."""
    _check_numbers(max_norm, norm_type)
    if _is_optimizer(given):
        source = source_of(unwrapped(given))
        source.receive()
        parameters = source.stepped()
    else:
        parameters = _listed(given)
        for optimizer, _ in states.live():
            source = source_of(optimizer)
            source.receive()
            parameters = source.in_place_of(parameters)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _check_numbers(max_norm: float, norm_type: float) -> None:
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:
            raise SettingError(f"{name} must be > 0, not {value!r}")


def _is_optimizer(given: Any) -> bool:
    return not isinstance(given, Tensor) and hasattr(unwrapped(given), "param_groups")


def _listed(given: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


def _to_clip(scaler: DistGradScaler, given: Any) -> tuple[list[Tensor], list[Subject]]:
    """Return what is to be clipped, and the optimizers that hold it."""
    if _is_optimizer(given):
        subject = subject_of(scaler, given)
        return list(subject.source.stepped()), [subject]
    parameters = _listed(given)
    owners = [subject_of(scaler, owner) for owner in _holding(scaler._states, parameters)]
    for owner in owners:
        parameters = owner.source.in_place_of(parameters)
    return parameters, owners


def _holding(states: OptimizerStates, parameters: list[Tensor]) -> Iterator[Any]:
    """Yield the optimizers that hold some of ``parameters``.

    Raises:
        StageError: One of them belongs to no optimizer seen so far.
    """
    left = set(map(id, parameters))
    wanted = len(left)
    mine = frozenset(left)
    for optimizer, _ in states.live():
        theirs = set(map(id, source_of(optimizer).watched()))
        if mine & theirs:
            left -= theirs
            yield optimizer
    if left:
        raise StageError(
            f"{len(left)} of {wanted} parameters belong to no optimizer this scaler has "
            "seen yet, so it cannot tell whether their gradients are still scaled. Give "
            "clip_grad_norm_ the optimizer, or call unscale_(optimizer) first"
        )


def _model_parameter(sources: Iterable[Any], tensor: Tensor) -> Tensor:
    found = (source.parameter_of(tensor) for source in sources)
    return next((parameter for parameter in found if parameter is not None), tensor)


def _all_of(subjects: Iterable[Subject], parameters: Iterable[Tensor]) -> bool:
    """Return whether these optimizers, of which hooks know, hold all of ``parameters``."""
    held = {id(p) for subject in subjects for p in parameters_of(subject.optimizer)}
    return held.issuperset(map(id, parameters))
